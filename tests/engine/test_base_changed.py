"""Over a root that others can change, the host's own or a directory: a program that changed underneath is noticed before anything is restored over it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rootfs import bash_rootfs
from waypoint.bases import base_from_rootfs
from waypoint.engine import Engine
from waypoint.errors import BaseChanged
from waypoint.session import Session


@pytest.fixture
def program() -> Iterator[Path]:
    path = Path("/usr/local/bin/waypoint-test-sleeper")
    shutil.copy2("/bin/sleep", path)
    yield path
    path.unlink(missing_ok=True)


def test_a_changed_program_is_refused(program: Path, host_session: Session) -> None:
    host_session.exec(f"{program} 1000 & V=live")
    taken = host_session.snapshot()
    assert str(program) in taken.manifest["base_files"]
    host_session.restore(taken.id)
    fresh = program.with_suffix(".new")
    fresh.write_bytes(program.read_bytes() + b"\0")
    fresh.chmod(0o755)
    fresh.replace(program)
    with pytest.raises(BaseChanged) as caught:
        host_session.restore(taken.id)
    assert caught.value.details["files"] == [str(program)]
    assert host_session.exec("echo $V").stdout == b"live\n"


def test_a_file_that_the_session_changed_itself_is_its_own(host_session: Session) -> None:
    host_session.exec("cp /bin/sleep /usr/local/bin/mine; /usr/local/bin/mine 1000 &")
    taken = host_session.snapshot()
    assert "/usr/local/bin/mine" not in taken.manifest["base_files"]
    host_session.exec("kill %1; rm /usr/local/bin/mine")
    host_session.restore(taken.id)
    assert b"Running" in host_session.exec("jobs").stdout


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A root of the test's own, with a program of its own in it."""
    root = tmp_path / "root"
    bash_rootfs(root)
    shutil.copy2("/bin/sleep", root / MINE)
    return root


MINE = "usr/bin/mine"
START = "mine 1000 & V=live; until [ $(readlink /proc/$!/exe) = /usr/bin/mine ]; do sleep 0.01; done"


def replace_program(root: Path) -> None:
    """By another of the same size."""
    program = root / MINE
    fresh = program.with_suffix(".new")
    fresh.write_bytes(program.read_bytes()[:-1] + b"?")
    fresh.chmod(0o755)
    fresh.replace(program)


def is_refused(session: Session, snapshot: str) -> None:
    with pytest.raises(BaseChanged) as caught:
        session.restore(snapshot)
    assert caught.value.details["files"] == [f"/{MINE}"]
    assert session.exec("echo $V").stdout == b"live\n"


def test_a_changed_program_of_a_root_directory_is_refused(
    directory: Path, engine: Engine, sessions: list[Session]
) -> None:
    session = engine.new(base=base_from_rootfs(engine.store, directory))
    session.exec(START, timeout=30)
    taken = session.snapshot()
    assert f"/{MINE}" in taken.manifest["base_files"]
    session.restore(taken.id)
    replace_program(directory)
    is_refused(session, taken.id)


def test_a_program_that_was_replaced_before_comes_along(
    directory: Path, engine: Engine, sessions: list[Session]
) -> None:
    """It has no name any more, and is saved whole."""
    session = engine.new(base=base_from_rootfs(engine.store, directory))
    session.exec(START, timeout=30)
    replace_program(directory)
    taken = session.snapshot()
    session.restore(taken.id)
    assert session.exec("echo $V; tail -c1 /proc/$!/exe | od -c").stdout.split()[:3] == [b"live", b"0000000", b"\\0"]


def test_a_program_that_was_replaced_before_and_has_another_name_is_refused(
    directory: Path, engine: Engine, sessions: list[Session]
) -> None:
    session = engine.new(base=base_from_rootfs(engine.store, directory))
    (directory / "usr/bin/other").hardlink_to(directory / MINE)
    session.exec(START, timeout=30)
    replace_program(directory)
    taken = session.snapshot()
    is_refused(session, taken.id)


def test_a_session_over_changed_programs_is_not_ended_for_a_snapshot(
    directory: Path, engine: Engine, sessions: list[Session]
) -> None:
    """One that has changed many files would be ended and brought back, which would not work: it is refused before."""
    session = engine.new(base=base_from_rootfs(engine.store, directory))
    (directory / "usr/bin/other").hardlink_to(directory / MINE)
    session.exec(START, timeout=30)
    session.exec("mkdir /many && cd /many && for i in {1..4000}; do : >$i; done", timeout=120)
    replace_program(directory)
    with pytest.raises(BaseChanged):
        session.snapshot()
    assert session.exec("echo $V; jobs -r | wc -l; ls | wc -l").stdout.split() == [b"live", b"1", b"4000"]
