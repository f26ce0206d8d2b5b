"""`cp`: into sessions, out of sessions and snapshots, between them."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
from pathlib import Path

import pytest

from waypoint.diff import compare
from waypoint.engine import Engine
from waypoint.errors import NotFound, UsageError, WrongState
from waypoint.session import Session
from waypoint.transfer import Progress, copy, parse_location


def do(session: Session, command: str) -> str:
    said = session.exec(command, timeout=60)
    assert said.exit_code == 0, said.stderr
    return said.text


@pytest.fixture(params=["stacked", "flat"])
def any_session(request: pytest.FixtureRequest) -> Session:
    made: Session = request.getfixturevalue("session" if request.param == "stacked" else "host_session")
    do(made, "mkdir -p /srv; rm -rf /srv/*; cd /srv")
    return made


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A directory with one of everything, owned by somebody else than root or the session's user."""
    top = tmp_path / "tree"
    (top / "sub/empty").mkdir(parents=True)
    (top / "file").write_bytes(b"hello\n")
    (top / "file").chmod(0o640)
    (top / "sub/program").write_bytes(b"#!/bin/sh\n")
    (top / "sub/program").chmod(0o4755)
    (top / "second").hardlink_to(top / "file")
    (top / "link").symlink_to("/etc/passwd")
    (top / "dangling").symlink_to("nowhere")
    os.setxattr(top / "file", "user.note", b"kept")
    with open(top / "sparse", "wb") as sparse:
        sparse.truncate(64 << 20)
        sparse.seek(32 << 20)
        sparse.write(b"middle")
    os.mkfifo(top / "sub/fifo")
    for path in [top, *top.rglob("*")]:
        os.chown(path, 1234, 2345, follow_symlinks=False)
    (top / "sub/program").chmod(0o4755)
    for path in [*top.rglob("*"), top]:
        os.utime(path, ns=(10**18, 10**18 + 123456789), follow_symlinks=False)
    (top / "sub").chmod(0o2750)
    return top


# -- in and out -------------------------------------------------------------------------------------------------------


def test_a_tree_goes_in(engine: Engine, any_session: Session, tree: Path) -> None:
    done = copy(engine, str(tree), f"{any_session.id}:/srv/tree")
    assert (done.files, done.directories, done.links) == (4, 3, 2)
    assert [note for note in done.notes if "fifo" in note] == list(done.notes)
    assert len(done.notes) == 1
    said = do(any_session, "cd /srv/tree; find . -printf '%p %y %m %U:%G %s %l|' | tr '|' '\\n' | sort")
    entries = {line.split()[0]: line.split()[1:] for line in said.splitlines()}
    assert entries["./file"] == ["f", "640", "0:0", "6"]
    assert entries["./sub/program"] == ["f", "755", "0:0", "10"]
    assert entries["./link"][0] == "l"
    assert entries["./link"][-1] == "/etc/passwd"
    assert entries["./sub"][:2] == ["d", "750"]
    assert "./sub/fifo" not in entries
    assert all(words[2] == "0:0" for words in entries.values())
    assert do(any_session, "cat /srv/tree/file; stat -c %h /srv/tree/file") == "hello\n2\n"
    assert (
        do(any_session, "stat -c %.9Y /srv/tree/file /srv/tree /srv/tree/sub /srv/tree/link").split()
        == ["1000000000.123456789"] * 4
    )
    assert int(do(any_session, "stat -c '%b' /srv/tree/sparse")) * 512 < 1 << 20
    assert do(any_session, "stat -c %s /srv/tree/sparse").strip() == str(64 << 20)
    assert do(any_session, "tail -c +$((32*1024*1024+1)) /srv/tree/sparse | head -c 6") == "middle"
    assert do(any_session, "ls -A /srv") == "tree\n"


def test_what_went_in_is_there_after_a_snapshot(engine: Engine, any_session: Session, tree: Path) -> None:
    do(any_session, "echo old > /srv/old")
    copy(engine, str(tree), f"{any_session.id}:/srv/tree")
    taken = any_session.snapshot()
    (fork,) = any_session.fork(1, from_snapshot=taken.id)
    assert do(fork, "cat /srv/tree/file; stat -c %u:%g /srv/tree/file; id -u") == "hello\n0:0\n0\n"
    do(fork, "echo more >> /srv/tree/file; chown 5 /srv/tree/file; rm -r /srv/tree/sub")


def test_a_tree_comes_out_as_it_went_in(engine: Engine, any_session: Session, tree: Path, tmp_path: Path) -> None:
    key = any_session.id
    copy(engine, str(tree), f"{key}:/srv/", archive=True)
    assert do(any_session, "stat -c %u:%g:%a /srv/tree/sub/program /srv/tree/link").split() == [
        "1234:2345:4755",
        "1234:2345:777",
    ]
    taken = any_session.snapshot()
    do(any_session, "rm -rf /srv/tree")
    for archive in (False, True):
        target = tmp_path / f"out-{archive}"
        done = copy(engine, f"{taken.id}:/srv/tree", str(target), archive=archive)
        assert (done.files, done.directories, done.links) == (4, 3, 2)
        for path in tree.rglob("*"):
            st, now = path.lstat(), target / path.relative_to(tree)
            if stat.S_ISFIFO(st.st_mode):
                assert not now.exists()
                continue
            assert (now.lstat().st_uid, now.lstat().st_gid) == (
                (1234, 2345) if archive else (os.geteuid(), os.getegid())
            )
            assert now.lstat().st_mode == (st.st_mode if archive or stat.S_ISLNK(st.st_mode) else st.st_mode & ~0o6000)
            assert now.lstat().st_mtime_ns == st.st_mtime_ns
            assert now.lstat().st_nlink == st.st_nlink
            if path.is_symlink():
                assert now.readlink() == path.readlink()
            elif path.is_file():
                assert now.read_bytes() == path.read_bytes()
        assert os.getxattr(target / "file", "user.note") == b"kept"
        assert (target / "sparse").stat().st_blocks * 512 < 1 << 20


def test_capabilities_and_access_lists_with_archive(engine: Engine, any_session: Session, tmp_path: Path) -> None:
    """Ids are in the bytes of these attributes: they must be right on both sides of the shifted uid map."""
    source = tmp_path / "f"
    source.write_bytes(b"x")
    subprocess.run(["setfacl", "-m", "u:77:r", source], check=True)
    subprocess.run(["setcap", "cap_net_raw+ep", source], check=True)
    key = any_session.id
    copy(engine, str(source), f"{key}:/srv/f", archive=True)
    names = ("system.posix_acl_access", "security.capability")
    before = {name: os.getxattr(source, name) for name in names}
    taken = any_session.snapshot()
    for origin in (key, taken.id):
        copy(engine, f"{origin}:/srv/f", str(tmp_path / origin), archive=True)
        assert {name: os.getxattr(tmp_path / origin, name) for name in names} == before
    on_disk = engine.store.paths.upper(taken.layers[0]) / "srv/f"
    assert os.getxattr(on_disk, names[0]) == before[names[0]]
    assert compare(engine, taken.id, key).files == ()
    copy(engine, f"{key}:/srv/f", str(tmp_path / "plain"))
    assert not set(os.listxattr(tmp_path / "plain")) & set(names)


def test_between_sessions_and_from_a_paused_one(engine: Engine, session: Session, host_session: Session) -> None:
    do(session, "mkdir /opt/d; echo 1 > /opt/d/f; chown 33:44 /opt/d/f")
    session.pause()
    copy(engine, f"{session.id}:/opt/d", f"{host_session.id}:/tmp/d", archive=True)
    copy(engine, f"{session.id}:/opt/d/f", f"{host_session.id}:/tmp/mine")
    assert do(host_session, "stat -c %u:%g /tmp/d/f /tmp/mine; cat /tmp/d/f") == "33:44\n0:0\n1\n"
    with pytest.raises(WrongState, match="waypoint resume"):
        copy(engine, f"{host_session.id}:/etc/passwd", f"{session.id}:/tmp/x")


def test_the_start_user_owns_what_arrives(engine: Engine, session: Session, tree: Path) -> None:
    by_name = engine.new(base=session.base, user="user")
    by_number = engine.new(base=session.base, user="1000:daemon")
    copy(engine, str(tree), f"{by_name.id}:/tmp/t")
    copy(engine, str(tree), f"{by_number.id}:/tmp/t")
    assert set(do(by_name, "find /tmp/t -printf '%U:%G\\n'").split()) == {"1000:1000"}
    assert set(do(by_number, "find /tmp/t -printf '%U:%G\\n'").split()) == {"1000:1"}
    do(by_name, "echo mine >> /tmp/t/file; rm -r /tmp/t")


def test_big_files_are_streamed_with_progress(engine: Engine, session: Session, tmp_path: Path) -> None:
    big = tmp_path / "big"
    block = os.urandom(1 << 20)
    with open(big, "wb") as file:
        for number in range(96):
            file.write(number.to_bytes(4, "big") + block)
    seen: list[Progress] = []
    copy(engine, str(big), f"{session.id}:/opt/big", on_progress=seen.append)
    assert seen[-1] == Progress(str(big), 1, big.stat().st_size)
    assert len(seen) > 2
    copy(engine, f"{session.id}:/opt/big", str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == big.read_bytes()


# -- names ------------------------------------------------------------------------------------------------------------


def test_names_follow_docker_cp(engine: Engine, session: Session, tmp_path: Path) -> None:
    key = session.id
    (tmp_path / "d/in").mkdir(parents=True)
    (tmp_path / "d/f").write_text("1")
    (tmp_path / "f").write_text("2")
    do(session, "mkdir -p /opt/there; ln -s there /opt/link; echo keep > /opt/there/keep; echo > /opt/plain")

    def listed(path: str) -> list[str]:
        return do(session, f"cd {path}; find . -mindepth 1 | sort").split()

    copy(engine, str(tmp_path / "f"), f"{key}:/opt/there")
    copy(engine, str(tmp_path / "f"), f"{key}:/opt/link/")
    copy(engine, str(tmp_path / "f"), f"{key}:/opt/other-name")
    assert listed("/opt/there") == ["./f", "./keep"]
    assert do(session, "cat /opt/other-name") == "2"
    with pytest.raises(UsageError, match="no such directory"):
        copy(engine, str(tmp_path / "f"), f"{key}:/opt/not-there/")
    with pytest.raises(NotFound):
        copy(engine, str(tmp_path / "f"), f"{key}:/opt/not-there/f")
    with pytest.raises(NotFound):
        copy(engine, str(tmp_path / "nothing"), f"{key}:/opt/x")

    copy(engine, str(tmp_path / "d"), f"{key}:/opt/there")
    assert listed("/opt/there") == ["./d", "./d/f", "./d/in", "./f", "./keep"]
    copy(engine, f"{tmp_path}/d/.", f"{key}:/opt/there")
    assert "./in" in listed("/opt/there")
    copy(engine, str(tmp_path / "d"), f"{key}:/opt/fresh")
    assert listed("/opt/fresh") == ["./f", "./in"]
    copy(engine, f"{tmp_path}/d/.", f"{key}:/opt/fresh2/")
    assert listed("/opt/fresh2") == ["./f", "./in"]
    with pytest.raises(UsageError, match="is a file"):
        copy(engine, str(tmp_path / "d"), f"{key}:/opt/plain")
    do(session, "rm -rf /opt/there/d; echo > /opt/there/d")
    with pytest.raises(UsageError, match="no directory"):
        copy(engine, str(tmp_path / "d"), f"{key}:/opt/there")
    do(session, "mkdir /opt/there/sub; mkdir /opt/there/sub/f")
    with pytest.raises(UsageError, match="a directory has its name"):
        copy(engine, str(tmp_path / "f"), f"{key}:/opt/there/sub")
    assert listed("/opt/there/sub") == ["./f"], "nothing half-made is left"


def test_links(engine: Engine, session: Session, tmp_path: Path) -> None:
    """A link is copied as a link; one at the target is written through, as by any program inside."""
    key = session.id
    do(
        session,
        "mkdir /opt/d; echo 1 > /opt/d/f; ln -s /opt/d /opt/dl; ln -s /opt/d/f /opt/fl; ln -s /opt/none /opt/dangling",
    )
    copy(engine, f"{key}:/opt/dl", str(tmp_path / "dl"))
    assert (tmp_path / "dl").readlink() == Path("/opt/d")
    copy(engine, f"{key}:/opt/dl/", str(tmp_path / "as-directory"))
    assert (tmp_path / "as-directory/f").read_text() == "1\n"
    (tmp_path / "new").write_text("2\n")
    copy(engine, str(tmp_path / "new"), f"{key}:/opt/fl")
    copy(engine, str(tmp_path / "new"), f"{key}:/opt/dangling")
    assert do(session, "readlink /opt/fl; cat /opt/d/f /opt/none") == "/opt/d/f\n2\n2\n"


def test_relative_local_paths(
    engine: Engine, session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/x:y").write_text("colon")
    monkeypatch.chdir(tmp_path / "a")
    copy(engine, "./x:y", f"{session.id}:/opt/xy")
    copy(engine, ".", f"{session.id}:/opt/all")
    copy(engine, f"{session.id}:/opt/xy", "..")
    copy(engine, f"{session.id}:/opt/xy", ".")
    assert (tmp_path / "xy").read_text() == (tmp_path / "a/xy").read_text() == "colon"
    assert do(session, "cat /opt/all/x:y") == "colon"


def test_locations() -> None:
    assert parse_location("s:/x").key == "s"
    assert parse_location("s:/a:b").path == "/a:b"
    for local in ("file", "./s:/x", "/s:/x", "a/b:c"):
        assert parse_location(local).key is None
    for wrong in ("", "s:", "s:relative", ":/x"):
        with pytest.raises(UsageError):
            parse_location(wrong)


def test_refusals(engine: Engine, session: Session, tmp_path: Path) -> None:
    key = session.id
    taken = session.snapshot()
    with pytest.raises(UsageError, match="neither"):
        copy(engine, str(tmp_path), "/tmp/x")
    with pytest.raises(UsageError, match="fork"):
        copy(engine, str(tmp_path), f"{taken.id}:/tmp/x")
    with pytest.raises(NotFound, match="waypoint ls"):
        copy(engine, "nobody:/x", str(tmp_path))
    with pytest.raises(UsageError, match="into itself"):
        copy(engine, f"{key}:/usr", f"{key}:/usr/bin/again")
    assert session.run(["test", "-e", "/usr/bin/again"]).exit_code != 0
    with pytest.raises(UsageError, match="into itself"):
        copy(engine, f"{key}:/usr", f"{key}:/")
    with pytest.raises(UsageError, match="mount of its own"):
        copy(engine, f"{key}:/proc/cmdline", str(tmp_path / "x"))
    for path in ("/.waypoint", "/.waypoint/init"):
        with pytest.raises(UsageError, match="Waypoint's own"):
            copy(engine, f"{key}:{path}", str(tmp_path / "x"))
        with pytest.raises(UsageError, match="Waypoint's own"):
            copy(engine, "/etc/passwd", f"{key}:{path}")
    (tmp_path / "w/.waypoint").mkdir(parents=True)
    with pytest.raises(UsageError, match="Waypoint's own"):
        copy(engine, f"{tmp_path}/w/.", f"{key}:/")


def test_the_whole_root_comes_out(engine: Engine, session: Session, tmp_path: Path) -> None:
    """Without Waypoint's own directory and without what is mounted in it."""
    do(session, "mkfifo /tmp/p; echo 1 > /tmp/f")
    done = copy(engine, f"{session.id}:/", str(tmp_path / "root"))
    names = {path.name for path in (tmp_path / "root").iterdir()}
    assert {"bin", "etc", "usr", "tmp"} <= names
    assert ".waypoint" not in names
    assert not (tmp_path / "root/proc").exists() or not any((tmp_path / "root/proc").iterdir())
    assert any(note.startswith("/proc:") for note in done.notes)
    assert any(note.startswith("/dev/null:") for note in done.notes)
    assert (tmp_path / "root/bin").is_symlink()


def test_a_socket_and_a_device_are_left_out(engine: Engine, session: Session, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "d/socket"))
    os.mknod(tmp_path / "d/null", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    done = copy(engine, str(tmp_path / "d"), f"{session.id}:/opt/d")
    server.close()
    assert len(done.notes) == 2
    assert do(session, "ls -A /opt/d") == ""
    single = copy(engine, str(tmp_path / "d/null"), f"{session.id}:/opt/null")
    assert single.notes
    assert session.run(["test", "-e", "/opt/null"]).exit_code != 0
