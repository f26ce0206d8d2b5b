"""A trace as something to look at: the tree as text, as JSON, and the facts that a picture of it needs."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from statefork.explore.model import Node
from statefork.explore.trace import read_trace

__all__ = ["Drawing", "fitted", "plain", "tree_lines"]

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])")
_TIMES = ("stand_ms", "exec_ms", "score_ms", "snapshot_ms")


@dataclass(frozen=True, slots=True)
class Drawing:
    """What one trace tells."""

    nodes: Mapping[int, Node]
    times: Mapping[int, Mapping[str, float]]
    """By node: when it was made (`at_ms`), and what it took."""
    run: Mapping[str, Any]
    """The line that the first run began with."""
    end: Mapping[str, Any] | None
    """None: the last run did not come to its end."""

    @classmethod
    def of(cls, path: Path) -> Drawing:
        nodes, events = read_trace(path)
        times = {
            event["node"]: {name: event[name] for name in ("at_ms", *_TIMES) if name in event}
            for event in events
            if event["event"] == "node"
        }
        run = next((event for event in events if event["event"] == "run"), {})
        end = events[-1] if events and events[-1]["event"] == "end" else None
        return cls(nodes, times, run, end)

    @property
    def best(self) -> Node | None:
        if self.end is not None and self.end["best"] in self.nodes:
            return self.nodes[self.end["best"]]
        return min(self.nodes.values(), key=lambda node: (-node.score, node.depth, node.id), default=None)

    @property
    def way(self) -> set[int]:
        """The root, the best node, and those between."""
        return set() if self.best is None else {0, *(node.id for node in self.best.path())}

    @property
    def seconds(self) -> float:
        return max((times["at_ms"] for times in self.times.values()), default=0.0) / 1000

    @property
    def summary(self) -> str:
        """One line for a person."""
        words = [f"{self.run.get('algorithm', 'search')} on {self.run.get('backend', 'an unknown backend')}"]
        words.append(f"{len(self.nodes)} nodes in {self.seconds:.1f} s")
        if self.seconds:
            words.append(f"{len(self.nodes) / self.seconds:.1f} nodes/s")
        if self.best is not None:
            words.append(f"best {self.best.score:g} at node {self.best.id}")
        if self.end is None:
            words.append("not ended")
        return ", ".join(words)

    def spent_ms(self, node: Node) -> float:
        return sum(self.times.get(node.id, {}).get(name, 0.0) for name in _TIMES)

    def to_json(self) -> dict[str, Any]:
        way = self.way
        return {
            "run": dict(self.run),
            "end": None if self.end is None else dict(self.end),
            "best": None if self.best is None else self.best.id,
            "nodes": [
                {
                    "node": node.id,
                    "parent": None if node.parent is None else node.parent.id,
                    "depth": node.depth,
                    "command": None if node.action is None else node.action.command,
                    "label": None if node.action is None else node.action.name,
                    "score": node.score,
                    "exit_code": node.exit_code,
                    "ended": node.ended,
                    "error": node.error,
                    "snapshot": node.snapshot,
                    "on_the_way": node.id in way,
                    "output": node.output,
                    **self.times.get(node.id, {}),
                }
                for node in self.nodes.values()
            ],
        }

    def text(self) -> str:
        if not self.nodes:
            return "no nodes"
        return "\n".join([self.summary, *tree_lines(self.nodes[0], self.way, self.label)])

    def label(self, node: Node) -> str:
        words = [f"{node.score:.3g}", "(the state it began with)" if node.action is None else plain(node.action.name)]
        if node.exit_code:
            words.append(f"exit {node.exit_code}")
        if node.id in self.times and node.action is not None:
            words.append(f"{self.spent_ms(node):.0f} ms")
        if node.error:
            words.append(f"failed: {plain(node.error)[:60]}")
        return "  ".join(words)


def tree_lines(root: Node, way: set[int], label: Any) -> Iterator[str]:
    """`*` marks the way to the best node."""
    waiting = [(root, "", "")]
    while waiting:
        node, first, rest = waiting.pop()
        mark = "*" if node.id in way else " "
        yield f"{mark} {first}{node.id}  {label(node)}"
        children = list(node.children)
        branches = [("├── ", "│   ")] * (len(children) - 1) + [("└── ", "    ")]
        below = [(c, rest + arm, rest + gap) for c, (arm, gap) in zip(children, branches, strict=False)]
        waiting.extend(reversed(below))


def plain(text: str) -> str:
    """On one line, without what a terminal or a page would take for more than text."""
    text = _ESCAPES.sub("", text)
    return "".join(char if char.isprintable() else " " for char in text)


def fitted(text: str, columns: int) -> str:
    """Cut to a width on the screen, where some characters take two columns and some none."""
    used = 0
    kept: list[str] = []
    for char in text:
        width = 0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        if used + width > columns - 1:
            return "".join(kept) + "…"
        used += width
        kept.append(char)
    return "".join(kept)
