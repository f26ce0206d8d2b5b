"""A network for a Firecracker machine: a namespace of its own with a tap in it, behind Waypoint's address translation.

A snapshot names its tap, so every copy of a machine needs one of that name: in a namespace of its own it has it, and the
guest keeps its address. All of it goes when the last process in the namespace does.
"""

from __future__ import annotations

import os
from contextlib import suppress

from statefork.errors import KernelError, WaypointError
from waypoint.kernel.nat import attach_nat, detach_nat
from waypoint.kernel.netns import in_netns, new_netns
from waypoint.kernel.nftables import run_nft
from waypoint.kernel.programs import run_program

__all__ = ["GUEST_MAC", "KERNEL_WORDS", "TAP", "TapNetwork"]

TAP = "tap0"
GUEST_MAC = "02:53:46:00:00:02"
_HOST, _GUEST = "172.30.0.1", "172.30.0.2"
_RESOLVER = "1.1.1.1"

KERNEL_WORDS = " ".join(
    (
        f"statefork.address={_GUEST} statefork.mask=255.255.255.252",
        f"statefork.gateway={_HOST} statefork.resolver={_RESOLVER}",
    )
)

_RULES = """
table ip statefork {{
  chain postrouting {{
    type nat hook postrouting priority 90; policy accept;
    oifname "eth0" ip saddr {guest} snat to {address}
  }}
}}
"""


class TapNetwork:
    """`namespace` is a descriptor, for `nsenter --net=/proc/self/fd/N` in front of the VMM; it needs root."""

    def __init__(self, key: str) -> None:
        self._key = f"statefork-{key}"
        self.namespace = new_netns()
        try:
            path = f"/proc/{os.getpid()}/fd/{self.namespace}"
            address = attach_nat(path, self._key).address
            in_netns(self.namespace, lambda: self._set_up(address))
        except BaseException:
            self.close()
            raise

    def _set_up(self, address: str) -> None:
        for words in (
            ["tuntap", "add", TAP, "mode", "tap"],
            ["address", "add", f"{_HOST}/30", "dev", TAP],
            ["link", "set", TAP, "up"],
        ):
            run_program(["ip", *words], timeout=30).check("making a tap")
        run_program(["sysctl", "-q", "-w", "net.ipv4.ip_forward=1"], timeout=30).check("forwarding in the namespace")
        run_nft(_RULES.format(guest=_GUEST, address=address))

    def let_go(self) -> None:
        """The VMM is in the namespace now and keeps it."""
        if self.namespace >= 0:
            os.close(self.namespace)
            self.namespace = -1

    def close(self) -> None:
        self.let_go()
        with suppress(WaypointError, KernelError):
            detach_nat(self._key)
