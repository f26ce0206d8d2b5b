"""The engine's own CRIU and the plain one: the same tree comes back, from the same images."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest

from waypoint.engine import Engine
from waypoint.errors import HostUnsupported, KernelError
from waypoint.kernel import build_criu, processes, tools
from waypoint.kernel import criu_rpc_pb2 as rpc
from waypoint.kernel.criu import cached_kernel_options
from waypoint.kernel.criu_start import Started
from waypoint.kernel.criu_worker import Hook, Worker
from waypoint.kernel.launch import launch_argv
from waypoint.kernel.netns import in_netns
from waypoint.model import BaseRecord
from waypoint.session import Session

_NS_GET_USERNS = 0xB701
SERVER = "python3 -c 'import socket; s = socket.create_server((\"127.0.0.1\", 8000)); c, _ = s.accept(); print(c.recv(9))' >/said &"


@pytest.fixture(params=["1", "0"])
def quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setenv("WAYPOINT_QUICK", request.param)
    return bool(request.param == "1")


@pytest.fixture
def session(quick: bool, eager: Engine, small_base: BaseRecord) -> Iterator[Session]:
    made = eager.new(base=small_base)
    yield made
    made.remove()


def test_it_is_built_here() -> None:
    """All else goes without it, too: so this says that it was not forgotten."""
    assert tools.quick_criu() is not None, "`waypoint setup` builds it"
    assert tools.engine_criu() == tools.quick_criu()
    assert tools.criu_argv() != list(tools.engine_criu().argv), "others are measured with the plain one"


def test_a_session_comes_back_with_either(quick: bool, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    used = set()
    receive = Worker._receive

    def watched(worker: Worker) -> bytes:
        with contextlib.suppress(FileNotFoundError):  # it has answered, and ended
            used.add(Path(f"/proc/{worker.pid}/exe").readlink() == tools.program_path(tools.QUICK))
        return receive(worker)

    monkeypatch.setattr(Worker, "_receive", watched)
    session.exec("N=1; sleep 1000 & echo one >/file; hostname changed 2>/dev/null")
    first = session.snapshot().id
    session.exec("N=2; echo two >/file; kill %1; hostname other 2>/dev/null")
    session.restore(first)
    assert session.exec("echo $N; cat /file; jobs -pr | wc -l").stdout.split() == [b"1", b"one", b"1"]
    (fork,) = session.fork(1, from_snapshot=first)
    assert fork.exec("echo $N; cat /file; jobs -pr | wc -l").stdout.split() == [b"1", b"one", b"1"]
    assert fork.verify() == []
    assert used == {quick}
    fork.remove()


def test_what_one_has_saved_the_other_restores(
    quick: bool, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.exec("N=1; sleep 1000 & echo one >/file")
    saved = session.snapshot().id
    monkeypatch.setenv("WAYPOINT_QUICK", "0" if quick else "1")
    session.restore(saved)
    assert session.exec("echo $N; cat /file; jobs -pr | wc -l").stdout.split() == [b"1", b"one", b"1"]
    assert session.verify() == []


def test_clocks_go_on_after_each_restore(quick: bool, session: Session) -> None:
    """From the second time on the session has a time namespace, whose clocks are read without entering it."""
    session.exec("up() { read -r up rest </proc/uptime; echo $up; }")
    at = float(session.exec("up").stdout)
    for _ in range(3):
        session.restore(session.snapshot().id)
        now = float(session.exec("up").stdout)
        assert at <= now < at + 30, "the clock has jumped"
        at = now


def test_the_host_name_that_a_session_gave_itself(quick: bool, eager: Engine, small_base: BaseRecord) -> None:
    session = eager.new(base=small_base, extra_capabilities=["+SYS_ADMIN"], seccomp=False)
    try:
        assert session.exec("hostname first").exit_code == 0
        saved = session.snapshot().id
        session.exec("hostname second")
        session.restore(saved)
        assert session.exec("hostname").stdout == b"first\n"
    finally:
        session.remove()


def test_sockets_are_asked_for_where_there_are_any(quick: bool, eager: Engine) -> None:
    """Without sockets the tables are not looked at; with one that listens and one that is connected they are."""
    session = eager.new()
    try:
        session.exec(SERVER)
        session.exec("until exec 9<>/dev/tcp/127.0.0.1/8000; do sleep 0.1; done 2>/dev/null", timeout=30)
        saved = session.snapshot().id
        session.exec("exec 9>&-; kill %1")
        session.restore(saved)
        said = session.exec("printf hello >&9; exec 9>&-; wait; cat /said", timeout=30)
        assert said.stdout == b"b'hello'\n", said.stderr
    finally:
        session.remove()


def test_the_programs_that_criu_starts(quick: bool, eager: Engine, small_base: BaseRecord) -> None:
    """CRIU saves a tmpfs with tar."""
    session = eager.new(base=small_base, extra_capabilities=["+SYS_ADMIN"], seccomp=False)
    try:
        made = session.exec(
            "mkdir /small && mount -t tmpfs none /small && seq 100000 >/small/numbers && tail -n1 /small/numbers"
        )
        assert made.stdout == b"100000\n", made.stderr
        saved = session.snapshot().id
        session.exec("echo gone >/small/numbers")
        session.restore(saved)
        assert session.exec("tail -n1 /small/numbers; wc -l </small/numbers").stdout.split() == [b"100000", b"100000"]
    finally:
        session.remove()


def test_the_network_of_what_comes_back(quick: bool, eager: Engine, session: Session) -> None:
    """Our own CRIU makes it beside the mounts and brings it up by itself; nobody is asked, and all is as if somebody had been."""
    saved = session.snapshot().id
    asked: list[str] = []
    before = Worker.answer_until

    def watched(self: Worker, question: str, hooks: Mapping[str, Hook]) -> rpc.criu_resp | None:
        told = {name: partial(_note, asked, name, hook) for name, hook in hooks.items()}
        return before(self, question, told)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "answer_until", watched)
        session.restore(saved)
    assert ("setup-namespaces" in asked) is not quick and "pre-restore" in asked
    shown = session.exec("cat /sys/class/net/lo/flags; ls /sys/class/net")
    assert shown.stdout.split() == [b"0x9", b"lo"], shown.stderr
    init = session.record.init_pid
    names = ("ipv4/ping_group_range", "ipv4/ip_unprivileged_port_start", "mptcp/enabled")
    settings = in_netns(f"/proc/{init}/ns/net", lambda: [Path(f"/proc/sys/net/{name}").read_text().split() for name in names])
    assert settings == [["0", "2147483647"], ["0"], ["0"]]
    with open(f"/proc/{init}/ns/net") as net:
        owner = fcntl.ioctl(net, _NS_GET_USERNS)
    try:
        assert os.fstat(owner).st_ino == Path(f"/proc/{init}/ns/user").stat().st_ino, "it does not belong to the session"
    finally:
        os.close(owner)


def _note(asked: list[str], name: str, hook: Hook, pid: int) -> Callable[[], None] | None:
    asked.append(name)
    return hook(pid)


def test_processes_come_back_free_to_run_anywhere(quick: bool, session: Session) -> None:
    """They are kept to one processor while CRIU steps through them."""
    session.exec("sleep 1000 & sleep 1000 &")
    session.restore(session.snapshot().id)
    ours = os.sched_getaffinity(0)
    pids = processes.namespace_pids(session.record.init_pid)
    assert len(pids) == 4 and all(os.sched_getaffinity(pid) == ours for pid in pids)


def test_mount_namespaces_inside(quick: bool, eager: Engine) -> None:
    session = eager.new(extra_capabilities=["+SYS_ADMIN"], seccomp=False)
    try:
        inner = "mkdir /inner; mount --bind /etc /inner && touch /ready; exec sleep 1000"
        session.exec(f"unshare -m sh -c '{inner}' & until [ -e /ready ]; do sleep 0.05; done", timeout=30)
        saved = session.snapshot().id
        session.exec("kill %1; rm /ready")
        session.restore(saved)
        assert session.exec("ls /inner | wc -l").stdout == b"0\n"
        assert session.exec("[ -e /proc/$(jobs -p)/root/inner/passwd ] && echo there").stdout == b"there\n"
    finally:
        session.remove()


def test_files_without_a_name_are_cleared_away(quick: bool, session: Session) -> None:
    """Then the first process waits for all others, and what was made for them is taken away before anything runs."""
    session.exec("mkdir /d; echo kept >/d/f; exec 8</d/f; rm -r /d; echo two >/a; ln /a /b; exec 9</a; rm /a")
    session.restore(session.snapshot().id)
    assert session.exec("cat <&8; cat <&9; ls -A / | grep -c -e '^d$' -e link_remap").stdout == b"kept\ntwo\n0\n"


def test_a_host_where_it_is_not_built_does_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tools.current_criu()
    monkeypatch.setattr(tools, "prefix", lambda: tmp_path)
    tools.remember_criu(plain)
    assert tools.quick_criu() is None
    assert tools.engine_criu() == plain


def test_a_build_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "prefix", lambda: tmp_path)
    archive = tmp_path / "criu_4.2.1.orig.tar.gz"
    (tmp_path / "criu").mkdir()
    (tmp_path / "criu" / "Makefile").write_text("all:\n")
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "criu", "criu-4.2.1")
    monkeypatch.setattr(build_criu, "fetch_source", lambda *_: archive)
    with pytest.raises(KernelError, match="does not fit"):
        build_criu.build_criu(tmp_path, lambda _: None)
    assert not list(tmp_path.glob(".staging*")) and not (tmp_path / "bin").exists()
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(HostUnsupported, match="without gcc"):
        build_criu.build_criu(tmp_path, lambda _: None)


def test_a_worker_that_is_killed_while_it_starts_leaves_nobody_behind() -> None:
    """It forks while it asks the kernel what that can do: who was forked then must not outlive it. (Plain, one in four did.)"""
    argv = launch_argv("criu", cached_kernel_options(), (), list(tools.engine_criu().argv))
    seen = []
    for step in range(40):
        worker = Started(argv, hold=[], environment={})
        children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children")
        deadline = time.monotonic() + 2
        while not (found := children.read_text().split()) and time.monotonic() < deadline:
            pass
        after = time.perf_counter() + step * 1e-5
        while time.perf_counter() < after:
            pass
        os.kill(worker.pid, signal.SIGKILL)
        worker.close()
        seen += [int(child) for child in found]
    assert len(seen) > 20, "it is not caught at it"
    deadline = time.monotonic() + 10
    while left := [pid for pid in seen if processes.state(pid) not in "ZX"]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.02)
