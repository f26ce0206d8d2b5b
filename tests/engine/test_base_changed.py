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


def test_a_changed_program_of_a_root_directory_is_refused(
    tmp_path: Path, engine: Engine, sessions: list[Session]
) -> None:
    """Of the same size: the program that lies there now is another one all the same."""
    root = tmp_path / "root"
    bash_rootfs(root)
    program = root / "usr/bin/mine"
    shutil.copy2("/bin/sleep", program)
    session = engine.new(base=base_from_rootfs(engine.store, root))
    session.exec("mine 1000 & V=live")
    taken = session.snapshot()
    assert "/usr/bin/mine" in taken.manifest["base_files"]
    session.restore(taken.id)
    fresh = program.with_suffix(".new")
    fresh.write_bytes(program.read_bytes()[:-1] + b"?")
    fresh.chmod(0o755)
    fresh.replace(program)
    with pytest.raises(BaseChanged) as caught:
        session.restore(taken.id)
    assert caught.value.details["files"] == ["/usr/bin/mine"]
    assert session.exec("echo $V").stdout == b"live\n"
