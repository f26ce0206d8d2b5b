"""Single files from outside: read, write, list, move, remove; and that nothing made inside leads out."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest

from waypoint import files
from waypoint.engine import Engine
from waypoint.errors import Exists, NotFound, UsageError, WaypointError, WrongState
from waypoint.kernel import processes
from waypoint.session import Session
from waypoint.transfer import copy
from waypoint.view import open_view


def do(session: Session, command: str) -> str:
    said = session.exec(command, timeout=60)
    assert said.exit_code == 0, said.stderr
    return said.text


@pytest.fixture(params=["stacked", "flat"])
def any_session(request: pytest.FixtureRequest) -> Session:
    made: Session = request.getfixturevalue("session" if request.param == "stacked" else "host_session")
    do(made, "mkdir -p /srv; rm -rf /srv/*; cd /srv")
    return made


def test_write_and_read(engine: Engine, any_session: Session) -> None:
    key = any_session.id
    data = bytes(range(256)) * 10
    files.write_file(engine, key, "/srv/f", data)
    assert files.read_file(engine, key, "/srv/f") == data
    assert do(any_session, "stat -c '%a %u %g %s' /srv/f") == f"644 0 0 {len(data)}\n"
    do(any_session, "chmod 750 /srv/f; chown 5:6 /srv/f; ln -s f /srv/l; exec 9</srv/f")
    files.write_file(engine, key, "/srv/l", b"new")
    assert do(any_session, "stat -c '%a %u %g %F' /srv/f; cat /srv/f; wc -c <&9") == "750 5 6 regular file\nnew2560\n"
    files.write_file(engine, key, "/srv/f", b"", mode=0o600, user="1:2")
    assert do(any_session, "stat -c '%a %u %g %s' /srv/f") == "600 1 2 0\n"
    files.write_file(engine, key, "/srv/a/b/c", b"deep", parents=True, user="1000")
    assert (
        do(any_session, "stat -c '%a %u' /srv/a /srv/a/b /srv/a/b/c; ls -A /srv/a/b")
        == "755 1000\n755 1000\n644 1000\nc\n"
    )
    taken = any_session.snapshot()
    do(any_session, "rm -r /srv/a")
    assert files.read_file(engine, taken.id, "/srv/a/b/c") == b"deep"
    with pytest.raises(UsageError):
        files.write_file(engine, taken.id, "/srv/x", b"")


def test_limits_and_wrong_kinds(engine: Engine, session: Session) -> None:
    do(session, "head -c 1000 /dev/zero > /opt/f; mkfifo /opt/p; mkdir /opt/d")
    assert len(files.read_file(engine, session.id, "/opt/f", limit=1000)) == 1000
    with pytest.raises(UsageError, match="larger than 999"):
        files.read_file(engine, session.id, "/opt/f", limit=999)
    for path, word in (("/opt/p", "fifo"), ("/opt/d", "directory"), ("/dev/null", "device")):
        with pytest.raises(UsageError, match=word):
            files.read_file(engine, session.id, path)
        with pytest.raises(UsageError):
            files.write_file(engine, session.id, path, b"x")
    for wrong in ("relative", "", "/opt/f\0"):
        with pytest.raises(UsageError):
            files.read_file(engine, session.id, wrong)
    with pytest.raises(UsageError, match="no user"):
        files.write_file(engine, session.id, "/opt/x", b"", user="stranger")


def test_list_and_stat(engine: Engine, any_session: Session) -> None:
    do(
        any_session,
        "mkdir d; echo 12 > f; chown 3:4 f; chmod 4700 f; ln -s f l; mkfifo p; touch -d @1000000000 f; touch $'\\xff'",
    )
    taken = any_session.snapshot()
    for key in (any_session.id, taken.id):
        found = {entry.name: entry for entry in files.list_files(engine, key, "/srv")}
        assert {name: entry.kind for name, entry in found.items()} == {
            "d": "directory", "f": "file", "l": "symlink", "p": "fifo", "\udcff": "file",
        }  # fmt: skip
        f = found["f"]
        assert (f.mode, f.uid, f.gid, f.size_bytes, f.mtime_ns, f.target) == (0o4700, 3, 4, 3, 10**18, None)
        assert found["l"].target == "f"
        assert files.stat_file(engine, key, "/srv/l").size_bytes == 3
        assert files.stat_file(engine, key, "/srv/l", follow=False).kind == "symlink"
        assert files.stat_file(engine, key, "/").kind == "directory"
        assert ".waypoint" not in {entry.name for entry in files.list_files(engine, key)}
        with pytest.raises(NotFound):
            files.stat_file(engine, key, "/srv/none")


def test_mkdir_move_remove(engine: Engine, any_session: Session) -> None:
    key = any_session.id
    files.mkdir(engine, key, "/srv/d", mode=0o700, user="7:8")
    assert do(any_session, "stat -c '%a %u:%g' /srv/d") == "700 7:8\n"
    with pytest.raises(Exists):
        files.mkdir(engine, key, "/srv/d")
    files.mkdir(engine, key, "/srv/d/e/f", parents=True)
    files.mkdir(engine, key, "/srv/d/e/f", parents=True)
    do(any_session, "echo 1 > /srv/d/e/x; ln -s /etc /srv/d/e/etc; echo 2 > /srv/two")
    files.move(engine, key, "/srv/d/e", "/srv/moved")
    files.move(engine, key, "/srv/two", "/srv/moved/x")
    assert do(any_session, "cat /srv/moved/x; ls /srv/d") == "2\n"
    with pytest.raises(UsageError, match="not empty"):
        files.remove(engine, key, "/srv/moved")
    files.remove(engine, key, "/srv/moved", recursive=True)
    files.remove(engine, key, "/srv/d")
    assert do(any_session, "ls -A /srv; test -s /etc/passwd") == ""
    for path in ("/", "/.", "/srv/.."):
        with pytest.raises(UsageError):
            files.remove(engine, key, path, recursive=True)
    with pytest.raises(NotFound):
        files.remove(engine, key, "/srv/none")
    with pytest.raises(WaypointError):
        files.remove(engine, key, "/proc", recursive=True)
    with pytest.raises(UsageError):
        files.move(engine, key, "/etc/passwd", "/.waypoint/x")


def test_a_directory_of_a_lower_layer_can_be_moved(engine: Engine, any_session: Session) -> None:
    files.move(engine, any_session.id, "/usr/bin", "/usr/nib")
    files.move(engine, any_session.id, "/usr/nib", "/usr/bin")
    files.move(engine, any_session.id, "/etc", "/srv/etc")
    taken = any_session.snapshot()
    assert files.read_file(engine, taken.id, "/srv/etc/passwd").startswith(b"root:")
    (fork,) = any_session.fork(1)
    assert do(fork, "test -s /srv/etc/passwd; ls -d /etc 2>&1 || true").startswith("ls:")


# -- nothing leads out ------------------------------------------------------------------------------------------------


def test_links_stay_inside(engine: Engine, any_session: Session, tmp_path: Path) -> None:
    """Links that would name a file of the host's if anybody resolved them there."""
    secret = tmp_path / "secret"
    secret.write_text("host")
    up = "../" * 40
    do(
        any_session,
        f"ln -s {secret} abs; ln -s {up}{secret} rel; ln -s / root; ln -s /proc/1/root magic; ln -s loop loop; ln -s {tmp_path} dir",
    )
    do(any_session, f"mkdir -p {tmp_path}; echo inside > {secret}")
    taken = any_session.snapshot()
    for key in (any_session.id, taken.id):
        for path in (
            "/srv/abs",
            "/srv/rel",
            f"/srv/root{secret}",
            f"/{up}{secret}",
            f"/srv/root/srv/{up}{secret}",
            "/srv/dir/secret",
        ):
            assert files.read_file(engine, key, path) == b"inside\n"
        with pytest.raises(WaypointError):
            files.read_file(engine, key, "/srv/loop")
        with pytest.raises(WaypointError):
            files.read_file(engine, key, f"/srv/magic{secret}")
    files.write_file(engine, any_session.id, "/srv/abs", b"written")
    copy(engine, "/etc/hostname", f"{any_session.id}:/srv/dir/hostname")
    files.remove(engine, any_session.id, "/srv/rel")
    assert secret.read_text() == "host"
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]
    assert do(any_session, f"cat {secret}; ls {tmp_path}") == "writtenhostname\nsecret\n"


def test_a_session_that_swaps_directories_for_links(engine: Engine, host_session: Session, tmp_path: Path) -> None:
    """While files are copied in and removed, the session flips a directory and a link to a host path; the host's stays whole."""
    (tmp_path / "keep").write_text("host")
    source = tmp_path / "src"
    (source / "a/b").mkdir(parents=True)
    for number in range(20):
        (source / f"a/b/{number}").write_text("x")
    flip = f"mkdir -p {tmp_path} r; ln -s {tmp_path} t; (while :; do mv -T r/a r/x; mv -T t r/a; mv -T r/a t; mv -T r/x r/a; done) 2>/dev/null &"
    assert host_session.exec(f"mkdir /srv/w; cd /srv/w; mkdir -p r/a; {flip}").exit_code == 0
    for _ in range(40):
        for work in (
            lambda: copy(engine, f"{source}/.", f"{host_session.id}:/srv/w/r"),
            lambda: copy(engine, f"{host_session.id}:/srv/w/r", str(tmp_path / "out")),
            lambda: files.remove(engine, host_session.id, "/srv/w/r/a", recursive=True),
        ):
            try:
                work()
            except WaypointError:
                continue
    assert (tmp_path / "keep").read_text() == "host"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keep", "out", "src"]
    assert not (tmp_path / "out/keep").exists()


def test_deep_nesting(engine: Engine, session: Session, tmp_path: Path) -> None:
    """Deeper than there are descriptors or Python frames; what is too long for a path is an error that says so."""
    deep = "d/" * 1100
    do(session, f"cd /opt; mkdir -p {deep}; echo bottom > {deep}f")
    copy(engine, f"{session.id}:/opt/d", str(tmp_path / "d"))
    found = subprocess.run(["find", tmp_path / "d", "-name", "f"], check=True, capture_output=True).stdout
    assert len(found.splitlines()) == 1
    files.remove(engine, session.id, "/opt/d", recursive=True)
    do(session, f"mkdir -p /opt/{deep}; cd -P /opt/{deep}; mkdir -p {'long/' * 500}; cd /")
    with pytest.raises(UsageError, match="too long"):
        copy(engine, f"{session.id}:/opt/d", str(tmp_path / "e"))
    with pytest.raises(UsageError, match="too long"):
        files.remove(engine, session.id, "/opt/d", recursive=True)
    do(session, "rm -rf /opt/d")
    subprocess.run(["rm", "-rf", tmp_path / "d", tmp_path / "e"], check=True)


# -- beside other work ------------------------------------------------------------------------------------------------


def _open_files() -> list[str]:
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


@pytest.mark.alone
def test_views_leave_nothing_behind(engine: Engine, any_session: Session) -> None:
    taken = any_session.snapshot()
    before, mounts = _open_files(), Path("/proc/self/mounts").read_text()
    for key in (any_session.id, taken.id):
        with open_view(engine, key) as view:
            assert view.read("/etc/passwd", 1 << 20)
            assert Path("/proc/self/mounts").read_text() == mounts
        with pytest.raises(ZeroDivisionError), open_view(engine, key):
            _ = 1 / 0
    assert _open_files() == before


def test_a_snapshot_waits_for_an_open_view(engine: Engine, session: Session) -> None:
    """What is being written when a snapshot begins is in it whole, or not at all."""
    done = threading.Event()

    def take() -> None:
        session.snapshot("waited")
        done.set()

    worker = threading.Thread(target=take)
    with open_view(engine, session.id, write=True) as view:
        worker.start()
        assert session.exec("echo still runs").text == "still runs\n"
        assert not done.wait(0.3)
        with view.parent("/opt/late") as (directory, name):
            os.close(os.open(name, os.O_CREAT | os.O_WRONLY, dir_fd=directory))
    worker.join(60)
    assert done.is_set()
    assert files.stat_file(engine, "waited", "/opt/late").kind == "file"


def test_a_snapshot_that_is_removed_while_it_is_read(engine: Engine, session: Session) -> None:
    taken = session.snapshot()
    with pytest.raises(NotFound, match="removed while"), open_view(engine, taken.id) as view:
        engine.remove_snapshot(taken.id)
        view.entries("/")


def test_many_views_of_one_snapshot_at_once(engine: Engine, host_session: Session) -> None:
    do(host_session, "echo same > /srv/f")
    taken = host_session.snapshot()
    failures: list[BaseException] = []

    def look() -> None:
        try:
            for _ in range(10):
                assert files.read_file(engine, taken.id, "/srv/f") == b"same\n"
        except BaseException as error:  # noqa: BLE001  told below
            failures.append(error)
        finally:
            engine.store.db.close()

    workers = [threading.Thread(target=look) for _ in range(8)]
    for worker in workers:
        worker.start()
    (fork,) = host_session.fork(1, from_snapshot=taken.id)
    for worker in workers:
        worker.join()
    assert not failures
    assert do(fork, "cat /srv/f") == "same\n"


def test_a_dead_session_can_be_read(engine: Engine, any_session: Session) -> None:
    do(any_session, "echo last words > /srv/f")
    init = processes.identify(any_session.record.init_pid)
    processes.kill(init)
    assert processes.wait_gone(init, 20)
    assert files.read_file(engine, any_session.id, "/srv/f") == b"last words\n"
    with pytest.raises(WrongState):
        files.write_file(engine, any_session.id, "/srv/f", b"")
