"""Hold back the packets of a session's own network while its connections are saved or restored.

The two ends of a loopback connection are dealt with one after the other. Were the kernel to move a byte between them in between,
that byte would be in both images or in none; and an end that is restored first would be reset by the missing other one. A dropped
packet is sent again by TCP. Only sessions with TCP connections pay for it (1-2 ms).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from waypoint.kernel.netns import in_netns
from waypoint.kernel.nftables import hold_nft
from waypoint.kernel.sockets import CLOSED, LISTENING, inet_sockets

__all__ = ["has_connections", "lock_network", "saved_connections"]

_CRIU_MARK = 0xC114
"""CRIU marks the few packets that it sends itself to restore a half-closed connection."""
_CHAIN = f"policy drop; meta mark {_CRIU_MARK:#x} accept;"
_RULES = f"""
table inet waypoint_lock {{
  flags owner
  chain input {{ type filter hook input priority -400; {_CHAIN} }}
  chain output {{ type filter hook output priority -400; {_CHAIN} }}
}}
"""


def lock_network(init_pid: int) -> Callable[[], None]:
    """No packet moves until the returned function is called or this process has ended."""
    return in_netns(f"/proc/{init_pid}/ns/net", lambda: hold_nft(_RULES))


def has_connections(init_pid: int) -> bool:
    """There is a TCP socket that is not just listening."""
    return any(one.kind.startswith("tcp") and one.state not in (LISTENING, CLOSED) for one in inet_sockets(init_pid))


def saved_connections(images: Path) -> bool:
    """The same of a saved tree."""
    return any(name.startswith("tcp-stream-") for name in os.listdir(images))
