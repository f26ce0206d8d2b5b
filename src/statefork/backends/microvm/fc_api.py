"""Firecracker's API: JSON over HTTP over a unix socket, as its `firecracker.yaml` describes it."""

from __future__ import annotations

import http.client
import json
import socket
import time
from pathlib import Path
from typing import Any

from statefork.backends.microvm.vmm import connected_socket
from statefork.errors import DiskFull, KernelError, SessionDead

__all__ = ["Api"]

_TIMEOUT = 120.0


class _Connection(http.client.HTTPConnection):
    def __init__(self, directory: Path, name: str) -> None:
        super().__init__("localhost", timeout=_TIMEOUT)
        self._directory, self._name = directory, name

    def connect(self) -> None:
        self.sock: socket.socket = connected_socket(self._directory, self._name)
        self.sock.settimeout(_TIMEOUT)


class Api:
    """One request, one connection: Firecracker answers them in turn."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory, self._name = directory, name

    def wait(self, alive: Any, timeout: float) -> None:
        """Until it answers. `alive` tells whether it is worth waiting."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                self.get("/")
                return
            except SessionDead:
                if time.monotonic() > deadline or not alive():
                    raise
            time.sleep(0.002)

    def get(self, path: str) -> Any:
        return self._request("GET", path, None)

    def put(self, path: str, **body: Any) -> None:
        self._request("PUT", path, body)

    def patch(self, path: str, **body: Any) -> None:
        self._request("PATCH", path, body)

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        connection = _Connection(self._directory, self._name)
        try:
            text = None if body is None else json.dumps(body)
            headers = {"Accept": "application/json", "Content-Type": "application/json"}
            connection.request(method, path, text, headers)
            answer = connection.getresponse()
            said = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise SessionDead(f"machine {self._directory.name}: Firecracker does not answer {path}: {error}") from error
        finally:
            connection.close()
        if answer.status < 300:
            return json.loads(said) if said else None
        try:
            words = json.loads(said).get("fault_message", "")
        except ValueError:
            words = said.decode(errors="replace")
        what = f"machine {self._directory.name}: Firecracker refused {method} {path}: {words or answer.reason}"
        raise DiskFull(what) if "No space left on device" in words else KernelError(what)
