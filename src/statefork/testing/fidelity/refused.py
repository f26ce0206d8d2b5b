"""What cannot be saved is refused, in words that help, and the environment goes on."""

from __future__ import annotations

import secrets
import socket
import threading

from statefork.testing.fidelity.case import Case, says
from statefork.testing.fidelity.guest import refused
from statefork.testing.fidelity.programs_inside import ProbeCase
from statefork.testing.fidelity.subject import Inside, Options

__all__ = ["CASES"]


class RefusedCase(ProbeCase):
    expects = "refused"

    def __init__(self, probe: type[refused._Held], network: str = "none") -> None:
        super().__init__("refused", probe, Options(network, probe.seccomp, probe.capabilities))
        self._says = probe.says

    def refusal(self, inside: Inside, error: Exception) -> None:
        says(str(error), self._says)


class ExternalSocketCase(RefusedCase):
    """Its other end is a thread of this process, which ends with the connection."""

    def __init__(self) -> None:
        super().__init__(refused.ExternalSocket, network="host")

    def setup(self, inside: Inside) -> None:
        name = f"fidelity-{secrets.token_hex(8)}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"\0{name}")
        listener.listen(1)
        listener.settimeout(60)
        threading.Thread(target=_echo, args=(listener,), daemon=True).start()
        inside.sh(f"mkdir -p {self.directory}; printf %s {name} >{self.directory}/address")
        super().setup(inside)


def _echo(listener: socket.socket) -> None:
    with listener:
        try:
            client, _ = listener.accept()
        except TimeoutError:
            return
    with client:
        while data := client.recv(4096):
            client.sendall(data)


CASES: tuple[Case, ...] = (
    ExternalSocketCase(),
    *(
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
    ),
)
