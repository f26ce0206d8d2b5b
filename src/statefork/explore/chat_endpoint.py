"""One call, `POST {base_url}/chat/completions`, with patience. No environment variable is read here: settings are handed in."""

from __future__ import annotations

import email.utils
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from statefork.errors import HostUnsupported, UsageError, WaypointError

__all__ = ["ChatError", "ChatSettings", "Endpoint"]

_AGAIN = {408, 409, 425, 429, 500, 502, 503, 504, 529}
_LONGEST_WAIT = 60.0


class ChatError(WaypointError):
    """The endpoint refused, or did not answer as often as it was asked."""

    code = "chat"


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Where the model is. `base_url` ends before `/chat/completions`, as `http://localhost:8000/v1`."""

    base_url: str
    model: str
    key: str | None = field(default=None, repr=False)
    temperature: float | None = 1.0
    """Below it a model says the same to the same, and there is nothing to choose from. None: the endpoint's own."""
    most_tokens: int | None = None
    timeout: float = 120.0
    """Of one request, in seconds."""
    retries: int = 4
    most_proposals: int = 4
    """How many requests run at once for one node."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Put into each request as it is, for what an endpoint has of its own."""

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise UsageError(f"{self.base_url!r} is no base URL; write it as https://host/v1")
        if not self.model:
            raise UsageError("which model? Endpoints have more than one")


class Endpoint:
    """Used by any number of threads."""

    def __init__(self, settings: ChatSettings, *, sleep: Callable[[float], None] = time.sleep) -> None:
        try:
            import httpx
        except ImportError as error:
            fix = "pip install 'statefork[chat]'"
            raise HostUnsupported(f"httpx is not installed; {fix}", fix=fix) from error
        self._httpx = httpx
        self._settings = settings
        self._sleep = sleep
        headers = {"Authorization": f"Bearer {settings.key}"} if settings.key else {}
        self._client = httpx.Client(timeout=settings.timeout, headers={**headers, **settings.headers})
        self._url = settings.base_url.rstrip("/") + "/chat/completions"

    def close(self) -> None:
        self._client.close()

    def complete(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The answer's message. Raises ChatError."""
        settings = self._settings
        body: dict[str, Any] = {"model": settings.model, "messages": list(messages), "tools": list(tools)}
        if settings.temperature is not None:
            body["temperature"] = settings.temperature
        if settings.most_tokens is not None:
            body["max_tokens"] = settings.most_tokens
        return self._message(self._post({**body, **settings.extra}))

    def _post(self, body: Mapping[str, Any]) -> Any:
        problem = ""
        for attempt in range(self._settings.retries + 1):
            wait = min(0.5 * 2**attempt, _LONGEST_WAIT) * (0.5 + random.random() / 2)
            try:
                answer = self._client.post(self._url, json=body)
            except self._httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if answer.is_success:
                    return _document(self._url, answer.text, answer.json)
                problem = f"{answer.status_code}: {_said(answer.text)}"
                if answer.status_code not in _AGAIN:
                    raise ChatError(f"{self._url} refuses: {problem}", status=answer.status_code)
                wait = max(wait, min(_asked_for(answer.headers.get("retry-after")), _LONGEST_WAIT))
            if attempt < self._settings.retries:
                self._sleep(wait)
        raise ChatError(f"{self._url} failed {self._settings.retries + 1} times; the last: {problem}")

    def _message(self, document: Any) -> dict[str, Any]:
        try:
            message = document["choices"][0]["message"]
            calls = message.get("tool_calls") or []
            for number, call in enumerate(calls):
                call.setdefault("id", f"call_{number}")
                call["function"]["name"]  # a call without a name is none
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ChatError(f"{self._url} does not answer as a chat endpoint does: {str(document)[:300]}") from error
        return dict(message)


def _document(url: str, text: str, parse: Callable[[], Any]) -> Any:
    try:
        return parse()
    except ValueError as error:
        raise ChatError(f"{url} answers with something that is no JSON: {_said(text)}") from error


def _said(text: str) -> str:
    return " ".join(text.split())[:300] or "(nothing)"


def _asked_for(header: str | None) -> float:
    """Retry-After: seconds, or a date."""
    if not header:
        return 0.0
    try:
        return max(float(header), 0.0)
    except ValueError:
        pass
    try:
        return max(email.utils.parsedate_to_datetime(header).timestamp() - time.time(), 0.0)
    except ValueError:
        return 0.0
