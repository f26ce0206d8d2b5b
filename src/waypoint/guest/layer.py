"""The guest layer: what every session needs in its root besides its base. Immutable, named by its content."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from waypoint.kernel.syscalls import open_inside

__all__ = ["OPAQUE", "PRIVATE", "build_guest_layer", "carry_command", "forget_socket", "guest_files", "make_run"]

PRIVATE = ".waypoint"
"""The one directory in a session's root that is ours; diff and tree never show it."""
_RUN, _RUN_MODE = "run", 0o711
_SOCKET = "sock"
_COMMAND, _COMMAND_MODE, _MOST_BYTES = "c", 0o600, 1 << 20
"""Init's: the text of the command, which the shell reads."""
OPAQUE = "trusted.overlay.opaque"

_NATIVE = Path(__file__).resolve().parent / "native"
_DEVICES = (("null", 1, 3), ("zero", 1, 5), ("full", 1, 7), ("random", 1, 8), ("urandom", 1, 9), ("tty", 5, 0))
_LINKS = (
    ("ptmx", "pts/ptmx"),
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
)


def guest_files() -> list[Path]:
    return [_NATIVE / "bashrc", _NATIVE / "shrc"]


def build_guest_layer(root: Path, init: Path) -> None:
    """Fill the empty directory `root`. Device nodes are made here, by the host: nobody inside can make any."""
    private = root / PRIVATE
    for path, mode in ((private, 0o755), (private / _RUN, _RUN_MODE), (private / "empty", 0o555)):
        path.mkdir()
        path.chmod(mode)
    target = private / "init"
    target.write_bytes(init.read_bytes())
    target.chmod(0o555)
    for source in guest_files():
        (private / source.name).write_bytes(source.read_bytes())
        (private / source.name).chmod(0o444)
    dev = root / "dev"
    dev.mkdir(mode=0o755)
    os.setxattr(dev, OPAQUE, b"y")
    for name, major, minor in _DEVICES:
        os.mknod(dev / name, 0o666 | 0o020000, os.makedev(major, minor))
        (dev / name).chmod(0o666)
    for name, to in _LINKS:
        (dev / name).symlink_to(to)
    for name, mode in (("pts", 0o755), ("mqueue", 0o1777), ("shm", 0o1777)):
        (dev / name).mkdir()
        (dev / name).chmod(mode)
    for name in ("proc", "sys"):
        (root / name).mkdir(mode=0o555)
    root.chmod(0o755)


def make_run(upper: Path) -> None:
    """Init's own directory, in an upper that is made before it is known what it is for; for `carry_command`."""
    directory = upper / PRIVATE / _RUN
    directory.mkdir()
    directory.chmod(_RUN_MODE)


def carry_command(below: Path, upper: Path) -> None:
    """The file for commands as it is in the layer `below`, in the upper: or the overlay would copy it, and the directory above it,
    when the first command after a restore is written, a millisecond of that command.

    Root in the session may have put anything there; what is not init's own file is left to the overlay.
    """
    found = _command(below)
    made = f"{upper}/{PRIVATE}/{_RUN}/{_COMMAND}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    if found is None:
        with contextlib.suppress(FileNotFoundError):
            Path(made).parent.rmdir()
        return
    text, uid, gid = found
    try:
        fd = os.open(made, flags, _COMMAND_MODE)
    except FileNotFoundError:
        make_run(upper)
        fd = os.open(made, flags, _COMMAND_MODE)
    try:
        os.write(fd, text)
        if uid or gid:
            os.fchown(fd, uid, gid)
    finally:
        os.close(fd)


def _command(below: Path) -> tuple[bytes, int, int] | None:
    """The text, and whose the file is."""
    try:
        fd = _open_inits(below, _COMMAND, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        st = os.fstat(fd)
        if not stat.S_ISREG(st.st_mode) or st.st_mode & 0o7777 != _COMMAND_MODE or st.st_size > _MOST_BYTES:
            return None
        return os.read(fd, _MOST_BYTES), st.st_uid, st.st_gid
    finally:
        os.close(fd)


def forget_socket(layer: Path) -> None:
    """Init's, in a layer that no session writes to any more: whoever restores makes it anew, and to remove it from a lower layer
    first costs the overlay a file of its own.

    As above: what is not a socket at that very place is left alone.
    """
    try:
        directory = _open_inits(layer, ".", os.O_PATH | os.O_DIRECTORY)
    except OSError:
        return
    try:
        if stat.S_ISSOCK(os.stat(_SOCKET, dir_fd=directory, follow_symlinks=False).st_mode):
            os.unlink(_SOCKET, dir_fd=directory)
    except FileNotFoundError:
        return
    finally:
        os.close(directory)


def _open_inits(layer: Path, name: str, flags: int) -> int:
    """Of what init has for itself, in this layer; no link leads out of it."""
    root = os.open(layer, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return open_inside(root, f"{PRIVATE}/{_RUN}/{name}", flags, follow=False)
    finally:
        os.close(root)
