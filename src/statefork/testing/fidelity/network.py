"""The network: what is inside comes back; what leads outside is cut, and both ends hear of it."""

from __future__ import annotations

from statefork.testing.fidelity.case import Case
from statefork.testing.fidelity.guest import network
from statefork.testing.fidelity.programs_inside import probe_cases

__all__ = ["CASES"]

CASES: tuple[Case, ...] = (*probe_cases("network", network),)
