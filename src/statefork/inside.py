"""What is done inside a live environment: commands, terminals, files. The half of Environment that changes no state of it."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from statefork.arguments import bytes_or_none, command_bytes, seconds
from statefork.counted import Bytes
from statefork.driver import Live, Terminal
from statefork.errors import Busy, ExecTimeout, UsageError
from statefork.family import Standing
from statefork.model import OUTPUT_LIMIT_BYTES, ExecRequest, ExecResult, FileInfo, OnOutput, RunRequest, Usage
from statefork.streaming import ExecStream

__all__ = ["Draft", "Inside"]


@dataclass(slots=True)
class Draft:
    """What an operation has to add to its history record."""

    snapshot: str | None = None
    files_bytes: Bytes = 0
    memory_bytes: int = 0
    details: dict[str, Any] = field(default_factory=dict)


class Inside(ABC):
    """Needs the rest of an Environment around it."""

    id: str
    _standing: Standing | None
    _shell_anew: bool
    _shell_lock: threading.Lock

    @property
    @abstractmethod
    def state(self) -> str: ...
    @abstractmethod
    def _live(self, what: str) -> Live: ...
    @abstractmethod
    def _recorded(self, operation: str) -> AbstractContextManager[Draft]: ...
    @abstractmethod
    def _tell(self) -> None: ...

    # -- commands -----------------------------------------------------------------------------------------------------

    def exec_command(
        self,
        command: str | bytes,
        *,
        timeout: float | None = None,
        stdin: bytes | str | IO[bytes] | None = None,
        on_output: OnOutput | None = None,
        on_start: Callable[[int], None] | None = None,
        output_limit_bytes: int = OUTPUT_LIMIT_BYTES,
        wait: bool = True,
    ) -> ExecResult:
        """Evaluate a command in the persistent shell: `cd`, `export`, functions and jobs stay for the next one.

        Raises ExecTimeout (with the partial result) when it had to be ended, and Busy if another command is running and
        `wait` is False.
        """
        request = ExecRequest(
            command_bytes(command), seconds(timeout), bytes_or_none(stdin), on_output, output_limit_bytes, on_start
        )
        if not self._shell_lock.acquire(blocking=wait):
            raise Busy(f"environment {self.id} is running another command; try again or pass wait=True")
        try:
            with self._recorded("exec") as draft:
                live = self._live("run a command")
                result = self._timed(lambda: live.exec(request))
                anew, self._shell_anew = self._shell_anew, False
                if anew:
                    self._tell()
                draft.details["exit_code"] = result.exit_code
                return replace(result, shell_restarted=result.shell_restarted or anew)
        finally:
            self._shell_lock.release()

    def stream_command(
        self, command: str | bytes, *, timeout: float | None = None, stdin: bytes | str | None = None
    ) -> ExecStream:
        """Iterate over `(stream, bytes)` as the command prints and then ask `.result`. Raises like `exec_command`."""
        return ExecStream(
            lambda on_output: self.exec_command(command, timeout=timeout, stdin=stdin, on_output=on_output)
        )

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float | None = None,
        stdin: bytes | str | IO[bytes] | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        on_output: OnOutput | None = None,
        on_start: Callable[[int], None] | None = None,
        output_limit_bytes: int = OUTPUT_LIMIT_BYTES,
    ) -> ExecResult:
        """Run a program beside the shell: no quoting, no shared state, several at once."""
        if isinstance(argv, str | bytes) or not argv:
            raise UsageError('run takes a list, such as ["ls", "-l"]; for a command line use exec_command')
        request = RunRequest(
            tuple(argv),
            seconds(timeout),
            bytes_or_none(stdin),
            cwd,
            dict(env or {}),
            on_output,
            output_limit_bytes,
            on_start,
        )
        with self._recorded("run") as draft:
            live = self._live("run a program")
            result = self._timed(lambda: live.run(request))
            draft.details["exit_code"] = result.exit_code
            return result

    def follow_command(
        self,
        number: int,
        *,
        seen: tuple[int, int] = (0, 0),
        timeout: float | None = None,
        stdin: IO[bytes] | None = None,
        on_output: OnOutput | None = None,
        output_limit_bytes: int = OUTPUT_LIMIT_BYTES,
    ) -> ExecResult:
        """Go on with a command that somebody started, by the number that `on_start` was told; raises like `exec_command`.

        `seen` bytes of stdout and stderr are not told again. Raises: Unsupported, NotFound if it is not known any more.
        """
        request = ExecRequest(b"", seconds(timeout), stdin, on_output, output_limit_bytes)
        with self._recorded("follow"):
            live = self._live("follow a command")
            return self._timed(lambda: live.follow(number, seen, request))

    def running_command(self) -> int | None:
        """The number of the command that runs in the shell, whoever started it; None: none, or the backend can't tell."""
        return self._live("look at the shell").running()

    def signal_command(self, signal: int, number: int | None = None) -> None:
        """Send a signal to a running command, by default the one in the shell."""
        with self._recorded("signal"):
            self._live("send a signal").signal(signal, number)

    def resize(self, rows: int, columns: int) -> None:
        """Set the size of the shell's terminal."""
        self._live("resize the terminal").resize(rows, columns)

    def terminal(self, rows: int = 24, columns: int = 80) -> Terminal:
        """A terminal on it, as `waypoint shell` is one."""
        with self._recorded("terminal"):
            return self._live("open a terminal").terminal(rows, columns)

    def usage(self) -> Usage | None:
        """CPU time since it came up and memory now; None if the backend cannot tell, or nothing is live."""
        standing = self._standing
        return standing.live.usage() if standing is not None and self.state == "live" else None

    # -- files --------------------------------------------------------------------------------------------------------

    def read_file(self, path: str, *, limit_bytes: int | None = None) -> bytes:
        with self._recorded("read_file") as draft:
            data = self._live("read a file").read_file(path, limit_bytes)
            draft.details["bytes"] = len(data)
            return data

    def write_file(self, path: str, data: bytes | str, mode: int | None = None) -> None:
        """Make or overwrite a file; missing directories above it are made."""
        content = data.encode() if isinstance(data, str) else data
        with self._recorded("write_file") as draft:
            draft.details["bytes"] = len(content)
            self._live("write a file").write_file(path, content, mode)

    def upload(self, source: Path | str, target: str) -> None:
        """Copy a file or directory of this host to exactly the path `target`."""
        with self._recorded("upload"):
            self._live("upload").upload(Path(source), target)

    def download(self, source: str, target: Path | str) -> None:
        """Copy a file or directory out, to exactly the path `target` on this host."""
        with self._recorded("download"):
            self._live("download").download(source, Path(target))

    def list_files(self, path: str) -> list[FileInfo]:
        with self._recorded("list_files"):
            return self._live("list files").list_files(path)

    def stat_file(self, path: str, *, follow: bool = True) -> FileInfo:
        with self._recorded("stat_file"):
            return self._live("look at a file").stat_file(path, follow=follow)

    def move_file(self, source: str, target: str) -> None:
        """`target` is the new name itself."""
        with self._recorded("move_file"):
            self._live("move a file").move_file(source, target)

    def remove_file(self, path: str, *, recursive: bool = False) -> None:
        with self._recorded("remove_file"):
            self._live("remove a file").remove_file(path, recursive=recursive)

    def make_directory(self, path: str) -> None:
        """With those above it; no error if it is there."""
        with self._recorded("make_directory"):
            self._live("make a directory").make_directory(path)

    def unpack_archive(self, archive: IO[bytes], target: str) -> None:
        """Unpack a tar stream into a directory. Names that lead out of it are for the caller to refuse."""
        with self._recorded("upload"):
            self._live("upload").unpack_archive(archive, target)

    def pack_archive(self, source: str, sink: Callable[[bytes], None]) -> None:
        """A directory's contents as a tar stream, piece by piece."""
        with self._recorded("download"):
            self._live("download").pack_archive(source, sink)

    def scan_files(self, path: str, *, recursive: bool = False) -> dict[str, str]:
        """Names below a directory, each with a word that changes when the file does."""
        return self._live("watch files").scan(path, recursive=recursive)

    def _timed(self, call: Callable[[], ExecResult]) -> ExecResult:
        began = time.perf_counter()
        try:
            result = call()
        except ExecTimeout as error:
            error.result = replace(error.result, duration_ms=(time.perf_counter() - began) * 1000)
            raise
        return replace(result, duration_ms=(time.perf_counter() - began) * 1000)
