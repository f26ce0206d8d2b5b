"""What callers pass in, checked and brought into one form, before anything is done with it."""

from __future__ import annotations

from typing import IO

from statefork.errors import Unsupported, UsageError
from statefork.model import Capabilities, Capability, Mode

__all__ = ["bytes_or_none", "check_mode", "command_bytes", "seconds"]


def check_mode(capabilities: Capabilities, mode: Mode) -> None:
    if mode not in ("auto", "full", "files"):
        raise UsageError(f"snapshot mode {mode!r}: use auto, full or files")
    if mode == "full" and not capabilities.full:
        has = ", ".join(sorted(capabilities.restores))
        raise Unsupported(
            f"{capabilities.backend} cannot take a full snapshot: restore brings back {has}; use mode='auto'"
        )
    if mode == "files" and Capability.FILES not in capabilities.restores:
        raise Unsupported(f"{capabilities.backend} stores no files; use mode='auto'")


def command_bytes(command: str | bytes) -> bytes:
    data = command.encode(errors="surrogateescape") if isinstance(command, str) else command
    if b"\0" in data:
        raise UsageError("a command cannot hold a NUL byte")
    return data


def seconds(timeout: float | None) -> float | None:
    if timeout is not None and not timeout > 0:
        raise UsageError(f"timeout {timeout!r}: give seconds above zero, or None for no limit")
    return timeout


def bytes_or_none(data: bytes | str | IO[bytes] | None) -> bytes | IO[bytes] | None:
    return data.encode() if isinstance(data, str) else data
