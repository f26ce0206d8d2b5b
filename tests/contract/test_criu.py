"""CRIU alone, by the contract; and what follows from sharing the host's files."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from statefork import Environment, create_env_manager
from statefork.errors import BaseChanged, NotCapturable, NotFound
from statefork.testing.contract import BackendContract, Subject
from statefork.testing.contract.subject import eventually

SLEEPER = "import time\nwhile True: time.sleep(0.1)"


def processes(home: Path) -> list[str]:
    """Those whose command line or surroundings name the state directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                mounts = (entry / "mounts").read_text()
            except OSError:
                continue
            if f"{home}/criu/here" in mounts:
                found.append(f"process {entry.name}")
    return found


def spoil(environment: Environment, snapshot: str) -> None:
    for image in environment._family._grounds.home.glob(f"trees/*/{snapshot}/images/core-*.img"):
        image.write_bytes(b"damaged")


@contextmanager
def own_process(home: Path) -> Iterator[Environment]:
    null = subprocess.DEVNULL
    child = subprocess.Popen(
        [sys.executable, "-c", SLEEPER], stdin=null, stdout=null, stderr=null, start_new_session=True
    )
    try:
        with create_env_manager("criu_attach", home=home, target_pid=child.pid, work_dir="/tmp") as environment:
            yield environment
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


class TestCriu(BackendContract):
    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls) -> Iterator[Subject]:
        with tempfile.TemporaryDirectory(prefix="contract-") as scratch:
            yield Subject(
                method="criu_build",
                arguments={"command": "sleep 600", "work_dir": "/tmp"},
                left_behind=processes,
                attach=own_process,
                spoil=spoil,
                scratch=f"{scratch}/inside",
            )


class TestCriuOnly:
    def test_the_command_and_its_log(self, tmp_path: Path) -> None:
        command = "n=0; while read -r x; do n=$((n+1)); echo line $n; done <>$STATEFORK_DIR/ask"
        with create_env_manager(
            "criu_build", home=tmp_path, command=f"mkfifo $STATEFORK_DIR/ask; {command}"
        ) as environment:
            ask = "echo >$STATEFORK_DIR/ask"
            log = "cat $STATEFORK_LOG"
            eventually("it listens", lambda: environment.exec_command("[ -p $STATEFORK_DIR/ask ]").ok)
            environment.exec_command(ask)
            eventually("line 1", lambda: environment.exec_command(log).stdout == "line 1\n")
            environment.snapshot("one")
            environment.exec_command(ask)
            eventually("line 2", lambda: environment.exec_command(log).stdout == "line 1\nline 2\n")
            a, b = environment.fork(2, from_snapshot="one")
            with a, b:
                assert a.exec_command(log).stdout == "line 1\n"
                a.exec_command(ask)
                eventually("line 2 of the fork", lambda: a.exec_command(log).stdout == "line 1\nline 2\n")
                assert b.exec_command(log).stdout == "line 1\n"

    def test_orphans_stay_in_the_tree(self, tmp_path: Path) -> None:
        with create_env_manager("criu_build", home=tmp_path, command="true") as environment:
            environment.exec_command("(sleep 611 >/dev/null 2>&1 &)")
            environment.restore(environment.snapshot())
            assert "sleep 611" in environment.exec_command("cat /proc/[0-9]*/cmdline | tr '\\0' ' '").stdout

    def test_each_has_its_own_ports(self, tmp_path: Path) -> None:
        command = f"{sys.executable} -m http.server 8123 --bind 127.0.0.1"
        ask = [sys.executable, "-c", "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8123').status)"]
        with create_env_manager("criu_build", home=tmp_path, command=command, work_dir=tmp_path) as environment:
            eventually("it serves", lambda: environment.run(ask).stdout == "200\n")
            (fork,) = environment.fork()
            with fork:
                assert [one.run(ask).stdout for one in (environment, fork)] == ["200\n", "200\n"]

    def test_a_changed_file_is_named(self, tmp_path: Path) -> None:
        data, log = tmp_path / "data", tmp_path / "growing.log"
        data.write_text("as it was")
        command = f"exec sleep 600 <{data} >>{log}"
        with create_env_manager("criu_build", home=tmp_path / "home", command=command) as environment:
            eventually("it is open", lambda: log.exists())
            snapshot = environment.snapshot()
            environment.exec_command("still=here")
            log.write_text("a file that is only appended to may have grown")
            assert environment.restore(snapshot).snapshot == snapshot
            environment.exec_command("still=here")
            data.write_text("other")
            with pytest.raises(BaseChanged, match=f"{tmp_path}/data"):
                environment.restore(snapshot)
            assert environment.exec_command("echo $still").stdout == "here\n"

    def test_wrong_targets(self, tmp_path: Path) -> None:
        with pytest.raises(NotFound):
            create_env_manager("criu_attach", home=tmp_path, target_pid=2**22 - 1)
        with pytest.raises(NotFound):
            create_env_manager("criu_build", home=tmp_path, command="true", work_dir=tmp_path / "none")
        inner = subprocess.Popen(["unshare", "--net", "sleep", "600"])
        try:
            outside = Path("/proc/self/ns/net").readlink()
            eventually("it is in", lambda: Path(f"/proc/{inner.pid}/ns/net").readlink() != outside)
            with pytest.raises(NotCapturable, match="container"):
                create_env_manager("criu_attach", home=tmp_path, target_pid=inner.pid)
        finally:
            inner.kill()
            inner.wait()
