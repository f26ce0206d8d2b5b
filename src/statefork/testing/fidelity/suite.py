"""All the cases, by kind, and the Debian packages that an environment needs to show them all."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

from statefork.errors import UsageError
from statefork.testing.fidelity import files, lost, network, processes, programs, refused, shell, shell_terminal
from statefork.testing.fidelity.case import Case

__all__ = ["all_cases", "packages", "select"]

_MODULES = (shell, shell_terminal, files, processes, network, programs, lost, refused)
KINDS = ("shell", "files", "processes", "network", "programs", "lost", "refused")


def all_cases() -> list[Case]:
    """In the order of the table: by kind, and within a kind as written."""
    found = [case for module in _MODULES for case in module.CASES]
    return sorted(found, key=lambda case: KINDS.index(case.kind))


def select(patterns: Iterable[str]) -> list[Case]:
    """By name, `kind/name` or kind, each a shell pattern; all when none is given. UsageError if one fits nothing."""
    cases = all_cases()
    wanted = list(patterns)
    if not wanted:
        return cases
    for pattern in wanted:
        if not any(_fits(case, pattern) for case in cases):
            raise UsageError(f"no case fits {pattern!r}; `statefork fidelity --list` names them all")
    return [case for case in cases if any(_fits(case, pattern) for pattern in wanted)]


def packages() -> list[str]:
    return sorted({package for case in all_cases() for package in case.packages})


def _fits(case: Case, pattern: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for name in (case.name, f"{case.kind}/{case.name}", case.kind))
