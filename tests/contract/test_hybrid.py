"""Podman + CRIU, by the contract; and connections, which CRIU has to be helped with."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest
from container_subject import NETWORK, attached, containers_and_images, said

from statefork import Environment, create_env_manager
from statefork.backends import hybrid
from statefork.errors import Exists, KernelError, NotCapturable
from statefork.testing.contract import BackendContract, Subject
from statefork.testing.contract.subject import eventually

SERVER = """
import socket, threading
listening = socket.create_server(("127.0.0.1", 7000))
def serve(connection):
    total = 0
    while data := connection.recv(100):
        total += 1
        connection.send(b"%d" % total)
threading.Thread(target=lambda: serve(listening.accept()[0]), daemon=True).start()
client = socket.create_connection(("127.0.0.1", 7000))
while line := open("/tmp/ask").readline():
    client.send(b"x")
    open("/tmp/answer", "wb").write(client.recv(100) + b"\\n")
"""


def containers(home: Path) -> list[str]:
    """Copies carry the labels of the first one, and every name is noted in the state directory."""
    notes = [note.read_text().strip() for note in home.glob("trees/*/*/container")]
    every = said("podman", "ps", "-a", "--format", "{{.Names}}").split()
    return sorted({*containers_and_images("podman")(home), *(f"container {name}" for name in notes if name in every)})


def spoil(environment: Environment, snapshot: str) -> None:
    (archive,) = environment._family._grounds.home.glob(f"trees/*/{snapshot}/checkpoint.tar")
    archive.write_bytes(b"damaged")


class TestHybrid(BackendContract):
    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, podman: str, podman_busybox: str) -> Subject:
        return Subject(
            method="hybrid_build",
            arguments={"base_image": podman_busybox, "extra_args": NETWORK},
            left_behind=containers,
            named=True,
            attach=attached("podman", "hybrid_attach", podman_busybox),
            spoil=spoil,
        )


class TestHybridOnly:
    def test_criu_does_not_wait_for_ever(
        self, podman_busybox: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A stopped process cannot be stored: CRIU waits for it without end. What was stored before can still be had."""
        monkeypatch.setattr(hybrid, "CRIU_TIMEOUT", 10.0)
        name = f"contract-{secrets.token_hex(4)}"
        arguments = {"base_image": podman_busybox, "container_name": name, "extra_args": NETWORK}
        with create_env_manager("hybrid_build", home=tmp_path, **arguments) as environment:
            before = environment.snapshot()
            environment.exec_command("sleep 1000 & kill -STOP $!")
            with pytest.raises(KernelError, match="did not end within 10 s"):
                environment.snapshot()
            environment.restore(before)
            assert environment.exec_command("echo on").stdout == "on\n"

    def test_a_connection_inside_comes_back(self, podman_debian: str, tmp_path: Path) -> None:
        name = f"contract-{secrets.token_hex(4)}"
        arguments = {"base_image": podman_debian, "container_name": name, "extra_args": NETWORK}
        with create_env_manager("hybrid_build", home=tmp_path, **arguments) as environment:
            environment.write_file("/server.py", SERVER)
            environment.exec_command(
                "mkfifo /tmp/ask /tmp/answer; python3 /server.py & exec 6<>/tmp/ask 7<>/tmp/answer"
            )
            ask = "echo more >&6; read -r n <&7; echo $n"
            assert [environment.exec_command(ask).stdout for _ in range(2)] == ["1\n", "2\n"]
            snapshot = environment.snapshot(mode="full")
            assert environment.snapshots()[0].not_captured == ()
            assert environment.exec_command(ask).stdout == "3\n"
            environment.restore(snapshot)
            assert environment.exec_command(ask).stdout == "3\n"
            assert environment.exec_command(
                "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 7000))'"
            ).ok

    def test_a_taken_name_is_refused(self, podman_busybox: str, tmp_path: Path) -> None:
        arguments = {
            "base_image": podman_busybox,
            "container_name": f"contract-{secrets.token_hex(4)}",
            "extra_args": NETWORK,
        }
        with create_env_manager("hybrid_build", home=tmp_path, **arguments) as environment:
            assert environment.description == arguments["container_name"]
            with pytest.raises(Exists):
                create_env_manager("hybrid_build", home=tmp_path, **arguments)
            assert environment.exec_command("echo untouched").stdout == "untouched\n"

    def test_export_dir(self, podman_busybox: str, tmp_path: Path) -> None:
        arguments = {
            "base_image": podman_busybox,
            "container_name": f"contract-{secrets.token_hex(4)}",
            "extra_args": NETWORK,
        }
        exports = tmp_path / "exports"
        with create_env_manager("hybrid_build", home=tmp_path / "home", export_dir=exports, **arguments) as environment:
            snapshot = environment.snapshot()
            assert (exports / snapshot / "checkpoint.tar").stat().st_size > 0
        eventually("the exports are removed", lambda: list(exports.iterdir()) == [])

    def test_what_cannot_be_stored_is_named_and_lives_on(self, podman_debian: str, tmp_path: Path) -> None:
        """A process in a namespace of its own: CRIU does not nest."""
        name = f"contract-{secrets.token_hex(4)}"
        arguments = {"base_image": podman_debian, "container_name": name, "extra_args": [*NETWORK, "--privileged"]}
        with create_env_manager("hybrid_build", home=tmp_path, **arguments) as environment:
            environment.exec_command("still=here; unshare --pid --fork sleep 600 &")
            eventually("it runs", lambda: environment.run(["pgrep", "-x", "sleep"]).exit_code == 0)
            with pytest.raises(NotCapturable, match="goes on"):
                environment.snapshot()
            assert environment.snapshots() == []
            assert (
                environment.exec_command("echo $still; pgrep -x sleep >/dev/null && echo running").stdout
                == "here\nrunning\n"
            )
