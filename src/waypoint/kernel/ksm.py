"""Kernel samepage merging: a kernel thread finds equal pages of processes that allow it, and keeps one copy, until one writes.

It is a setting of the whole host, with a price: the thread's time, and that a process can find out by timing whether another has
a page like its own. So Waypoint never turns it on; a session that asks for it says what to do.
"""

from __future__ import annotations

from pathlib import Path

from waypoint.errors import HostUnsupported

__all__ = ["require_merging"]

_RUN = Path("/sys/kernel/mm/ksm/run")


def require_merging() -> None:
    """HostUnsupported when nothing would be merged."""
    if not _RUN.exists():
        raise HostUnsupported("merging equal memory needs a kernel with KSM, which this one is not", feature="ksm", fix="leave out merge")
    if _RUN.read_text().strip() != "1":
        raise HostUnsupported(
            f"merging equal memory needs the host's KSM, which is off: echo 1 > {_RUN}", feature="ksm", fix=f"echo 1 > {_RUN}"
        )
