"""gVisor, by the contract; and what only a sandbox has: a kernel of its own, its platforms, what it cannot store."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from rootfs import bash_rootfs
from statefork import Environment, create_env_manager
from statefork.backends.gvisor import GvisorDriver
from statefork.backends.gvisor_guest import outside_connections
from statefork.backends.gvisor_install import fetch_runsc
from statefork.backends.gvisor_sandbox import sandbox_processes
from statefork.errors import HostUnsupported, NotCapturable, UsageError
from statefork.home import collect
from statefork.testing.contract import BackendContract, Subject


def left_behind(home: Path) -> list[str]:
    return [f"process {pid}" for pid in sandbox_processes(home)]


def spoil(environment: Environment, snapshot: str) -> None:
    (image,) = environment._family._grounds.home.glob(f"trees/*/{snapshot}/image/checkpoint.img")
    image.write_bytes(b"damaged")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fetch_runsc(print)
    return bash_rootfs(tmp_path_factory.mktemp("rootfs") / "root")


class TestGvisor(BackendContract):
    @pytest.fixture(scope="class")
    def subject(self, small: Path) -> Subject:
        return Subject("gvisor_build", {"rootfs": small}, left_behind, spoil=spoil)


class TestGvisorOnly:
    def test_the_kernel_is_its_own(self, small: Path, tmp_path: Path) -> None:
        with create_env_manager("gvisor_build", home=tmp_path, rootfs=small, platform="ptrace") as environment:
            assert environment.capabilities.versions["platform"] == "ptrace"
            assert environment.exec_command("uname -r").stdout.strip() != os.uname().release
            environment.exec_command("kept=1; echo 1 >/root/kept")
            environment.restore(environment.snapshot())
            assert environment.exec_command("cat /root/kept; echo $kept").stdout == "1\n1\n"

    def test_the_base_is_never_written_to(self, small: Path, tmp_path: Path) -> None:
        before = sorted(small.rglob("*"))
        with create_env_manager("gvisor_build", home=tmp_path, rootfs=small) as environment:
            environment.exec_command("rm -rf /etc /home; echo new >/root/new; ls -a /tmp")
            (fork,) = environment.fork()
            with fork:
                assert fork.exec_command("ls /etc 2>/dev/null; cat /root/new").stdout == "new\n"
        assert sorted(small.rglob("*")) == before

    def test_files_and_memory_are_counted_apart(self, small: Path, tmp_path: Path) -> None:
        with create_env_manager("gvisor_build", home=tmp_path, rootfs=small) as environment:
            environment.exec_command("head -c 9000000 /dev/urandom >/root/blob; sum=$(md5sum </root/blob)")
            environment.snapshot()
            (snapshot,) = environment.snapshots()
            assert 9_000_000 <= snapshot.files_bytes < 12_000_000
            assert "bash --norc --noprofile --noediting +H -i" in snapshot.processes
            environment.exec_command("rm /root/blob")
            environment.restore(snapshot.id)
            assert environment.exec_command('[ "$sum" = "$(md5sum </root/blob)" ] && echo same').stdout == "same\n"

    def test_what_run_left_behind_is_named_and_lives_on(self, small: Path, tmp_path: Path) -> None:
        with create_env_manager("gvisor_build", home=tmp_path, rootfs=small) as environment:
            environment.exec_command("still=here")
            environment.run(["sh", "-c", "sleep 611 & echo $! >/tmp/left"])
            with pytest.raises(NotCapturable, match="sleep 611"):
                environment.snapshot()
            assert environment.exec_command("echo $still; kill $(cat /tmp/left)").stdout == "here\n"

    def test_what_is_not_there(self, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(UsageError, match="dockerfile_dir or rootfs"):
            create_env_manager("gvisor_build", home=tmp_path)
        with pytest.raises(UsageError, match="systrap"):
            create_env_manager("gvisor_build", home=tmp_path, rootfs=small, platform="magic")
        monkeypatch.setenv("WAYPOINT_TOOLS", str(tmp_path / "none"))
        monkeypatch.setenv("PATH", "/nowhere")
        with pytest.raises(HostUnsupported) as caught:
            create_env_manager("gvisor_build", home=tmp_path, rootfs=small)
        assert caught.value.details["fix"] == "statefork setup gvisor"

    def test_a_dockerfile_is_the_start_state(self, small: Path, tmp_path: Path) -> None:
        task = tmp_path / "task"
        task.mkdir()
        subprocess.run(["tar", "-C", str(small), "-cf", str(task / "root.tar"), "."], check=True)
        (task / "Dockerfile").write_text(
            "FROM scratch\nADD root.tar /\nENV PATH=/usr/bin MODE=test\nWORKDIR /srv\n"
            "RUN mkdir made && chown 1000 made\nUSER 1000\n"
        )
        home = tmp_path / "home"
        with create_env_manager("gvisor_build", home=home, dockerfile_dir=task) as environment:
            result = environment.exec_command('echo "$MODE"; id -u; touch made/x')
            assert (result.stdout, result.exit_code, result.cwd) == ("test\n1000\n", 0, "/srv")
            assert environment.run(["sh", "-c", "id -u; pwd"]).stdout == "1000\n/srv\n"
            environment.restore(environment.snapshot())
            assert environment.exec_command("ls made; id -u").stdout == "x\n1000\n"
            assert list(collect(home, [GvisorDriver])) == []
        with create_env_manager("gvisor_build", home=home, rootfs=task / "root.tar") as environment:
            assert environment.exec_command("id -u").stdout == "0\n"
        removed = list(collect(home, [GvisorDriver]))
        assert len(removed) == 2 and all(line.startswith("gvisor base") for line in removed)
        assert list(collect(home, [GvisorDriver])) == []


class TestConnections:
    def test_those_within_the_sandbox_are_no_hindrance(self) -> None:
        listing = (
            "  sl  local_address rem_address   st\n"
            "   0: 0100007F:1B58 00000000:0000 0A 0\n"
            "   1: 0100007F:7E83 0100007F:1B58 01 0\n"
            "   1: 00000000000000000000000001000000:C017 00000000000000000000000001000000:1B58 01 0\n"
        )
        assert outside_connections(listing) == ()

    def test_those_that_leave_it_are_named(self) -> None:
        listing = (
            "   1: 0200630A:1B58 0100630A:C7B8 01 0\n"
            "   2: 0000000000000000FFFF00000200630A:1B58 0000000000000000FFFF00000100630A:0050 01 0\n"
        )
        assert outside_connections(listing) == (
            "a tcp connection to 10.99.0.1 port 51128",
            "a tcp connection to 10.99.0.1 port 80",
        )
