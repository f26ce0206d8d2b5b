"""Any StateFork backend as a subject: what a third party imports to have its own judged.

    from statefork.testing.fidelity import Backend, environment_backend, run_cases, select

    backend = environment_backend("mine", lambda: Environment.create(MyDriver(), home=home))
    for result in run_cases(backend, select([])):
        print(result.kind, result.case, result.verdict, result.message)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from statefork.environment import Environment
from statefork.errors import Unsupported, UsageError
from statefork.model import Capability, ExecResult, RestoreResult
from statefork.testing.fidelity.runner import Backend
from statefork.testing.fidelity.subject import Channel, Options

__all__ = ["EnvironmentSubject", "environment_backend"]

_OF_A_MACHINE = frozenset({"network", "ipc", "inodes", "controlling-terminal"})
"""What a whole machine brings back and StateFork has no word of its own for."""


class EnvironmentSubject:
    """A thin coat over an Environment: it has all of the methods but two."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment

    def exec_command(
        self, command: str, *, timeout: float | None = None, stdin: bytes | str | None = None
    ) -> ExecResult:
        return self.environment.exec_command(command, timeout=timeout, stdin=stdin)

    def run(self, argv: Sequence[str], *, timeout: float | None = None) -> ExecResult:
        return self.environment.run(argv, timeout=timeout)

    def snapshot(self, name: str | None = None) -> str:
        return self.environment.snapshot(name)

    def restore(self, snapshot: str) -> RestoreResult:
        return self.environment.restore(snapshot)

    def fork(self, n: int = 1, *, from_snapshot: str | None = None) -> list[EnvironmentSubject]:
        return [EnvironmentSubject(fork) for fork in self.environment.fork(n, from_snapshot=from_snapshot)]

    def not_captured(self, snapshot: str) -> Iterable[str]:
        return next(found.not_captured for found in self.environment.snapshots() if found.id == snapshot)

    def open_terminal(self, rows: int, columns: int) -> Channel:
        raise Unsupported(f"{self.environment.backend} environments have no terminal to attach to")

    def destroy(self) -> None:
        self.environment.destroy()


def environment_backend(
    name: str,
    make: Callable[[], Environment],
    unclaimed: Mapping[str, str] | None = None,
    claimed: Iterable[str] = (),
) -> Backend:
    """The backend claims what its probe found; it is probed by making one environment. `unclaimed`: see Backend.

    `claimed`: what it brings back beside that, of `network`, `ipc`, `inodes` and `controlling-terminal`.
    """
    unknown = set(claimed) - _OF_A_MACHINE
    if unknown:
        raise UsageError(f"{name}: nobody can claim {', '.join(sorted(unknown))}; choose of {sorted(_OF_A_MACHINE)}")
    with make() as environment:
        restores = environment.capabilities.restores
    claims = frozenset(str(one) for one in restores if one != Capability.TERMINAL) | frozenset(claimed)
    if Capability.MACHINE in restores:
        claims |= _OF_A_MACHINE

    def open_environment(options: Options) -> EnvironmentSubject:
        if not options.plain:
            raise Unsupported(f"{name} environments are made without such options")
        return EnvironmentSubject(make())

    return Backend(name, open_environment, claims, unclaimed or {})
