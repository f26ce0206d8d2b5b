"""One session: bash on a terminal of its own, inside the environment, that is snapshotted and forked with it.

SWE-ReX types commands at a prompt and reads until the prompt comes back. Here the command is put into a file that bash then
sources, so that text of any length with any quoting is one command, and the prompt itself tells the exit code.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import re
import time
from typing import Any

from statefork.errors import SessionDead
from statefork.server.foreign.attendant import Attended, Listener
from statefork.server.foreign.swerex.errors import Raised
from statefork.server.foreign.swerex.expecting import PROMPT, Match, Patterns
from statefork.server.service.service import Service

__all__ = ["Observation", "Shell"]

_CONTROL = re.compile(r"\x1B[@-_][0-?]*[ -/]*[@-~]")
_MOST_OUTPUT = 16 << 20
_SETTLE_SECONDS = 0.3
_KILL = (
    b" kill -9 %%; for __rex in 1 2 3 4 5 6 7 8 9; do jobs %% >/dev/null 2>&1 || break; sleep 0.1; done; unset __rex\n"
)
"""Bash tells of a killed job once it has noticed: not amid the next command, please."""

Observation = dict[str, Any]


class Shell:
    """Turns of one session follow one another; an interrupt goes past them."""

    def __init__(self, service: Service, process: Attended, listener: Listener) -> None:
        self.service, self.process = service, process
        self.turn = asyncio.Lock()
        self._arrived = asyncio.Event()
        self._waiting = bytearray()
        self._reading_over = False
        self._reading = asyncio.ensure_future(self._read(listener))
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._text = ""
        self._seen = 0
        mark = process.name
        self._prompt = re.compile(f"{PROMPT}{mark}:([0-9]+):")
        self._set = f"PS1='{PROMPT}{mark}:$?:' PS2= PS0= PROMPT_COMMAND="
        self._file = f"/tmp/.statefork-swerex-{mark}"

    @property
    def alive(self) -> bool:
        return self.process.alive

    async def start(self, sources: list[str], timeout: float) -> str:
        """Raises pexpect's TIMEOUT on the client's side, as it would be there."""
        lines = "".join(f"source {_quoted(path)}\n" for path in sources)
        await self._source(lines + "unset HISTFILE; bind 'set enable-bracketed-paste off' 2>/dev/null; true")
        try:
            _, output = await self._until(Patterns([]), timeout)
        except TimeoutError:
            raise Raised("pexpect.exceptions.TIMEOUT", f"the session did not start in {timeout:g} s") from None
        return output

    # -- commands -----------------------------------------------------------------------------------------------------

    async def run(self, action: dict[str, Any]) -> Observation:
        command, timeout = str(action["command"]), action["timeout"]
        patterns = Patterns(action["expect"])
        interactive = action["is_interactive_command"] or action["is_interactive_quit"]
        if interactive:
            await self.process.feed(command.encode(errors="surrogateescape") + b"\n")
        else:
            await self._source(command)
        try:
            match, output = await self._until(patterns, timeout)
        except TimeoutError:
            message = f"timeout after {timeout} seconds while running command {command!r}"
            raise Raised("CommandTimeoutError", message) from None
        if not interactive:
            return self._finished(action, match, output)
        if not action["is_interactive_quit"]:
            output = output.lstrip().removeprefix(command).strip()
        return _observed(output, 0, match)

    def _finished(self, action: dict[str, Any], match: Match, output: str) -> Observation:
        code = int(match[0][len(PROMPT) :]) if match[0].startswith(PROMPT) else None
        check, command = action["check"], action["command"]
        if check == "ignore":
            return _observed(output, None, match)
        if check == "raise" and code is None:
            raise Raised(
                "NoExitCodeError", f"{match[0]!r} came before the end of {command!r}: there is no exit code yet"
            )
        if check == "raise" and code != 0:
            message = f"Command {command!r} failed with exit code {code}. Here is the output:\n{output!r}"
            raise Raised(
                "NonZeroExitCodeError", f"{action['error_msg']}: {message}" if action["error_msg"] else message
            )
        return _observed(output, code, match)

    async def interrupt(self, action: dict[str, Any]) -> Observation:
        """Ctrl-C, some times; then Ctrl-Z and kill. While somebody waits for the command, its end is told to them."""
        for _ in range(max(1, action["n_retry"])):
            if not self.turn.locked():
                break
            await self.process.feed(b"\x03")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(action["timeout"], 0.5)), self.turn:
                    return _observed("", 0, (PROMPT, 0, 0))
        if self.turn.locked():
            raise Raised("pexpect.exceptions.TIMEOUT", "Failed to interrupt session")
        async with self.turn:
            return await self._interrupt(action)

    async def _interrupt(self, action: dict[str, Any]) -> Observation:
        patterns, collected = Patterns(action["expect"]), ""
        for _ in range(action["n_retry"]):
            await self.process.feed(b"\x03")
            try:
                match, output = await self._until(patterns, max(action["timeout"], 0.05))
            except TimeoutError:
                continue
            collected += output + await self._settled()
            return _observed(collected.strip(), 0, match)
        await self.process.feed(b"\x1a")
        try:
            _, output = await self._until(Patterns([]), max(action["timeout"], 2))
            await self.process.feed(_KILL)
            match, more = await self._until(Patterns([]), max(action["timeout"], 2))
        except TimeoutError:
            raise Raised("pexpect.exceptions.TIMEOUT", "Failed to interrupt session") from None
        return _observed((output + more + await self._settled()).strip(), 0, match)

    async def close(self) -> None:
        """Hang up, as a terminal that is closed does, and then make sure."""
        for signal in (1, 9):
            if self.alive:
                await self.process.signal(signal)
                try:
                    async with asyncio.timeout(2):
                        await self.process.over.wait()
                except TimeoutError:
                    continue

    # -- the terminal -------------------------------------------------------------------------------------------------

    async def _source(self, command: str) -> None:
        data = command.encode(errors="surrogateescape")
        async with self.service.use(self.process.held) as live:
            await self.service.commands.run(lambda: live.write_file(self._file, data + b"\n", 0o600))
        self._text, self._seen = "", 0  # what came between two commands is nobody's
        self._waiting.clear()
        line = f' . {self._file}; __rex=$?; {self._set}; eval "unset __rex; (exit $__rex)"\n'
        await self.process.feed(line.encode())

    async def _until(self, patterns: Patterns, timeout: float | None) -> tuple[Match, str]:
        """What was found, and all that came before it. Raises TimeoutError; what came stays for the next who waits."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            match = self._found(patterns)
            if match is not None:
                output, self._text = self._text[: match[1]], self._text[match[2] :]
                self._seen = 0
                return match, _plain(output)
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if left == 0.0:
                raise TimeoutError
            await self._more(left)

    def _found(self, patterns: Patterns) -> Match | None:
        best = patterns.search(self._text, self._seen)
        prompt = self._prompt.search(self._text, max(0, self._seen - 128))
        if prompt is not None and (best is None or prompt.start() <= best[1]):
            best = (PROMPT + prompt.group(1), prompt.start(), prompt.end())
        self._seen = len(self._text)
        return best

    async def _read(self, listener: Listener) -> None:
        """All the time: what jobs print between two commands is not to hold them back."""
        try:
            async for kind, data in listener:
                if kind == "p":
                    self._waiting += data
                    if len(self._waiting) > _MOST_OUTPUT:
                        del self._waiting[:-_MOST_OUTPUT]
                    self._arrived.set()
        finally:
            self._reading_over = True
            self._arrived.set()

    async def _more(self, timeout: float | None) -> None:
        async with asyncio.timeout(timeout):
            await self._arrived.wait()
        if self._waiting:
            self._text += self._decoder.decode(bytes(self._waiting))
            self._waiting.clear()
            if len(self._text) > _MOST_OUTPUT:
                self._text = self._text[-_MOST_OUTPUT:]
                self._seen = min(self._seen, len(self._text))
        elif self._reading_over:
            ending = self.process.ending
            if ending is not None and ending.error is not None:
                raise SessionDead(f"the session is gone: {ending.error}")
            raise Raised("pexpect.exceptions.EOF", "End Of File (EOF): the shell of this session has ended")
        if not self._reading_over:
            self._arrived.clear()

    async def _settled(self) -> str:
        """What still comes in the next moment, without further prompts."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            try:
                await self._more(left)
            except TimeoutError:
                break
        output, self._text, self._seen = self._text, "", 0
        return _plain(self._prompt.sub("", output))


def _observed(output: str, code: int | None, match: Match) -> Observation:
    name = PROMPT if match[0].startswith(PROMPT) else match[0]
    return {"output": output, "exit_code": code, "failure_reason": "", "expect_string": name, "session_type": "bash"}


def _plain(text: str) -> str:
    return _CONTROL.sub("", text).replace("\r\n", "\n")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
