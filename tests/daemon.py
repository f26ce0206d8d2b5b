"""A real `statefork serve` for tests: its own process, its own state directory, spoken to over its socket."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, unix_connect

from waypoint.engine import Engine
from waypoint.kernel import processes

__all__ = ["Daemon", "TcpDaemon", "running", "until"]


def until(condition: Callable[[], Any], seconds: float = 30, what: str = "") -> Any:
    """The first true value; busy machines get their time."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {seconds} s: {what or condition}"
        time.sleep(0.02)


class Daemon:
    def __init__(self, home: Path, *options: str, env: dict[str, str] | None = None) -> None:
        self.home = home
        self.socket = home / "s.sock"
        self.log = home / "serve.log"
        self._options, self._env = options, env or {}
        self._process: subprocess.Popen[bytes] | None = None
        self.client = httpx.Client(transport=self.transport(), base_url="http://daemon", timeout=60)

    @property
    def listening(self) -> tuple[str, ...]:
        return ("--socket", str(self.socket))

    def transport(self) -> httpx.HTTPTransport:
        return httpx.HTTPTransport(uds=str(self.socket), limits=httpx.Limits(max_connections=None))

    def start(self) -> None:
        env = {**os.environ, "STATEFORK_HOME": str(self.home), **self._env}
        env.pop("WAYPOINT_HOME", None)
        self.home.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            argv = [sys.executable, "-m", "statefork.cli.main", "serve", *self.listening, *self._options]
            argv[1:3] = ["-c", "from statefork.cli.main import main; main()"]
            self._process = subprocess.Popen(argv, env=env, stdout=log, stderr=log)
        until(self._ready, 60, "the daemon's readiness")

    def _ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log.read_text()[-4000:]
        try:
            return self.client.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """-9: it has no time for anything."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(30)
        self._talk_anew()

    def stop(self) -> int:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(60)
        self._talk_anew()
        return code

    def _talk_anew(self) -> None:
        self.client.close()
        self.client = httpx.Client(transport=self.transport(), base_url="http://daemon", timeout=60)

    # -- short words --------------------------------------------------------------------------------------------------

    def call(self, method: str, path: str, expect: int = 200, **more: Any) -> Any:
        answer = self.client.request(method, path, **more)
        assert answer.status_code == expect, f"{method} {path}: {answer.status_code} {answer.text[:1000]}"
        if (
            answer.headers.get("content-type", "").startswith("application/")
            and "json" in answer.headers["content-type"]
        ):
            return answer.json()
        return answer.content

    def create(self, **body: Any) -> str:
        made: str = self.call("POST", "/v1/environments", 201, json=body)["id"]
        return made

    def exec(self, environment: str, command: str, expect: int = 200, **more: Any) -> Any:
        return self.call("POST", f"/v1/environments/{environment}/exec", expect, json={"command": command, **more})

    def snapshot(self, environment: str, **body: Any) -> str:
        taken: str = self.call("POST", f"/v1/environments/{environment}/snapshots", 201, json=body)["id"]
        return taken

    def delete(self, environment: str) -> None:
        self.call("DELETE", f"/v1/environments/{environment}", 204)

    def state(self, environment: str) -> str:
        found: str = self.call("GET", f"/v1/environments/{environment}")["state"]
        return found

    def listed(self) -> dict[str, Any]:
        return {one["id"]: one for one in self.call("GET", "/v1/environments?limit=1000")["items"]}

    def websocket(self, path: str) -> ClientConnection:
        return unix_connect(str(self.socket), f"ws://daemon{path}", max_size=None)

    def leftovers(self) -> list[str]:
        """Sessions, processes and trees that are still there."""
        store = self.home / "waypoint"
        found = [str(path) for path in (self.home / "trees").glob("*")]
        if (store / "store.db").exists():
            with Engine(store) as engine:
                found += [f"session {record.id}" for record in engine.store.db.sessions()]
                found += [f"snapshot {record.id}" for record in engine.snapshots()]
                found += [f"process {init.pid}" for init in processes.inits(engine.store.tag)]
        return found


class TcpDaemon(Daemon):
    """On a free port of the loopback, with a token: for clients that speak nothing else."""

    def __init__(self, home: Path, *options: str, env: dict[str, str] | None = None) -> None:
        super().__init__(home, *options, env=env)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.token = self.make_token("admin")
        self._talk_anew()

    @property
    def listening(self) -> tuple[str, ...]:
        return ("--host", "127.0.0.1", "--port", str(self.port))

    def make_token(self, scope: str) -> str:
        argv = [
            sys.executable,
            "-c",
            "from statefork.cli.main import main; main()",
            "token",
            "create",
            "--scope",
            scope,
        ]
        env = {**os.environ, "STATEFORK_HOME": str(self.home)}
        return subprocess.run(argv, env=env, check=True, capture_output=True, text=True, timeout=60).stdout.strip()

    def _talk_anew(self) -> None:
        self.client.close()
        self.client = httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {self.token}"}, timeout=60)


@contextmanager
def running(
    home: Path, *options: str, env: dict[str, str] | None = None, expected: str = "\0", tcp: bool = False
) -> Iterator[Any]:
    """Everything is deleted at the end, and nothing may be left behind. `expected`: in the errors that the test provokes."""
    daemon = (TcpDaemon if tcp else Daemon)(home, *options, env=env)
    daemon.start()
    try:
        yield daemon
    finally:
        try:
            for pool in daemon.call("GET", "/v1/pools")["items"]:
                daemon.call("DELETE", f"/v1/pools/{pool['name']}", 204)
            for snapshot in daemon.call("GET", "/v1/snapshots?limit=1000")["items"]:
                if snapshot["pinned"]:
                    daemon.call("PATCH", f"/v1/snapshots/{snapshot['id']}", json={"pinned": False})
            for environment in daemon.listed():
                daemon.delete(environment)
        finally:
            code = daemon.stop()
    assert code == 0, daemon.log.read_text()[-4000:]
    left = daemon.leftovers()
    assert not left, f"left behind: {left}"
    # uvicorn says that of every WebSocket that is refused with a response
    harmless = ("without completing handshake", expected)
    errors = [line for line in daemon.log.read_text().splitlines() if '"level": "error"' in line]
    lines = [line for line in errors if not any(text in line for text in harmless)]
    assert not lines, "\n".join(lines)[-6000:]
