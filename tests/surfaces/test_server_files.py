"""Files over HTTP: read, write, list, move, remove, archives, watching; and every trick with paths that we know."""

from __future__ import annotations

import io
import json
import secrets
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from daemon import Daemon, running, until

pytestmark = pytest.mark.timeout(180)  # a busy machine gets its time


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(tmp_path_factory.mktemp("d")) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def files(daemon: Daemon) -> str:
    return f"/v1/environments/{daemon.create()}/files"


def at(path: str) -> str:
    return f"path={quote(path)}"


def archive(*members: tuple[str, Any]) -> bytes:
    """Name and content; a str is a symbolic link's target, a `hard:` one a hard link's, None a directory."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as made:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if content is None:
                member.type, member.mode = tarfile.DIRTYPE, 0o755
            elif isinstance(content, str) and content.startswith("hard:"):
                member.type, member.linkname = tarfile.LNKTYPE, content.removeprefix("hard:")
            elif isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
            else:
                member.size = len(content)
                made.addfile(member, io.BytesIO(content))
                continue
            made.addfile(member)
    return buffer.getvalue()


def test_write_read_list_stat_move_remove(daemon: Daemon, files: str) -> None:
    content = bytes(range(256)) * 40
    daemon.call("PUT", f"{files}/content?{at('/srv/a b/ü.bin')}&mode={0o640}", 204, content=content)
    assert daemon.call("GET", f"{files}/content?{at('/srv/a b/ü.bin')}") == content
    found = daemon.call("GET", f"{files}/stat?{at('/srv/a b/ü.bin')}")
    assert (found["name"], found["kind"], found["size_bytes"], found["mode"]) == ("ü.bin", "file", len(content), 0o640)
    daemon.call("POST", f"{files}/directory", 204, json={"path": "/srv/a b/deep/er"})
    listed = daemon.call("GET", f"{files}?{at('/srv/a b')}")["items"]
    assert [(one["name"], one["kind"]) for one in listed] == [("deep", "directory"), ("ü.bin", "file")]
    daemon.call("POST", f"{files}/move", 204, json={"source": "/srv/a b/ü.bin", "target": "/srv/plain"})
    assert daemon.call("GET", f"{files}/content?{at('/srv/a b/ü.bin')}", 404)["code"] == "not_found"
    assert daemon.call("DELETE", f"{files}?{at('/srv/a b')}", 400)["code"] == "usage"
    daemon.call("DELETE", f"{files}?{at('/srv/a b')}&recursive=true", 204)
    daemon.call("DELETE", f"{files}?{at('/srv/plain')}", 204)
    assert daemon.call("GET", f"{files}?{at('/srv')}")["items"] == []
    assert daemon.call("GET", f"{files}/content?{at('/srv')}", 400)["code"] == "usage"
    assert daemon.call("GET", f"{files}?{at('/etc/passwd')}", 400)["code"] == "usage"


def test_an_empty_and_a_large_file(daemon: Daemon, files: str) -> None:
    daemon.call("PUT", f"{files}/content?{at('/srv/empty')}", 204, content=b"")
    assert daemon.call("GET", f"{files}/content?{at('/srv/empty')}") == b""
    large = secrets.token_bytes(5 << 20)
    daemon.call("PUT", f"{files}/content?{at('/srv/large')}", 204, content=large)
    assert daemon.call("GET", f"{files}/content?{at('/srv/large')}") == large
    daemon.call("DELETE", f"{files}?{at('/srv/large')}", 204)


def test_directories_as_archives(daemon: Daemon, files: str) -> None:
    sent = archive(("d", None), ("d/one", b"1"), ("d/two", b"2" * 100_000), ("link", "d/one"), ("same", "hard:d/one"))
    daemon.call("PUT", f"{files}/archive?{at('/srv/up/here')}", 204, content=sent)
    back = daemon.call("GET", f"{files}/archive?{at('/srv/up/here')}")
    with tarfile.open(fileobj=io.BytesIO(back)) as opened:
        names = {member.name.removeprefix("./") for member in opened}
        assert {"d", "d/one", "d/two", "link", "same"} <= names
        assert opened.getmember("./link").linkname == "d/one"
        inner = opened.extractfile("./d/two")
        assert inner is not None and inner.read() == b"2" * 100_000
    assert daemon.call("GET", f"{files}/archive?{at('/none')}", 404)["code"] == "not_found"
    single = daemon.call("GET", f"{files}/archive?{at('/srv/up/here/link')}")
    with tarfile.open(fileobj=io.BytesIO(single)) as opened:
        (member,) = opened.getmembers()
        assert (member.name, member.size, member.isreg()) == ("./link", 1, True)
    assert (
        daemon.call("PUT", f"{files}/archive?{at('/srv/up')}", 400, content=b"no archive at all" * 100)["code"]
        == "usage"
    )
    half = daemon.client.put(f"{files}/archive?{at('/srv/half')}", content=sent[:1500])
    assert (half.status_code, half.json()["code"]) == (400, "usage")


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ([("../../out", b"x")], "leads out"),
        ([("a/../../out", b"x")], "leads out"),
        ([("/etc/passwd", b"x")], "absolute"),
        ([("door", "/etc"), ("door/passwd", b"x")], "behind a symbolic link"),
        ([("door", ".."), ("door/out", b"x")], "behind a symbolic link"),
        ([("d", None), ("d/door", "/"), ("d/door/etc/x", None)], "behind a symbolic link"),
        ([("h", "hard:/etc/passwd")], "absolute"),
        ([("h", "hard:../x")], "leads out"),
        ([("door", "/etc"), ("h", "hard:door/passwd")], "behind a symbolic link"),
    ],
)
def test_archives_that_lead_out_are_refused(daemon: Daemon, files: str, members: list[Any], why: str) -> None:
    target = f"/srv/{secrets.token_hex(4)}"
    problem = daemon.call("PUT", f"{files}/archive?{at(target)}", 400, content=archive(*members))
    assert problem["code"] == "usage" and why in problem["detail"]
    assert daemon.call("GET", f"{files}?{at(target)}", 404)["code"] == "not_found"


def test_a_nul_in_an_archive(daemon: Daemon, files: str) -> None:
    for keyword in ("path", "linkpath"):
        member = tarfile.TarInfo("plain")
        member.type, member.linkname = (tarfile.SYMTYPE, "x") if keyword == "linkpath" else (tarfile.REGTYPE, "")
        member.pax_headers = {keyword: "a\0b"}
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as made:
            made.addfile(member)
        problem = daemon.call("PUT", f"{files}/archive?{at('/srv/nul')}", 400, content=buffer.getvalue())
        assert problem["code"] == "usage"


def test_links_are_followed_inside_only(daemon: Daemon, files: str, tmp_path: Path) -> None:
    """An absolute link arrives as it is, and what it leads to is the environment's, never the host's."""
    secret = tmp_path / "secret"
    secret.write_text("the host's own")
    sent = archive(
        ("to-host", str(secret)), ("to-etc", "/etc/hostname"), ("up", "../../../../../../../.." + str(secret))
    )
    daemon.call("PUT", f"{files}/archive?{at('/srv/links')}", 204, content=sent)
    daemon.call("PUT", f"{files}/content?{at('/etc/hostname')}", 204, content=b"inside\n")
    assert daemon.call("GET", f"{files}/content?{at('/srv/links/to-etc')}") == b"inside\n"
    environment = files.split("/")[3]
    daemon.exec(environment, f"mkdir -p {tmp_path}; echo inside > {secret}")
    for name in ("to-host", "up"):
        assert daemon.call("GET", f"{files}/content?{at(f'/srv/links/{name}')}") == b"inside\n"
        daemon.call("PUT", f"{files}/content?{at(f'/srv/links/{name}')}", 204, content=b"changed\n")
        daemon.call("PUT", f"{files}/content?{at(f'/srv/links/{name}')}", 204, content=b"inside\n")
    assert secret.read_text() == "the host's own"
    assert daemon.call("GET", f"{files}/stat?{at('/srv/links/to-host')}&follow=false")["kind"] == "symlink"


def test_paths_that_are_no_paths(daemon: Daemon, files: str) -> None:
    for path in ("relative", "", "../etc", "/a\0b"):
        assert daemon.call("GET", f"{files}/content?{at(path)}", 400)["code"] == "usage", path
        assert daemon.call("PUT", f"{files}/content?{at(path)}", 400, content=b"x")["code"] == "usage", path
    for body in ({"source": "/a\0", "target": "/b"}, {"source": "/a", "target": "b"}):
        assert daemon.call("POST", f"{files}/move", 400, json=body)["code"] == "usage"
    daemon.call("PUT", f"{files}/content?{at('/srv/../../../../srv/climb')}", 204, content=b"here")
    assert daemon.call("GET", f"{files}/content?{at('/srv/climb')}") == b"here"
    assert not Path("/srv/climb").exists()
    assert daemon.call("DELETE", f"{files}?{at('/')}&recursive=true", 400)["code"] == "usage"
    assert daemon.client.get(f"{files}/content").status_code == 422


def test_watching(daemon: Daemon, files: str) -> None:
    daemon.call("POST", f"{files}/directory", 204, json={"path": "/srv/watched/sub"})
    seen: list[tuple[str, str]] = []
    watching = threading.Event()

    def watch() -> None:
        with daemon.client.stream("GET", f"{files}/watch?{at('/srv/watched')}&recursive=true&interval=0.1") as answer:
            name = ""
            for line in answer.iter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    watching.set()
                    seen.append((name, json.loads(line.removeprefix("data: "))["path"]))
                    if name == "removed":
                        return

    thread = threading.Thread(target=watch)
    thread.start()
    assert watching.wait(30)
    daemon.call("PUT", f"{files}/content?{at('/srv/watched/sub/new')}", 204, content=b"1")
    until(lambda: ("added", "/srv/watched/sub/new") in seen)
    daemon.call("PUT", f"{files}/content?{at('/srv/watched/sub/new')}", 204, content=b"22")
    until(lambda: ("changed", "/srv/watched/sub/new") in seen)
    daemon.call("DELETE", f"{files}?{at('/srv/watched/sub/new')}", 204)
    until(lambda: ("removed", "/srv/watched/sub/new") in seen)
    thread.join(30)
    assert daemon.call("GET", f"{files}/watch?{at('/none')}", 404)["code"] == "not_found"
