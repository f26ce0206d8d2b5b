"""The fidelity suite: what is restored is what was saved, or the backend does not claim it.

Each case makes one kind of state, sees it, snapshots, destroys it, restores, and judges from inside; see `case.py`. Any backend
can be judged: `environments.py` shows how.
"""

from __future__ import annotations

from statefork.testing.fidelity.case import Case, ShellCase
from statefork.testing.fidelity.environments import environment_backend
from statefork.testing.fidelity.runner import WAYS, Backend, Outcome, Result, Verdict, run_case, run_cases
from statefork.testing.fidelity.subject import CaseFailed, Inside, Options, Subject
from statefork.testing.fidelity.suite import all_cases, packages, select

__all__ = [
    "WAYS",
    "Backend",
    "Case",
    "CaseFailed",
    "Inside",
    "Options",
    "Outcome",
    "Result",
    "ShellCase",
    "Subject",
    "Verdict",
    "all_cases",
    "environment_backend",
    "packages",
    "run_case",
    "run_cases",
    "select",
]
