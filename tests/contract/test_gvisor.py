"""gVisor, by the contract; and what only a sandbox has: a kernel of its own, its platforms, what it cannot store."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rootfs import bash_rootfs
from statefork import Environment, create_env_manager
from statefork.backends.gvisor import GvisorDriver
from statefork.backends.gvisor_guest import outside_connections
from statefork.backends.gvisor_install import fetch_runsc, find_runsc
from statefork.backends.gvisor_sandbox import CAPABILITIES, kill_sandboxes, sandbox_processes
from statefork.errors import HostUnsupported, NotCapturable, NotFound, Unsupported, UsageError
from statefork.home import collect
from statefork.testing.contract import BackendContract, Subject
from statefork.testing.contract.subject import eventually


def left_behind(home: Path) -> list[str]:
    return [f"process {pid}" for pid in sandbox_processes(home)]


def spoil(environment: Environment, snapshot: str) -> None:
    (image,) = environment._family._grounds.home.glob(f"trees/*/{snapshot}/image/checkpoint.img")
    image.write_bytes(b"damaged")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fetch_runsc(print)
    return bash_rootfs(tmp_path_factory.mktemp("rootfs") / "root")


class UsersContainer:
    """Started by hand, with a state directory of its own. It counts in its memory, and notes the number in a file."""

    def __init__(self, small: Path, where: Path, *flags: str, user: int = 0) -> None:
        self.name = f"users-own-{secrets.token_hex(4)}"
        self.state = where / "state"
        (where / "bundle").mkdir(parents=True)
        (where / "data").mkdir()
        config = {
            "ociVersion": "1.0.0",
            "process": {
                "user": {"uid": user, "gid": user},
                "args": ["/bin/sh", "-c", "n=0; while :; do n=$((n+1)); echo $n >/tmp/n; sleep 0.1; done"],
                "env": ["PATH=/usr/bin:/bin"],
                "cwd": "/usr",
                "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), CAPABILITIES),
            },
            "root": {"path": str(small)},
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/mnt", "type": "bind", "source": str(where / "data"), "options": ["rbind", "rw"]},
            ],
            "linux": {"namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "network")]},
        }
        (where / "bundle/config.json").write_text(json.dumps(config))
        self._runsc = [str(find_runsc()), f"--root={self.state}", "--network=none", "--ignore-cgroups", *flags]
        with open(where / "log", "wb") as log:
            argv = [*self._runsc, "run", "--detach", "--bundle", str(where / "bundle"), self.name]
            subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._filestore = small / f".gvisor.filestore.{self.name}"

    def said(self, script: str) -> str:
        argv = [*self._runsc, "exec", self.name, "/bin/sh", "-c", script]
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout

    def __enter__(self) -> UsersContainer:
        return self

    def __exit__(self, *_: object) -> None:
        kill_sandboxes(self.state)
        self._filestore.unlink(missing_ok=True)


class TestGvisor(BackendContract):
    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, small: Path, tmp_path_factory: pytest.TempPathFactory) -> Subject:
        @contextmanager
        def attach(home: Path) -> Iterator[Environment]:
            with UsersContainer(small, tmp_path_factory.mktemp("users-own")) as users:
                before = sandbox_processes(users.state)
                with create_env_manager("gvisor_attach", home=home, container_name=users.name) as environment:
                    yield environment
                assert sandbox_processes(users.state) == before
                assert "statefork" not in users.said("ls -a / /tmp; cat /proc/[0-9]*/cmdline; :")
                counted = users.said("cat /tmp/n")
                eventually("it counts on", lambda: users.said("cat /tmp/n") not in ("", counted))

        return Subject("gvisor_build", {"rootfs": small}, left_behind, attach=attach, spoil=spoil)


class TestGvisorAttach:
    def test_what_comes_back_is_the_containers_own(self, small: Path, tmp_path: Path) -> None:
        with UsersContainer(small, tmp_path / "own", user=1000) as users:
            arguments = {"container_name": users.name, "root": users.state}
            with create_env_manager("gvisor_attach", home=tmp_path / "home", **arguments) as environment:
                assert environment.capabilities.restores == {"files", "processes", "memory"}
                assert "runsc exec" in environment.capabilities.missing["shell"]
                result = environment.exec_command("id -u; pwd; mine=1; sleep 613 & echo file >/tmp/file", timeout=60)
                assert result.stdout == "1000\n/usr\n"
                snapshot = environment.snapshot()
                (taken,) = environment.snapshots()
                assert "the shell" in taken.not_captured
                assert any("sleep 613" in one for one in taken.not_captured)
                assert any("/mnt" in one for one in taken.not_captured)
                assert not any("sleep 613" in line for line in taken.processes)
                alive = environment.exec_command("echo $mine; kill -0 $! && echo runs")
                assert (alive.stdout, alive.shell_restarted) == ("1\nruns\n", False)
                with pytest.raises(NotCapturable, match="sleep 613"):
                    environment.snapshot(mode="full")
                stood = int(environment.read_file("/tmp/n"))
                assert environment.restore(snapshot).shell_restarted
                result = environment.exec_command(
                    'echo "mine=$mine"; cat /tmp/file; cat /proc/[0-9]*/cmdline | tr "\\0" " "'
                )
                assert result.stdout.startswith("mine=\nfile\n")
                assert "sleep 613" not in result.stdout
                eventually("the copy counts on", lambda: int(environment.read_file("/tmp/n") or 0) > stood)
                assert environment.description != users.name
                (fork,) = environment.fork()
                with fork:
                    assert fork.exec_command("cat /tmp/file").stdout == "file\n"
            assert "statefork" not in users.said("ls -a /")

    def test_a_killed_owner_is_cleared_up_after(self, small: Path, tmp_path: Path) -> None:
        owner = (
            "import os, signal, sys\nfrom statefork import create_env_manager\n"
            "environment = create_env_manager('gvisor_attach', home=sys.argv[1], container_name=sys.argv[2])\n"
            "environment.fork(1)\nos.kill(os.getpid(), signal.SIGKILL)\n"
        )
        with UsersContainer(small, tmp_path / "own") as users:
            argv = [sys.executable, "-c", owner, str(tmp_path / "home"), users.name]
            done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == -9, done.stderr
            assert "statefork" in users.said("ls -a /")
            removed = list(collect(tmp_path / "home", [GvisorDriver]))
            assert f"gvisor shell in {users.name}" in removed
            assert left_behind(tmp_path / "home") == []
            assert "statefork" not in users.said("ls -a /; cat /proc/[0-9]*/cmdline; :")

    def test_what_cannot_be_taken_is_refused(self, small: Path, tmp_path: Path) -> None:
        with UsersContainer(small, tmp_path / "own", "--overlay2=none") as users:
            with pytest.raises(Unsupported, match="overlay2"):
                create_env_manager("gvisor_attach", home=tmp_path, container_name=users.name)
            with pytest.raises(NotFound, match=f"{users.name} .root={users.state}"):
                create_env_manager("gvisor_attach", home=tmp_path, container_name="surely-not")
            with pytest.raises(NotFound, match="root="):
                create_env_manager("gvisor_attach", home=tmp_path, container_name=users.name, root=tmp_path)


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
            environment.run(["sh", "-c", "sleep 612 </dev/null >/dev/null 2>&1 & echo $! >/tmp/left"])
            with pytest.raises(NotCapturable, match="sleep 612"):
                environment.snapshot()
            environment.exec_command("kill $(cat /tmp/left); sleep 614 &")
            environment.restore(environment.snapshot())
            assert "sleep 614" in environment.exec_command("cat /proc/[0-9]*/cmdline | tr '\\0' ' '").stdout

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
        (task / "Dockerfile").write_text("FROM scratch\nADD root.tar /\nENV PATH=/usr/bin\nWORKDIR /srv/none/yet\n")
        with create_env_manager("gvisor_build", home=home, dockerfile_dir=task) as environment:
            assert environment.exec_command("pwd; stat -c %a /").stdout == "/srv/none/yet\n755\n"
        removed = list(collect(home, [GvisorDriver]))
        assert len(removed) == 3 and all(line.startswith("gvisor base") for line in removed)
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
