"""The error tree. Every failure of Waypoint is one of these; `code` is the same word in the CLI, REST and the SDKs.

WaypointError                 internal       125
├── UsageError                usage            2   the caller's arguments are wrong
├── NotFound                  not_found            no session, snapshot or file of that name
├── Ambiguous                 ambiguous            an id prefix fits more than one
├── Exists                    exists               a name that must be unique is taken
├── WrongState                wrong_state          e.g. exec on a paused session
├── Busy                      busy                 the shell runs another command and the caller would not wait
├── HasChildren               has_children         removal refused without --recursive
├── HostUnsupported           host_unsupported     a host feature is missing; `details["fix"]` is the command that mends it
├── KernelError               kernel               a syscall or a helper program failed
│   ├── CriuError             criu                 dump or restore failed; details quote the log
│   └── NotCapturable         not_capturable       a process holds something that no snapshot can carry
├── BuildError                build                a base could not be made
├── BaseChanged               base_changed         a program or library under a restored process is not what it was
├── StoreError                store                the store is damaged, or of an unknown format version
│   └── DiskFull              disk_full            no space; nothing was lost
├── SessionDead               session_dead         the session's init is gone
├── VerifyFailed              verify_failed        a restored session differs from its snapshot's manifest
└── ExecTimeout               timeout        124   carries the partial result
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from waypoint.model import ExecResult

__all__ = [
    "Ambiguous",
    "BaseChanged",
    "BuildError",
    "Busy",
    "CriuError",
    "DiskFull",
    "ExecTimeout",
    "Exists",
    "HasChildren",
    "HostUnsupported",
    "KernelError",
    "NotCapturable",
    "NotFound",
    "SessionDead",
    "StoreError",
    "UsageError",
    "VerifyFailed",
    "WaypointError",
    "WrongState",
]


class WaypointError(Exception):
    """Base of all errors; `message` says what failed, on what, the cause and the next step."""

    code = "internal"
    exit_code = 125

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, Any] = details


class UsageError(WaypointError):
    code = "usage"
    exit_code = 2


class NotFound(WaypointError):
    code = "not_found"


class Ambiguous(WaypointError):
    code = "ambiguous"


class Exists(WaypointError):
    code = "exists"


class WrongState(WaypointError):
    code = "wrong_state"


class Busy(WaypointError):
    code = "busy"


class HasChildren(WaypointError):
    code = "has_children"


class HostUnsupported(WaypointError):
    code = "host_unsupported"


class KernelError(WaypointError):
    code = "kernel"


class CriuError(KernelError):
    code = "criu"


class NotCapturable(KernelError):
    code = "not_capturable"


class BuildError(WaypointError):
    code = "build"


class BaseChanged(WaypointError):
    code = "base_changed"


class StoreError(WaypointError):
    code = "store"


class DiskFull(StoreError):
    code = "disk_full"


class SessionDead(WaypointError):
    code = "session_dead"


class VerifyFailed(WaypointError):
    code = "verify_failed"


class ExecTimeout(WaypointError):
    """The command outlived its timeout and was ended; `result` holds what it had printed until then."""

    code = "timeout"
    exit_code = 124

    def __init__(self, message: str, result: ExecResult, **details: Any) -> None:
        super().__init__(message, **details)
        self.result = result
