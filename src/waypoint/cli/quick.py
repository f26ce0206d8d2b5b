"""`waypoint exec` and `run` in their plain form, without click, the engine or the records: importing those takes longer.

Understands a subset of the options that exec.py and run.py declare and gives up (None) on everything else: help, a mistake, an
option it does not know, a session that is not simply live. Then the whole command line takes over, and says what there is to say.
"""

from __future__ import annotations

from waypoint.cli import output
from waypoint.cli.streams import Streams, carry
from waypoint.errors import WaypointError
from waypoint.guest import commands
from waypoint.reach import Reach

__all__ = ["attempt"]


class _Asked:
    __slots__ = ("as_json", "no_wait", "stdin", "timeout", "words")

    def __init__(self) -> None:
        self.as_json = False
        self.no_wait = False
        self.stdin: bool | None = None
        self.timeout: float | None = None
        self.words: list[str] = []


def attempt(verb: str, words: list[str]) -> int | None:
    """The exit code, or None when this is not for us; then nothing has been done yet."""
    asked = _parse(words)
    if asked is None or len(asked.words) < 2 or (verb == "run" and asked.no_wait):
        return None
    try:
        reach = Reach(output.home(), asked.words[0])
    except (LookupError, WaypointError):
        return None
    try:
        streams = Streams(reach, as_json=asked.as_json, stdin=asked.stdin)
        if verb == "run":
            request = reach.run_request(asked.words[1:], streams.stdin)
        else:
            request = commands.exec_request(" ".join(asked.words[1:]), stdin=streams.stdin, no_wait=asked.no_wait)
        request.timeout, request.limit = asked.timeout, streams.limit
        request.on_stdout, request.on_stderr, request.on_start = streams.on_stdout, streams.on_stderr, streams.on_start
        return carry(streams, reach.session, lambda: commands.execute(reach, request))
    except WaypointError as error:
        return output.fail(error, asked.as_json)


def _parse(words: list[str]) -> _Asked | None:
    asked = _Asked()
    rest = iter(words)
    for word in rest:
        if word == "--":
            asked.words += rest
        elif not word.startswith("-") or word == "-":
            asked.words.append(word)
        elif word == "--json":
            asked.as_json = True
        elif word == "--no-wait":
            asked.no_wait = True
        elif word in ("-i", "--stdin"):
            asked.stdin = True
        elif word in ("-n", "--no-stdin"):
            asked.stdin = False
        elif word == "--timeout" or word.startswith("--timeout="):
            value = word.removeprefix("--timeout").removeprefix("=") or next(rest, "")
            try:
                asked.timeout = float(value)
            except ValueError:
                return None
            if not 0 < asked.timeout < 1e9:
                return None
        else:
            return None
    return asked
