"""`create_env_manager`: from a method's name and its arguments to a live environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from statefork.environment import Environment
from statefork.registry import find_method

__all__ = ["create_env_manager"]


def create_env_manager(method: str, *, home: Path | str | None = None, **arguments: Any) -> Environment:
    """Make or attach to an environment. The methods and what each takes are in docs/backends.md, and in the error that
    a wrong one raises. `home` is StateFork's state directory, for all methods; it has a sensible default.

    Raises: UsageError, NotFound, HostUnsupported (says what to install), BuildError.
    """
    chosen = find_method(method)
    return Environment.create(chosen.driver(arguments), home=Path(home) if home else None, attach=chosen.attach)
