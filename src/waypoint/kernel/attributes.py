"""Extended attributes as they are inside a session, whatever uid map they are seen through.

File capabilities and access lists carry ids in their bytes. Seen from the host a live session's ids are shifted, in a layer
they are plain; here they always come out plain. Overlay's own marks are hidden by the overlay itself.
"""

from __future__ import annotations

import errno
import os
import struct

__all__ = ["attribute", "attributes", "set_attributes"]

_CAPABILITY = "security.capability"
_LISTS = ("system.posix_acl_access", "system.posix_acl_default")
_ACL_ENTRY = struct.Struct("<HHI")
_ACL_NAMED = (0x02, 0x08)
"""ACL_USER and ACL_GROUP: the entries that name an id."""
_CAP_REVISION = 0xFF000000
_CAP_V3 = 0x03000000
_CAP_V2 = 0x02000000
_ABSENT = (errno.ENODATA, errno.ENOTSUP, errno.ENOENT, errno.EPERM)
_HIDDEN = ("trusted.overlay.", "user.overlay.")


def attributes(path: str | int, idmap: int) -> dict[str, bytes]:
    """All attributes of a path (a link is not followed) or descriptor, with ids made plain."""
    found: dict[str, bytes] = {}
    follow = isinstance(path, int)
    try:
        names = os.listxattr(path, follow_symlinks=follow)
    except OSError as error:
        if error.errno in _ABSENT:
            return found
        raise
    for name in names:
        if name.startswith(_HIDDEN):
            continue
        try:
            found[name] = _shifted(name, os.getxattr(path, name, follow_symlinks=follow), -idmap)
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
    return found


def attribute(path: str, name: str) -> bytes | None:
    """One attribute as it is stored; a link is not followed."""
    try:
        return os.getxattr(path, name, follow_symlinks=False)
    except OSError as error:
        if error.errno in _ABSENT:
            return None
        raise


def set_attributes(fd: int, values: dict[str, bytes], idmap: int) -> list[str]:
    """Set them on an open file, shifting ids the other way; returns the names that the file system does not take."""
    refused = []
    for name, value in values.items():
        try:
            os.setxattr(fd, name, _shifted(name, value, idmap))
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.EPERM, errno.EINVAL):
                raise
            refused.append(name)
    return refused


def _shifted(name: str, value: bytes, by: int) -> bytes:
    if name == _CAPABILITY:
        return _shifted_capability(value, by)
    if name in _LISTS:
        return _shifted_list(value, by)
    return value


def _shifted_capability(value: bytes, by: int) -> bytes:
    """Revision 3 ends in the id of the user namespace's root; the kernel hides it (revision 2) when that root is ours."""
    head = int.from_bytes(value[:4], "little")
    revision = head & _CAP_REVISION
    if revision == _CAP_V3 and len(value) == 24:
        root = int.from_bytes(value[20:24], "little") + by
        plain = value[4:20]
    elif revision == _CAP_V2 and len(value) == 20:
        root = max(by, 0)
        plain = value[4:20]
    else:
        return value
    flags = head & ~_CAP_REVISION
    if root <= 0:
        return (flags | _CAP_V2).to_bytes(4, "little") + plain
    return (flags | _CAP_V3).to_bytes(4, "little") + plain + root.to_bytes(4, "little")


def _shifted_list(value: bytes, by: int) -> bytes:
    out = bytearray(value)
    for at in range(4, len(value) - _ACL_ENTRY.size + 1, _ACL_ENTRY.size):
        tag, permissions, identity = _ACL_ENTRY.unpack_from(value, at)
        if tag in _ACL_NAMED and identity + by >= 0:
            _ACL_ENTRY.pack_into(out, at, tag, permissions, identity + by)
    return bytes(out)
