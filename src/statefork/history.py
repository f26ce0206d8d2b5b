"""What was done, when, how long it took and what it stored: one record per operation, one clock for every backend."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, overload

from statefork.counted import Bytes, Counted

__all__ = ["History", "Operation", "OperationStats", "Stats"]


@dataclass(frozen=True)
class Operation:
    """One call. `duration_ms` runs until the environment has answered, not until a tool has returned."""

    number: int
    operation: str
    environment: str
    backend: str
    started_at: datetime
    duration_ms: float
    error: str | None
    """The error's code; None if it went well."""
    snapshot: str | None = None
    files_bytes: Counted = Counted()
    memory_bytes: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        row = asdict(self)
        row["started_at"] = self.started_at.isoformat()
        return json.dumps(row)


@dataclass(frozen=True, slots=True)
class OperationStats:
    count: int
    errors: int
    total_ms: float
    min_ms: float
    mean_ms: float
    max_ms: float
    files_bytes: int = 0
    memory_bytes: int = 0
    """What they stored, all together; some of it may have been removed since."""


@dataclass(frozen=True, slots=True)
class Stats:
    """Time by kind of operation, and what the snapshot tree holds on to at present."""

    operations: Mapping[str, OperationStats]
    snapshots: int
    environments: int
    """Live ones that share the tree."""
    files_bytes: int
    memory_bytes: int

    @property
    def storage_bytes(self) -> int:
        return self.files_bytes + self.memory_bytes


class History(Sequence[Operation]):
    """The operations of one environment, oldest first; safe to read while other threads add to it."""

    def __init__(self, environment: str, backend: str, *, most: int | None = None) -> None:
        """`most`: keep only that many, the newest; an environment that lives for weeks must not grow."""
        self._environment = environment
        self._backend = backend
        self._operations: deque[Operation] = deque(maxlen=most)
        self._count = 0
        self._lock = threading.Lock()

    @classmethod
    def of(cls, environment: str, backend: str, operations: Iterable[Operation]) -> History:
        """Records that were kept elsewhere."""
        history = cls(environment, backend)
        history._operations.extend(operations)
        history._count = history._operations[-1].number if history._operations else 0
        return history

    def add(
        self,
        operation: str,
        *,
        started_at: datetime,
        duration_ms: float,
        error: str | None = None,
        snapshot: str | None = None,
        files_bytes: Bytes = 0,
        memory_bytes: int = 0,
        details: Mapping[str, Any] | None = None,
    ) -> Operation:
        with self._lock:
            self._count += 1
            record = Operation(
                number=self._count,
                operation=operation,
                environment=self._environment,
                backend=self._backend,
                started_at=started_at.astimezone(UTC),
                duration_ms=duration_ms,
                error=error,
                snapshot=snapshot,
                files_bytes=files_bytes,
                memory_bytes=memory_bytes,
                details=dict(details or {}),
            )
            self._operations.append(record)
            return record

    def __len__(self) -> int:
        return len(self._operations)

    @overload
    def __getitem__(self, index: int) -> Operation: ...
    @overload
    def __getitem__(self, index: slice) -> list[Operation]: ...
    def __getitem__(self, index: int | slice) -> Operation | list[Operation]:
        if isinstance(index, slice):
            return list(self)[index]
        return self._operations[index]

    def __iter__(self) -> Iterator[Operation]:
        with self._lock:
            return iter(tuple(self._operations))

    def to_jsonl(self) -> str:
        return "".join(record.to_json() + "\n" for record in self)

    def export(self, path: Path | str) -> None:
        """Write JSON lines, one operation each."""
        Path(path).write_text(self.to_jsonl())

    def summary(self) -> dict[str, OperationStats]:
        grouped: dict[str, list[Operation]] = {}
        for record in self:
            grouped.setdefault(record.operation, []).append(record)
        return {operation: _summarise(records) for operation, records in grouped.items()}


def _summarise(records: Sequence[Operation]) -> OperationStats:
    times = [record.duration_ms for record in records]
    return OperationStats(
        count=len(records),
        errors=sum(record.error is not None for record in records),
        total_ms=sum(times),
        min_ms=min(times),
        mean_ms=sum(times) / len(times),
        max_ms=max(times),
        files_bytes=sum(record.files_bytes for record in records),
        memory_bytes=sum(record.memory_bytes for record in records),
    )
