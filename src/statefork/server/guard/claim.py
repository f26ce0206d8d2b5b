"""One daemon per state directory: a lock that is freed when its holder dies, whatever it dies of.

Without it a second daemon would take the socket from under the first (binding to a unix socket's path replaces it), and
both would look after the same environments.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from statefork.errors import Busy, StoreError

__all__ = ["Claim"]


class Claim:
    """Held from `Claim(directory)` until `release`. Raises Busy, with the pid of who holds it."""

    def __init__(self, directory: Path) -> None:
        path = directory / "daemon.lock"
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(
                f"cannot write to {directory}: {error.strerror}; choose another $STATEFORK_HOME"
            ) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 32, 0).decode(errors="replace").strip() or "?"
            os.close(self._descriptor)
            raise Busy(
                f"another daemon (process {holder}) looks after {directory.parent} already; "
                "use that one, stop it first, or choose another $STATEFORK_HOME",
                pid=holder,
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._descriptor)
