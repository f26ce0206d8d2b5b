"""A sandbox that runs: commands, programs, checkpoints. What `start` makes, and the common part of what was attached to.

The persistent shell is behind FIFOs of the host (fifos.py), so it comes back with a checkpoint. What `runsc exec` starts
does not: `runsc restore` kills every process that descends from one. So `run` marks its programs, and a
checkpoint that would lose one of them is refused.
"""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from statefork.backends.fifos import FIFO_DIRECTORY, FifoChannel
from statefork.backends.gate import Gate
from statefork.backends.guest_run import run_in_guest
from statefork.backends.gvisor_bases import note_base
from statefork.backends.gvisor_guest import MARK, Inside, look_inside, named
from statefork.backends.gvisor_sandbox import Sandbox, failure, kill_sandboxes, sandbox_processes
from statefork.backends.persistent_shell import Channel, PersistentShell, ShellState
from statefork.driver import Captured, Live, Place
from statefork.errors import KernelError, NotCapturable, SessionDead, WaypointError
from statefork.manifest import Manifest, read_guest_manifest
from statefork.model import Capability, ExecRequest, ExecResult, Mode, RunRequest
from waypoint.build.base import Base

__all__ = ["BROUGHT_BACK", "Checkpoint", "GvisorLive", "SandboxLive", "Taken"]

RUN_TIMEOUT = 30.0
"""How long a snapshot waits for programs of `run` to end."""

LEFT_SECONDS = 5.0
"""How long a snapshot waits for what such programs have left behind: most of it is just about to end."""

BROUGHT_BACK = (Capability.FILES, Capability.PROCESSES, Capability.MEMORY)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    image: Path
    base: Base
    shell: ShellState | None


@dataclass(frozen=True, slots=True)
class Taken:
    """What a checkpoint cost."""

    files_bytes: int
    memory_bytes: int
    paused_ms: float


class SandboxLive(Live):
    """A running sandbox, asked by `runsc`. Where its shell is and how one gets there is left open."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.description = sandbox.name
        self._sandbox = sandbox
        self._gate = Gate()
        self._shell: PersistentShell

    @abstractmethod
    def _channel(self) -> Channel: ...

    @abstractmethod
    def _stage(self, data: bytes) -> str: ...

    def _talk(self, adopted: ShellState | None) -> PersistentShell:
        return PersistentShell(self._channel, self._aside, self._stage, self._dead, adopted)

    def exec(self, request: ExecRequest) -> ExecResult:
        return self._shell.exec(request)

    def run(self, request: RunRequest) -> ExecResult:
        with self._gate.passing():
            return run_in_guest(self._wrap, request, self._dead)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _look(self, what: str) -> Inside:
        """Refuse before anything is stopped what could be stored but never brought back."""
        inside = look_inside(self._sandbox, what)
        if inside.outward:
            raise NotCapturable(
                f"{what}: {inside.outward[0]} still has a pipe of the `runsc exec` (`run`) that started it, which cannot be "
                "stored; end it, or start it from the shell. The sandbox goes on"
            )
        if inside.connections:
            raise NotCapturable(
                f"{what}: it has {inside.connections[0]}, which runsc cannot store. The sandbox goes on"
            )
        return inside

    def _checkpoint(self, what: str, image: Path) -> Taken:
        files_bytes = self._sandbox.files_bytes()
        began = time.perf_counter()
        options = ["--leave-running", "--compression=none", f"--image-path={image}"]
        done = self._sandbox.call("checkpoint", *options, self._sandbox.name)
        paused_ms = (time.perf_counter() - began) * 1000
        if done.exit_code != 0:
            error = failure(what, done.stderr.decode(errors="replace"))
            if isinstance(error, KernelError) and self._answers():
                raise NotCapturable(f"{error.message}; the sandbox goes on")
            raise error
        size_bytes = sum(file.stat().st_blocks * 512 for file in image.iterdir())
        return Taken(min(files_bytes, size_bytes), max(size_bytes - files_bytes, 0), paused_ms)

    def _answers(self) -> bool:
        return self._sandbox.call("exec", self._sandbox.name, "/bin/sh", "-c", ":").exit_code == 0

    def _wrap(self, request: RunRequest, argv: Sequence[str]) -> list[str]:
        env = {**request.env, MARK: "1"}
        return self._sandbox.argv(*self._sandbox.exec_arguments(argv, env, request.cwd))

    def _aside(self, script: str, *arguments: str) -> None:
        done = self._sandbox.call(*self._sandbox.exec_arguments(["sh", "-c", script, "sh", *arguments], {}, "/"))
        if done.exit_code == 128:
            raise failure(f"sandbox {self._sandbox.name}", done.stderr.decode(errors="replace"))

    def _dead(self, said: str) -> WaypointError:
        if not sandbox_processes(self._sandbox.state):
            return SessionDead(f"sandbox {self._sandbox.name} is gone: {said}")
        return failure(f"sandbox {self._sandbox.name}", said)


class GvisorLive(SandboxLive):
    """One of our own: the shell is a child of its PID 1, and is stored."""

    def __init__(self, sandbox: Sandbox, place: Place, base: Base, adopted: ShellState | None) -> None:
        super().__init__(sandbox)
        self._base = base
        self._io = place.directory / "io"
        self._adopted = adopted
        self._shell = self._talk(adopted)

    def ready(self, timeout: float) -> None:
        """As usual, but the shell's last status stays what it was."""
        status = self._adopted.status if self._adopted else 0
        self.exec(ExecRequest(b"(exit %d)" % status, timeout=timeout))

    def capture(self, place: Place, mode: Mode, parent: Captured | None) -> Captured:
        what = f"snapshot of sandbox {self._sandbox.name}"
        image = place.directory / "image"
        note_base(place, self._base)
        with self._gate.alone(RUN_TIMEOUT):
            inside = self._look(what)
            deadline = time.monotonic() + LEFT_SECONDS
            while inside.started and time.monotonic() < deadline:
                time.sleep(0.1)
                inside = self._look(what)
            if inside.started:
                lost = named(*next(iter(inside.started.items())))
                raise NotCapturable(
                    f"{what}: {lost} was started with `run` and lives on, and runsc would end it in every copy; end it, or "
                    "start it from the shell. The sandbox goes on"
                )
            taken = self._checkpoint(what, image)
        shell = self._shell.state
        return Captured(
            handle=Checkpoint(image, self._base, shell),
            captured=(*BROUGHT_BACK, Capability.SHELL) if shell is not None else BROUGHT_BACK,
            files_bytes=taken.files_bytes,
            memory_bytes=taken.memory_bytes,
            paused_ms=taken.paused_ms,
            processes=inside.processes,
        )

    def stop(self) -> None:
        self._shell.close()
        kill_sandboxes(self._sandbox.state)

    def manifest(self) -> Manifest:
        found = read_guest_manifest(self.run)
        return {path: facts for path, facts in found.items() if not f"{path}/".startswith(f"{FIFO_DIRECTORY}/")}

    def _channel(self) -> Channel:
        return FifoChannel(self._io)

    def _stage(self, data: bytes) -> str:
        name = f"staged-{secrets.token_hex(8)}"
        (self._io / name).write_bytes(data)
        (self._io / name).chmod(0o666)
        return f"{FIFO_DIRECTORY}/{name}"
