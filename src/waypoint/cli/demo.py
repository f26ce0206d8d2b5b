"""`waypoint demo`: the main job from beginning to end, every step checked."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from waypoint.cli import output
from waypoint.cli.options import json_option

if TYPE_CHECKING:
    from waypoint.engine import Engine

__all__ = ["demo"]


@click.command()
@json_option
def demo(as_json: bool) -> None:
    """Set up a shell and a server in a session over this machine's root, snapshot it, break it, restore it, and let three
    forks try three fixes at once. Ends in 0 only if every step was right; removes all that it made.

    Uses $WAYPOINT_HOME if that is set, else a store of its own that it removes.
    """
    from waypoint.cli.demo_story import tell

    teller = Teller(quiet=as_json)
    with _store() as engine:
        teller.title(f"Waypoint on this machine: kernel {os.uname().release}, store {engine.store.paths.home}")
        tree = tell(engine, teller)
    if as_json:
        output.print_json({"ok": True, "steps": teller.steps, "tree": tree})
        return
    total = sum(float(str(step["duration_ms"])) for step in teller.steps)
    checks = sum(len(step["checks"]) for step in teller.steps if isinstance(step["checks"], list))
    teller.title(f"All {len(teller.steps)} steps and {checks} checks were right, in {total / 1000:.1f} s.")


@contextmanager
def _store() -> Iterator[Engine]:
    from waypoint.engine import Engine
    from waypoint.errors import VerifyFailed
    from waypoint.kernel import processes

    if os.environ.get("WAYPOINT_HOME"):
        with Engine(Path(output.home())) as engine:
            yield engine
        return
    with tempfile.TemporaryDirectory(prefix="waypoint-demo-", dir="/var/tmp") as directory:
        with Engine(Path(directory)) as engine:
            yield engine
            engine.gc()
            if left := list(processes.inits(engine.store.tag)):
                raise VerifyFailed(f"processes {left} are left behind")


class Teller:
    """Prints what happens as it happens, with times, and remembers it for --json."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self.steps: list[dict[str, object]] = []
        self._checks: list[str] = []

    def title(self, text: str) -> None:
        self._print(f"\n{output.paint(text, '1', sys.stdout)}")

    def say(self, text: str) -> None:
        self._print(output.paint(f"       {text}", "2", sys.stdout))

    def show(self, text: str) -> None:
        self._print("".join(f"       {line}\n" for line in text.splitlines()).rstrip("\n"))

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """One step. Its time is that of the work inside, checks included."""
        self._checks = []
        began = time.perf_counter()
        try:
            yield
        except BaseException:
            self._print(f" {output.paint('✗', '31', sys.stdout)} {what}")
            raise
        duration_ms = (time.perf_counter() - began) * 1000
        self.steps.append({"step": what, "duration_ms": round(duration_ms, 3), "checks": self._checks})
        self._print(f" {output.paint('✓', '32', sys.stdout)} {what:<70} {duration_ms:7.0f} ms")
        for check in self._checks:
            self.say(f"· {check}")

    def check(self, what: str, found: object, wanted: object) -> None:
        """VerifyFailed unless they are the same."""
        from waypoint.errors import VerifyFailed

        if found != wanted:
            raise VerifyFailed(f"demo: {what}: expected {wanted!r}, found {found!r}")
        self._checks.append(what)

    def _print(self, text: str) -> None:
        if not self._quiet:
            click.echo(text.encode(sys.stdout.encoding or "ascii", "replace").decode(sys.stdout.encoding or "ascii"))
