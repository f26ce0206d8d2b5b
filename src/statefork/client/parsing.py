"""Documents of the API as the library's own values."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any

from statefork.history import Operation
from statefork.model import Capabilities, Capability, Diff, ExecResult, FileInfo, RestoreResult, Snapshot
from statefork.tree import TreeNode, TreeView

__all__ = [
    "CommandInfo",
    "EnvironmentInfo",
    "TotalUsage",
    "capabilities",
    "command_info",
    "diff",
    "environment_info",
    "exec_result",
    "file_info",
    "operation",
    "restore_result",
    "snapshot",
    "total_usage",
    "tree_view",
]  # fmt: skip

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EnvironmentInfo:
    """An environment as the daemon tells of it."""

    id: str
    state: str
    lost: str | None
    backend: str
    method: str
    owner: str
    """The id of the token that made it."""
    metadata: Mapping[str, str]
    created_at: datetime
    used_at: datetime
    expires_at: datetime | None
    ttl_seconds: float | None
    idle_pause_seconds: float | None
    paused_by: str | None
    """`idle`: the next call resumes it; `caller`: only `resume` does."""
    tree: str
    snapshot: str | None
    description: str
    commands: int
    """Under way."""
    capabilities: Capabilities = field(repr=False)


@dataclass(frozen=True, slots=True)
class CommandInfo:
    """A command that is under way, or ended lately after its caller had left it."""

    id: str
    environment: str
    kind: str
    state: str
    started_at: datetime
    stdout_bytes: int
    stderr_bytes: int


@dataclass(frozen=True, slots=True)
class TotalUsage:
    """What an environment has used in all its life; nothing grows while it is paused."""

    cpu_seconds: float
    memory_byte_seconds: float
    live_seconds: float
    stored_bytes: int
    snapshots: int


def environment_info(document: Document) -> EnvironmentInfo:
    plain = {name: document[name] for name in EnvironmentInfo.__slots__ if name in document}
    times = ("created_at", "used_at", "expires_at")
    return EnvironmentInfo(
        **{
            **plain,
            **{name: _moment(document[name]) for name in times},
            "capabilities": capabilities(document["backend"], document["capabilities"]),
        }
    )


def capabilities(backend: str, document: Document | None) -> Capabilities:
    """None: it is lost, and nothing is known any more."""
    told = document or {}
    return Capabilities(
        backend=backend,
        restores=frozenset(Capability(name) for name in told.get("restores", ()) if name in set(Capability)),
        pause_releases_memory=told.get("pause_releases_memory", False),
        snapshot_during_exec=told.get("snapshot_during_exec", False),
        missing=told.get("missing", {}),
        versions=told.get("versions", {}),
    )


def exec_result(document: Document) -> ExecResult:
    read = _from_base64 if document.get("encoding") == "base64" else str.encode
    return ExecResult(
        exit_code=document["exit_code"],
        stdout_bytes=read(document.get("stdout", "")),
        stderr_bytes=read(document.get("stderr", "")),
        output_bytes=read(document.get("output", "")),
        cwd=document.get("cwd", ""),
        duration_ms=document.get("duration_ms", 0.0),
        timed_out=document.get("timed_out", False),
        truncated=document.get("truncated", False),
        shell_restarted=document.get("shell_restarted", False),
    )


def command_info(document: Document) -> CommandInfo:
    plain = {name: document[name] for name in CommandInfo.__slots__}
    return CommandInfo(**{**plain, "started_at": datetime.fromisoformat(document["started_at"])})


def snapshot(document: Document) -> Snapshot:
    plain = {one.name: document[one.name] for one in fields(Snapshot)}
    for name in ("captured", "not_captured", "processes"):
        plain[name] = tuple(plain[name])
    return Snapshot(**{**plain, "created_at": datetime.fromisoformat(document["created_at"])})


def tree_view(document: Document) -> TreeView:
    """The nodes come parents first, so from behind every child is made before its parent."""
    made: dict[str, TreeNode] = {}
    for node in reversed(document["nodes"]):
        taken = snapshot(node["snapshot"])
        children = tuple(made[child] for child in node["children"])
        made[taken.id] = TreeNode(taken, children, tuple(node["environments"]))
    return TreeView(tuple(made[root] for root in document["roots"]), tuple(document["environments"]))


def restore_result(document: Document) -> RestoreResult:
    return RestoreResult(**{**document, "restored": tuple(document["restored"])})


def file_info(document: Document) -> FileInfo:
    return FileInfo(**{**document, "modified_at": datetime.fromisoformat(document["modified_at"]).timestamp()})


def diff(document: Document) -> Diff:
    lists = {name: tuple(value) for name, value in document.items() if isinstance(value, list)}
    return Diff(a=document["a"], b=document["b"], **lists)


def operation(document: Document, environment: str, backend: str) -> Operation:
    started_at = datetime.fromisoformat(document["started_at"])
    return Operation(**{**document, "environment": environment, "backend": backend, "started_at": started_at})


def total_usage(document: Document) -> TotalUsage:
    return TotalUsage(**{name: document[name] for name in TotalUsage.__slots__})


def _moment(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def _from_base64(text: str | Sequence[str]) -> bytes:
    return base64.b64decode(str(text))
