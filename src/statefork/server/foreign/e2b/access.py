"""Who calls: the API key is one of our tokens; a sandbox's own key (envd's access token) opens that sandbox and nothing else.

Such a key is not stored: it names the environment and the token of whoever asked for it, and carries a code over both that only
this daemon can make. It is worth what that token is worth at the moment, on that one environment.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qs

from starlette.types import Scope

from statefork.server.guard.install import Guard
from statefork.server.guard.principal import LOCAL, Principal
from statefork.server.guard.problems import Refused

__all__ = ["ENVD_PORT", "Access", "sandbox_of"]

ENVD_PORT = 49983
_KEY = re.compile(r"sfe_(e-[0-9a-f]+)_([0-9a-z]+)_([0-9a-f]{40})")
_HOST = re.compile(r"(\d+)-([A-Za-z0-9-]+)\.")


class Access:
    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        path = guard.settings.directory / "e2b.key"
        self._secret = _kept_secret(path)
        self._issued: dict[str, set[str]] = {}
        """Tokens that keys were given to, by environment: signatures do not say whose they are."""

    def key(self, environment: str, principal: Principal) -> str:
        self._issued.setdefault(environment, set()).add(principal.token_id)
        return f"sfe_{environment}_{principal.token_id}_{self._code(environment, principal.token_id)}"

    def by_key(self, presented: str) -> tuple[Principal, str]:
        """Whose it is, and the sandbox that it opens. Raises: Refused 401."""
        match = _KEY.fullmatch(presented)
        environment, token, code = match.groups() if match else ("", "", "")
        if not hmac.compare_digest(self._code(environment, token), code) or not match:
            raise Refused(401, "unauthenticated", "this access token does not open a sandbox here")
        return self._bound(environment, token), environment

    def by_signature(self, scope: Scope, environments: Mapping[str, str]) -> tuple[Principal, str] | None:
        """A signed link to a file. `environments`: ids, with the token that owns each."""
        asked = {name: values[0] for name, values in parse_qs(scope["query_string"].decode("latin-1")).items()}
        given = asked.get("signature")
        if given is None:
            return None
        expiration = asked.get("signature_expiration")
        if expiration is not None and not (
            expiration.isascii() and expiration.isdigit() and int(expiration) >= time.time()
        ):
            raise Refused(401, "unauthenticated", "the signature of this link has expired")
        verb = "read" if scope["method"] in ("GET", "HEAD") else "write"
        for environment, owner in environments.items():
            for token in {owner, *self._issued.get(environment, ())}:
                key = f"sfe_{environment}_{token}_{self._code(environment, token)}"
                text = f"{asked.get('path', '')}:{verb}:{asked.get('username', '')}:{key}"
                text += f":{expiration}" if expiration is not None else ""
                digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
                if hmac.compare_digest(f"v1_{digest}".encode(), given.encode()):
                    return self._bound(environment, token), environment
        raise Refused(401, "unauthenticated", "the signature of this link is not right")

    def _code(self, environment: str, token: str) -> str:
        return hmac.new(self._secret, f"{environment}\0{token}".encode(), "sha256").hexdigest()[:40]

    def _bound(self, environment: str, token: str) -> Principal:
        if token == LOCAL.token_id:
            if not self._guard.settings.unix_socket:
                raise Refused(401, "unauthenticated", "this access token was made for callers of the unix socket")
            return LOCAL
        return replace(self._guard.tokens.standing_for(token), max_environments=0)


def sandbox_of(headers: Mapping[str, str]) -> str | None:
    """The sandbox that a request is for: by its header, or by a host name such as 49983-ID.example.org."""
    named = headers.get("e2b-sandbox-id")
    if named:
        return named
    match = _HOST.match(headers.get("host", ""))
    return match.group(2) if match else None


def _kept_secret(path: Path) -> bytes:
    if not path.exists():
        fresh = path.with_suffix(".new")
        fresh.touch(mode=0o600)
        fresh.write_bytes(secrets.token_bytes(32))
        fresh.replace(path)
    return path.read_bytes()
