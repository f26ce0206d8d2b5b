"""A command's output as it comes over the network: server-sent events, gone on with after a broken connection.

Nothing here waits or connects: `streaming.py` does, once blocking and once awaiting.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx

from statefork.backends.output import OutputRecord
from statefork.client.errors import error_of
from statefork.client.parsing import exec_result
from statefork.client.patience import Patience
from statefork.client.steps import Follow, Request
from statefork.errors import WaypointError
from statefork.model import ExecResult, Stream

__all__ = ["EventReader", "Following"]


class EventReader:
    """Bytes in any pieces become events: (name, document)."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[tuple[str, Any]]:
        *blocks, self._rest = (self._rest + data).split(b"\n\n")
        for block in blocks:
            fields = dict(line.split(b": ", 1) for line in block.split(b"\n") if not line.startswith(b":"))
            if b"event" in fields:
                yield fields[b"event"].decode(), json.loads(fields[b"data"])


class Following:
    """What is known of one command: how far its output has come, and how it ended."""

    def __init__(self, step: Follow, where: str, retry_seconds: float) -> None:
        self._step = step
        self._where, self._retry_seconds = where, retry_seconds
        self._patience: Patience | None = None
        self._seen: dict[Stream, int] = {"stdout": 0, "stderr": 0}
        self._gap = False
        self._record = OutputRecord(step.output_limit_bytes, step.on_output)
        self._events = EventReader()
        self._result: ExecResult | None = None
        self._error: BaseException | None = None
        self.command: str | None = None
        """Its id, as soon as it is known."""

    @property
    def ended(self) -> bool:
        return self._result is not None or self._error is not None

    def request(self) -> Request:
        """What to open, at first and after each break."""
        self._events = EventReader()
        if self.command is None:
            return self._step.first
        query: dict[str, str | int | float | list[str]] = {
            "stdout_offset": self._seen["stdout"],
            "stderr_offset": self._seen["stderr"],
        }
        return Request("GET", f"{self._step.commands}/{self.command}/output", query=query, events=True)

    def feed(self, data: bytes) -> Iterator[tuple[Stream, bytes]]:
        for name, document in self._events.feed(data):
            if name in self._seen:
                stream: Stream = "stdout" if name == "stdout" else "stderr"
                piece = base64.b64decode(document["data"])
                self._gap = self._gap or document["offset"] > self._seen[stream]
                self._seen[stream] = document["offset"] + len(piece)
                self._patience = None
                self._record.add(stream, piece)
                yield stream, piece
            elif name == "started":
                self.command = document["command"]
            elif name == "exit":
                self._result = self._whole(document)
            elif name == "problem":
                self._error = error_of(document, self._record.result(0))

    def broke(self, error: httpx.TransportError | None, *, met: bool) -> float:
        """The connection is gone and the command has not ended: seconds to wait, or raises."""
        if self._patience is None:
            self._patience = Patience(self.request(), self._where, self._retry_seconds)
        try:
            return self._patience.after_failure(error or httpx.ReadError("the stream ended too early"), met=met)
        except WaypointError as hopeless:
            self._error = hopeless
            raise

    def failed(self, error: BaseException) -> None:
        """It could not be started, or is not known any more."""
        self._error = error

    def outcome(self) -> ExecResult:
        """When it has ended."""
        if self._error is not None:
            raise self._error
        if self._record.failure is not None:
            raise self._record.failure
        assert self._result is not None
        return self._result

    def _whole(self, document: dict[str, Any]) -> ExecResult:
        """The last event has no output: whoever followed has that."""
        kept = self._record.result(0)
        return replace(
            exec_result(document),
            stdout_bytes=kept.stdout_bytes,
            stderr_bytes=kept.stderr_bytes,
            output_bytes=kept.output_bytes,
            truncated=kept.truncated or self._gap,
        )
