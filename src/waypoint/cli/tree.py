"""`waypoint tree`: the snapshots, what grew out of what, and the sessions that live at their ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from waypoint.cli.options import ANYTHING, json_option, open_engine
from waypoint.cli.output import paint, print_json
from waypoint.cli.show import age, size

if TYPE_CHECKING:
    from waypoint.model import SessionRecord, SnapshotRecord

__all__ = ["draw", "tree"]


@click.command()
@click.argument("session", type=ANYTHING, required=False)
@json_option
def tree(session: str | None, as_json: bool) -> None:
    """Draw the tree of snapshots, of all sessions or of the tree that S (a session or snapshot) belongs to.

    A snapshot has its name, the size of its files and memory, its age and how long taking it took.
    """
    with open_engine() as engine:
        only = None
        if session is not None:
            from waypoint.view import find

            only = find(engine, session).tree
        snapshots = [record for record in engine.snapshots(only) if not record.pinned]
        sessions = [record for record in engine.sessions() if only in (None, record.tree)]
    if as_json:
        print_json({"snapshots": [_document(record, snapshots, sessions) for record in snapshots]})
    else:
        click.echo(draw(snapshots, sessions, time.time()), nl=False)


def _document(
    record: SnapshotRecord, snapshots: Sequence[SnapshotRecord], sessions: Sequence[SessionRecord]
) -> dict[str, Any]:
    return {
        "snapshot": record.id,
        "name": record.name,
        "parent": record.parent,
        "children": [other.id for other in snapshots if other.parent == record.id],
        "sessions": [one.id for one in sessions if one.snapshot == record.id],
        "session": record.session,
        "tree": record.tree,
        "base": record.base,
        "created": record.created,
        "duration_ms": round(record.duration_ms, 3),
        "paused_ms": round(record.paused_ms, 3),
        "files_bytes": record.files_bytes,
        "memory_bytes": record.memory_bytes,
        "files_only": not record.full,
    }


def draw(snapshots: Sequence[SnapshotRecord], sessions: Sequence[SessionRecord], now: float) -> str:
    """As text, one line for each snapshot and session."""
    known = {record.id for record in snapshots}
    below: dict[str | None, list[SnapshotRecord | SessionRecord]] = {}
    for snapshot in snapshots:
        below.setdefault(snapshot.parent if snapshot.parent in known else None, []).append(snapshot)
    for session in sessions:
        below.setdefault(session.snapshot if session.snapshot in known else None, []).append(session)
    pen = _Pen(now)
    for root in below.get(None, ()):
        pen.draw(root, below, "", "", "")
    return "".join(f"{line}\n" for line in pen.lines)


class _Pen:
    """Collects the lines; plain signs where the terminal's encoding has no others."""

    def __init__(self, now: float) -> None:
        self.lines: list[str] = []
        self._now = now
        try:
            "├└│─●▶".encode(sys.stdout.encoding or "ascii")
            self._signs = ("├─ ", "└─ ", "│  ", "●", "▶")
        except UnicodeEncodeError:
            self._signs = ("|- ", "`- ", "|  ", "o", ">")

    def draw(
        self,
        record: SnapshotRecord | SessionRecord,
        below: dict[str | None, list[SnapshotRecord | SessionRecord]],
        before: str,
        sign: str,
        under: str,
    ) -> None:
        from waypoint.model import SnapshotRecord

        if not isinstance(record, SnapshotRecord):
            self.lines.append(f"{before}{sign}{self._session(record)}")
            return
        self.lines.append(f"{before}{sign}{self._snapshot(record)}")
        children = below.get(record.id, [])
        tee, corner, bar, _, _ = self._signs
        for number, child in enumerate(children):
            last = number == len(children) - 1
            self.draw(child, below, before + under, corner if last else tee, "   " if last else bar)

    def _snapshot(self, record: SnapshotRecord) -> str:
        name = f" {paint(record.name, '1', sys.stdout)}" if record.name else ""
        memory = f" + {size(record.memory_bytes)} memory" if record.full else ", files only"
        facts = f"{size(record.files_bytes)} files{memory}, {age(self._now - record.created)} old"
        facts += f", taken in {record.duration_ms:.0f} ms"
        return f"{paint(self._signs[3], '36', sys.stdout)} {record.id}{name}  {paint(facts, '2', sys.stdout)}"

    def _session(self, record: SessionRecord) -> str:
        name = f" {paint(record.name, '1', sys.stdout)}" if record.name else ""
        colour = {"live": "32", "paused": "33"}.get(record.state, "31")
        return f"{paint(self._signs[4], colour, sys.stdout)} {record.id}{name}  {paint(record.state, colour, sys.stdout)}"
