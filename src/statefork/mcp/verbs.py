"""The daemon's REST API, as far as the tools need it. The one place that knows its paths."""

from __future__ import annotations

import base64
import secrets
from typing import Any
from urllib.parse import quote

import httpx

from statefork.errors import WaypointError
from statefork.mcp.daemon import Daemon

__all__ = ["Remote", "RemoteError"]

_OUTPUT_BYTES = 4 << 20
"""Of each stream: what read_output can page through."""


class RemoteError(WaypointError):
    """A problem that the daemon told of; `code` is its word for it."""

    def __init__(self, code: str, message: str, **details: Any) -> None:
        super().__init__(message, **details)
        self.code = code


class Remote:
    """The verbs, for one caller."""

    def __init__(self, daemon: Daemon, token: str | None) -> None:
        self._daemon, self._token = daemon, token

    # -- environments -------------------------------------------------------------------------------------------------

    async def create(self, body: dict[str, Any]) -> dict[str, Any]:
        return await self._json("POST", "/v1/environments", json=body, once=True)

    async def environments(self, limit: int, cursor: str | None) -> dict[str, Any]:
        params = {"limit": str(limit), **({"cursor": cursor} if cursor else {})}
        return await self._json("GET", "/v1/environments", params=params)

    async def environment(self, environment: str) -> dict[str, Any]:
        return await self._json("GET", _of(environment))

    async def destroy(self, environment: str) -> None:
        await self._sent("DELETE", _of(environment))

    async def pause(self, environment: str) -> dict[str, Any]:
        return await self._json("POST", _of(environment, "pause"))

    async def resume(self, environment: str) -> dict[str, Any]:
        return await self._json("POST", _of(environment, "resume"))

    async def fork(self, environment: str, body: dict[str, Any]) -> dict[str, Any]:
        return await self._json("POST", _of(environment, "fork"), json=body, once=True)

    # -- commands -----------------------------------------------------------------------------------------------------

    async def exec(self, environment: str, command: str, *, timeout: float, stdin: str | None = None) -> dict[str, Any]:
        """The result, also of a command that had to be ended."""
        body = {"command": command, "timeout": timeout, "output_limit_bytes": _OUTPUT_BYTES}
        if stdin is not None:
            body["stdin"] = stdin
        try:
            return await self._json("POST", _of(environment, "exec"), json=body)
        except RemoteError as error:
            if error.code == "timeout" and isinstance(error.details.get("result"), dict):
                return dict(error.details["result"], timed_out=True)
            raise

    async def run(self, environment: str, argv: list[str], *, timeout: float = 60) -> bytes:
        """What a small program printed."""
        body = {"argv": argv, "timeout": timeout, "encoding": "base64", "output_limit_bytes": _OUTPUT_BYTES}
        return base64.b64decode((await self._json("POST", _of(environment, "run"), json=body))["stdout"])

    # -- files --------------------------------------------------------------------------------------------------------

    async def read_file(self, environment: str, path: str) -> bytes:
        return (await self._sent("GET", _of(environment, "files/content"), params={"path": path})).content

    async def write_file(self, environment: str, path: str, data: bytes) -> None:
        await self._sent("PUT", _of(environment, "files/content"), params={"path": path}, content=data)

    async def list_files(self, environment: str, path: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await self._json("GET", _of(environment, "files"), params={"path": path}))[
            "items"
        ]
        return found

    # -- states -------------------------------------------------------------------------------------------------------

    async def snapshot(self, environment: str, body: dict[str, Any]) -> dict[str, Any]:
        return await self._json("POST", _of(environment, "snapshots"), json=body, once=True)

    async def restore(self, environment: str, snapshot: str) -> dict[str, Any]:
        return await self._json("POST", _of(environment, "restore"), json={"snapshot": snapshot})

    async def diff(self, environment: str, a: str, b: str | None) -> dict[str, Any]:
        return await self._json("GET", _of(environment, "diff"), params={"a": a, **({"b": b} if b else {})})

    async def tree(self, environment: str) -> dict[str, Any]:
        return await self._json("GET", _of(environment, "tree"))

    # -- inside -------------------------------------------------------------------------------------------------------

    async def _json(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        found: dict[str, Any] = (await self._sent(method, path, **more)).json()
        return found

    async def _sent(self, method: str, path: str, *, once: bool = False, **more: Any) -> httpx.Response:
        """`once`: with a key, so that the daemon's next process does it only if this one had not."""
        headers = {"Idempotency-Key": secrets.token_hex(16)} if once else None
        repeatable = once or method in ("GET", "PUT")
        try:
            response = await self._daemon.request(
                method, path, token=self._token, headers=headers, repeatable=repeatable, **more
            )
        except httpx.ConnectError as error:
            raise RemoteError("kernel", f"the daemon cannot be reached ({error}); is it running?") from error
        except httpx.HTTPError as error:
            raise RemoteError(
                "kernel", f"the daemon ended during the call ({type(error).__name__}); look before you repeat it"
            ) from error
        if response.status_code < 400:
            return response
        try:
            problem = response.json()
            code, detail = problem["code"], problem["detail"]
        except (ValueError, KeyError, TypeError):
            raise RemoteError("internal", f"the daemon answered {response.status_code}") from None
        raise RemoteError(
            code, detail, **{name: value for name, value in problem.items() if name not in ("code", "detail")}
        )


def _of(environment: str, *rest: str) -> str:
    return "/".join(["/v1/environments", quote(environment, safe=""), *rest])
