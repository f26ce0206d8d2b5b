"""A root file system without bash: the persistent shell is a plain sh, with the same promises except line editing and job control."""

from __future__ import annotations

from pathlib import Path

import pytest

from rootfs import busybox_rootfs
from waypoint.bases import base_from_rootfs
from waypoint.engine import Engine
from waypoint.errors import ExecTimeout
from waypoint.session import Session


@pytest.fixture(scope="module")
def busybox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("busybox") / "root"
    busybox_rootfs(root)
    return root


def test_plain_sh(engine: Engine, busybox: Path, sessions: list[Session]) -> None:
    session = engine.new(base=base_from_rootfs(engine.store, busybox))
    session.exec("cd /tmp; X=kept; f() { echo f$1; }; echo one > file; sleep 1000 &")
    result = session.exec("echo $X $(f 2); echo err >&2; cat; (exit 5)", stdin=b"in\n")
    assert (result.stdout, result.stderr, result.exit_code) == (b"kept f2\nin\n", b"err\n", 5)
    assert session.exec("echo $?").stdout == b"5\n"
    assert session.exec("if").exit_code != 0
    with pytest.raises(ExecTimeout):
        session.exec("sleep 100", timeout=0.3)
    taken = session.snapshot()
    session.exec("cd /; X=gone; rm /tmp/file; kill %1")
    session.restore(taken.id)
    (fork,) = session.fork(1, from_snapshot=taken.id)
    for one in (session, fork):
        assert one.exec("echo $X $PWD; cat file; f 1").stdout == b"kept /tmp\none\nf1\n"
        assert b"sleep 1000" in one.run(["ps", "-o", "args"]).stdout
    assert session.exec("exit 4").shell_died
    assert session.exec("echo [$X]").stdout == b"[]\n"


def test_an_open_dev_tty_is_held_by_its_name(session: Session) -> None:
    session.exec("V=live; exec 3<>/dev/tty; (exec 4>/dev/tty; exec sleep 1000) & :")
    taken = session.snapshot()
    assert session.exec("readlink /proc/$$/fd/3").stdout == b"/dev/pts/0\n"
    session.exec("V=; exec 3<&-; kill %1")
    session.restore(taken.id)
    assert session.exec("echo $V; [ -t 3 ] && echo text >&3; readlink /proc/$!/fd/4").stdout == b"live\n/dev/pts/0\n"
