"""The trace of a search: one JSON line for each thing that happened, written before anything is built on it.

    {"event": "run", "algorithm": "mcts", "seed": 7, "budget": {...}, "backend": ..., "started_at": ..., "note": {...}}
    {"event": "node", "node": 3, "parent": 1, "action": {...}, "exit_code": 0, "digest": ..., "state": ..., "score": 0.5,
     "ended": false, "error": "", "snapshot": "s-...", "at_ms": ..., "stand_ms": ..., "exec_ms": ..., "score_ms": ...,
     "snapshot_ms": ..., "output": "tail of it"}
    {"event": "drop", "node": 3}            its snapshot was dropped for want of room
    {"event": "rebuilt", "node": 3, "snapshot": ...}    by replay, and found equal
    {"event": "failed", "node": 3, "why": ...}          the backend could not bring it up
    {"event": "lost", "node": 3, "why": ...}            nothing can follow it: that, or by replay it was found to differ
    {"event": "spent", "node": 3}           the policy has nothing more to try there
    {"event": "end", "best": 9, "score": 1.0, "nodes": 40, "forks": 52, "seconds": 12.5}

`at_ms` counts from the beginning of the run; a run that goes on with an interrupted one begins with a line `run` of its own,
and its clock goes on too. A torn last line, of a process that was killed, is left out; everything before it counts.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from statefork.errors import StoreError
from statefork.explore.model import Action, Node

__all__ = ["Trace", "read_trace", "used_so_far"]


class Trace:
    """Append-only, from any thread. A path of None keeps nothing."""

    def __init__(self, path: Path | None, nodes: dict[int, Node] | None = None, *, seconds: float = 0.0) -> None:
        """`nodes`: what an earlier, interrupted run wrote into it in `seconds`; new lines are added behind."""
        self._lock = threading.Lock()
        self._began = time.monotonic() - seconds
        self._file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            if nodes is not None:
                _cut_torn_line(path)
            self._file = path.open("w" if nodes is None else "a", encoding="utf-8")

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, event: str, **facts: Any) -> None:
        if self._file is None:
            return
        line = json.dumps({"event": event, "at_ms": round((time.monotonic() - self._began) * 1000, 1), **facts})
        with self._lock:
            self._file.write(line + "\n")
            self._file.flush()

    def run(self, **facts: Any) -> None:
        self.write("run", started_at=datetime.now(UTC).isoformat(timespec="seconds"), **facts)

    def node(self, node: Node, **times: float) -> None:
        self.write(
            "node",
            node=node.id,
            parent=None if node.parent is None else node.parent.id,
            action=None if node.action is None else asdict(node.action),
            exit_code=node.exit_code,
            digest=node.digest,
            state=node.state,
            score=node.score,
            ended=node.ended,
            error=node.error,
            snapshot=node.snapshot,
            output=node.output,
            **{name: round(value, 3) for name, value in times.items()},
        )


def _cut_torn_line(path: Path) -> None:
    with path.open("rb+") as file:
        data = file.read()
        file.truncate(data.rfind(b"\n") + 1)


def read_trace(path: Path) -> tuple[dict[int, Node], list[dict[str, Any]]]:
    """(nodes by id, all events). Snapshots that were dropped are not named any more."""
    if not path.exists():
        raise StoreError(f"there is no trace {path}")
    nodes: dict[int, Node] = {}
    events: list[dict[str, Any]] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith("\n"):
                break  # its writer was killed in the middle of it
            try:
                event = json.loads(line)
            except json.JSONDecodeError as error:
                raise StoreError(f"{path}: line {number} is no JSON") from error
            events.append(event)
            with contextlib.suppress(KeyError):
                if event["event"] == "node":
                    _add(nodes, event)
                elif event["event"] == "drop":
                    nodes[event["node"]].snapshot = None
                elif event["event"] == "rebuilt":
                    nodes[event["node"]].snapshot = event["snapshot"]
                elif event["event"] == "lost":
                    nodes[event["node"]].ended = True
                elif event["event"] == "spent":
                    nodes[event["node"]].spent = True
    return nodes, events


def used_so_far(events: list[dict[str, Any]]) -> float:
    """Seconds until the last thing that an interrupted run wrote down."""
    return float(events[-1].get("at_ms", 0)) / 1000 if events else 0.0


def _add(nodes: dict[int, Node], event: dict[str, Any]) -> None:
    parent = nodes.get(event["parent"]) if event["parent"] is not None else None
    action = None if event["action"] is None else Action(**event["action"])
    node = Node(
        event["node"], parent, action, event["score"], event["output"], event["digest"], event["exit_code"],
        event["snapshot"], event["ended"],
    )  # fmt: skip
    node.error, node.state = event.get("error", ""), event.get("state", "")
    nodes[node.id] = node
    if parent is not None:
        parent.children.append(node)
