"""What both kinds of remote environment hold: the id, and what does not change about it."""

from __future__ import annotations

from urllib.parse import quote

from statefork.client.parsing import EnvironmentInfo
from statefork.errors import WrongState
from statefork.model import Capabilities

__all__ = ["Handle", "path_of"]


def path_of(*parts: str) -> str:
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)


class Handle:
    def __init__(self, info: EnvironmentInfo) -> None:
        self.id = info.id
        self.backend = info.backend
        self.method = info.method
        self.capabilities: Capabilities = info.capabilities
        """What `restore` brings back on the daemon's host."""
        self.destroyed = False
        """Here; another client may have done it unseen."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.backend}{' destroyed' if self.destroyed else ''}>"

    def path(self, *parts: str) -> str:
        """Below it in the API. Raises WrongState if it was destroyed here, as the library does."""
        if self.destroyed:
            raise WrongState(f"environment {self.id} is destroyed")
        return path_of("environments", self.id, *parts)
