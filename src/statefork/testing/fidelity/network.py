"""The network: what is inside comes back; what leads outside is cut, and both ends hear of it."""

from __future__ import annotations

import tempfile

from statefork.testing.fidelity.case import Case
from statefork.testing.fidelity.guest import network
from statefork.testing.fidelity.guest.outbound import Outbound
from statefork.testing.fidelity.outside import Outside, outside
from statefork.testing.fidelity.programs_inside import ProbeCase, probe_cases
from statefork.testing.fidelity.subject import CaseFailed, Inside, Options

__all__ = ["CASES"]


class OutboundCase(ProbeCase):
    """Two environments cannot both be the other end of one connection. So no copy is: it is reset, and knows it."""

    expects = "own"

    def __init__(self) -> None:
        super().__init__("network", Outbound, Options(network="nat"))
        self.name = "outbound-connection"
        self.summary = "a connection to the outside: every copy is reset, none is shared, new ones work"

    def judge(self, inside: Inside) -> None:
        with tempfile.NamedTemporaryFile(prefix="fidelity-") as log, outside(log.name) as machine:
            inside.sh(f"mkdir -p {self.directory}; echo {machine.address} {machine.port} >{self.directory}/address")
            self.setup(inside)
            _says(self.ask(inside, "exchange"), "seen ping", "the connection before the snapshot")
            snapshot = inside.subject.snapshot()
            _says(self.ask(inside, "exchange"), "seen ping", "the live connection after the snapshot")
            forks = [Inside(fork, inside.patience) for fork in inside.subject.fork(2, from_snapshot=snapshot)]
            try:
                for fork in forks:
                    self._cut(fork, "a fork")
                again = forks[0].subject.snapshot()
                forks += [Inside(fork, inside.patience) for fork in forks[0].subject.fork(1, from_snapshot=again)]
                _says(self.ask(forks[-1], "again"), "seen new", "a new connection from the fork of a fork")
                _says(self.ask(inside, "exchange"), "seen ping", "the original's connection, with forks beside it")
            finally:
                for fork in forks:
                    fork.subject.destroy()
            self._only_the_original(machine)
            inside.subject.restore(snapshot)
            self._cut(inside, "the restored environment")
            machine.until("the end of the first connection", [1, "end"], [1, "ConnectionResetError"])

    def _cut(self, inside: Inside, who: str) -> None:
        _says(self.ask(inside, "exchange"), "reset", f"the connection of {who}")
        _says(self.ask(inside, "again"), "seen new", f"a new connection of {who}")

    def _only_the_original(self, machine: Outside) -> None:
        """Three exchanges of the original's, and nothing else, came over the first connection."""
        first = [event[1:] for event in machine.events() if event[0] == 1]
        if first != [["data", "ping"]] * 3:
            raise CaseFailed(f"over the first connection outside saw {first}")


def _says(found: str, wanted: str, who: str) -> None:
    if found != wanted:
        raise CaseFailed(f"{who} says {found!r}, not {wanted!r}")


CASES: tuple[Case, ...] = (*probe_cases("network", network), OutboundCase())
