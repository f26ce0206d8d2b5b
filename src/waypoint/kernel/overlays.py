"""Read-only overlays that are mounted nowhere: a descriptor of a root, gone with its last holder.

`fsmount` gives a mount that belongs to no namespace. Nobody else can see it, paths are opened relative to its descriptor, and the
kernel takes it down when the descriptor is closed, so a killed caller leaves nothing behind. There is no upper and no work
directory: looking never writes to a layer, and any number of views of one snapshot may be open at once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from waypoint.errors import KernelError
from waypoint.kernel.probe_calls import syscall

__all__ = ["open_overlay"]

_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
_CLOEXEC = 1
_SET_STRING, _CMD_CREATE = 1, 6
_READ_ONLY, _NO_SETUID, _NO_DEVICES, _NO_EXEC = 1, 2, 4, 8


def open_overlay(layers: Path, lower: Sequence[str], base: Sequence[Path], *, around_layers: bool) -> int:
    """A descriptor of the root that these layers form, top-most first; `lower` are names below `layers`.

    `around_layers`: a base directory contains `layers`. Overlayfs refuses such a pair of lower layers, since it compares
    directories of one file system; so the base is first wrapped in an overlay of its own, which is another file system to it.
    The lower layers stay what they are, so whiteouts, opaque directories and redirects mean what they always mean.
    """
    with ExitStack() as stack:
        found = _opened(stack, layers)
        names = [f"/proc/self/fd/{found}/{name}" for name in lower]
        below = [_name(_opened(stack, path)) for path in base]
        if around_layers:
            # at least two layers, and this one must not lie in the base either: an empty tmpfs
            below.append(_name(_closed_with(stack, _mount("tmpfs", []))))
            below = [_name(_closed_with(stack, _mount_overlay(below)))]
        return _mount_overlay([*names, *below])


def _mount_overlay(lower: Sequence[str]) -> int:
    options = [("lowerdir+", name) for name in lower]
    # `xino` would only write a line into the kernel's log; without an upper there is nothing to index
    options += [("redirect_dir", "follow"), ("index", "off"), ("nfs_export", "off"), ("xino", "off")]
    return _mount("overlay", options)


def _mount(kind: str, options: Sequence[tuple[str, str]]) -> int:
    context = -1
    try:
        context = syscall(f"fsopen {kind}", _FSOPEN, kind.encode(), _CLOEXEC)
        for key, value in options:
            syscall(f"{kind} option {key}={value}", _FSCONFIG, context, _SET_STRING, key.encode(), value.encode(), 0)
        syscall(f"creating the {kind}", _FSCONFIG, context, _CMD_CREATE, None, None, 0)
        attributes = _READ_ONLY | _NO_SETUID | _NO_DEVICES | _NO_EXEC
        return syscall(f"mounting the {kind}", _FSMOUNT, context, _CLOEXEC, attributes)
    except OSError as error:
        said = _complaints(context)
        raise KernelError(f"the layers cannot be looked at: {error}{f' ({said})' if said else ''}") from error
    finally:
        if context >= 0:
            os.close(context)


def _complaints(context: int) -> str:
    """What the kernel has to say about a refused mount, one message per read."""
    said = []
    try:
        while context >= 0:
            said.append(os.read(context, 512).decode(errors="replace").strip())
    except OSError:
        pass  # ENODATA: no more messages
    return "; ".join(said)


def _opened(stack: ExitStack, path: Path) -> int:
    return _closed_with(stack, os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))


def _closed_with(stack: ExitStack, fd: int) -> int:
    stack.callback(os.close, fd)
    return fd


def _name(fd: int) -> str:
    """Option strings end at 256 bytes, paths do not."""
    return f"/proc/self/fd/{fd}"
