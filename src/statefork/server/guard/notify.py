"""systemd's start-up protocol (sd_notify): one datagram on a unix socket. No library is needed for that."""

from __future__ import annotations

import logging
import socket

__all__ = ["notify"]

log = logging.getLogger(__name__)


def notify(address: str | None, state: str) -> bool:
    """Send `READY=1`, `STOPPING=1` or `STATUS=…` to $NOTIFY_SOCKET, which the command line reads; False if nobody asked."""
    if not address:
        return False
    name = f"\0{address[1:]}" if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.connect(name)
            sender.sendall(state.encode())
    except OSError as error:  # systemd would end us for a missing READY=1; it can say why, we cannot do more
        log.warning("systemd's socket %s cannot be reached: %s", address, error)
        return False
    return True
