"""`diff` finds exactly the files that differ: judged by listings made inside the sessions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from listing import Facts, expected_changes, listing
from rootfs import bash_rootfs
from waypoint import capture
from waypoint.bases import base_from_rootfs
from waypoint.diff import Difference, compare
from waypoint.engine import Engine
from waypoint.kernel import processes
from waypoint.session import Session


def changes(difference: Difference) -> set[tuple[str, str]]:
    assert not [note for note in difference.notes if "shell" not in note]
    return {(change.status, change.path) for change in difference.files}


def do(session: Session, command: str) -> None:
    said = session.exec(command, timeout=60)
    assert said.exit_code == 0, said.stderr


@pytest.fixture(params=["stacked", "flat"])
def any_session(request: pytest.FixtureRequest) -> Session:
    """Over a rootfs, whose layers are stacked, and over the host's own root, whose layers are copied."""
    made: Session = request.getfixturevalue("session" if request.param == "stacked" else "host_session")
    do(made, "mkdir -p /srv; cd /srv; rm -rf /srv/*")
    return made


def test_nothing_differs_at_once(engine: Engine, any_session: Session) -> None:
    do(any_session, "mkdir /srv/a; echo 1 > /srv/a/f; chown 3:4 /srv/a/f; ln -s x /srv/l; mkfifo /srv/p")
    taken = any_session.snapshot()
    difference = compare(engine, taken.id, any_session.id)
    assert difference.files == ()
    assert not difference
    (fork,) = any_session.fork(1, from_snapshot=taken.id)
    assert compare(engine, taken.id, fork.id).files == ()
    assert compare(engine, any_session.id, fork.id).files == ()


def test_each_kind_of_change_is_named(engine: Engine, any_session: Session) -> None:
    do(
        any_session,
        "mkdir -p /srv/d/sub /srv/gone/deep; cd /srv/d; echo one > content; echo one > size; echo > mode; echo > owner; "
        "ln -s here link; echo > becomes; mkdir was; echo > was/in; echo > same; setfattr -n user.k -v 1 same; echo > tagged; echo > /srv/gone/deep/f",
    )
    before = any_session.snapshot()
    do(
        any_session,
        "echo two > content; touch -r size content; echo three > size; chmod 4711 mode; chown 7:8 owner; ln -sfn there link; "
        "rm becomes; mkdir becomes; rm -r was; echo > was; touch -d 2001-01-01 same; rm -r /srv/gone; mkdir /srv/new; echo hi > /srv/new/f; "
        "mkfifo fifo",
    )
    found = {change.path: change for change in compare(engine, before.id, any_session.id).files}
    assert {path: (change.status, change.detail) for path, change in found.items()} == {
        "/srv/d/content": ("changed", "content"),
        "/srv/d/size": ("changed", "size 4 → 6"),
        "/srv/d/mode": ("changed", "mode 0644 → 4711"),
        "/srv/d/owner": ("changed", "owner 0:0 → 7:8"),
        "/srv/d/link": ("changed", "target here → there"),
        "/srv/d/becomes": ("changed", "file → directory"),
        "/srv/d/was": ("changed", "directory → file"),
        "/srv/d/fifo": ("added", "fifo"),
        "/srv/gone": ("removed", "directory, 2 entries"),
        "/srv/new": ("added", "directory, 1 entry"),
    }
    assert found["/srv/gone"].entries == 2
    back = compare(engine, any_session.id, before.id, every=True)
    assert {(change.status, change.path) for change in back.files if "/srv/gone" in change.path} == {
        ("added", "/srv/gone"),
        ("added", "/srv/gone/deep"),
        ("added", "/srv/gone/deep/f"),
    }


def test_same_size_and_time_is_not_taken_as_proof(engine: Engine, any_session: Session) -> None:
    do(any_session, "echo aaaa > /srv/f; touch -d 2020-01-01 /srv/f")
    before = any_session.snapshot()
    do(any_session, "echo bbbb > /srv/f; touch -d 2020-01-01 /srv/f")
    after = any_session.snapshot()
    for left, right in ((before.id, after.id), (before.id, any_session.id)):
        assert changes(compare(engine, left, right)) == {("changed", "/srv/f")}


def test_a_host_directory_that_was_moved_and_replaced(engine: Engine, host_session: Session) -> None:
    """Over the host's root: redirected, opaque and whited-out directories of the host's own files."""
    roots = ("/etc", "/srv")
    facts: dict[str, Facts] = {}
    steps = [
        "true",
        "mv /etc/alternatives /etc/choices; echo 1 > /etc/choices/new; rm /etc/hostname; echo x >> /etc/passwd",
        "mv /etc/choices /srv/c; mkdir /etc/choices; rm -r /etc/apt; mkdir -p /etc/apt/man; mv /etc/default /etc/alternatives",
        "mv /srv/c /etc/again; rm -r /etc/choices; mv /etc/dpkg /etc/gkpd; cp -a /etc/gkpd /etc/dpkg",
    ]
    for step in steps:
        do(host_session, step)
        taken = host_session.snapshot()
        host_session.restore(taken.id)
        facts[taken.id] = listing(host_session, *roots)  # outside of these nothing is touched
    ids = list(facts)
    for left in ids:
        for right in ids:
            assert changes(compare(engine, left, right, every=True)) == expected_changes(facts[left], facts[right])
    assert changes(compare(engine, ids[-1], host_session.id)) == set()
    do(host_session, "rm -r /etc/again; echo 2 > /etc/alternatives/y")
    found = changes(compare(engine, ids[1], host_session.id, every=True))
    assert found == expected_changes(facts[ids[1]], listing(host_session, *roots))


class Mess:
    """Random work on a tree, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def path(self) -> str:
        top = self.random.choice(["/srv", "/etc", "/usr/share", "/home", "/opt"])
        return top + "".join(f"/{self.random.choice('abc')}" for _ in range(self.random.randint(1, 3)))

    def step(self) -> str:
        one, two = self.path(), self.path()
        return self.random.choice(
            [
                f"mkdir -p {one}",
                f"mkdir -p {one}/x; echo {self.random.randint(0, 3)} > {one}/x/f",
                f"echo {self.random.randint(0, 3)} > {one}",
                f"echo more >> {one}",
                f"rm -rf {one}",
                f"rm -rf {one}; mkdir -p {one}",
                f"mv -T {one} {two}",
                f"rm -rf {two}; mv -T {one} {two}",
                f"mv {one} {two}",
                f"mv -T /usr/{self.random.choice(['lib/terminfo', 'share/a', 'share/b'])} {two}",
                f"mv -T /etc/{self.random.choice(['group', 'hosts', 'a', 'b'])} {two}",
                f"chmod {self.random.choice(['700', '755', '644'])} {one}",
                f"chown {self.random.randint(0, 2)} {one}",
                f"ln -sfn {two} {one}",
                f"ln -f {one} {two}",
                f"cp -a {one} {two}",
                f"touch {one}",
            ]
        )

    def steps(self, count: int) -> Iterator[str]:
        return (f"{{ {self.step()}; }} 2>/dev/null" for _ in range(count))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rehome", [False, True], ids=["copied", "re-homed"])
def test_random_work_over_a_chain(
    engine: Engine, session: Session, seed: int, rehome: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snapshots with and without a restore between, so that layers are stacked, shared and forked in all ways."""
    if rehome:
        monkeypatch.setattr(capture, "is_big", lambda *_, **__: True)
    mess = Mess(seed)
    taken = []
    for generation in range(5):
        for step in mess.steps(25):
            session.exec(step)
        taken.append(session.snapshot().id)
        if generation % 2:
            session.restore(mess.random.choice(taken))
    facts = {}
    for snapshot in taken:
        session.restore(snapshot)
        facts[snapshot] = listing(session)
    for left in taken:
        for right in taken:
            assert changes(compare(engine, left, right, every=True)) == expected_changes(facts[left], facts[right])
    for step in mess.steps(40):
        session.exec(step)
    now = listing(session)
    for left in taken:
        found = compare(engine, left, session.id, every=True)
        assert changes(found) == expected_changes(facts[left], now)


def test_other_names_of_a_file_that_was_written_to(engine: Engine, session: Session) -> None:
    """A lower file with several names is copied up once: the live session shows the change under all of them."""
    do(
        session,
        "mkdir -p /srv; echo one > /srv/f1; ln /srv/f1 /srv/f2; mkdir /opt/d; ln /srv/f1 /opt/d/f3; echo > /srv/alone",
    )
    before = session.snapshot()
    session.restore(before.id)
    do(session, "mv /srv/alone /srv/moved")
    assert changes(compare(engine, before.id, session.id)) == {("removed", "/srv/alone"), ("added", "/srv/moved")}
    do(session, "echo two > /srv/f1; rm /srv/f1")
    assert session.exec("cat /srv/f2 /opt/d/f3").stdout == b"two\ntwo\n"
    assert changes(compare(engine, before.id, session.id)) == {
        ("removed", "/srv/alone"),
        ("added", "/srv/moved"),
        ("removed", "/srv/f1"),
        ("changed", "/srv/f2"),
        ("changed", "/opt/d/f3"),
    }


def test_a_paused_and_a_dead_session(engine: Engine, any_session: Session) -> None:
    do(any_session, "echo 1 > /srv/one")
    before = any_session.snapshot()
    do(any_session, "echo 2 > /srv/two; rm /srv/one")
    wanted = {("added", "/srv/two"), ("removed", "/srv/one")}
    any_session.pause()
    paused = compare(engine, before.id, any_session.id)
    assert changes(paused) == wanted
    assert not paused.processes
    any_session.resume()
    do(any_session, "echo 3 > /srv/three")
    init = processes.identify(any_session.record.init_pid)
    processes.kill(init)
    assert processes.wait_gone(init, 20)
    dead = compare(engine, before.id, any_session.id)
    assert {(change.status, change.path) for change in dead.files} == wanted | {("added", "/srv/three")}
    assert any("is dead" in note for note in dead.notes)


def test_two_different_bases(engine: Engine, session: Session, tmp_path: Path) -> None:
    """Nothing is shared, so both roots are walked; the same programs are the same files by content."""
    other_root = bash_rootfs(tmp_path / "other")
    (other_root / "etc/only-here").write_text("x")
    (other_root / "usr/bin/ls").unlink()
    other = engine.new(base=base_from_rootfs(engine.store, other_root))
    found = changes(compare(engine, session.id, other.id, every=True))
    assert found == expected_changes(listing(session), listing(other))
    assert {("added", "/etc/only-here"), ("removed", "/usr/bin/ls")} <= found
    other.remove()
