"""The verbs of an environment as steps: commands, states, records. Each is bound twice, in blocking.py and awaiting.py."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Mapping, Sequence
from signal import Signals
from typing import IO, Any

from statefork.arguments import bytes_or_none, command_bytes, seconds
from statefork.client import parsing
from statefork.client.errors import error_of
from statefork.client.handle import Handle
from statefork.client.parsing import CommandInfo, EnvironmentInfo, TotalUsage
from statefork.client.steps import Call, Follow, Request
from statefork.errors import NotFound, UsageError
from statefork.history import History, Stats
from statefork.model import OUTPUT_LIMIT_BYTES, Diff, ExecResult, ForkFailure, Mode, OnOutput, RestoreResult, Snapshot
from statefork.tree import TreeView

__all__ = [
    "attach_command", "commands", "description", "destroy", "diff", "exec_command", "fork", "history", "info", "pages", "pause",
    "pin_snapshot", "remove_snapshot", "rename_snapshot", "restore", "resume", "run", "signal_command", "snapshot", "snapshots",
    "state", "stats", "stream_command", "tree", "update", "usage",
]  # fmt: skip

Input = bytes | str | IO[bytes] | None
_PAGE = 1000
_UNSET: Any = object()


def pages(path: str, **query: Any) -> Call[list[dict[str, Any]]]:
    """All items of a list."""
    found: list[dict[str, Any]] = []
    cursor: str | None = None
    while True:
        asked = {"limit": _PAGE, **query, **({"cursor": cursor} if cursor else {})}
        page = (yield Request("GET", path, query=asked)).json()
        found += page["items"]
        cursor = page["next_cursor"]
        if cursor is None:
            return found


# -- commands ---------------------------------------------------------------------------------------------------------


def exec_command(
    handle: Handle,
    command: str | bytes,
    *,
    timeout: float | None = None,
    stdin: Input = None,
    on_output: OnOutput | None = None,
    output_limit_bytes: int = OUTPUT_LIMIT_BYTES,
    wait: bool = True,
) -> Call[ExecResult]:
    """Evaluate a command in the persistent shell: `cd`, `export`, functions and jobs stay for the next one.

    Raises ExecTimeout (with the partial result) when it had to be ended, and Busy if another command is running and
    `wait` is False.
    """
    body = {**_told(command_bytes(command), "command"), "wait": wait, **_program(timeout, stdin, output_limit_bytes)}
    return (yield from _ended(handle, "exec", body, on_output, output_limit_bytes))


def run(
    handle: Handle,
    argv: Sequence[str],
    *,
    timeout: float | None = None,
    stdin: Input = None,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    on_output: OnOutput | None = None,
    output_limit_bytes: int = OUTPUT_LIMIT_BYTES,
) -> Call[ExecResult]:
    """Run a program beside the shell: no quoting, no shared state, several at once."""
    if isinstance(argv, str | bytes) or not argv:
        raise UsageError('run takes a list, such as ["ls", "-l"]; for a command line use exec_command')
    body = {"argv": list(argv), "cwd": cwd, "env": dict(env or {}), **_program(timeout, stdin, output_limit_bytes)}
    return (yield from _ended(handle, "run", body, on_output, output_limit_bytes))


def stream_command(
    handle: Handle, command: str | bytes, *, timeout: float | None = None, stdin: Input = None
) -> Follow:
    """Iterate over `(stream, bytes)` as the command prints and then ask for the result. Raises like `exec_command`."""
    body = {**_told(command_bytes(command), "command"), **_program(timeout, stdin, OUTPUT_LIMIT_BYTES)}
    return Follow(Request("POST", handle.path("exec"), body=body, events=True), handle.path("commands"))


def attach_command(handle: Handle, command: str) -> Follow:
    """Come back to a command by its id (`commands` lists them): what is still known of its output, and what comes."""
    return Follow(Request("GET", handle.path("commands", command, "output"), events=True), handle.path("commands"))


def _ended(
    handle: Handle, route: str, body: dict[str, Any], on_output: OnOutput | None, output_limit_bytes: int
) -> Call[ExecResult]:
    if on_output is None:
        answer = yield Request("POST", handle.path(route), body=body, once=True)
        return parsing.exec_result(answer.json())
    first = Request("POST", handle.path(route), body=body, events=True)
    result: ExecResult = yield Follow(first, handle.path("commands"), on_output, output_limit_bytes)
    return result


def _program(timeout: float | None, stdin: Input, output_limit_bytes: int) -> dict[str, Any]:
    given = bytes_or_none(stdin)
    data = given if isinstance(given, bytes | None) else given.read()
    return {
        "timeout": seconds(timeout),
        "encoding": "base64",
        "output_limit_bytes": max(1024, min(output_limit_bytes, OUTPUT_LIMIT_BYTES)),
        **(_told(data, "stdin") if data is not None else {}),
    }


def _told(data: bytes, name: str) -> dict[str, str]:
    """As text where it is text: shorter, and readable on the way."""
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}


def commands(handle: Handle) -> Call[list[CommandInfo]]:
    """Those under way, and those that ended lately after their caller had left; oldest first."""
    return [parsing.command_info(one) for one in (yield from pages(handle.path("commands")))]


def signal_command(handle: Handle, signal: int, command: str | None = None) -> Call[None]:
    """Send a signal to a running command, by default the one in the shell."""
    if command is None:
        running = [one for one in (yield from commands(handle)) if one.kind == "exec" and one.state == "running"]
        if not running:
            raise NotFound(f"environment {handle.id}: no command runs in the shell")
        command = running[0].id
    yield Request("POST", handle.path("commands", command, "signal"), body={"signal": Signals(signal).name})


# -- states -----------------------------------------------------------------------------------------------------------


def snapshot(handle: Handle, name: str | None = None, *, mode: Mode = "auto") -> Call[str]:
    """Store the present state and go on; returns the snapshot's id."""
    body = {"name": name, "mode": mode}
    document = (yield Request("POST", handle.path("snapshots"), body=body, once=True)).json()
    return str(document["id"])


def restore(handle: Handle, snapshot: str) -> Call[RestoreResult]:
    """Go back (or sideways) to a snapshot, given by id, name or unique prefix; the environment keeps its id."""
    request = Request("POST", handle.path("restore"), body={"snapshot": snapshot}, once=True)
    return parsing.restore_result((yield request).json())


def fork(
    handle: Handle, n: int, from_snapshot: str | None, return_errors: bool
) -> Call[list[EnvironmentInfo | ForkFailure]]:
    if n < 1:
        raise UsageError(f"fork {n}: ask for at least one")
    body = {"n": n, "snapshot": from_snapshot, "return_errors": return_errors}
    document = (yield Request("POST", handle.path("fork"), body=body, once=True)).json()
    failed = {error["index"]: ForkFailure(error_of(error)) for error in document["errors"]}
    made = iter(document["environments"])
    return [failed[index] if index in failed else parsing.environment_info(next(made)) for index in range(n)]


def pause(handle: Handle) -> Call[None]:
    """Release the CPU, and the memory where the backend can (`capabilities.pause_releases_memory`)."""
    yield Request("POST", handle.path("pause"))


def resume(handle: Handle) -> Call[None]:
    """Go on where `pause` stopped."""
    yield Request("POST", handle.path("resume"))


def destroy(handle: Handle) -> Call[None]:
    """End the environment and remove all that was made for it. Calling it again does nothing."""
    if handle.destroyed:
        return
    with contextlib.suppress(NotFound):  # somebody else did, or its time was over
        yield Request("DELETE", handle.path())
    handle.destroyed = True


def remove_snapshot(handle: Handle, snapshot: str, *, recursive: bool = False) -> Call[None]:
    """Free a snapshot's storage. Refused while it has children (unless `recursive`) or a live environment on it."""
    query = {"cascade": "true" if recursive else "false"}
    yield Request("DELETE", handle.path("snapshots", snapshot), query=query)


def rename_snapshot(handle: Handle, snapshot: str, name: str | None) -> Call[Snapshot]:
    """None takes the name away."""
    request = Request("PATCH", handle.path("snapshots", snapshot), body={"name": name})
    return parsing.snapshot((yield request).json())


def pin_snapshot(handle: Handle, snapshot: str, pinned: bool = True) -> Call[Snapshot]:
    """A pinned snapshot cannot be removed, and its tree outlives its environments."""
    request = Request("PATCH", handle.path("snapshots", snapshot), body={"pinned": pinned})
    return parsing.snapshot((yield request).json())


# -- records ----------------------------------------------------------------------------------------------------------


def info(handle: Handle) -> Call[EnvironmentInfo]:
    """As the daemon knows it now."""
    return parsing.environment_info((yield Request("GET", handle.path())).json())


def state(handle: Handle) -> Call[str]:
    """`live`, `paused`, `lost` or `destroyed`."""
    return "destroyed" if handle.destroyed else (yield from info(handle)).state


def description(handle: Handle) -> Call[str]:
    """What to look for on the daemon's host: a session, a container; empty unless live."""
    return "" if handle.destroyed else (yield from info(handle)).description


def update(
    handle: Handle,
    *,
    metadata: Mapping[str, str] = _UNSET,
    ttl_seconds: float | None = _UNSET,
    idle_pause_seconds: float | None = _UNSET,
) -> Call[EnvironmentInfo]:
    """What is left out stays; None takes a limit away."""
    given = {"metadata": metadata, "ttl_seconds": ttl_seconds, "idle_pause_seconds": idle_pause_seconds}
    body = {name: value for name, value in given.items() if value is not _UNSET}
    return parsing.environment_info((yield Request("PATCH", handle.path(), body=body)).json())


def snapshots(handle: Handle) -> Call[list[Snapshot]]:
    """All of the tree, oldest first: forks share it."""
    return [parsing.snapshot(one) for one in (yield from pages(handle.path("snapshots")))]


def tree(handle: Handle) -> Call[TreeView]:
    return parsing.tree_view((yield Request("GET", handle.path("tree"))).json())


def diff(handle: Handle, a: str, b: str | None = None) -> Call[Diff]:
    """What changed from snapshot `a` to snapshot `b`, or to the present state if `b` is left out."""
    query = {"a": a, **({"b": b} if b is not None else {})}
    return parsing.diff((yield Request("GET", handle.path("diff"), query=query)).json())


def history(handle: Handle) -> Call[History]:
    """What was done with it, by whomever, since the daemon started; at most the newest thousand."""
    rows = yield from pages(handle.path("history"))
    return History.of(handle.id, handle.backend, (parsing.operation(row, handle.id, handle.backend) for row in rows))


def stats(handle: Handle) -> Call[Stats]:
    done = yield from history(handle)
    view = yield from tree(handle)
    taken = [node.snapshot for node in view]
    return Stats(
        operations=done.summary(),
        snapshots=len(taken),
        environments=len(view.environments) + sum(len(node.environments) for node in view),
        files_bytes=sum(one.files_bytes for one in taken),
        memory_bytes=sum(one.memory_bytes for one in taken),
    )


def usage(handle: Handle) -> Call[TotalUsage]:
    return parsing.total_usage((yield Request("GET", handle.path("usage"))).json())
