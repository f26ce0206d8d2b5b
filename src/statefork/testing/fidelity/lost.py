"""What the mechanism below forgets: given back where that is possible, named where it is not, and never just missing."""

from __future__ import annotations

import re

from statefork.testing.fidelity.case import Case
from statefork.testing.fidelity.guest import lost
from statefork.testing.fidelity.programs_inside import ProbeCase
from statefork.testing.fidelity.subject import CaseFailed, Inside, Options

__all__ = ["CASES"]


class NamedCase(ProbeCase):
    """The snapshot says that this is not in it, and says so only when it was there."""

    expects = "own"

    def __init__(self, probe: type[lost._Named]) -> None:
        super().__init__("lost", probe, Options(seccomp=probe.seccomp))
        self._names = probe.names
        self.summary += " (named as not captured)"
        self._always = probe is lost.Keyring

    def judge(self, inside: Inside) -> None:
        if not self._always:
            self._expect(inside, there=False)
        self.setup(inside)
        self.observe(inside)
        self._expect(inside, there=True)
        inside.sh(":")

    def _expect(self, inside: Inside, *, there: bool) -> None:
        said = list(inside.subject.not_captured(inside.subject.snapshot()))
        if any(re.search(self._names, line) for line in said) != there:
            raise CaseFailed(f"the snapshot {'does not name' if there else 'names'} {self._names!r}: {said}")


CASES: tuple[Case, ...] = (
    *(
        ProbeCase("lost", probe)
        for probe in (lost.CpuAffinity, lost.IoPriority, lost.TimerSlack, lost.CoredumpFilter)
    ),
    *(
        NamedCase(probe)
        for probe in (lost.SemaphoreEventfd, lost.OpenDatabase, lost.Personality, lost.MemorySeal, lost.Keyring)
    ),
)
