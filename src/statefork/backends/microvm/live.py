"""One machine as a Live: the persistent shell, programs, captures."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import threading
import time
from dataclasses import dataclass
from typing import IO

from statefork.backends.gate import Gate
from statefork.backends.microvm.agent import PATH, Agent, Ended, Output, Program
from statefork.backends.microvm.vmm import Machine, Saved
from statefork.backends.output import OutputRecord
from statefork.backends.persistent_shell import WRAPPER, PersistentShell, ShellState
from statefork.driver import Captured, Live, Place
from statefork.errors import ExecTimeout, SessionDead, WaypointError
from statefork.model import Capability, ExecRequest, ExecResult, Mode, RunRequest
from waypoint.build.base import StartState

__all__ = ["BROUGHT_BACK", "MicroVmLive", "ShellNote", "Stored"]

BROUGHT_BACK = (
    Capability.FILES,
    Capability.PROCESSES,
    Capability.MEMORY,
    Capability.TERMINAL,
    Capability.MACHINE,
)
"""And the shell, unless it was not there when the state was stored."""

_LIST_TIMEOUT = 10.0
_SYNC_TIMEOUT = 10.0
_RUN_TIMEOUT = 30.0
"""How long a snapshot waits for programs of `run` to end, where they would not outlive it."""
_AFTER_KILL = 5.0
_PIECE = 1 << 16


@dataclass(frozen=True, slots=True)
class ShellNote:
    """A shell that is part of a stored state, and how to find it there."""

    state: ShellState
    channel: int
    busy: bool
    """It was in the middle of a command, which goes on in every machine made from the state."""


@dataclass(frozen=True, slots=True)
class Stored:
    saved: Saved
    start: StartState
    shell: ShellNote | None


class _ShellChannel:
    """A program's two streams as pipes, which is how PersistentShell wants them."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.stdout, self._stdout_end = os.pipe()
        self.stderr, self._stderr_end = os.pipe()
        self._thread = threading.Thread(target=self._carry, name="statefork-shell-pipes", daemon=True)
        self._thread.start()

    def send(self, data: bytes) -> None:
        self.program.send(data)

    def close(self) -> None:
        """Its jobs go on; the shell itself finds its input at its end."""
        self.program.let_go()
        for descriptor in (self.stdout, self.stderr):
            os.close(descriptor)
        self._thread.join()

    def _carry(self) -> None:
        ends = {"stdout": self._stdout_end, "stderr": self._stderr_end}
        with contextlib.suppress(BrokenPipeError):
            while isinstance(event := self.program.next(None), Output):
                view = memoryview(event.data)
                while view:
                    view = view[os.write(ends[event.stream], view) :]
        for descriptor in ends.values():
            os.close(descriptor)


class MicroVmLive(Live):
    def __init__(
        self,
        machine: Machine,
        agent: Agent,
        start: StartState,
        *,
        owned: bool,
        kept: Program | None = None,
        note: ShellNote | None = None,
    ) -> None:
        self.description = str(machine.directory)
        self._machine = machine
        self._agent = agent
        self._start = start
        self._owned = owned
        self._env = {"PATH": PATH, **dict(start.env)}
        self._kept = kept
        self._channel = 0
        self._executing = False
        self._gate = Gate()
        self._adopted_busy = kept is not None and note is not None and note.busy
        adopted = note.state if kept is not None and note is not None else None
        self._shell = PersistentShell(self._open_channel, self._aside, self._stage, self._dead, adopted)

    # -- commands -----------------------------------------------------------------------------------------------------

    def exec(self, request: ExecRequest) -> ExecResult:
        self._executing = True
        try:
            return self._shell.exec(request)
        finally:
            self._executing = False

    def ready(self, timeout: float) -> None:
        """A shell that came back in the middle of a command answers when that has ended: ask the agent instead."""
        if self._adopted_busy:
            self._agent.processes(timeout)
        else:
            super().ready(timeout)

    def run(self, request: RunRequest) -> ExecResult:
        with contextlib.nullcontext() if self._machine.keeps_connection else self._gate.passing():
            return self._run(request)

    def _run(self, request: RunRequest) -> ExecResult:
        env = {**self._env, **request.env}
        deadline = None if request.timeout is None else time.monotonic() + request.timeout
        program = self._agent.start(request.argv, env, self._start.user, request.cwd or self._start.workdir)
        record = OutputRecord(request.output_limit_bytes, request.on_output)
        _feed(program, request.stdin)
        try:
            ended = _collect(program, record, deadline)
            if ended is None:
                program.signal(signal.SIGKILL)
                _collect(program, record, time.monotonic() + _AFTER_KILL)
        finally:
            program.let_go()
        if record.failure is not None:
            raise record.failure
        if ended is None:
            partial = record.result(137, timed_out=True)
            raise ExecTimeout(f"`{request.argv[0]}` did not end within {request.timeout:g} s and was killed", partial)
        if ended.exit_code is None:
            raise self._dead(f"it went away while `{request.argv[0]}` ran")
        return record.result(ended.exit_code)

    # -- states -------------------------------------------------------------------------------------------------------

    def capture(self, place: Place, mode: Mode, parent: Captured | None) -> Captured:
        if mode == "files":
            return self._capture_files(place)
        processes: tuple[str, ...] = ()
        with contextlib.suppress(WaypointError):  # a machine that is too busy to tell is stored all the same
            # Nothing would be lost without: what the guest has not written yet is in its memory. But files should be
            # stored, and counted, as files, and once for all snapshots.
            self._agent.sync(_SYNC_TIMEOUT)
            processes = self._agent.processes(_LIST_TIMEOUT)
        busy, state = self._executing, self._shell.state
        saved = self._save(place, memory=True)
        shell = ShellNote(state, self._channel, busy) if state is not None and state.pid else None
        return Captured(
            handle=Stored(saved, self._start, shell),
            captured=(*BROUGHT_BACK, Capability.SHELL) if shell is not None else BROUGHT_BACK,
            not_captured=() if saved.spec.network == "none" else ("connections to the outside",),
            files_bytes=saved.files_bytes,
            memory_bytes=saved.memory_bytes,
            paused_ms=saved.paused_ms,
            processes=processes,
        )

    def _capture_files(self, place: Place) -> Captured:
        """What is still in the guest's memory has to be on its disk first, and nothing may change until it is stored."""
        self._agent.freeze(True)
        try:
            saved = self._save(place, memory=False)
        finally:
            self._agent.freeze(False)
        return Captured(
            handle=Stored(saved, self._start, None),
            captured=(Capability.FILES,),
            not_captured=("processes", "memory"),
            files_bytes=saved.files_bytes,
            paused_ms=saved.paused_ms,
        )

    def _save(self, place: Place, *, memory: bool) -> Saved:
        if self._machine.keeps_connection:
            saved = self._machine.save(place.directory, memory=memory)
            self._agent.set_clock()
            return saved
        with self._gate.alone(_RUN_TIMEOUT):
            try:
                return self._machine.save(place.directory, memory=memory)
            finally:
                self._agent.reconnect(self._machine.connect(_LIST_TIMEOUT), _LIST_TIMEOUT, self._channel)

    def suspend(self) -> None:
        self._machine.stand_still()

    def proceed(self) -> None:
        self._machine.go_on()
        self._agent.set_clock()

    def stop(self) -> None:
        if self._owned:
            self._machine.end()  # first: whatever waits for the machine then hears at once that it is gone
        self._shell.close()
        if not self._owned:
            with contextlib.suppress(WaypointError):  # an answer means that it has heard of the shell's end too
                self._agent.processes(_LIST_TIMEOUT)
        self._agent.close()
        if not self._owned:
            self._machine.end()

    # -- for the shell ------------------------------------------------------------------------------------------------

    def _open_channel(self) -> _ShellChannel:
        program, self._kept = self._kept, None
        if program is None:
            program = self._agent.start(("sh", "-c", WRAPPER), self._env, self._start.user, self._start.workdir)
        self._channel = program.channel
        return _ShellChannel(program)

    def _aside(self, script: str, *arguments: str) -> None:
        self.run(RunRequest(("sh", "-c", script, "sh", *arguments), timeout=30))

    def _stage(self, data: bytes) -> str:
        path = f"/tmp/.statefork-{secrets.token_hex(8)}"
        self.write_file(path, data, 0o600)
        return path

    def _dead(self, said: str) -> WaypointError:
        return SessionDead(f"machine {self.description}: {said}")


def _collect(program: Program, record: OutputRecord, deadline: float | None) -> Ended | None:
    """None if it was too late."""
    while (event := program.next(deadline)) is not None:
        if isinstance(event, Ended):
            return event
        record.add(event.stream, event.data)
    return None


def _feed(program: Program, source: bytes | IO[bytes] | None) -> None:
    """From a thread: a program may stop reading, or never begin to."""

    def work() -> None:
        with contextlib.suppress(OSError, ValueError):
            if isinstance(source, bytes):
                program.send(source)
            elif source is not None:
                while piece := source.read(_PIECE):
                    program.send(piece)
        program.end_stdin()

    if not source:
        program.end_stdin()
    else:
        threading.Thread(target=work, name="statefork-stdin", daemon=True).start()
