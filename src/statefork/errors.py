"""The errors of StateFork: the tree of `waypoint.errors`, with its codes, and the two meanings that it lacks.

WaypointError
├── Unsupported               unsupported          this backend cannot do that on any host
├── (waypoint) ExecTimeout    timeout        124
│   └── ExecTimeout                                carries a statefork ExecResult
└── everything else           as in waypoint.errors, re-exported here

A driver raises these and nothing else; what the operating system raises (OSError) is mapped once, in environment.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import waypoint.errors
from waypoint.errors import (
    Ambiguous,
    BaseChanged,
    BuildError,
    Busy,
    CriuError,
    DiskFull,
    Exists,
    HasChildren,
    HostUnsupported,
    KernelError,
    NotCapturable,
    NotFound,
    SessionDead,
    StoreError,
    UsageError,
    VerifyFailed,
    WaypointError,
    WrongState,
)

if TYPE_CHECKING:
    from statefork.model import ExecResult

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
    "Unsupported",
    "UsageError",
    "VerifyFailed",
    "WaypointError",
    "WrongState",
]


class Unsupported(WaypointError):
    """The backend lacks the ability by its nature: choose another backend, or ask for less (`capabilities` tells)."""

    code = "unsupported"


class ExecTimeout(waypoint.errors.ExecTimeout):
    """The command outlived its timeout and was ended; `result` holds what it had printed until then."""

    result: ExecResult  # type: ignore[assignment]

    def __init__(self, message: str, result: ExecResult, **details: Any) -> None:
        super().__init__(message, result, **details)  # type: ignore[arg-type]
