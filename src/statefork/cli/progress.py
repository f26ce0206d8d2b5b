"""How a search gets on, on stderr: a live tree on a terminal, a line for each node elsewhere."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Mapping

import click

from statefork.explore.drawing import fitted, plain, tree_lines
from statefork.explore.model import Meter, Node

__all__ = ["LiveTree", "PlainLines", "watch_for"]

_EVERY_SECONDS = 0.2


class PlainLines:
    """For logs and pipes."""

    def began(self, meter: Meter, nodes: Mapping[int, Node]) -> None:
        self._meter = meter

    def made(self, node: Node) -> None:
        parent = "" if node.parent is None else f" from {node.parent.id}"
        click.echo(f"node {node.id}{parent}: {_label(node)}  (left: {self._meter.left()})", err=True)

    def ended(self) -> None:
        return


class LiveTree:
    """Redrawn in place a few times a second by a thread of its own; the last tree stays on the screen."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._drawn = 0
        self._before = 0

    def began(self, meter: Meter, nodes: Mapping[int, Node]) -> None:
        self._meter, self._nodes, self._before = meter, nodes, len(nodes)
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._draw_on, name="explore-progress", daemon=True)
        self._thread.start()

    def made(self, node: Node) -> None:
        return  # the thread looks by itself

    def ended(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _draw_on(self) -> None:
        while not self._stop.wait(_EVERY_SECONDS):
            self._draw()
        self._draw()

    def _draw(self) -> None:
        columns, rows = shutil.get_terminal_size()
        lines = [fitted(line, columns) for line in self._lines(max(rows - 2, 3))]
        up = f"\x1b[{self._drawn}A" if self._drawn else ""
        text = "".join(f"\x1b[2K{line}\r\n" for line in lines)
        sys.stderr.write(f"{up}\r{text}\x1b[J")
        sys.stderr.flush()
        self._drawn = len(lines)

    def _lines(self, most: int) -> list[str]:
        nodes = dict(self._nodes)  # workers add to it
        best = min(nodes.values(), key=lambda node: (-node.score, node.depth, node.id))
        way = {0, *(node.id for node in best.path())}
        elapsed = max(time.monotonic() - self._started, 0.001)
        speed = (len(nodes) - self._before) / elapsed
        head = f"{len(nodes)} nodes  {speed:.1f} nodes/s  best {best.score:.3g} (node {best.id})  left: {self._meter.left()}"
        tree = list(tree_lines(nodes[0], way, _label))
        return [head, *_chosen(tree, most - 1)]


def _chosen(tree: list[str], most: int) -> list[str]:
    """Where it does not fit: the way to the best node and the newest lines around, with the number of the rest."""
    if len(tree) <= most:
        return tree
    way = [number for number, line in enumerate(tree) if line.startswith("*")]
    others = [number for number in range(len(tree)) if not tree[number].startswith("*")]
    kept = sorted(
        [*way[-(most - 1) :], *others[-max(most - 1 - len(way), 0) :]] if len(way) < most - 1 else way[-(most - 1) :]
    )
    return [*(tree[number] for number in kept), f"  … {len(tree) - len(kept)} more"]


def _label(node: Node) -> str:
    name = "(start)" if node.action is None else plain(node.action.name)
    busy = "  …" if node.busy and not node.children else ""
    return f"{node.score:.3g}  {name}" + (f"  exit {node.exit_code}" if node.exit_code else "") + busy


def watch_for(quiet: bool) -> LiveTree | PlainLines | None:
    if quiet:
        return None
    return LiveTree() if sys.stderr.isatty() else PlainLines()
