"""Read the audit log from end to end and say what does not fit."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from statefork.errors import NotFound
from statefork.server.guard.audit import GENESIS, HEAD_MISSING, Head, canonical, line_hash, parse_head

__all__ = ["Finding", "Verdict", "verify"]

FINDINGS_LIMIT = 100


@dataclass(frozen=True, slots=True)
class Finding:
    line: int
    """Counted from 1; the line at which it shows."""
    kind: str
    """`changed`, `missing`, `damaged` or `head`."""
    message: str


@dataclass(slots=True)
class Verdict:
    lines: int = 0
    seq: int = 0
    hash: str = GENESIS
    healed: int = 0
    """Torn lines that were cut off after a crash: no finding, the log tells of each."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.findings

    def add(self, kind: str, message: str) -> None:
        if len(self.findings) < FINDINGS_LIMIT:
            self.findings.append(Finding(self.lines, kind, message))


def verify(directory: Path, *, known: tuple[int, str] | None = None) -> Verdict:
    """`known` is number and hash of a line, noted earlier and kept elsewhere: it has to be in the log, unchanged.

    May run beside a daemon that writes: the log is judged as it is when this begins. Raises NotFound if there is none.
    """
    head, problem, size = _beginning(directory)
    verdict, seen = Verdict(), False
    for raw in _lines(directory / "audit.jsonl", size):
        verdict.lines += 1
        if not raw.endswith(b"\n") and (head is None or verdict.seq >= head.seq):
            verdict.lines -= 1  # a writer was killed in the middle of it: the next one cuts it off
            break
        record = _parsed(raw)
        if record is None:
            verdict.add("damaged", "is not a line of this log")
            continue
        if canonical(record) != raw.strip(b"\n"):  # the same to a parser, but not what a reader sees: doubled members
            verdict.add("changed", f"number {record['seq']} is not written as this log writes")
        _judge(record, verdict)
        seen = seen or known == (record["seq"], record["hash"])
    if problem:
        verdict.add("head", problem)
    elif head is not None and verdict.seq < head.seq:
        verdict.add("missing", f"the log ends with line number {verdict.seq}, but {head.seq} were written")
    elif head is not None and verdict.seq == head.seq and verdict.hash != head.hash:
        verdict.add("changed", "the last line is not the one that was written")
    if known is not None and not seen:
        verdict.add(
            "changed", f"the line number {known[0]} with the hash {known[1]} is not in this log: it was written anew"
        )
    return verdict


def _judge(record: dict[str, Any], verdict: Verdict) -> None:
    seq, digest = record["seq"], record["hash"]
    if digest != line_hash(record):
        verdict.add("changed", f"number {seq} was changed after it was written")
    if seq != verdict.seq + 1:
        gone = f"{verdict.seq + 1} to {seq - 1}" if seq > verdict.seq + 1 else f"order: {seq} follows {verdict.seq}"
        verdict.add("missing", f"lines are missing before number {seq} ({gone})")
    elif record["prev"] != verdict.hash:
        verdict.add("missing", f"number {seq} does not follow the line before it: one of the two was replaced")
    if record.get("action") == HEAD_MISSING:
        verdict.add("head", "audit.head had been removed: lines before this one may be missing")
    if record.get("action") == "audit.torn_line_removed":
        verdict.healed += 1
    verdict.seq, verdict.hash = seq, digest


def _beginning(directory: Path) -> tuple[Head | None, str, int]:
    """Head and size that belong together, and what is wrong with the head."""
    try:
        log_size = (directory / "audit.jsonl").stat().st_size
    except FileNotFoundError:
        raise NotFound(f"there is no audit log in {directory}; `statefork serve` begins one") from None
    try:
        descriptor = os.open(directory / "audit.head", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None, "audit.head is gone: lines at the end may be missing" if log_size else "", log_size
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        log_size = (directory / "audit.jsonl").stat().st_size
        try:
            return parse_head(os.read(descriptor, 256)), "", log_size
        except ValueError as error:
            return None, f"audit.head is damaged: {error}", log_size
    finally:
        os.close(descriptor)


def _lines(path: Path, size: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        left = size
        while left > 0 and (line := file.readline(left)):
            left -= len(line)
            yield line


def _parsed(raw: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(raw)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("seq"), int):
        return None
    if not isinstance(record.get("hash"), str) or not isinstance(record.get("prev"), str):
        return None
    return record
