"""What Waypoint changes in the images that CRIU wrote, before the snapshot exists (docs/format.md). Nothing else is touched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from waypoint.kernel import criu_images_pb2

__all__ = ["claim_network", "mend_terminals"]

_MAGIC = 8
"""Two words before the entries; the inventory has one."""


def claim_network(images: Path) -> None:
    """Say in the image that the tree had a network namespace of its own.

    CRIU was run inside that namespace, and so left it out: dumping even an empty one walks the host's whole connection
    table twice (20 ms). On restore it must make a fresh one, owned by the tree's user namespace, as `empty_ns` asks.
    """
    path = images / "inventory.img"
    data = path.read_bytes()
    size = int.from_bytes(data[4:8], "little")
    entry = criu_images_pb2.inventory_entry.FromString(data[8 : 8 + size])
    entry.root_ids.net_ns_id += 1 << 16
    path.write_bytes(data[:4] + _encoded(entry.SerializeToString()) + data[8 + size :])


def mend_terminals(images: Path) -> None:
    """A terminal whose foreground job is gone goes back to its session's leader.

    Between the end of a command and the moment in which the shell takes its terminal back, the terminal belongs to a process
    group without processes. CRIU saves that number and then cannot restore it ("Failed to set group"): such a snapshot never
    came back. What the shell would do next is what is saved instead.
    """
    path = images / "tty-info.img"
    if not path.exists():
        return
    data = path.read_bytes()
    entries = [criu_images_pb2.tty_info_entry.FromString(body) for body in _entries(data)]
    if not entries:
        return
    tree = (images / "pstree.img").read_bytes()
    groups = {criu_images_pb2.pstree_entry.FromString(body).pgid for body in _entries(tree)}
    lost = [entry for entry in entries if entry.pgrp and entry.pgrp not in groups]
    for entry in lost:
        entry.pgrp = entry.sid
    if lost:
        path.write_bytes(data[:_MAGIC] + b"".join(_encoded(entry.SerializeToString()) for entry in entries))


def _entries(data: bytes) -> Iterator[bytes]:
    at = _MAGIC
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        yield data[at + 4 : at + 4 + size]
        at += 4 + size


def _encoded(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body
