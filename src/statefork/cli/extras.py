"""What is installed on request only: `pip install 'statefork[server]'`."""

from __future__ import annotations

import importlib.util

from statefork.errors import HostUnsupported

__all__ = ["need"]

_PROOF = {"server": ("fastapi", "uvicorn", "prometheus_client"), "mcp": ("mcp", "fastapi", "uvicorn")}


def need(extra: str) -> None:
    """Raises HostUnsupported, with the command that mends it."""
    missing = [name for name in _PROOF[extra] if importlib.util.find_spec(name) is None]
    if missing:
        fix = f"pip install 'statefork[{extra}]'"
        raise HostUnsupported(f"{', '.join(missing)} is not installed; {fix}", fix=fix)
