"""What a trace keeps of a state, so that one that was rebuilt can be told from one that only looks like it."""

from __future__ import annotations

from hashlib import blake2b

from statefork.environment import Environment
from statefork.model import Capability, ExecResult

__all__ = ["output_digest", "state_digest"]


def output_digest(result: ExecResult) -> str:
    """Of all that a command printed, its exit code, and where the shell stands."""
    found = blake2b(digest_size=16)
    for part in (result.stdout_bytes, result.stderr_bytes, result.cwd.encode()):
        found.update(len(part).to_bytes(8, "little") + part)
    found.update(str(result.exit_code).encode())
    return found.hexdigest()


def state_digest(environment: Environment, snapshot: str) -> str:
    """Of the command lines of all processes in a snapshot; empty where it holds none."""
    for one in environment.snapshots():
        if one.id == snapshot and Capability.PROCESSES in one.captured:
            return blake2b("\0".join(sorted(one.processes)).encode(), digest_size=16).hexdigest()
    return ""
