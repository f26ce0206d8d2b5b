"""A case: one kind of state, how to make it, how to see it, how to destroy it, and how to prove that it still works.

`observe` describes the state in text. The text after a restore must be the text before the snapshot; and it must not be the text
after `perturb`, so a case that sees nothing fails. `works` then uses the state, which may change it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from statefork.testing.fidelity.subject import DEADLINE_SECONDS, CaseFailed, Inside, Options

__all__ = ["SCRATCH", "Case", "ShellCase", "says", "slug"]

SHELL = frozenset({"shell"})
SCRATCH = "${STATEFORK_DIR:-/tmp}"
"""For cases that do not need files to come back: where forks share the host's, each has this directory for itself."""


class Case:
    """Override what differs. Instances hold no state of a run: one may be used by several environments at once."""

    name: str
    kind: str
    summary: str
    needs: frozenset[str] = SHELL
    """Capabilities; a backend that does not claim them all is not judged."""
    programs: tuple[str, ...] = ()
    """Commands that must be there inside, else the case is skipped with that reason."""
    packages: tuple[str, ...] = ()
    """The Debian packages that bring them."""
    modules: tuple[str, ...] = ()
    """Python modules of the environment's own `python3` that must be there."""
    options: Options = Options()
    expects: ClassVar[str] = "restored"
    """"restored": judged three ways; "refused": the snapshot must be refused; "own": by its own `judge`."""

    def setup(self, inside: Inside) -> None:
        raise NotImplementedError

    def observe(self, inside: Inside) -> str:
        raise NotImplementedError

    def perturb(self, inside: Inside) -> None:
        raise NotImplementedError

    def works(self, inside: Inside) -> None:
        """Nothing more to prove than `observe` does."""

    def judge(self, inside: Inside) -> None:
        """Only where `expects` is "own": does all of the three ways by itself."""

    def refusal(self, inside: Inside, error: Exception) -> None:
        """Only where `expects` is "refused": CaseFailed when the error does not say what it must."""

    def __repr__(self) -> str:
        return f"<case {self.kind}/{self.name}>"


@dataclass(frozen=True)
class ShellCase(Case):
    """A case in four lines of shell. `same` is evaluated in the persistent shell, so it sees the shell's own state."""

    name: str
    summary: str
    make: str | tuple[str, ...]
    """One command, or several: a shell numbers jobs anew only when no command is running."""
    same: str
    spoil: str
    use: str = ""
    kind: str = ""
    needs: frozenset[str] = SHELL
    programs: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    options: Options = field(default_factory=Options)
    timeout: float = DEADLINE_SECONDS
    """For each command; more than usual where there is really much to do."""

    def setup(self, inside: Inside) -> None:
        for command in (self.make,) if isinstance(self.make, str) else self.make:
            inside.sh(command, timeout=self.timeout)

    def observe(self, inside: Inside) -> str:
        return inside.sh(self.same, timeout=self.timeout)

    def perturb(self, inside: Inside) -> None:
        inside.sh(self.spoil, timeout=self.timeout)

    def works(self, inside: Inside) -> None:
        if self.use:
            inside.sh(self.use, timeout=self.timeout)


def says(message: str, wanted: Iterable[str]) -> None:
    """The refusal says all that it must: CaseFailed says which word is missing."""
    for pattern in wanted:
        if not re.search(pattern, message):
            raise CaseFailed(f"the refusal does not say {pattern!r}: {message}")


def slug(name: str) -> str:
    """`PendingSignals` -> `pending-signals`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower()
