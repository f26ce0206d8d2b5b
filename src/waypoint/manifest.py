"""The manifest of a snapshot: what was there, in words that can be compared later."""

from __future__ import annotations

import time
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

from waypoint.errors import Busy, WaypointError
from waypoint.guest import commands, frames
from waypoint.guest.commands import Link
from waypoint.kernel import inspect
from waypoint.kernel.losses import find_losses
from waypoint.model import ExecResult
from waypoint.reapply import LOST, collect

__all__ = ["SHELL_QUERY", "ask_shell", "describe_session", "shell_state", "told"]

SHELL_QUERY = (
    "declare -p 2>/dev/null && printf '\\0' || { export -p; printf '\\0'; set; set +o; }; declare -f 2>/dev/null; alias; umask; trap; "
    "__wp_go"
)
"""Ends in the status of the command before it: a snapshot must not change `$?`.

Each of them wakes init once more. What is exported a bash says with its variables, and which options are on (SHELLOPTS, BASHOPTS).
"""
_QUERY = 2
"""Answers to another one cannot be compared."""
_BETWEEN_COMMANDS = 1.0
_VOLATILE = (
    "SECONDS", "RANDOM", "SRANDOM", "EPOCHSECONDS", "EPOCHREALTIME", "BASHPID", "BASH_ARGC", "BASH_ARGV", "BASH_LINENO",
    "BASH_COMMAND", "LINENO", "PIPESTATUS", "HISTCMD", "_", "BASH_SOURCE", "FUNCNAME", "DIRSTACK", "LINES", "COLUMNS",
    "BASH_REMATCH",
)  # fmt: skip


def shell_state(link: Link) -> dict[str, Any] | None:
    """The shell's exported variables and a digest of all its state, asked from the shell itself; None when it is busy."""
    return told(ask_shell(link))


def told(result: ExecResult | None) -> dict[str, Any] | None:
    """What the shell's answer says."""
    if result is None:
        return None
    exported = result.stdout.partition(b"\0")[0]
    digest = blake2b(digest_size=16)
    for line in result.stdout.splitlines():
        name = line.split(b"=", 1)[0].split(b" ")[-1].decode(errors="replace")
        if name not in _VOLATILE and not name.startswith("__wp_"):
            digest.update(line + b"\n")
    return {
        "env": _exported(exported.decode(errors="surrogateescape")),
        "digest": digest.hexdigest(),
        "query": _QUERY,
        "cwd": result.cwd,
    }


def ask_shell(link: Link, meanwhile: Callable[[], None] | None = None) -> ExecResult | None:
    """For `told`; None when the shell is busy. `meanwhile` is called while it answers, once for each time that it is asked.

    A command's outcome is out a moment before the shell waits for the next: until then it refuses, but runs nothing.
    """
    request = commands.exec_request(SHELL_QUERY, no_wait=True, ours=True)
    request.timeout = 5
    request.meanwhile = meanwhile
    deadline = time.monotonic() + _BETWEEN_COMMANDS
    try:
        while True:
            try:
                return commands.execute(link, request)
            except Busy:
                if _runs_a_command(link) or time.monotonic() > deadline:
                    return None
                time.sleep(0.001)
    except WaypointError:
        return None


def _runs_a_command(link: Link) -> bool:
    connection, _ = link.connect()
    with connection:
        connection.send(frames.HELLO)
        frame = connection.receive(time.monotonic() + 10)
    return frame is None or b"\ncurrent=0\n" not in b"\n" + frame.payload


def _exported(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in text.splitlines():
        words = line.split(" ", 2)
        if words[0] == "declare" and len(words) == 3:
            if "x" not in words[1]:
                continue
            name, _, value = words[2].partition("=")
        elif words[0] == "export" and len(words) >= 2:
            name, _, value = line.removeprefix("export ").partition("=")
        else:
            continue
        if name not in _VOLATILE and not name.startswith("__wp_"):
            found[name] = value.strip("\"'")
    return found


def describe_session(
    init_pid: int,
    idmap: int,
    shell: dict[str, Any] | None,
    *,
    filtered: bool = True,
    held: dict[int, dict[str, int]] | None = None,
) -> dict[str, Any]:
    """Everything about the processes now, with the shell's own answer beside it. Times are the engine's business."""
    began = time.perf_counter()
    found = inspect.describe(init_pid, idmap, held)
    found["shell"] = shell
    found[LOST] = collect(init_pid)
    found["not_captured"] = find_losses(init_pid, filtered=filtered)
    found["manifest_ms"] = round((time.perf_counter() - began) * 1000, 3)
    return found
