"""A deep chain is merged, and the merged layer is exactly what the chain was."""

from __future__ import annotations

import pytest

from waypoint import capture, sealing
from waypoint import engine as engine_module
from waypoint.engine import Engine
from waypoint.model import BaseRecord
from waypoint.session import Session

STEPS = [
    "mkdir -p /a/b /c; echo 1 > /a/b/f; echo keep > /a/keep; ln /a/keep /a/hard; mkfifo /c/p; touch -d 2001-02-03 /a/old",
    "rm /a/b/f; echo 2 > /a/b/g; chmod 700 /c; chown 12:34 /a/b/g; ln -s nowhere /a/link",
    "mv /a /moved; mkdir /a; echo new > /a/new; rm -rf /usr/share; mkdir /usr/share; echo only > /usr/share/only",
    "rm -rf /c; echo file > /c; mv /etc /etc2; cp -a /etc2 /etc; truncate -s 1M /sparse; bash -c 'exec -a x sleep 0'",
    "rm /moved/keep; mkdir -p /deep/er/still; echo d > /deep/er/still/f; setfattr -n user.x -v y /deep 2>/dev/null; true",
    "mv /deep/er /er; echo last > /last",
]
LISTING = (
    "cd /; find . -xdev \\( -path ./.waypoint -o -path ./proc -o -path ./sys -o -path ./dev \\) -prune -o "
    "-printf '%y %m %U %G %s %p %l %T@\\n' | grep -v '^d' | sort; find . -xdev -path ./proc -prune -o -type f -name '[a-z]*' "
    "-path './[aemdl]*' -exec md5sum {} + | sort; find . -xdev \\( -path ./proc -o -path ./sys \\) -prune -o -type d -printf '%m %U %p\\n' | sort"
)


def test_merged_chain_is_the_same(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in STEPS:
        session.exec(step)
        session.restore(session.snapshot().id)
    wanted = session.exec(LISTING, timeout=60).stdout
    assert len(session.record.layers) > len(STEPS)
    monkeypatch.setattr(engine_module, "DEPTH", 3)
    merged = session.snapshot("merged")
    assert len(merged.layers) == 2
    session.restore("merged", verify=True)
    said = session.exec(LISTING, timeout=60).stdout
    assert said.decode().splitlines() == wanted.decode().splitlines()
    session.exec("echo more >> /a/new; rm /last; mv /moved /again")
    (fork,) = session.fork(1)
    assert fork.exec("cat /a/new /again/hard; ls /last").stdout == b"new\nmore\nkeep\n"


def test_a_session_that_is_brought_back_over_its_own_layers_has_few_of_them(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells of a mount in one line, which CRIU reads 4096 characters of."""
    monkeypatch.setattr(capture, "is_big", lambda *_, **__: True)
    for module in (capture, sealing):
        monkeypatch.setattr(module, "DEPTH", 4)
    session.exec("sleep 100000 & HERE=$!; exec 7<>/kept; echo kept >&7")
    taken = []
    for step in [*STEPS, *("echo more >> /last; rm -f /n; echo $RANDOM > /n; cp -a /last /last2" for _ in range(3))]:
        session.exec(step)
        wanted = session.exec(LISTING, timeout=60).stdout
        taken.append((session.snapshot(), wanted))
        assert len(session.record.layers) <= 4
        assert session.exec(LISTING, timeout=60).stdout == wanted
        assert session.exec("kill -0 $HERE && cat /kept && cat /proc/$$/fd/7").stdout == b"kept\nkept\n"
    for snapshot, wanted in taken:
        session.restore(snapshot.id, verify=True)
        assert session.exec(LISTING, timeout=60).stdout == wanted


@pytest.mark.parametrize("way", ["pause", "snapshot"])
@pytest.mark.parametrize("files_only", [False, True], ids=["full", "files"])
def test_layers_that_nobody_needs_any_more_go_when_they_are_merged(
    engine: Engine, small_base: BaseRecord, sessions: list[Session], monkeypatch: pytest.MonkeyPatch, way: str, files_only: bool
) -> None:
    monkeypatch.setattr(capture, "is_big", lambda *_, **__: True)
    for module in (capture, sealing):
        monkeypatch.setattr(module, "DEPTH", 5)
    before = set(engine.store.paths.layers.iterdir())
    session = engine.new(base=small_base, files_only=files_only)
    for i in range(12):
        session.exec(f"echo {i} > /n; echo {i} > /f{i}")
        if way == "pause":
            session.pause()
            session.resume()
        else:
            engine.drop_snapshots([session.snapshot().id])
        assert len(session.record.layers) <= 5
    assert session.exec("cat /n; cat /f*").stdout.split() == [b"11", *sorted((b"%d" % i for i in range(12)), key=lambda i: b"f" + i)]
    named = {layer for record in engine.sessions() for layer in (record.upper, *record.layers)}
    named |= {layer for record in engine.snapshots() for layer in record.layers}
    assert {int(one.name) for one in set(engine.store.paths.layers.iterdir()) - before} <= named


def test_a_long_chain_of_generations(session: Session) -> None:
    for i in range(60):
        session.exec(f"echo {i} > /n; echo {i} > /f{i}")
        session.restore(session.snapshot().id)
    assert len(session.record.layers) < 50
    assert session.exec("cat /n; ls /f* | wc -l; cat /f0 /f59").stdout == b"59\n60\n0\n59\n"
