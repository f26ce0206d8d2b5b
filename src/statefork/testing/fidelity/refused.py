"""What cannot be saved is refused, in words that help, and the environment goes on."""

from __future__ import annotations

from statefork.testing.fidelity.case import Case, says
from statefork.testing.fidelity.guest import refused
from statefork.testing.fidelity.programs_inside import ProbeCase
from statefork.testing.fidelity.subject import Inside, Options

__all__ = ["CASES"]


class RefusedCase(ProbeCase):
    expects = "refused"

    def __init__(self, probe: type[refused._Held]) -> None:
        super().__init__("refused", probe, Options(seccomp=probe.seccomp, capabilities=probe.capabilities))
        self._says = probe.says

    def refusal(self, inside: Inside, error: Exception) -> None:
        says(str(error), self._says)


CASES: tuple[Case, ...] = tuple(
    RefusedCase(probe)
    for probe in (
        refused.Traced,
        refused.IoUring,
        refused.PerfEvent,
        refused.SecretMemory,
        refused.Vsock,
        refused.PacketPipe,
        refused.ManyPipes,
        refused.MessageQueue,
        refused.NestedUserNamespace,
        refused.NestedPidNamespace,
    )
)
