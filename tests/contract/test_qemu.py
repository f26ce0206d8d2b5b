"""QEMU microVMs, by the contract; and what only a whole machine has. Every environment begins as a copy of one boot."""

from __future__ import annotations

import socketserver
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rootfs import busybox_rootfs
from statefork import Environment, create_env_manager
from statefork.backends.microvm.kernel import fetch_kernel
from statefork.backends.microvm.qemu_disks import DEEPEST
from statefork.backends.microvm.qemu_machine import QemuMachine
from statefork.backends.microvm.vmm import machine_processes
from statefork.backends.qemu import boot_machine, end_machine
from statefork.errors import BuildError, Busy, HostUnsupported, NotFound, SessionDead, UsageError
from statefork.testing.contract import BackendContract, Subject
from statefork.testing.contract.subject import eventually

PROGRAM = "qemu-system-x86_64"


def machines(home: Path) -> list[str]:
    return [f"machine in {tree}, process {pid}" for pid, tree in machine_processes(PROGRAM, home / "trees")]


def spoil(environment: Environment, snapshot: str) -> None:
    for file in environment._family._grounds.home.glob(f"trees/*/{snapshot}/devices"):
        file.write_bytes(b"damaged" + file.read_bytes()[7:])


def programs_in(environment: Environment) -> int:
    """Kernel threads have no executable."""
    return len(environment.run(["sh", "-c", "ls -l /proc/[0-9]*/exe 2>/dev/null"]).stdout.split("->"))


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernel is fetched if no other test run has."""
    fetch_kernel(print)
    return busybox_rootfs(tmp_path_factory.mktemp("machine") / "root")


@pytest.fixture(scope="session")
def users_own(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A machine that was booted by hand."""
    directory = boot_machine(tmp_path_factory.mktemp("users-own"), rootfs=small, memory_mib=96, disk_mib=64)
    yield directory
    end_machine(directory)


class TestQemu(BackendContract):
    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, small: Path, users_own: Path) -> Subject:
        @contextmanager
        def attach(home: Path) -> Iterator[Environment]:
            before = (users_own / "machine.json").read_text()
            with create_env_manager("qemu_attach", home=home, vm_id=users_own) as environment:
                programs = programs_in(environment)
                yield environment
            assert (users_own / "machine.json").read_text() == before
            with create_env_manager("qemu_attach", home=home, vm_id=users_own) as environment:
                assert "statefork" not in environment.exec_command("ls -a / /tmp").stdout
                assert programs_in(environment) == programs

        return Subject(
            "qemu_build", {"rootfs": small, "memory_mib": 96, "disk_mib": 64}, machines, attach=attach, spoil=spoil
        )


@pytest.fixture(scope="module")
def machine(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    arguments = {"rootfs": small, "memory_mib": 96, "disk_mib": 64}
    with create_env_manager("qemu_build", home=tmp_path_factory.mktemp("home"), **arguments) as environment:
        yield environment


class TestQemuOnly:
    def test_a_running_command_goes_on_in_a_fork(self, machine: Environment) -> None:
        begun = threading.Event()
        script = "rm -f /tmp/gate; echo begun; while ! [ -e /tmp/gate ]; do sleep 0.05; done; done=yes"
        running = threading.Thread(
            target=machine.exec_command, args=(script,), kwargs={"on_output": lambda *_: begun.set()}
        )
        running.start()
        assert begun.wait(30)
        (fork,) = machine.fork()
        with fork:
            fork.run(["touch", "/tmp/gate"])
            assert fork.exec_command("echo $done", timeout=30).stdout == "yes\n"
            assert running.is_alive()
            machine.run(["touch", "/tmp/gate"])
            running.join(30)
            assert not running.is_alive()

    def test_clocks_are_right_and_randomness_differs(self, machine: Environment) -> None:
        machine.pause()
        machine.resume()
        forks = machine.fork(2)
        ask = ["sh", "-c", "date +%s; head -c 16 /dev/urandom | od -An -tx1; cat /proc/sys/kernel/random/uuid"]
        answers = [fork.run(ask).stdout.splitlines() for fork in (machine, *forks)]
        for fork in forks:
            fork.destroy()
        assert all(abs(int(answer[0]) - time.time()) < 30 for answer in answers)
        assert len({answer[1] for answer in answers}) == len({answer[2] for answer in answers}) == 3

    def test_a_terminal_comes_back(self, machine: Environment) -> None:
        """A shell on a pseudo-terminal of its own, spoken to over a connection inside the machine: both come back."""
        machine.exec_command(
            "mkfifo /tmp/keys; telnetd -l /bin/sh -p 2323; "
            "(nc 127.0.0.1 2323 <>/tmp/keys >/tmp/screen 2>&1 &); echo 'n=41; tty' >/tmp/keys"
        )
        eventually("it has a terminal", lambda: "/dev/pts/0" in machine.exec_command("cat /tmp/screen").stdout)
        (fork,) = machine.fork()
        with fork:
            fork.exec_command("echo 'echo answer=$((n+1)); tty' >/tmp/keys")
            eventually("it answers", lambda: "answer=42" in fork.exec_command("cat /tmp/screen").stdout)
        assert "answer=42" not in machine.exec_command("cat /tmp/screen").stdout

    def test_mounts_and_kernel_state_come_back(self, machine: Environment) -> None:
        machine.exec_command("mkdir -p /mnt/t; mount -t tmpfs none /mnt/t; echo deep >/mnt/t/f; hostname changed")
        (fork,) = machine.fork()
        with fork:
            assert fork.exec_command("cat /mnt/t/f; hostname").stdout == "deep\nchanged\n"

    def test_more_snapshots_than_layers(self, machine: Environment) -> None:
        """The chain of disks is made flat when it gets too deep; nothing of it is lost, and nothing holds old layers."""
        (fork,) = machine.fork()
        with fork:
            names = []
            for number in range(DEEPEST + 3):
                fork.exec_command(f"echo {number} >/root/n{number}; sync")
                names.append(fork.snapshot())
            for number in (0, DEEPEST - 1, DEEPEST + 2):
                fork.restore(names[number])
                assert (
                    fork.exec_command(f"ls /root | grep -c n; cat /root/n{number}").stdout
                    == f"{number + 1}\n{number}\n"
                )
            stored = fork._family.tree.find(names[-1]).captured.handle
            assert len(stored.saved.disks) < DEEPEST

    def test_only_files_if_asked(self, machine: Environment) -> None:
        (fork,) = machine.fork()
        with fork:
            fork.exec_command("echo kept >/root/kept; lost=1; sleep 600 &")
            snapshot = fork.snapshot(mode="files")
            assert fork.exec_command("echo goes on >>/root/kept; cat /root/kept").stdout == "kept\ngoes on\n"
            assert fork.restore(snapshot).shell_restarted
            result = fork.exec_command('cat /root/kept; echo "lost=$lost"; ps | grep -c "[s]leep 600"')
            assert (result.stdout, result.shell_restarted) == ("kept\nlost=\n0\n", True)
            assert fork.restore(fork.snapshot()).shell_restarted is False

    def test_a_connection_that_a_snapshot_cuts(self, machine: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
        """As Firecracker's vsock is: the shell is found again over a new connection, in the middle of nothing."""
        monkeypatch.setattr(QemuMachine, "keeps_connection", False)
        (fork,) = machine.fork()
        with fork:
            fork.exec_command("cd /tmp; kept=1; (while :; do echo noise; done) & job=$!")
            for _ in range(3):
                fork.snapshot()
                result = fork.exec_command("kept=$((kept+1))", timeout=30)
                assert (result.exit_code, result.cwd, result.shell_restarted) == (0, "/tmp", False)
            fork.exec_command("kill $job; wait $job")
            assert fork.exec_command("echo $kept").stdout == "4\n"
            fork.restore(fork.snapshots()[-1].id)
            assert fork.exec_command("kill $job; echo $kept", timeout=30).stdout.endswith("3\n")

    def test_a_machine_that_is_switched_off(self, machine: Environment) -> None:
        (fork,) = machine.fork()
        with fork:
            with pytest.raises(SessionDead):
                fork.run(["poweroff", "-f"])
            with pytest.raises(SessionDead):
                fork.exec_command("true")
            fork.restore(fork.snapshots()[-1].id)
            assert fork.exec_command("echo back").stdout == "back\n"


class TestOtherMachines:
    def test_a_dockerfile_is_the_start_state(self, small: Path, tmp_path: Path) -> None:
        """And its machine has a network: of its own, behind the host."""
        task = tmp_path / "task"
        task.mkdir()
        subprocess.run(["tar", "-C", str(small), "-cf", str(task / "root.tar"), "."], check=True)
        (task / "note").write_text("from the context\n")
        (task / "Dockerfile").write_text(
            "FROM scratch\nADD root.tar /\nENV PATH=/bin MODE=test\nWORKDIR /srv\nCOPY note .\n"
            "RUN mkdir made && chown 1000 made && rm /bin/vi\nUSER 1000\nWORKDIR /not/there/yet\n"
        )
        arguments = {"dockerfile_dir": task, "network": "user", "memory_mib": 96, "disk_mib": 64}
        with socketserver.TCPServer(("127.0.0.1", 0), Greeter) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            fetch = ["nc", "10.0.2.2", str(server.server_address[1])]
            with create_env_manager("qemu_build", home=tmp_path / "home", **arguments) as environment:
                result = environment.exec_command('cat /srv/note; echo "$MODE"; id -u; touch /srv/made/x; ls /bin/vi')
                assert (result.stdout, result.cwd) == ("from the context\ntest\n1000\n", "/not/there/yet")
                (fork,) = environment.fork()
                assert [one.run(fetch).stdout for one in (environment, fork)] == ["hello\n", "hello\n"]
                assert fork.exec_command('ls /srv/made; echo "$MODE"; id -u').stdout == "x\ntest\n1000\n"
                assert "connections to the outside" in environment.snapshots()[0].not_captured
                fork.destroy()
            server.shutdown()

    def test_a_dockerfile_that_fails_shows_why(self, small: Path, tmp_path: Path) -> None:
        subprocess.run(["tar", "-C", str(small), "-cf", str(tmp_path / "root.tar"), "."], check=True)
        (tmp_path / "Dockerfile").write_text(
            "FROM scratch\nADD root.tar /\nENV PATH=/bin\nRUN echo 'the reason' >&2; exit 9\n"
        )
        with pytest.raises(BuildError, match="the reason"):
            create_env_manager("qemu_build", home=tmp_path / "home", dockerfile_dir=tmp_path)

    def test_wrong_arguments(self, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for arguments, said in (
            ({}, "dockerfile_dir or rootfs"),
            ({"rootfs": small, "dockerfile_dir": small}, "only one"),
            ({"rootfs": small, "memory_mib": 8}, "at least 64"),
            ({"rootfs": small, "vcpus": 0}, "vcpus"),
            ({"rootfs": small, "network": "wifi"}, "user"),
            ({"rootfs": tmp_path / "none"}, "archive"),
        ):
            with pytest.raises(UsageError, match=said):
                create_env_manager("qemu_build", home=tmp_path / "home", **arguments)
        with pytest.raises(BuildError, match="/bin/sh"):
            create_env_manager("qemu_build", home=tmp_path / "home", rootfs=tmp_path)
        with pytest.raises(NotFound, match="no kernel"):
            create_env_manager("qemu_build", home=tmp_path / "home", rootfs=small, kernel=tmp_path / "vmlinuz")
        with pytest.raises(NotFound, match="booted in"):
            create_env_manager("qemu_attach", home=tmp_path / "home", vm_id=tmp_path)
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(HostUnsupported) as caught:
            create_env_manager("qemu_build", home=tmp_path / "home", rootfs=small)
        assert "apt-get install qemu-system-x86" in caught.value.details["fix"]

    def test_a_host_without_a_kernel(self, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WAYPOINT_TOOLS", str(tmp_path / "empty"))
        with pytest.raises(HostUnsupported) as caught:
            create_env_manager("qemu_build", home=tmp_path / "home", rootfs=small)
        assert caught.value.details["fix"] == "statefork setup microvm"

    def test_a_machine_has_one_client(self, users_own: Path, tmp_path: Path) -> None:
        with create_env_manager("qemu_attach", home=tmp_path, vm_id=users_own) as first:
            with pytest.raises(Busy):
                create_env_manager("qemu_attach", home=tmp_path, vm_id=users_own)
            assert first.exec_command("echo still mine").stdout == "still mine\n"


class Greeter(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.sendall(b"hello\n")
