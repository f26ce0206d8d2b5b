"""Commands of environments: started, followed, found again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from statefork.environment import Environment
from statefork.errors import Ambiguous, ExecTimeout, NotFound, WaypointError
from statefork.model import ExecResult
from statefork.server.guard.problems import Refused
from statefork.server.service.command import Command, Input
from statefork.server.service.held import Held
from statefork.server.service.records import CommandRow
from statefork.tree import mint

if TYPE_CHECKING:
    from statefork.server.service.service import Service

__all__ = ["Program", "Running"]

log = logging.getLogger(__name__)

WRITTEN_DOWN_SECONDS = 0.25
"""A command that runs for longer is written down, so that the daemon's next process finds it. One for the shell is found
without that too."""


@dataclass(frozen=True, slots=True)
class Program:
    """What to start: a command line for the shell, or a program with its arguments."""

    command: str | bytes | None = None
    argv: Sequence[str] = ()
    timeout: float | None = None
    stdin: bytes | None = None
    feed: bool = False
    """stdin comes later, while it runs."""
    followed: bool = False
    """Whoever starts it follows it at once, and has to see all of its output."""
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    output_bytes: int = 1 << 20
    wait: bool = True
    """Wait for the shell, if another command runs in it."""

    @property
    def kind(self) -> str:
        return "exec" if self.command is not None else "run"


class Running:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def run(self, held: Held, program: Program, *, identifier: str | None = None) -> Command:
        """To its end; `command.result` is there. Raises what the command's failure raises."""
        async with self._service.use(held) as environment:
            command, future = self._start(held, environment, program, identifier)
            try:
                await asyncio.shield(future)
            except ExecTimeout as error:
                error.details["command"] = command.id
                raise
            finally:
                if command.done.is_set() or future.done():
                    held.drop(command)
                else:  # its caller has left: it goes on
                    command.detached = True
        return command

    async def launch(self, held: Held, program: Program, *, detached: bool, identifier: str | None = None) -> Command:
        """Started, and left to itself; follow it with `command.follow`."""
        async with self._service.use(held) as environment:
            command, _ = self._start(held, environment, program, identifier)
            command.detached = detached
        return command

    def find(self, held: Held, reference: str) -> Command:
        if reference in held.commands:
            return held.commands[reference]
        fits = [command for key, command in held.commands.items() if reference and key.startswith(reference)]
        if len(fits) > 1:
            raise Ambiguous(f"{reference!r} fits {', '.join(one.id for one in fits)}; write more of it")
        if not fits:
            raise NotFound(f"environment {held.id} knows no command {reference!r}: it ended long ago, or never was")
        return fits[0]

    async def adopt(self, held: Held) -> None:
        """Go on with what ran when an earlier process ended."""
        service, environment = self._service, held.environment
        if environment is None or held.lost:
            return
        rows = await service.work.run(lambda: service.records.commands(held.id))
        known = set()
        for row in rows:
            if row.place == environment.place:
                known.add(row.number)
                self._follow(held, environment, row)
                service.records.put_command(row)
            else:
                await service.work.run(lambda row=row: service.records.remove_command(row.id))  # type: ignore[misc]
        if held.state == "live":
            try:
                number = await service.work.run(environment.running_command)
            except WaypointError as error:
                log.warning("environment %s: cannot ask its shell: %s", held.id, error)
                return
            if number is not None and number not in known:
                command = Command(environment, "exec")
                row = CommandRow(command.id, held.id, "exec", number, environment.place, time.time())
                self._follow(held, environment, row)
                service.records.put_command(row)

    async def take_up(self, held: Held, number: int) -> Command:
        """Follow a program that runs in it, and that nobody here started: it came with a fork or a restore."""
        async with self._service.use(held) as environment:
            place = environment.place
            for command in held.commands.values():
                if (command.number, command.place) == (number, place) and not command.done.is_set():
                    return command
            row = CommandRow(mint("c"), held.id, "run", number, place, time.time())
            command = self._follow(held, environment, row)
            self._write_down_later(held, command, None, WRITTEN_DOWN_SECONDS)
            return command

    # -- inside -------------------------------------------------------------------------------------------------------

    def _start(
        self, held: Held, environment: Environment, program: Program, identifier: str | None
    ) -> tuple[Command, asyncio.Future[ExecResult]]:
        if held.running >= self._service.settings.commands_per_environment:
            raise Refused(
                429,
                "overloaded",
                f"environment {held.id} has {held.running} commands under way or waiting; try again when some have ended",
                retry_after=1,
            )
        command = Command(environment, program.kind, identifier=identifier)
        if program.feed:
            command.input = Input()
        if program.followed:
            command.await_follower()
        if identifier is not None:  # somebody may ask for this one by its key: it is written down at once
            command.on_number = lambda: self._write_down(held, command, program.timeout)
        future = self._work(held, command, lambda one: _call(environment, program, one))
        if identifier is None:
            self._write_down_later(held, command, program.timeout, WRITTEN_DOWN_SECONDS)
        return command, future

    def _follow(self, held: Held, environment: Environment, row: CommandRow) -> Command:
        command = Command(environment, row.kind, identifier=row.id)
        command.number, command.place, command.started = row.number, row.place, row.started
        command.detached = True
        command.input = feed = Input()
        left = None if row.timeout_at is None else max(0.1, row.timeout_at - time.time())

        def call(one: Command) -> ExecResult:
            return environment.follow_command(row.number, on_output=one.output, timeout=left, stdin=feed.reading)

        command.await_follower()
        self._work(held, command, call)
        return command

    def _work(self, held: Held, command: Command, call: Callable[[Command], ExecResult]) -> asyncio.Future[ExecResult]:
        service, began = self._service, time.perf_counter()
        future = service.commands.start(lambda: command.work(call))
        held.keep(command)

        def ended(future: asyncio.Future[ExecResult]) -> None:
            error = None if future.cancelled() else future.exception()
            outcome = "ok" if error is None else getattr(error, "code", "internal")
            service.guard.metrics.operation(held.backend, command.kind, outcome, time.perf_counter() - began)
            held.row.used = time.time()
            service.notice(held, error)
            if command.on_number is not None and not service.ending:
                service.books.start(lambda: service.records.remove_command(command.id))
            if not command.detached:
                held.drop(command)

        future.add_done_callback(ended)
        return future

    def _write_down_later(self, held: Held, command: Command, timeout: float | None, delay: float) -> None:
        def write() -> None:
            if command.done.is_set() or self._service.ending:
                return
            if command.number is None:  # waits for its turn; never numbered on a backend that knows none
                self._write_down_later(held, command, timeout, min(delay * 2, 5.0))
                return
            command.on_number = lambda: self._write_down(held, command, timeout)  # says that there is a row
            self._service.books.start(command.on_number)

        asyncio.get_running_loop().call_later(delay, write)

    def _write_down(self, held: Held, command: Command, timeout: float | None) -> None:
        assert command.number is not None
        at = None if timeout is None else command.started + timeout
        row = CommandRow(command.id, held.id, command.kind, command.number, command.place, command.started, at)
        self._service.records.put_command(row)


def _call(environment: Environment, program: Program, command: Command) -> ExecResult:
    stdin = command.input.reading if command.input is not None else program.stdin
    if program.command is not None:
        return environment.exec_command(
            program.command,
            timeout=program.timeout,
            stdin=stdin,
            on_output=command.output,
            on_start=command.numbered,
            output_limit_bytes=program.output_bytes,
            wait=program.wait,
        )
    return environment.run(
        program.argv,
        timeout=program.timeout,
        stdin=stdin,
        cwd=program.cwd,
        env=program.env,
        on_output=command.output,
        on_start=command.numbered,
        output_limit_bytes=program.output_bytes,
    )
