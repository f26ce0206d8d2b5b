"""The system calls that the probes need and Python 3.11 does not wrap, as functions that raise OSError."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

__all__ = ["attach", "checked", "die_with_parent", "libc", "mount", "overlay", "syscall", "unshare"]

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_REC = 0x4000
MS_PRIVATE = 1 << 18

libc = ctypes.CDLL(None, use_errno=True)

_PR_SET_PDEATHSIG = 1
# These numbers are the same on every architecture.
_MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT = 429, 430, 431, 432
_CLOEXEC = 1
_SET_FLAG, _SET_STRING, _CMD_CREATE = 0, 1, 6
_MOVE_MOUNT_F_EMPTY_PATH = 4
_AT_FDCWD = -100


def syscall(what: str, number: int, *arguments: object) -> int:
    """`syscall(2)`; the error names `what`."""
    result = int(libc.syscall(ctypes.c_long(number), *arguments))
    return checked(what, result)


def unshare(flags: int) -> None:
    checked("unshare", libc.unshare(flags))


def mount(source: str | None, target: str, fstype: str | None, flags: int, data: str | None = None) -> None:
    words = [None if word is None else word.encode() for word in (source, target, fstype, data)]
    checked(f"mount {fstype or ''} at {target}", libc.mount(*words[:3], ctypes.c_ulong(flags), words[3]))


def die_with_parent() -> None:
    checked("prctl", libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


def overlay(target: Path, options: list[tuple[str, str | None]]) -> None:
    """Mount an overlay through fsopen and fsconfig; an option without value is a flag. The error quotes the kernel."""
    context = syscall("fsopen overlay", _FSOPEN, b"overlay", _CLOEXEC)
    try:
        for key, value in options:
            command = _SET_FLAG if value is None else _SET_STRING
            data = None if value is None else value.encode()
            syscall(f"overlay option {key}", _FSCONFIG, context, command, key.encode(), data, 0)
        try:
            syscall("mounting overlay", _FSCONFIG, context, _CMD_CREATE, None, None, 0)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror} ({_log(context)})") from error
        made = syscall("fsmount", _FSMOUNT, context, _CLOEXEC, 0)
    finally:
        os.close(context)
    attach(made, target)


def attach(tree: int, target: Path) -> None:
    """Put a detached mount at `target` and close its descriptor."""
    try:
        path = str(target).encode()
        syscall("move_mount", _MOVE_MOUNT, tree, b"", _AT_FDCWD, path, _MOVE_MOUNT_F_EMPTY_PATH)
    finally:
        os.close(tree)


def _log(context: int) -> str:
    """What the file system said about a refused mount; each read gives one line."""
    lines = []
    while True:
        try:
            lines.append(os.read(context, 4096).decode(errors="replace").strip())
        except OSError:  # ENODATA: no more lines
            return "; ".join(lines) or "no reason given; see dmesg"


def checked(what: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
