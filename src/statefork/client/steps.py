"""What a verb of the client is made of, before anybody has decided how to wait for it.

A verb is a generator: it yields steps (a Request, a command to Follow, or Work that would block), is sent what came of each,
and returns its value. `transport.py` runs verbs twice, blocking and awaiting; so each is written once.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import IO, Any, TypeVar

from statefork.model import OUTPUT_LIMIT_BYTES, OnOutput

__all__ = ["Answer", "Call", "Follow", "Request", "Work"]

T = TypeVar("T")


def _new_key() -> str:
    return secrets.token_hex(16)


@dataclass(frozen=True, slots=True)
class Request:
    """One request. With `once` it carries an idempotency key: however often it is sent, it is done once."""

    method: str
    path: str
    query: Mapping[str, str | int | float | list[str]] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None
    content: bytes | IO[bytes] | None = None
    """Instead of `body`; a file is sent from its beginning, each time."""
    sink: IO[bytes] | None = None
    """Where the answer's body goes, if it may be large."""
    once: bool = False
    events: bool = False
    key: str = field(default_factory=_new_key)

    @property
    def repeatable(self) -> bool:
        """Whether to send it again is safe when it is not known what came of the first."""
        return self.once or self.method in ("GET", "PUT", "DELETE", "PATCH")

    def headers(self) -> dict[str, str]:
        found = {"Accept": "text/event-stream" if self.events else "*/*"}
        if self.once:
            found["Idempotency-Key"] = self.key
        if self.body is not None:
            found["Content-Type"] = "application/json"
        return found

    def payload(self) -> bytes | IO[bytes] | None:
        return json.dumps(self.body).encode() if self.body is not None else self.content


@dataclass(frozen=True, slots=True)
class Follow:
    """A command, to its end; an ExecResult comes of it."""

    first: Request
    """Starts it, or finds it."""
    commands: str
    """The path below which it is found again when the connection breaks."""
    on_output: OnOutput | None = None
    output_limit_bytes: int = OUTPUT_LIMIT_BYTES


@dataclass(frozen=True, slots=True)
class Work:
    """Packing and unpacking: it blocks, and must not hold up an event loop."""

    call: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


Call = Generator[Request | Follow | Work, Any, T]
"""A verb that returns T."""
