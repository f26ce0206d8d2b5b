"""A store on a disk that is really full: what cannot be done is said to be so, and everything that was there goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from wreck import SETTING, check_state, grow, leftovers, out, remove_all, start_call

from waypoint.bases import base_from_rootfs
from waypoint.engine import Engine
from waypoint.errors import DiskFull
from waypoint.session import Session

LEFT = [0, 4 << 10, 32 << 10, 128 << 10, 512 << 10, 2 << 20]
"""Bytes free when an operation begins: it runs out of space at another step each time."""


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An ext4 of 160 MB on a loop device, with no reserve for root."""
    place = tmp_path_factory.mktemp("disk")
    image, mount = place / "image", place / "mounted"
    with image.open("wb") as file:
        file.truncate(160 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
    mount.mkdir()
    subprocess.run(["mount", "-o", "loop", str(image), str(mount)], check=True)
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)
        shutil.rmtree(place)


@pytest.fixture(scope="module")
def small(disk: Path, small_rootfs: Path) -> Iterator[Engine]:
    with Engine(disk / "home") as engine:
        base_from_rootfs(engine.store, small_rootfs, name="floor")
        yield engine
        remove_all(engine)
        engine.gc()
        assert leftovers(engine) == []


@pytest.fixture(scope="module")
def subject(small: Engine) -> Session:
    session = small.new(base=small.store.db.base("floor"))
    session.exec(SETTING + " sleep 1000 | sleep 1001 &")
    session.exec("kill %+")
    session.snapshot("before")
    return session


@pytest.fixture(autouse=True)
def ballast(disk: Path, small: Engine, subject: Session) -> Iterator[Callable[[int], None]]:
    """Fill the disk up to so many bytes; afterwards it is emptied, and all is as it was."""
    file = disk / "ballast"

    def fill(left: int) -> None:
        stat = os.statvfs(disk)
        with file.open("wb") as opened:
            for _ in range(5):
                for size in (1 << 20, 4 << 10):
                    while os.statvfs(disk).f_bavail * stat.f_frsize >= left + size:
                        try:
                            os.posix_fallocate(opened.fileno(), opened.seek(0, os.SEEK_END), size)
                        except OSError:
                            break
                os.sync()  # what was just removed is free only now
                if os.statvfs(disk).f_bavail * stat.f_frsize < left + (4 << 10):
                    return

    yield fill
    file.unlink(missing_ok=True)
    small.gc()
    assert leftovers(small) == []
    check_state(subject)


def attempt(work: Callable[[], object]) -> bool:
    """Whether it succeeded; if not, for the right reason."""
    try:
        work()
        return True
    except DiskFull as error:
        assert error.code == "disk_full"
        return False


def everything_goes_on(engine: Engine, subject: Session) -> None:
    """With the disk still full: the shell takes commands, and its state is there."""
    assert out(subject, "echo $V $PWD; cat f") == "one /w\none\n"
    assert [record.name for record in engine.snapshots()] == ["before"]


@pytest.mark.parametrize("how", ["copying", "re-homing"])
def test_snapshot(small: Engine, subject: Session, ballast: Callable[[int], None], disk: Path, how: str) -> None:
    if how == "re-homing":
        grow(subject)
    failures = 0
    for left in LEFT:
        ballast(left)
        if attempt(lambda: subject.snapshot("more")):
            break
        failures += 1
        everything_goes_on(small, subject)
    assert failures
    (disk / "ballast").unlink()
    if failures == len(LEFT):
        subject.snapshot("more")
    subject.exec("V=two; rm /w/f")
    subject.restore("more")
    check_state(subject)
    subject.restore("before")
    small.remove_snapshot("more")


def test_restore(small: Engine, subject: Session, ballast: Callable[[int], None], disk: Path) -> None:
    subject.exec("V=two; echo two > /w/f")
    failures = 0
    for left in LEFT:
        ballast(left)
        if attempt(lambda: subject.restore("before")):
            (disk / "ballast").unlink()
            assert out(subject, "echo written >/w/new && cat /w/new") == "written\n", "it came back read-only"
            break
        failures += 1
        assert out(subject, "echo $V; cat /w/f") == "two\ntwo\n"
    assert failures
    (disk / "ballast").unlink(missing_ok=True)
    subject.restore("before")


def test_fork(small: Engine, subject: Session, ballast: Callable[[int], None], disk: Path) -> None:
    failures = 0
    for left in LEFT:
        ballast(left)
        forks: list[Session] = []
        if attempt(lambda: forks.extend(subject.fork(3, from_snapshot="before"))):  # noqa: B023  called at once
            (disk / "ballast").unlink()  # what failed before may have spent the reserve
            for fork in forks:
                assert out(fork, "echo written >/w/new && cat /w/new") == "written\n", "it came up read-only"
                fork.remove()
        else:
            failures += 1
            assert [record.id for record in small.sessions()] == [subject.id], "all or none"
        everything_goes_on(small, subject)
    assert failures


def test_new(small: Engine, subject: Session, ballast: Callable[[int], None], disk: Path) -> None:
    failures = 0
    for left in LEFT:
        ballast(left)
        if attempt(lambda: small.new(base=small.store.db.base("floor"), name="another")):
            (disk / "ballast").unlink()
            assert small.session("another").exec("echo >/new").exit_code == 0, "it came up read-only"
            small.session("another").remove()
        else:
            failures += 1
        everything_goes_on(small, subject)
    assert failures


def test_pause_and_resume(small: Engine, subject: Session, ballast: Callable[[int], None], disk: Path) -> None:
    for left in LEFT:
        ballast(left)
        if attempt(subject.pause):
            break
        everything_goes_on(small, subject)
    ballast(0)
    if subject.record.state == "paused" and not attempt(subject.resume):
        assert subject.record.state == "paused"
    (disk / "ballast").unlink()
    subject.resume()


def test_room_can_be_made(small: Engine, subject: Session, ballast: Callable[[int], None]) -> None:
    """On a full disk sessions and snapshots can be removed, and a session can remove its own files."""
    (fork,) = subject.fork(1, from_snapshot="before")
    subject.exec("head -c 8000000 /dev/zero > /w/big")
    subject.snapshot("doomed")
    ballast(0)
    assert not attempt(subject.snapshot)
    assert subject.exec("echo more >> /w/big2; rm -f /w/big /w/big2", timeout=10).exit_code == 0
    fork.remove()
    small.remove_snapshot("doomed")
    ballast(4 << 20)
    subject.snapshot("fits")
    small.remove_snapshot("fits")


def test_a_fresh_process_finds_its_way(small: Engine, subject: Session, ballast: Callable[[int], None]) -> None:
    """SQLite needs some space even to read; a process that begins when there is none gets it from the store's reserve."""
    (fork,) = subject.fork(1, from_snapshot="before")
    assert (small.store.paths.home / "reserve").exists()
    small.store.db.close()
    ballast(0)
    call = start_call(
        small.store.paths.home, fork.id, "assert session.exec('echo $V').stdout == b'one\\n'; session.remove()"
    )
    assert call.communicate(timeout=50)[1] == "" and call.returncode == 7
    assert [record.id for record in small.sessions()] == [subject.id]


def test_the_host_root_stacks_over_a_store_elsewhere(small: Engine, subject: Session) -> None:
    """The store is on another file system than the root, so layers are stacked over it, not copied."""
    session = small.new()
    assert not session.base.flat
    session.exec(SETTING)
    first = session.snapshot("first")
    session.exec("V=two; echo two > /w/f; echo new > /etc/hostname; rm -f /etc/passwd")
    second = session.snapshot("second")
    session.restore("first")
    check_state(session)
    assert len(second.layers) == len(first.layers) and Path("/etc/passwd").exists()
    (fork,) = session.fork(1, from_snapshot="second")
    assert out(fork, "cat /etc/hostname /w/f; ls /etc/passwd; echo $V") == "new\ntwo\ntwo\n"
    assert out(fork, f"ls -d {small.store.paths.home} 2>&1 | grep -c cannot") == "1\n"
    fork.pause()
    fork.resume()
    check_state(fork, "two")
    for one in (fork, session):
        one.remove()
    small.remove_snapshot("first", recursive=True)
