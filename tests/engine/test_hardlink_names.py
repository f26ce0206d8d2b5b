"""A file of the base with several names, changed under one of them: every name shows the change, here and after a restore."""

from __future__ import annotations

from pathlib import Path

import pytest

from rootfs import bash_rootfs
from waypoint.bases import base_from_rootfs
from waypoint.engine import Engine
from waypoint.session import Session

CHECK = "cat /opt/f1 /opt/sub/f2 /opt/sub/f3; stat -c %h /opt/f1; [ /opt/f1 -ef /opt/sub/f3 ] && echo same"


@pytest.fixture(scope="module")
def linked_rootfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("linked") / "root"
    bash_rootfs(root)
    (root / "opt/sub").mkdir(parents=True, exist_ok=True)
    (root / "opt/f1").write_text("one\n")
    for name in ("sub/f2", "sub/f3"):
        (root / "opt" / name).hardlink_to(root / "opt/f1")
    return root


@pytest.mark.parametrize("many", [False, True], ids=["copied", "re-homed"])
def test_all_names_change_together(engine: Engine, linked_rootfs: Path, sessions: list[Session], many: bool) -> None:
    session = engine.new(base=base_from_rootfs(engine.store, linked_rootfs))
    session.exec("echo two > /opt/f1")
    if many:
        session.exec("mkdir /many; for i in $(seq 3500); do : > /many/$i; done", timeout=60)
    wanted = session.exec(CHECK).stdout
    assert wanted == b"two\ntwo\ntwo\n3\nsame\n"
    taken = session.snapshot()
    (fork,) = session.fork(1, from_snapshot=taken.id)
    assert fork.exec(CHECK).stdout == wanted
    fork.exec("echo three > /opt/sub/f2")
    (second,) = fork.fork(1)
    assert second.exec(CHECK).stdout == b"three\nthree\nthree\n3\nsame\n"
    assert session.exec(CHECK).stdout == wanted
    session.pause()
    session.resume()
    assert session.exec(CHECK).stdout == wanted
