"""What a command printed: marks picked out of a byte stream, and a bounded record of the rest.

Two streams are all that a `docker exec` gives us, so what the protocol has to say travels on the same pipes as what the
command prints, as marks: NUL, a random token, a colon, a payload, NUL. A token is made for one use and handed to the
shell only after the command it follows has ended, so no command can print one. The pipe keeps the order: when an end
mark has come, everything that was written before it has come too.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from statefork.model import ExecResult, OnOutput, Stream

__all__ = ["Mark", "MarkScanner", "OutputRecord", "new_token"]


def new_token() -> str:
    return secrets.token_hex(16)


@dataclass(frozen=True, slots=True)
class Mark:
    token: str
    payload: bytes


class MarkScanner:
    """Splits a stream into plain bytes and marks. Tokens may be added and removed by another thread than feeds it."""

    def __init__(self) -> None:
        self._heads: dict[str, bytes] = {}
        self._rest = b""

    def watch(self, *tokens: str) -> None:
        self._heads = {**self._heads, **{token: b"\0" + token.encode() + b":" for token in tokens}}

    def forget(self, token: str) -> None:
        self._heads = {key: head for key, head in self._heads.items() if key != token}

    def feed(self, data: bytes) -> list[bytes | Mark]:
        """What can be told apart by now; a beginning of a mark at the end of `data` is kept for the next call."""
        heads = self._heads
        rest = self._rest + data if self._rest else data
        found: list[bytes | Mark] = []
        while True:
            starts = [(at, token) for token, head in heads.items() if (at := rest.find(head)) >= 0]
            if not starts:
                break
            at, token = min(starts)
            begin = at + len(heads[token])
            end = rest.find(b"\0", begin)
            if at:
                found.append(rest[:at])
            if end < 0:
                self._rest = rest[at:]
                return found
            found.append(Mark(token, rest[begin:end]))
            rest = rest[end + 1 :]
        keep = _undecided(heads.values(), rest)
        if len(rest) > keep:
            found.append(rest[: len(rest) - keep])
        self._rest = rest[len(rest) - keep :]
        return found


def _undecided(heads: Collection[bytes], rest: bytes) -> int:
    """How many bytes at the end may be the beginning of a mark."""
    longest = max(map(len, heads), default=1) - 1
    tail = rest[-longest:] if longest else b""
    at = tail.find(b"\0")
    while at >= 0:
        if any(head.startswith(tail[at:]) for head in heads):
            return len(tail) - at
        at = tail.find(b"\0", at + 1)
    return 0


class _Kept:
    """The head and the tail of a stream of any length, in bounded memory."""

    def __init__(self, limit_bytes: int) -> None:
        self._half = max(limit_bytes // 2, 1)
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self.dropped_bytes = 0

    def add(self, data: bytes) -> None:
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if not data:
            return
        self._tail.append(data)
        self._tail_bytes += len(data)
        while self._tail_bytes - len(self._tail[0]) >= self._half:
            gone = self._tail.popleft()
            self._tail_bytes -= len(gone)
            self.dropped_bytes += len(gone)

    def value(self) -> bytes:
        tail = b"".join(self._tail)
        dropped = self.dropped_bytes + max(len(tail) - self._half, 0)
        if not dropped:
            return bytes(self._head) + tail
        return bytes(self._head) + b"\n[... %d bytes left out ...]\n" % dropped + tail[-self._half :]

    @property
    def truncated(self) -> bool:
        return self.dropped_bytes > 0 or self._tail_bytes > self._half


class OutputRecord:
    """Collects both streams and passes each piece on. A caller's callback that raises is told at the end, once."""

    def __init__(self, limit_bytes: int, on_output: OnOutput | None) -> None:
        self._kept: dict[str, _Kept] = {key: _Kept(limit_bytes) for key in ("stdout", "stderr", "both")}
        self._on_output = on_output
        self._lock = threading.Lock()
        self.failure: Exception | None = None

    def add(self, stream: Stream, data: bytes) -> None:
        with self._lock:
            self._kept[stream].add(data)
            self._kept["both"].add(data)
            call = self._on_output
        if call is not None:
            try:
                call(stream, data)
            except Exception as error:  # noqa: BLE001  the caller's own; raised again in the caller's thread
                self.failure, self._on_output = error, None

    def result(
        self, exit_code: int, *, cwd: str = "", timed_out: bool = False, shell_restarted: bool = False
    ) -> ExecResult:
        with self._lock:
            return ExecResult(
                exit_code=exit_code,
                stdout_bytes=self._kept["stdout"].value(),
                stderr_bytes=self._kept["stderr"].value(),
                output_bytes=self._kept["both"].value(),
                cwd=cwd,
                timed_out=timed_out,
                truncated=any(kept.truncated for kept in self._kept.values()),
                shell_restarted=shell_restarted,
            )
