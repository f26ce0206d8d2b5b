"""Give a layer's directory a new inode, so that it can be mounted again at once.

An overlay that is being taken down keeps its upper directory marked as in use until the kernel has dropped every inode that it had,
50 ms for 20,000 files, and the mark is on the directory itself, not on what is in it. So what is in it is moved to another one.
No process of the old overlay may run any more. Whoever finds this half done goes on with it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from waypoint import faults
from waypoint.kernel import later
from waypoint.kernel.small_trees import copy_attributes

__all__ = ["begun", "forget", "hold", "move"]

_NEXT, _OLD = "next", "old"


_HELD_SECONDS = 0.3


def hold(init_pid: int) -> Callable[[], None]:
    """The mount goes when somebody has time for it, not beside what is about to be done: some time after what this returns is called."""
    root = os.open(f"/proc/{init_pid}/root", os.O_PATH | os.O_CLOEXEC)
    return lambda: later.do(lambda: os.close(root), _HELD_SECONDS)


def begun(layer: Path) -> bool:
    """Until `forget`."""
    return (layer / _NEXT).exists() or (layer / _OLD).exists()


def move(layer: Path) -> None:
    """`layer`/d is as before, but another directory. Complete or to be completed."""
    here, following, old = layer / "d", layer / _NEXT, layer / _OLD
    if not old.exists():
        following.mkdir(exist_ok=True)
        faults.point("snapshot-moving")
        st = here.lstat()
        for name in os.listdir(here):
            os.rename(here / name, following / name)
        copy_attributes(str(here), str(following), st)
        here.rename(old)
    if following.exists():
        following.rename(here)


def forget(layer: Path) -> None:
    """The rows say by now what `begun` said."""
    if (layer / _OLD).exists():
        (layer / _OLD).rmdir()
