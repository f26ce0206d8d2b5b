"""Unix sockets whose name was changed after they were bound.

supervisord binds its socket to a passing name, links it to the final one and removes the first; others rename it. The kernel
remembers the first, so that is the one that CRIU restores, and the name that clients know would lead nowhere. Therefore the image
is given the name that the socket has in its directory. (`getsockname` of a restored process shows that name too.)
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from pathlib import Path

from waypoint.kernel.netns import in_netns
from waypoint.kernel.syscalls import open_inside
from waypoint.kernel.wire_format import messages, pack, unpack, write_messages

__all__ = ["present_names", "rewrite_names"]

_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _UNIX = 4, 20, 1
_SHOW_NAME, _SHOW_VFS = 1, 2
_ATTR_NAME, _ATTR_VFS = 0, 1
_DUMP_REQUEST = 0x301
_DONE, _ERROR = 3, 2
_UNIX_SOCKET, _SOCKET_NAME, _SOCKET_DELETED = 16, 11, 15
"""Fields of CRIU's file_entry and unix_sk_entry."""


def present_names(init_pid: int) -> dict[str, str]:
    """The name that a socket was bound to -> the one it has, where they differ. To be called while nothing moves."""
    found = {}
    for path, inode in _bound(init_pid):
        directory, _, bound = path.rpartition("/")
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), _Directory(init_pid, directory or "/") as fd:
            present = _present_name(fd, bound, inode)
            if present is not None:
                found[path] = f"{directory}/{present}"
    return found


def rewrite_names(images: Path, names: dict[str, str]) -> None:
    """Change the names in a dump that is otherwise done."""
    image = images / "files.img"
    changed = []
    for message in messages(image):
        fields = unpack(message)
        for index, (number, value) in enumerate(fields):
            if number == _UNIX_SOCKET and isinstance(value, bytes):
                fields[index] = (number, _renamed(value, names))
        changed.append(pack(fields))
    write_messages(image, changed)


def _renamed(entry: bytes, names: dict[str, str]) -> bytes:
    fields = unpack(entry)
    name = dict(fields).get(_SOCKET_NAME, b"")
    present = names.get(os.fsdecode(name.rstrip(b"\0"))) if isinstance(name, bytes) else None
    if present is None:
        return entry
    kept = [field for field in fields if field[0] not in (_SOCKET_NAME, _SOCKET_DELETED)]
    return pack([*kept, (_SOCKET_NAME, os.fsencode(present) + b"\0")])


class _Directory:
    """A directory as the session sees it, opened so that no symlink leads out."""

    def __init__(self, init_pid: int, path: str) -> None:
        root = os.open(f"/proc/{init_pid}/root", os.O_PATH | os.O_CLOEXEC | os.O_DIRECTORY)
        try:
            self._fd = open_inside(root, path, os.O_RDONLY | os.O_DIRECTORY)
        finally:
            os.close(root)

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _present_name(fd: int, bound: str, inode: int) -> str | None:
    """Another name of the socket, if the one it was bound to does not lead to it any more."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.stat(bound, dir_fd=fd, follow_symlinks=False).st_mode):
            return None
    with os.scandir(fd) as entries:
        for entry in entries:
            st = entry.stat(follow_symlinks=False)
            if stat.S_ISSOCK(st.st_mode) and st.st_ino == inode:
                return entry.name
    return None


def _bound(init_pid: int) -> list[tuple[str, int]]:
    """Absolute names and inodes of the unix sockets in the session's network namespace, of those whose name is not there."""
    with open(f"/proc/{init_pid}/net/unix", errors="surrogateescape") as lines:
        next(lines)
        names = {words[7] for words in (line.split(maxsplit=7) for line in lines) if len(words) > 7}
    gone = [name for name in names if name.startswith("/") and not os.path.lexists(f"/proc/{init_pid}/root{name.rstrip()}")]
    return in_netns(f"/proc/{init_pid}/ns/net", _ask_kernel) if gone else []


def _ask_kernel() -> list[tuple[str, int]]:
    request = struct.pack("=BBHIIIII", _UNIX, 0, 0, 0xFFFFFFFF, 0, _SHOW_NAME | _SHOW_VFS, 0, 0)
    header = struct.pack("=IHHII", 16 + len(request), _SOCK_DIAG_BY_FAMILY, _DUMP_REQUEST, 1, 0)
    found: list[tuple[str, int]] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as link:
        link.send(header + request)
        while True:
            data = link.recv(1 << 16)
            while data:
                size, kind = struct.unpack_from("=IH", data)
                if kind in (_DONE, _ERROR):
                    return found
                attributes = _attributes(data[16 + 16 : size])
                name = attributes.get(_ATTR_NAME, b"")
                if name.startswith(b"/") and _ATTR_VFS in attributes:
                    inode = struct.unpack_from("=I", attributes[_ATTR_VFS])[0]
                    found.append((os.fsdecode(name.rstrip(b"\0")), inode))
                data = data[size + 3 & ~3 :]


def _attributes(data: bytes) -> dict[int, bytes]:
    found = {}
    while len(data) >= 4:
        size, kind = struct.unpack_from("=HH", data)
        found[kind] = data[4:size]
        data = data[size + 3 & ~3 :] if size >= 4 else b""
    return found
