"""The service's objects as documents of the API."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from statefork.errors import WaypointError
from statefork.model import ExecResult, FileInfo, Snapshot
from statefork.server.guard.problems import STATUS, problem_body
from statefork.server.routes.asking import moment, text_of
from statefork.server.service.command import Command
from statefork.server.service.held import Held
from statefork.server.service.pools import Pool
from statefork.server.service.service import Tree
from statefork.server.service.usage import Total
from statefork.tree import TreeNode

__all__ = [
    "command_document",
    "environment_document",
    "file_document",
    "pool_document",
    "problem_document",
    "result_document",
    "snapshot_document",
    "tree_document",
    "usage_document",
]


def environment_document(held: Held) -> dict[str, Any]:
    row, environment = held.row, held.environment
    state = held.state
    found: dict[str, Any] = {
        "id": row.id,
        "state": state,
        "lost": held.lost if state == "lost" else None,
        "backend": held.backend,
        "method": row.method,
        "owner": row.owner,
        "metadata": row.metadata,
        "created_at": moment(row.created),
        "used_at": moment(row.used),
        "expires_at": moment(row.expires),
        "ttl_seconds": row.ttl_seconds,
        "idle_pause_seconds": row.idle_pause_seconds,
        "paused_by": row.paused_by if state == "paused" else None,
        "tree": row.tree,
        "snapshot": None,
        "description": "",
        "commands": held.running,
        "capabilities": None,
    }
    if environment is not None and state != "destroyed":
        able = environment.capabilities
        found["snapshot"] = environment.family.tree.latest(environment.id)
        found["description"] = environment.description
        found["capabilities"] = {
            "restores": sorted(able.restores),
            "full": able.full,
            "pause_releases_memory": able.pause_releases_memory,
            "snapshot_during_exec": able.snapshot_during_exec,
            "durable": environment.family.driver.durable,
            "missing": dict(able.missing),
            "versions": dict(able.versions),
        }
    return found


def result_document(command: str, result: ExecResult, encoding: str = "utf-8") -> dict[str, Any]:
    return {
        "command": command,
        "exit_code": result.exit_code,
        "stdout": text_of(result.stdout_bytes, encoding),
        "stderr": text_of(result.stderr_bytes, encoding),
        "output": text_of(result.output_bytes, encoding),
        "encoding": encoding,
        "cwd": _plain(result.cwd),
        "duration_ms": round(result.duration_ms, 3),
        "timed_out": result.timed_out,
        "truncated": result.truncated,
        "shell_restarted": result.shell_restarted,
    }


def problem_document(error: WaypointError, request_id: str) -> dict[str, Any]:
    return problem_body(STATUS.get(error.code, 500), error.code, error.message, request_id, error.details)


def command_document(command: Command, environment: str, encoding: str = "utf-8") -> dict[str, Any]:
    out, err = command.offsets
    return {
        "id": command.id,
        "environment": environment,
        "kind": command.kind,
        "state": command.state,
        "started_at": moment(command.started),
        "stdout_bytes": out,
        "stderr_bytes": err,
        "result": result_document(command.id, command.result, encoding) if command.result else None,
        "problem": problem_document(command.error, "") if command.error else None,
    }


def snapshot_document(snapshot: Snapshot, tree: str, pinned: bool) -> dict[str, Any]:
    return {
        "id": snapshot.id,
        "name": snapshot.name,
        "parent": snapshot.parent,
        "environment": snapshot.environment,
        "tree": tree,
        "pinned": pinned,
        "created_at": snapshot.created_at.isoformat(),
        "duration_ms": round(snapshot.duration_ms, 3),
        "paused_ms": round(snapshot.paused_ms, 3),
        "files_bytes": snapshot.files_bytes,
        "memory_bytes": snapshot.memory_bytes,
        "captured": list(snapshot.captured),
        "not_captured": list(snapshot.not_captured),
        "processes": [_plain(line) for line in snapshot.processes],
    }


def tree_document(key: str, tree: Tree) -> dict[str, Any]:
    view = tree.family.tree.view()
    return {
        "id": key,
        "roots": [node.snapshot.id for node in view.roots],
        "nodes": [_node(node, key, tree) for node in view],
        "environments": list(view.environments),
        "text": str(view),
    }


def _node(node: TreeNode, key: str, tree: Tree) -> dict[str, Any]:
    pinned = tree.family.tree.is_pinned(node.snapshot.id)
    return {
        "snapshot": snapshot_document(node.snapshot, key, pinned),
        "environments": list(node.environments),
        "children": [child.snapshot.id for child in node.children],
    }


def file_document(info: FileInfo) -> dict[str, Any]:
    return {
        "name": _plain(info.name),
        "kind": info.kind,
        "size_bytes": info.size_bytes,
        "mode": info.mode,
        "modified_at": moment(info.modified_at),
    }


def usage_document(total: Total) -> dict[str, Any]:
    found = asdict(total)
    del found["environments"]
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in found.items()}


def pool_document(pool: Pool) -> dict[str, Any]:
    row = pool.row
    return {
        "name": row.name,
        "method": row.method,
        "arguments": row.arguments,
        "size": row.size,
        "ready": len(pool.ready),
        "problem": pool.problem,
    }


def _plain(text: str) -> str:
    """Names in a guest may be no UTF-8: JSON has no word for that."""
    return text.encode(errors="surrogateescape").decode(errors="replace")
