"""One long-lived shell per environment, spoken to over pipes: `cd`, `export`, functions and jobs stay between commands.

It is an *interactive* shell without a terminal, because only an interactive shell comes back to its top level on
SIGINT (bash, dash and busybox ash all do): so a timeout can end `while :; do :; done`, which runs in the shell itself,
and keep every variable. Each command is one `eval` of a quoted text. The shell's own stdout and stderr
lead to /dev/null (prompts, notices); the command's are fd 8 and 9 of the shell, which it cannot see.

After the begin mark the shell is sent the line that reports. It lies in the pipe until the command has ended, however
it ended: dash throws away what it has buffered when a command fails, so it must not have read the line before.

A small `sh` around it waits for its end and reports that too (`exit 3`, kill -9), whatever background jobs keep open.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from statefork.backends.output import Mark, MarkScanner, OutputRecord, new_token
from statefork.backends.programs import PIECE_BYTES
from statefork.errors import ExecTimeout, KernelError, SessionDead, WaypointError
from statefork.model import ExecRequest, ExecResult, Stream

__all__ = ["WRAPPER", "Channel", "PersistentShell", "ShellState"]

log = logging.getLogger(__name__)

START_TIMEOUT = 30.0
GRACE_SECONDS = (0.5, 0.5, 1.0, 2.0, 5.0, 10.0)
"""After SIGINT, then after each round of SIGKILL to what the command started; then the shell itself is given up. Only a
shell that is stuck costs all of it; one on a busy machine must not be taken for one."""

BEGIN_SECONDS = 10.0

INLINE_BYTES = 1 << 15
"""bash reads a pipe byte by byte: longer commands go through a file."""

WRAPPER = r"""
while IFS= read -r line; do case $line in "hello "*) break;; esac; done
token=${line#hello }
trap : INT
if command -v bash >/dev/null 2>&1; then bash --norc --noprofile --noediting +H -i; else sh -i; fi
rc=$?
printf '\0%s:exit %s\0' "$token" "$rc"; printf '\0%s:\0' "$token" >&2
while IFS= read -r line; do case $line in "bye $token") break;; esac; done
"""
"""For `sh -c`: starts the best shell that the environment has, once a line of input has told it the token of its marks.
Where the input is a FIFO, lines that were meant for a shell that died may lie before that one. At its end it waits for
a word from us: podman drops what it has not yet read when the process that it started ends."""

_SETUP = (
    r"PS1= PS2=; exec 8>&1 9>&2 >/dev/null 2>&1; __statefork_status() { return $1; };"
    r' if [ -n "$BASH_VERSION" ]; then set +o history; unset HISTFILE; fi;'
    r" \command printf '\0%s:%s\0' {token} $$ >&8" + "\n"
)
_BEGIN = (
    r"\read -r __statefork_now </proc/uptime || :;"
    r""" \command printf '\0%s:%s ' {token} "$__statefork_now" >&8; \jobs -p >&8; \command printf '\0' >&8;"""
    r" \command printf '\0%s:\0' {token} >&9; case $- in *e*) ;; *) __statefork_status {status};; esac; "
)
_REPORT = r"""\command printf '\0%s:%s %s\0' {token} "$?" "$PWD" >&8; \command printf '\0%s:\0' {token} >&9""" + "\n"

_ECHO = r"\command printf '\0%s:\0' {token} >&8" + "\n"

# Signals everything below the shell that began since the command did, but for the jobs that were there before, and
# interrupts the shell itself. It stands still meanwhile, or it would go on to the next command when a program is gone.
_SIGNAL = r"""
signal=$1 shell=$2 since=$3 spare=" $4 "; all=
for d in /proc/[0-9]*; do
  read -r s 2>/dev/null <"$d/stat" || continue
  s=${s##*) }; set -- $s; all="$all ${d#/proc/}:$2:${20}"
done
kill -STOP "$shell"; todo=$shell
while [ -n "$todo" ]; do
  next=
  for parent in $todo; do for one in $all; do
    pid=${one%%:*}; rest=${one#*:}
    [ "${rest%%:*}" = "$parent" ] || continue
    case $spare in *" $pid "*) continue;; esac
    [ "${rest#*:}" -ge "$since" ] && kill "-$signal" "$pid" 2>/dev/null
    next="$next $pid"
  done; done
  todo=$next
done
kill -INT "$shell"; kill -CONT "$shell"
"""


class Channel(Protocol):
    """The pipes to a shell: a child process's, or FIFOs."""

    @property
    def stdout(self) -> int: ...
    @property
    def stderr(self) -> int: ...
    def send(self, data: bytes) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ShellState:
    """What one has to know of a shell to go on talking to it; stored with a snapshot that has the shell itself."""

    life: str
    """The token of the mark that says that the shell has ended."""
    pid: str = ""
    """As seen from inside."""
    cwd: str = ""
    status: int = 0


@dataclass(slots=True)
class _Command:
    """One command under way, shared by the caller's thread and the reader's."""

    record: OutputRecord
    begin: str = field(default_factory=new_token)
    end: str = field(default_factory=new_token)
    begun: set[Stream] = field(default_factory=set)
    ended: set[Stream] = field(default_factory=set)
    started: threading.Event = field(default_factory=threading.Event)
    """Set when the shell has begun with it, so that `since` and `jobs` are known; or when that will never be."""
    done: threading.Event = field(default_factory=threading.Event)
    since: str = "0"
    jobs: str = ""
    exit_code: int | None = None
    cwd: str = ""


class PersistentShell:
    """Calls never overlap (the Environment sees to that); `close` may come at any time.

    `open_channel` starts WRAPPER inside; `aside(script, *arguments)` runs a one-shot `sh -c` inside, for signals;
    `stage(data)` puts bytes into a file inside and returns its path; `dead` makes the error when no shell comes up;
    `adopted` is a shell that came back with a snapshot and is waiting at the other end of the channel.
    """

    def __init__(
        self,
        open_channel: Callable[[], Channel],
        aside: Callable[..., None],
        stage: Callable[[bytes], str],
        dead: Callable[[str], WaypointError],
        adopted: ShellState | None = None,
    ) -> None:
        self._open_channel, self._aside, self._stage, self._dead = open_channel, aside, stage, dead
        self._running = _Shell(open_channel(), dead, adopted) if adopted is not None else None
        self._lost = False
        self._closed = False

    def exec(self, request: ExecRequest) -> ExecResult:
        if self._closed:
            raise SessionDead("the environment is gone")
        shell = self._running
        if shell is None or shell.over.is_set():
            if shell is not None:
                shell.close()
                self._running, self._lost = None, True  # if no other comes up, this one is not closed again
            shell = self._running = _Shell(self._open_channel(), self._dead)
            if self._closed:  # meanwhile, by another thread
                shell.close()
                raise SessionDead("the environment is gone")
        lost, self._lost = self._lost, False
        text, files = self._text(request)
        command = _Command(OutputRecord(request.output_limit_bytes, request.on_output))
        deadline = None if request.timeout is None else time.monotonic() + request.timeout
        try:
            shell.submit(command, text)
            left = None if deadline is None else max(deadline - time.monotonic(), 0)
            in_time = command.done.wait(left)
            if not in_time:
                self._interrupt(shell, command)
            return self._outcome(shell, command, request, not in_time, lost)
        finally:
            shell.finish(command)
            if files:
                self._remove(files)

    def signal(self, number: int) -> None:
        """To what the running command started; the shell itself is interrupted, as by Ctrl-C. Nothing runs: nothing."""
        shell = self._running
        command = shell.command if shell is not None else None
        if shell is not None and command is not None and not command.done.is_set():
            self._aside(_SIGNAL, str(number), shell.state.pid, command.since, command.jobs)

    @property
    def state(self) -> ShellState | None:
        """None if there is no shell at present. Only ask between commands."""
        shell = self._running
        return shell.state if shell is not None and not shell.over.is_set() else None

    def _text(self, request: ExecRequest) -> tuple[bytes, list[str]]:
        """The `eval` line, and the files that it needs."""
        files = []
        if len(request.command) <= INLINE_BYTES:
            line = b"\\eval " + _quoted(request.command)
        else:
            files.append(self._stage(request.command + b"x"))  # `$(…)` drops newlines at the end: the x protects them
            path = _quoted(files[-1].encode())
            line = b"__statefork_text=$(\\command cat " + path + b'); \\eval "${__statefork_text%x}"'
        source = b"/dev/null"
        if request.stdin is not None:
            given = request.stdin if isinstance(request.stdin, bytes) else request.stdin.read()
            files.append(self._stage(given))
            source = _quoted(files[-1].encode())
        return line + b" <" + source + b" >&8 2>&9 8>&- 9>&-\n", files

    def _remove(self, files: list[str]) -> None:
        if self._closed:
            return
        try:
            self._aside('rm -f -- "$@"', *files)
        except WaypointError as error:
            log.warning("staged files %s could not be removed: %s", files, error)

    def _interrupt(self, shell: _Shell, command: _Command) -> None:
        """End the command: as Ctrl-C would, then by force, and at last with the shell that runs it.

        On a busy machine the shell may not have come to it yet. Then nobody can tell what it has started from what was
        there before, which must be spared: so it is let begin first.
        """
        command.started.wait(BEGIN_SECONDS)
        for number, grace in enumerate(GRACE_SECONDS):
            if self._closed:
                return
            if number:
                self._aside(_SIGNAL, "KILL", shell.state.pid, command.since, command.jobs)
                if command.done.wait(0.05):
                    break
            self._aside(_SIGNAL, "INT", shell.state.pid, command.since, command.jobs)
            if command.done.wait(grace):
                break
            shell.ask_again(command)
        if command.done.is_set() and shell.in_step():
            return
        self._aside('kill -KILL "$1"', shell.state.pid)
        if not shell.over.wait(GRACE_SECONDS[-1]):
            shell.give_up()

    def _outcome(
        self, shell: _Shell, command: _Command, request: ExecRequest, timed_out: bool, lost: bool
    ) -> ExecResult:
        if command.record.failure is not None:
            raise command.record.failure
        over = shell.over.is_set()
        if over and command.exit_code is None and not timed_out:
            raise SessionDead("the environment went away while the command ran")
        code = command.exit_code if command.exit_code is not None else 137
        cwd = command.cwd or shell.state.cwd
        shell.state = replace(shell.state, cwd=cwd, status=code)
        result = command.record.result(
            124 if timed_out else code, cwd=cwd, timed_out=timed_out, shell_restarted=over or lost
        )
        if not timed_out:
            return result
        state = "; the shell did not survive it, the next command gets a new one" if over else ""
        raise ExecTimeout(f"the command did not end within {request.timeout:g} s and was ended{state}", result)

    def close(self) -> None:
        """Let go of the shell; a command that runs in it raises SessionDead."""
        self._closed = True
        if self._running is not None:
            self._running.close()
            self._running = None


class _Shell:
    """One shell process and the thread that reads from it. Output that comes while no command runs is dropped: a
    background job that prints must never block because nobody reads."""

    def __init__(
        self, channel: Channel, dead: Callable[[str], WaypointError], adopted: ShellState | None = None
    ) -> None:
        self.over = threading.Event()
        self.state = adopted or ShellState(life=new_token())
        self._channel = channel
        self._command: _Command | None = None
        self._ready = threading.Event()
        self._hello = new_token()
        self._said = b""
        self._echo, self._echoed = "", threading.Event()
        self._exit_code: int | None = None
        self._scanners: dict[Stream, MarkScanner] = {"stdout": MarkScanner(), "stderr": MarkScanner()}
        for scanner in self._scanners.values():
            scanner.watch(self.state.life, self._hello)
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._read, name="statefork-shell", daemon=True)
        self._thread.start()
        if adopted is not None:
            self._ready.set()
            return
        with contextlib.suppress(OSError):  # the reader sees the end of the streams and says so
            channel.send(f"hello {self.state.life}\n".encode() + _SETUP.replace("{token}", self._hello).encode())
        if not self._ready.wait(START_TIMEOUT) or not self.state.pid:
            said = self._said.decode(errors="replace").strip()
            self.close()
            raise dead(said or "no shell came up inside")

    @property
    def command(self) -> _Command | None:
        return self._command

    def submit(self, command: _Command, text: bytes) -> None:
        for scanner in self._scanners.values():
            scanner.watch(command.begin, command.end)
        self._command = command
        begin = _BEGIN.replace("{token}", command.begin).replace("{status}", str(self.state.status))
        if self.over.is_set():
            command.done.set()
            return
        try:
            self._channel.send(begin.encode() + text)
        except OSError as error:
            if not self.over.wait(GRACE_SECONDS[-1]):
                raise KernelError(f"the shell does not take commands: {error}") from error

    def ask_again(self, command: _Command) -> None:
        """A SIGINT that comes too late makes the shell throw away the line that it is reading: maybe our question."""
        self._send_report(command)

    def in_step(self) -> bool:
        """After a SIGINT: go on only when the shell has answered to a line that was sent later than the signal."""
        for grace in GRACE_SECONDS:
            token, self._echoed = new_token(), threading.Event()
            self._scanners["stdout"].watch(token)
            self._echo = token
            with contextlib.suppress(OSError):
                self._channel.send(_ECHO.replace("{token}", token).encode())
            answered = self._echoed.wait(max(grace, 1.0))
            self._scanners["stdout"].forget(token)
            if answered or self.over.is_set():
                return answered
        return False

    def finish(self, command: _Command) -> None:
        self._command = None
        for scanner in self._scanners.values():
            scanner.forget(command.begin)
            scanner.forget(command.end)

    def give_up(self) -> None:
        """It neither ends nor answers: leave it alone, as dead."""
        self.over.set()

    def close(self) -> None:
        self.over.set()
        os.write(self._wake_write, b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._channel.close()
        for descriptor in (self._wake_read, self._wake_write):
            os.close(descriptor)

    # -- the reader's thread ------------------------------------------------------------------------------------------

    def _read(self) -> None:
        streams: dict[int, Stream] = {self._channel.stdout: "stdout", self._channel.stderr: "stderr"}
        dead: set[Stream] = set()
        with selectors.DefaultSelector() as selector:
            for descriptor in (*streams, self._wake_read):
                selector.register(descriptor, selectors.EVENT_READ)
            while len(dead) < 2:
                for key, _ in selector.select():
                    if key.fd == self._wake_read:
                        dead = {"stdout", "stderr"}
                        break
                    stream = streams[key.fd]
                    data = _read_some(key.fd)
                    if not data:
                        selector.unregister(key.fd)
                    if not data or self._take(stream, data):
                        dead.add(stream)
        with contextlib.suppress(OSError):
            if self._exit_code is not None:
                self._channel.send(f"bye {self.state.life}\n".encode())
        self.over.set()
        self._ready.set()
        command = self._command
        if command is not None:
            if command.exit_code is None:
                command.exit_code = self._exit_code
            command.started.set()
            command.done.set()

    def _take(self, stream: Stream, data: bytes) -> bool:
        """True when this stream has said that the shell has ended."""
        for piece in self._scanners[stream].feed(data):
            command = self._command
            if isinstance(piece, Mark):
                if self._marked(stream, piece, command):
                    return True
            elif command is not None and stream in command.begun and stream not in command.ended:
                command.record.add(stream, piece)
            elif not self._ready.is_set():
                self._said = (self._said + piece)[-4096:]
        return False

    def _marked(self, stream: Stream, mark: Mark, command: _Command | None) -> bool:
        words = mark.payload.decode(errors="surrogateescape").split(" ", 1)
        if mark.token == self.state.life:
            if words[0] == "exit":
                self._exit_code = int(words[1])
            return True
        if mark.token == self._hello:
            self.state = replace(self.state, pid=words[0])
            self._ready.set()
        elif mark.token == self._echo:
            self._echoed.set()
        elif command is not None and mark.token == command.begin:
            command.begun.add(stream)
            if stream == "stdout":
                command.since = _ticks_before(words[0].split()[0]) if words[0].split() else "0"
                command.jobs = " ".join(
                    word for word in mark.payload.decode(errors="replace").split() if word.isdigit()
                )
            if len(command.begun) == 2:
                command.started.set()
                self._send_report(command)
        elif command is not None and mark.token == command.end:
            command.ended.add(stream)
            if stream == "stdout":
                command.exit_code, command.cwd = int(words[0]), words[1]
            if len(command.ended) == 2:
                command.done.set()
        return False

    def _send_report(self, command: _Command) -> None:
        with contextlib.suppress(OSError):  # the shell has ended already: the streams will say so
            self._channel.send(_REPORT.replace("{token}", command.end).encode())


def _ticks_before(uptime: str) -> str:
    """When a command begins, in hundredths of a second, as /proc/*/stat tells the start of a process. A little earlier:
    gVisor rounds the uptime to the nearest, and the start of a process down."""
    seconds, _, hundredths = uptime.partition(".")
    return str(max(int(seconds + hundredths) - 2, 0))


def _read_some(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, PIECE_BYTES)
    except OSError:
        return b""


def _quoted(data: bytes) -> bytes:
    """For a shell, whatever the bytes: within single quotes nothing but the quote itself has a meaning."""
    return b"'" + data.replace(b"'", b"'\\''") + b"'"
