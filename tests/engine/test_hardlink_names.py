"""A file of the base with several names, changed under one of them: every name shows the change, here and after a restore."""

from __future__ import annotations

from pathlib import Path

import pytest

from rootfs import bash_rootfs
from waypoint.bases import base_from_rootfs
from waypoint.engine import Engine
from waypoint.kernel import aliases, trees
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


@pytest.fixture(params=[aliases._BIG_BYTES, -1], ids=["here", "by the program"])
def looked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks at the overlay's index."""
    monkeypatch.setattr(aliases, "_BIG_BYTES", request.param)


@pytest.mark.usefixtures("looked")
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


@pytest.mark.usefixtures("looked")
@pytest.mark.parametrize("way", ["re-homed", "paused"])
def test_a_changed_file_has_one_name(
    engine: Engine, linked_rootfs: Path, sessions: list[Session], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old overlay's index has links to changed files, which are not names. To clear all of it away may take long."""
    monkeypatch.setattr(trees, "discard_tree", lambda root: None)
    session = engine.new(base=base_from_rootfs(engine.store, linked_rootfs))
    session.exec("echo one >>/etc/profile; chmod 600 /etc/passwd; stat -c %h /etc/profile", timeout=60)
    if way == "paused":
        session.pause()
        session.resume()
    else:
        session.exec("mkdir /many; for i in $(seq 4000); do : > /many/$i; done", timeout=60)
        session.snapshot()
    found = session.exec("chmod 644 /etc/passwd; echo two >>/etc/profile; stat -c %h /etc/profile /etc/passwd").stdout
    assert found.split() == [b"1", b"1"]


def test_the_program_says_the_same(
    engine: Engine, linked_rootfs: Path, sessions: list[Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = engine.new(base=base_from_rootfs(engine.store, linked_rootfs))
    session.exec("echo two >/opt/f1; echo x >>/etc/profile; rm /opt/sub/f3; ln /etc/profile /etc/second; chmod 700 /opt")
    index = engine.store.paths.work(session.record.upper or 0) / "index"
    here = aliases._listed(index)
    monkeypatch.setattr(aliases, "_BIG_BYTES", -1)
    assert sorted(aliases.Hidden(index)._told()) == sorted(here)
    assert any(hidden for _, hidden, _ in here)
