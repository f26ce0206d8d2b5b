"""StateFork: one interface over branchable environments."""

from statefork.environment import Environment
from statefork.factory import create_env_manager
from statefork.model import Capabilities, Capability, Diff, ExecResult, FileInfo, RestoreResult, Snapshot

__all__ = [
    "Capabilities",
    "Capability",
    "Diff",
    "Environment",
    "ExecResult",
    "FileInfo",
    "RestoreResult",
    "Snapshot",
    "create_env_manager",
]
