"""Compare a restored tree with the manifest of its snapshot.

During a restore this happens when every process is in place and none has taken a step yet, so that any difference is a fault and
not just life going on. Asked about a session that runs, the same comparison also shows what it has done since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from waypoint.errors import VerifyFailed
from waypoint.guest.layer import PRIVATE
from waypoint.kernel import inspect, trees
from waypoint.model import SnapshotRecord

__all__ = ["FILES", "checker", "differences", "file_digest"]

FILES = "files"
"""The manifest's key for the digest of the sealed layer."""
_OF_A_PROCESS = ("ppid", "name", "argv", "state", "uid", "pgid", "sid", "threads", "cwd", "exe", "descriptors")
_SHOWN = 8


def file_digest(root: Path) -> str:
    """Of names, kinds, permissions, owners, sizes, times of files and targets of links; not of content."""
    return trees.digest(root, skip=PRIVATE)


def differences(
    saved: dict[str, Any], found: dict[str, Any], shell: dict[str, Any] | None = None, *, running: bool = False
) -> list[str]:
    """One line for each; `found` is what `inspect.describe` says now, `shell` what the shell says, if it was asked.

    `running`: our own init answers questions meanwhile, so its descriptors are not compared.
    """
    lines = list(_processes(saved["processes"], found["processes"], running))
    lines += _sets("listening on", saved["listening"], found["listening"])
    lines += _sets("mount", saved["mounts"], found["mounts"])
    before = saved.get("shell")
    if shell is not None and before is not None:
        lines += _mapping("variable", before["env"], shell["env"])
        if before["cwd"] != shell["cwd"]:
            lines.append(f"the shell's directory is {shell['cwd']}, was {before['cwd']}")
        comparable = before.get("query") == shell.get("query")
        if comparable and before["digest"] != shell["digest"] and before["env"] == shell["env"]:
            lines.append("the shell's variables, functions, aliases or options differ")
    return lines


def checker(snapshot: SnapshotRecord, idmap: int, layer: Path, upper: Path | None) -> Callable[[int], None]:
    """For a restore: called with the pid of the new PID 1 before anything runs; raises VerifyFailed.

    `layer` is the snapshot's own top layer; `upper` the session's copy of it, where layers are copied.
    """

    def check(init_pid: int) -> None:
        lines = differences(snapshot.manifest, inspect.describe(init_pid, idmap))
        wanted = snapshot.manifest.get(FILES)
        if wanted is not None:
            if file_digest(layer) != wanted:
                lines.append(f"the files in the store are not those that were saved ({layer})")
            elif upper is not None and file_digest(upper) != wanted:
                lines.append("the restored files are not those that were saved")
        if lines:
            raise VerifyFailed(
                f"snapshot {snapshot.id}: what came up is not what was saved: {'; '.join(lines[:_SHOWN])}. "
                "The new session was dropped and the old one goes on; please report this",
                snapshot=snapshot.id,
                differences=lines,
            )

    return check


def _processes(saved: list[dict[str, Any]], found: list[dict[str, Any]], running: bool) -> Iterable[str]:
    before = {one["pid"]: one for one in saved}
    after = {one["pid"]: one for one in found}
    for pid in sorted(before.keys() - after.keys()):
        yield f"process {pid} ({_command(before[pid])}) is missing"
    for pid in sorted(after.keys() - before.keys()):
        yield f"process {pid} ({_command(after[pid])}) is new"
    for pid in sorted(before.keys() & after.keys()):
        for key in _OF_A_PROCESS:
            was, now = _plain(before[pid][key]), _plain(after[pid][key])
            if was != now and not (running and pid == 1 and key == "descriptors"):
                yield f"process {pid} ({_command(before[pid])}): {key} is {now!r}, was {was!r}"


def _command(process: dict[str, Any]) -> str:
    return " ".join(process["argv"])[:60] or str(process["name"])


def _plain(value: Any) -> Any:
    """CRIU gives a deleted file another name on the way."""
    if isinstance(value, str) and value.endswith(" (deleted)"):
        return "(deleted)"
    return value


def _sets(what: str, saved: list[str], found: list[str]) -> list[str]:
    gone = [f"{what} {one} is missing" for one in sorted(set(saved) - set(found))]
    return gone + [f"{what} {one} is new" for one in sorted(set(found) - set(saved))]


def _mapping(what: str, saved: dict[str, str], found: dict[str, str]) -> list[str]:
    keys = sorted(key for key in saved.keys() | found.keys() if saved.get(key) != found.get(key))
    return [f"{what} {key} is {found.get(key)!r}, was {saved.get(key)!r}" for key in keys]
