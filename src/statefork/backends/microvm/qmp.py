"""QEMU's monitor: one command, one answer; events are skipped."""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import threading
import time
from typing import Any

from statefork.errors import KernelError, SessionDead

__all__ = ["Monitor"]

_TIMEOUT = 60.0


class Monitor:
    """Calls from several threads take turns."""

    def __init__(self, connection: socket.socket, what: str, timeout: float) -> None:
        """Raises TimeoutError if nobody answers in time."""
        self._connection = connection
        self._what = what
        self._rest = b""
        self._lock = threading.Lock()
        try:
            self._message(time.monotonic() + timeout)  # the greeting
            self.call("qmp_capabilities")
        except BaseException:
            connection.close()
            raise

    def call(self, command: str, timeout: float = _TIMEOUT, /, **arguments: Any) -> Any:
        """What the command returned. Raises KernelError with QEMU's words, SessionDead if QEMU is gone."""
        request = json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n"
        deadline = time.monotonic() + timeout
        with self._lock:
            try:
                self._connection.sendall(request)
                while True:
                    message = self._message(deadline)
                    if "return" in message:
                        return message["return"]
                    if "error" in message:
                        raise KernelError(f"{self._what}: QEMU refused {command}: {message['error']['desc']}")
            except TimeoutError as error:
                raise KernelError(f"{self._what}: QEMU did not answer {command} within {timeout:g} s") from error
            except OSError as error:
                raise SessionDead(f"{self._what}: QEMU is gone: {error.strerror or error}") from error

    def _message(self, deadline: float) -> dict[str, Any]:
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(errno.ETIMEDOUT, "no answer in time")
            self._connection.settimeout(left)
            piece = self._connection.recv(1 << 16)
            if not piece:
                raise SessionDead(f"{self._what}: QEMU has ended")
            self._rest += piece
        line, self._rest = self._rest.split(b"\n", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.close()
