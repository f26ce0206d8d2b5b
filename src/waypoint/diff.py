"""What differs between two states, each a session or a snapshot: files, processes, variables, place, ports.

Files are compared exactly (filediff.py). The rest comes from a snapshot's manifest, and for a live session from the same
questions asked now. Memory is not compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from waypoint.diff_text import render
from waypoint.errors import Ambiguous, SessionDead
from waypoint.filediff import FileChange, Status, Where, compare_files
from waypoint.hardlinks import changed_aliases
from waypoint.manifest import describe_session, shell_state
from waypoint.model import SessionRecord, SnapshotRecord
from waypoint.store.store import Store
from waypoint.view import View, find, open_view, own_layers

if TYPE_CHECKING:
    from waypoint.engine import Engine

__all__ = [
    "Difference",
    "FileChange",
    "PortChange",
    "ProcessChange",
    "VariableChange",
    "compare",
    "render",
    "to_json",
]

Record = SessionRecord | SnapshotRecord
_FOLLOWS_CWD = ("PWD", "OLDPWD")


@dataclass(frozen=True, slots=True)
class ProcessChange:
    """By pid inside the session. A program that was started anew is one removed and one added."""

    status: Status
    pid: int
    argv: tuple[str, ...]
    detail: str = ""


@dataclass(frozen=True, slots=True)
class VariableChange:
    """An exported variable of the shell; None where it is not set."""

    status: Status
    name: str
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True)
class PortChange:
    status: Status
    address: str
    """As in `tcp 0.0.0.0:8000`."""


@dataclass(frozen=True, slots=True)
class Difference:
    """All that is different in `after`, seen from `before`."""

    before: str
    after: str
    files: tuple[FileChange, ...]
    processes: tuple[ProcessChange, ...]
    environment: tuple[VariableChange, ...]
    cwd: tuple[str, str] | None
    """The shell's directory before and after, where it is not the same."""
    listening: tuple[PortChange, ...]
    shell: Literal["same", "differs", "unknown"]
    """All of the shell's state by its digest: variables, functions, aliases, options, traps."""
    notes: tuple[str, ...]
    """What could not be compared."""

    def __bool__(self) -> bool:
        found = self.files or self.processes or self.environment or self.cwd or self.listening
        return bool(found) or self.shell == "differs"


def compare(engine: Engine, a: str, b: str, *, every: bool = False) -> Difference:
    """From `a` to `b`. With `every`, what is in an added or removed directory is listed instead of counted.

    Snapshot names are looked up in the other one's tree first.
    """
    before, after = _pair(engine, a, b)
    notes: list[str] = []
    with open_view(engine, before) as one, open_view(engine, after) as other:
        states = _state(engine, one, notes), _state(engine, other, notes)
        files, more = compare_files(one, other, _where(engine.store, one, other), every=every)
    shells = states[0].get("shell"), states[1].get("shell")
    return Difference(
        before=before.id,
        after=after.id,
        files=tuple(files),
        processes=tuple(_processes(states[0].get("processes", ()), states[1].get("processes", ()))),
        environment=tuple(_variables(shells[0], shells[1])),
        cwd=_cwd(shells[0], shells[1]),
        listening=tuple(_ports(states[0].get("listening", ()), states[1].get("listening", ()))),
        shell=_shell(shells[0], shells[1]),
        notes=(*notes, *more),
    )


def _pair(engine: Engine, a: str, b: str) -> tuple[Record, Record]:
    try:
        before = find(engine, a)
    except Ambiguous:
        after = find(engine, b)
        return find(engine, a, after.tree), after
    return before, find(engine, b, before.tree)


def _where(store: Store, one: View, other: View) -> Where:
    """Of the two stacks of layers, those below that are the same cannot show anything different."""
    stacks: list[list[Path]] = []
    uppers: list[Path] = []
    aliases: list[str] = []
    for view in (one, other):
        record = view.record
        assert record is not None
        base = store.db.base(record.base)
        own = [store.paths.upper(layer) for layer in own_layers(record, base)]
        stacks.append([*own, *(Path(layer) for layer in base.layers)])
        if isinstance(record, SessionRecord) and record.state == "live" and record.upper is not None:
            uppers.append(store.paths.upper(record.upper))
            aliases += changed_aliases(view, store.paths.work(record.upper))
    devices = {path.stat().st_dev for stack in stacks for path in stack}
    while stacks[0] and stacks[1] and stacks[0][-1] == stacks[1][-1]:
        stacks[0].pop()
        stacks[1].pop()
    left = stacks[0] + stacks[1]
    # the host's root is not walked as a layer: other file systems are mounted in it
    return Where(None if Path("/") in left else left, uppers, aliases, len(devices) == 1)


# -- everything but files ---------------------------------------------------------------------------------------------


def _state(engine: Engine, view: View, notes: list[str]) -> Mapping[str, Any]:
    """A manifest: the one that was saved, or one made now. `view` is open, so a live session stays what it is."""
    record = view.record
    if isinstance(record, SessionRecord) and record.state == "paused" and record.pause is not None:
        record = engine.store.db.snapshot(record.pause)
    if isinstance(record, SnapshotRecord):
        found: Mapping[str, Any] = record.manifest
        if not record.full:
            notes.append(f"snapshot {record.id} holds files only")
        elif found.get("shell") is None:
            notes.append(f"snapshot {record.id}: the shell was busy when it was taken; its variables are not known")
        return found
    assert record is not None
    if record.state != "live":
        notes.append(f"session {record.id} is {record.state}: it has no processes")
        return {}
    shell = shell_state(engine.session(record.id))
    if shell is None:
        notes.append(f"session {record.id}: the shell is busy; its variables are not known")
    try:
        return describe_session(record.init_pid, record.spec.idmap, shell)
    except OSError as error:
        raise SessionDead(
            f"session {record.id}: its processes ended while they were looked at", session=record.id
        ) from error


def _processes(before: Iterable[Mapping[str, Any]], after: Iterable[Mapping[str, Any]]) -> list[ProcessChange]:
    old, new = ({int(process["pid"]): process for process in side} for side in (before, after))
    found = []
    for pid in sorted(old.keys() | new.keys()):
        if pid not in old or pid not in new:
            process = new.get(pid) or old[pid]
            found.append(ProcessChange("added" if pid in new else "removed", pid, _argv(process)))
            continue
        parts = [
            f"{word} {old[pid][word]} → {new[pid][word]}"
            for word in ("state", "uid", "ppid", "cwd")
            if old[pid][word] != new[pid][word]
        ]
        if _argv(old[pid]) != _argv(new[pid]):
            parts.insert(0, f"was {' '.join(_argv(old[pid]))}")
        if parts:
            found.append(ProcessChange("changed", pid, _argv(new[pid]), ", ".join(parts)))
    return found


def _argv(process: Mapping[str, Any]) -> tuple[str, ...]:
    """A process may have no argv (a zombie): then its name stands for it."""
    return tuple(process["argv"]) or (f"[{process['name']}]",)


def _variables(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> list[VariableChange]:
    if before is None or after is None:
        return []
    old, new = before["env"], after["env"]
    found = []
    for name in sorted(old.keys() | new.keys()):
        if name in _FOLLOWS_CWD or old.get(name) == new.get(name):
            continue
        status: Status = "added" if name not in old else "removed" if name not in new else "changed"
        found.append(VariableChange(status, name, old.get(name), new.get(name)))
    return found


def _cwd(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> tuple[str, str] | None:
    if before is None or after is None or before["cwd"] == after["cwd"]:
        return None
    return before["cwd"], after["cwd"]


def _shell(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> Literal["same", "differs", "unknown"]:
    if before is None or after is None or before.get("query") != after.get("query"):
        return "unknown"
    return "same" if before["digest"] == after["digest"] else "differs"


def _ports(before: Iterable[str], after: Iterable[str]) -> list[PortChange]:
    old, new = set(before), set(after)
    return [PortChange("added" if port in new else "removed", port) for port in sorted(old ^ new)]


def to_json(difference: Difference) -> dict[str, Any]:
    """For `--json`: lists of objects under the same words."""
    found = asdict(difference)
    found["cwd"] = None if difference.cwd is None else {"before": difference.cwd[0], "after": difference.cwd[1]}
    found["different"] = bool(difference)
    return found
