"""What the examples share: their command line, and telling what happens while checking it.

    python -m examples.kv_store.branch                                        # Waypoint, over this machine's own root
    python -m examples.kv_store.branch --backend docker base_image=debian:12
    python -m examples.kv_store.branch --method gvisor_build rootfs=/path/to/root

Everything goes on in an environment that is removed at the end, however it ends. The exit code is 0 only if all that
came back is what had been stored; a backend that brings back less than it promises makes it 1.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from statefork import Environment, create_env_manager
from statefork.errors import ExecTimeout, UsageError, WaypointError
from statefork.model import Capability

__all__ = ["Story", "main"]

ANSWER_SECONDS = 60.0
MOST_LINES = 2
PYTHON = "/usr/bin/python3"


class Wrong(Exception):
    """What came back is not what had been stored. There is no sense in going on."""


class Story:
    """Prints each step as it happens, and checks it."""

    def __init__(self, environment: Environment) -> None:
        self.whole = environment.capabilities.full
        """Whether running programs come back. If not, an example says what is lost, and starts its program again."""

    def title(self, text: str) -> None:
        print(f"\n== {text}", flush=True)

    def say(self, text: str) -> None:
        print(f"   {text}", flush=True)

    def check(self, what: str, found: object, wanted: object) -> None:
        if found != wanted:
            print(f"   WRONG  {what}: {found!r}, not {wanted!r}", flush=True)
            raise Wrong
        print(f"   ok     {what}: {found}", flush=True)

    # -- what a newcomer came to see ----------------------------------------------------------------------------------

    def snapshot(self, environment: Environment, name: str) -> str:
        identifier = environment.snapshot(name)
        taken = next(one for one in environment.snapshots() if one.id == identifier)
        self.say(f"snapshot {name!r}: {', '.join(taken.captured)}; {taken.duration_ms:.0f} ms")
        lost = list(dict.fromkeys(taken.not_captured))
        for one in lost[:MOST_LINES]:
            self.say(f"   not in it: {one}")
        if len(lost) > MOST_LINES:
            self.say(f"   and {len(lost) - MOST_LINES} more of that")
        return identifier

    def restore(self, environment: Environment, name: str) -> None:
        result = environment.restore(name)
        anew = "; the shell and all programs are gone" if result.shell_restarted else ""
        self.say(f"restored {name!r}: {', '.join(result.restored)}; {result.duration_ms:.0f} ms{anew}")

    @contextmanager
    def forks(self, environment: Environment, count: int, name: str) -> Iterator[list[Environment]]:
        """Live copies of a snapshot; removed at the end."""
        began = time.perf_counter()
        made = environment.fork(count, from_snapshot=name)
        self.say(f"{count} forks of {name!r}; {(time.perf_counter() - began) * 1000:.0f} ms")
        try:
            yield made
        finally:
            for fork in made:
                fork.destroy()


def inside(environment: Environment, command: str, timeout: float = 120.0) -> str:
    """What a command printed; it must succeed."""
    result = environment.exec_command(command, timeout=timeout)
    if not result.ok:
        raise SystemExit(f"`{command}` ended in {result.exit_code}: {result.output.strip()}")
    return result.stdout.strip()


def ask(environment: Environment, directory: str, question: str) -> str | None:
    """Put a line to a program that listens on the FIFO `in` and answers on `out`; None if there is no such program."""
    # Nobody may be there to read the line, and opening a FIFO then waits for ever: hence the timeout.
    script = 'cd "$1" && echo "$2" >in && read -r answer <out && echo "$answer"'
    try:
        done = environment.run(["sh", "-c", script, "sh", directory, question], timeout=ANSWER_SECONDS)
    except ExecTimeout:
        return None
    return done.stdout.strip() if done.ok else None


def listens(environment: Environment, directory: str, seconds: float = 3.0) -> bool:
    """Whether a program has the FIFO `in` open: otherwise opening it waits."""
    try:
        return environment.run(["sh", "-c", '[ -p "$1/in" ] && : >"$1/in"', "sh", directory], timeout=seconds).ok
    except ExecTimeout:
        return False


def until(what: str, check: Callable[[], bool]) -> None:
    """Poll: programs take their time to come up."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while not check():
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {ANSWER_SECONDS:g} s: {what}")
        time.sleep(0.05)


# -- the command line -------------------------------------------------------------------------------------------------


def main(description: str | None, tell: Callable[[Environment, Story], None]) -> int:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--backend", default="waypoint", help="as `statefork backends` lists them; waypoint")
    parser.add_argument("--method", help="such as podman_build or waypoint_attach, instead of a backend")
    parser.add_argument("arguments", nargs="*", metavar="NAME=VALUE", help="what the method takes: rootfs=DIR ...")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that everything is removed
    try:
        arguments = dict(_pair(argument) for argument in given.arguments)
        home = os.environ.get("STATEFORK_HOME")
        method = given.method or f"{given.backend}_build"
        with create_env_manager(method, home=Path(home) if home else None, **arguments) as environment:
            story = Story(environment)
            if Capability.FILES not in environment.capabilities.restores:
                raise UsageError(f"{environment.backend} keeps no files, and this example needs them to be kept")
            story.title(f"{environment.backend} brings back: {', '.join(sorted(environment.capabilities.restores))}")
            tell(environment, story)
    except Wrong:
        print("\nthis backend did not bring back what it had promised", flush=True)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read this has gone; what is still buffered has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except WaypointError as error:
        fix = error.details.get("fix")
        print(f"{error.message}" + (f"; fix: {fix}" if fix else ""), file=sys.stderr)
        return error.exit_code
    print("\nall as it should be", flush=True)
    return 0


def _pair(argument: str) -> tuple[str, str]:
    name, equals, value = argument.partition("=")
    if not equals:
        raise UsageError(f"{argument!r}: write arguments as NAME=VALUE")
    return name, value
