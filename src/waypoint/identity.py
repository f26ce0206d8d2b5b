"""The identity file: how a program finds out that it is in another copy than a moment ago (docs/clones.md).

Written into the new upper layer before any process of it runs. Always of the same size, so that a program which holds it open can
be restored. A fresh name replaces the old one: whoever holds the old file open still reads the old identity.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from waypoint.guest.layer import PRIVATE

__all__ = ["IDENTITY", "has_identity", "write_identity"]

IDENTITY = f"/{PRIVATE}/identity"
_NAME = "identity"


def has_identity(upper: Path) -> bool:
    """It was written when the upper was made, ahead of its use."""
    return os.path.lexists(upper / PRIVATE / _NAME)


def write_identity(upper: Path) -> str:
    """128 random bits as hex digits, different in every copy; returns them."""
    directory = upper / PRIVATE
    if not directory.exists():
        directory.mkdir()
        directory.chmod(0o755)
    token = secrets.token_hex(16)
    fresh = directory / f".{_NAME}"
    fresh.unlink(missing_ok=True)
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o444)
    try:
        os.write(fd, f"{token}\n".encode())
        os.fchmod(fd, 0o444)
    finally:
        os.close(fd)
    fresh.replace(directory / _NAME)
    return token
