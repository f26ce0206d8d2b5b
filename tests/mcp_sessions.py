"""`statefork mcp` as a program, and the SDK's own client over either transport."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

PROGRAM = ["-c", "from statefork.cli.main import main; main()"]


@dataclass(slots=True)
class Tools:
    """Calls tools, and wants to know whether they may fail."""

    client: Client

    async def __call__(self, tool: str, **arguments: Any) -> dict[str, Any]:
        answer = await self.client.call_tool(tool, arguments)
        assert not answer.is_error, f"{tool}: {answer.content[0].text}"
        assert answer.structured_content is not None and answer.content[0].type == "text"
        return answer.structured_content

    async def text(self, tool: str, **arguments: Any) -> str:
        return (await self.client.call_tool(tool, arguments)).content[0].text

    async def error(self, tool: str, **arguments: Any) -> str:
        answer = await self.client.call_tool(tool, arguments)
        assert answer.is_error, f"{tool} did not fail: {answer.content[0].text}"
        return answer.content[0].text


@dataclass(frozen=True, slots=True)
class Place:
    """A state directory, and the store of the test run."""

    home: Path
    store: Path

    @property
    def variables(self) -> dict[str, str]:
        return {"STATEFORK_HOME": str(self.home), "WAYPOINT_HOME": str(self.store)}

    def statefork(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *PROGRAM, *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, **self.variables},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    @asynccontextmanager
    async def stdio(self, **more: Any) -> AsyncIterator[Tools]:
        parameters = StdioServerParameters(command=sys.executable, args=[*PROGRAM, "mcp"], env=self.variables)
        async with Client(parameters, **more) as client:
            yield Tools(client)

    @contextmanager
    def http(self) -> Iterator[str]:
        """The address of a server over HTTP."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        command = [sys.executable, *PROGRAM, "mcp", "--http", f"127.0.0.1:{port}"]
        server = subprocess.Popen(command, env={**os.environ, **self.variables})
        try:
            deadline = time.monotonic() + 60
            while True:
                try:
                    httpx.get(f"http://127.0.0.1:{port}/mcp", trust_env=False)
                    break
                except httpx.ConnectError:
                    assert server.poll() is None and time.monotonic() < deadline, "the server did not start"
                    time.sleep(0.05)
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            server.terminate()
            server.wait(30)


@asynccontextmanager
async def over_http(url: str, token: str, **more: Any) -> AsyncIterator[Tools]:
    headers = {"Authorization": f"Bearer {token}"}
    async with httpx2.AsyncClient(headers=headers, timeout=60, trust_env=False) as http:
        async with Client(streamable_http_client(url, http_client=http), **more) as client:
            yield Tools(client)
