"""The audit log: one JSON line per thing done, each carrying the hash of the line before and its own.

    audit.jsonl    the lines; opened for appending only
    audit.head     number and hash of the last line, and the log's size after it; locked (flock) while a line is added
    audit.key      makes digests of commands useless to whoever has the log without it

A line is written first, then the head. So after kill -9 the log may be ahead of the head, by a whole line or a torn one; it
is never behind. Whoever writes next (or opens the log) puts that right: whole lines that fit are taken in, a torn one is cut
off and a line says so. A log that is *behind* its head has lost lines, and then the next line follows the head, not the
last line that is left: `verify` finds the gap for ever after.

Durability: a line is in the kernel's hands before the answer that it tells of is complete, so the daemon's death loses none.
`fdatasync` runs once a second while there is something new, and at once for what changes tokens: a power cut can cost the last second.

Whoever is root can write the log anew from any line on. `verify` prints the last hash: keep it elsewhere, and compare with
`--head`.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from statefork.errors import StoreError
from statefork.server.guard.redact import redacted

__all__ = ["GENESIS", "HEAD_MISSING", "AuditLog", "Head", "canonical", "line_hash", "parse_head"]

GENESIS = "0" * 64
HEAD_MISSING = "audit.head_missing"
_HEAD_BYTES = 108
TEXT_LIMIT = 256


@dataclass(frozen=True, slots=True)
class Head:
    """The last line: its number, its hash, and where the log ends after it."""

    seq: int = 0
    hash: str = GENESIS
    size: int = 0

    def encode(self) -> bytes:
        """Always as long, so that it is overwritten whole."""
        return f"{self.seq:020d} {self.hash} {self.size:020d}".encode().ljust(_HEAD_BYTES - 1) + b"\n"


def parse_head(data: bytes) -> Head | None:
    """None if there is none; raises ValueError for one that is damaged."""
    if not data:
        return None
    seq, digest, size = data.decode("ascii").split()
    if len(digest) != 64:
        raise ValueError("not a hash")
    return Head(int(seq), digest, int(size))


def line_hash(record: Mapping[str, Any]) -> str:
    """Over everything in the line but the hash itself."""
    rest = {name: value for name, value in record.items() if name != "hash"}
    return hashlib.sha256(canonical(rest)).hexdigest()


class AuditLog:
    """Append to the log of a directory; several threads and processes may."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "audit.jsonl"
        self._lock = threading.Lock()
        self._unsynced = threading.Event()
        self._closing = threading.Event()
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._log = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._head = os.open(directory / "audit.head", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._key = _key(directory / "audit.key")
        except OSError as error:
            raise StoreError(f"cannot open the audit log in {directory}: {error}") from error
        self._syncer = threading.Thread(target=self._sync_always, name="statefork-audit", daemon=True)
        with self._locked():
            self._recovered()
        self._syncer.start()

    def append(
        self,
        *,
        action: str,
        principal: str,
        name: str,
        outcome: str,
        environment: str | None = None,
        request_id: str = "",
        status: int | None = None,
        duration_ms: float | None = None,
        durable: bool = False,
        facts: Mapping[str, Any] | None = None,
    ) -> Head:
        """Add a line. Whatever looks like a token is blotted out, and long text is cut: facts are not for contents."""
        record: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="microseconds"),
            "principal": principal,
            "name": redacted(name),
            "action": action,
            "environment": redacted(environment) if environment else None,
            "outcome": outcome,
            "request_id": request_id,
        }
        if status is not None:
            record["status"] = status
        if duration_ms is not None:
            record["duration_ms"] = round(duration_ms, 3)
        if facts:
            record["facts"] = _plain(facts)
        with self._locked():
            head = self._written(record, self._recovered())
            if durable:
                os.fdatasync(self._log)
        if not durable:
            self._unsynced.set()
        return head

    def fingerprint(self, secret: str | bytes) -> dict[str, Any]:
        """Stands for a command: tells whether two were the same, and how long; the key keeps short ones from being guessed."""
        data = secret.encode("utf-8", "surrogateescape") if isinstance(secret, str) else secret
        return {"digest": hmac.new(self._key, data, hashlib.sha256).hexdigest()[:32], "bytes": len(data)}

    def close(self) -> None:
        self._closing.set()
        self._unsynced.set()
        self._syncer.join()
        with self._lock:
            os.fdatasync(self._log)
            os.close(self._log)
            os.close(self._head)

    # -- inside -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """A thread lock too: flock knows only open files, and our threads share one."""
        with self._lock:
            try:
                fcntl.flock(self._head, fcntl.LOCK_EX)
                try:
                    yield
                finally:
                    fcntl.flock(self._head, fcntl.LOCK_UN)
            except OSError as error:
                raise StoreError(f"cannot write the audit log {self.path}: {error}; free some space?") from error

    def _recovered(self) -> Head:
        """Where the next line goes; first puts right what a writer that was killed left."""
        try:
            known = parse_head(os.pread(self._head, _HEAD_BYTES, 0))
        except ValueError as error:
            raise StoreError(
                f"{self.path.with_suffix('.head')} is damaged ({error}): look with `statefork audit verify`, "
                "then move the log and its head away together to begin a new one"
            ) from error
        size = os.fstat(self._log).st_size
        head = known or Head()
        if size == head.size:
            return head
        if size < head.size:  # lines are gone; what follows links to the head, and so shows it
            facts = {"expected_bytes": head.size, "found_bytes": size}
            return self._written(_own("audit.lines_missing", facts), Head(head.seq, head.hash, size))
        return self._caught_up(head, os.pread(self._log, size - head.size, head.size), size, known is None)

    def _caught_up(self, head: Head, ahead: bytes, size: int, headless: bool) -> Head:
        """Take in whole lines that the head does not know yet, and cut off a torn one."""
        *whole, torn = ahead.split(b"\n")
        for line in whole:
            found = _fitting(line, head)
            if found is None:  # not ours: leave it where it is, for `verify` to find
                return self._written(_own("audit.foreign_lines", {}), Head(head.seq, head.hash, size))
            head = found
        self._note(head)
        if torn:
            os.ftruncate(self._log, head.size)
            facts = {"torn_bytes": len(torn), "torn_sha256": hashlib.sha256(torn).hexdigest()}
            head = self._written(_own("audit.torn_line_removed", facts), head)
        return self._written(_own(HEAD_MISSING, {}), head) if headless and head.seq else head

    def _written(self, record: dict[str, Any], head: Head) -> Head:
        chained = {"seq": head.seq + 1, **record, "prev": head.hash}
        digest = line_hash(chained)
        line = canonical({**chained, "hash": digest}) + b"\n"
        if head.size and os.pread(self._log, 1, head.size - 1) != b"\n":
            line = b"\n" + line  # somebody cut into the line before
        done = os.write(self._log, line)
        if done != len(line):  # a full disk: no half line stays
            os.ftruncate(self._log, head.size)
            raise OSError(f"only {done} of {len(line)} bytes were written")
        after = Head(head.seq + 1, digest, head.size + len(line))
        self._note(after)
        return after

    def _note(self, head: Head) -> None:
        os.pwrite(self._head, head.encode(), 0)

    def _sync_always(self) -> None:
        while not self._closing.wait(1.0):
            if self._unsynced.is_set():
                self._unsynced.clear()
                os.fdatasync(self._log)


def _fitting(line: bytes, head: Head) -> Head | None:
    try:
        record = json.loads(line)
        fits = record["seq"] == head.seq + 1 and record["prev"] == head.hash and record["hash"] == line_hash(record)
    except (ValueError, KeyError, TypeError):
        return None
    return Head(record["seq"], record["hash"], head.size + len(line) + 1) if fits else None


def _own(action: str, facts: dict[str, Any]) -> dict[str, Any]:
    now = datetime.now(UTC).isoformat(timespec="microseconds")
    return {"time": now, "principal": "daemon", "name": "daemon", "action": action, "outcome": "ok", "facts": facts}


def _plain(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {str(name): _value(value) for name, value in facts.items()}


def _value(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return _plain(value)
    if isinstance(value, list | tuple | set | frozenset):
        return [_value(one) for one in list(value)[:32]]
    text = redacted(str(value))
    return text if len(text) <= TEXT_LIMIT else f"{text[:TEXT_LIMIT]}… ({len(text)} characters)"


def canonical(record: Mapping[str, Any]) -> bytes:
    """The one way in which a record is written; members stay in their order."""
    return json.dumps(record, separators=(",", ":"), ensure_ascii=True).encode()


def _key(path: Path) -> bytes:
    """Made once; a second process that comes first at the same time wins."""
    while True:
        try:
            found = path.read_bytes()
            if len(found) == 32:
                return found
        except FileNotFoundError:
            pass
        draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.write(descriptor, secrets.token_bytes(32))
        os.fsync(descriptor)
        os.close(descriptor)
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            draft.unlink()
