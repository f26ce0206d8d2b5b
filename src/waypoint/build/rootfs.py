"""A directory that already holds a root filesystem, used in place.

Nothing is copied, so it must not be changed while sessions or snapshots over it exist: what overlay shows when a lower
directory changes underneath is undefined, and a restored process may find another library than the one it had mapped.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from waypoint.build.base import Base, StartState, require_shell
from waypoint.build.lookup import find
from waypoint.errors import BuildError

__all__ = ["use_rootfs"]

_LANDMARKS = ("/", "/bin", "/etc", "/lib", "/usr", "/usr/bin", "/usr/lib", "/bin/sh", "/etc/os-release", "/etc/passwd")


def use_rootfs(directory: Path, *, store: Path) -> Base:
    """Check that `directory` can be the root of a session and name it as the only layer. Raises BuildError."""
    try:
        root = directory.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise BuildError(f"{directory} does not exist; name a directory that holds a root filesystem") from error
    if not root.is_dir():
        raise BuildError(f"{directory} is not a directory; a packed root is unpacked when its name is a file's")
    if root.samefile("/"):
        raise BuildError(f"{directory} is the host's own root; leave out --rootfs to start a session over that")
    home = store.resolve()
    if home == root or home in root.parents or root in home.parents:
        raise BuildError(
            f"{directory} and the store {home} lie inside each other, so sessions would change their own base; "
            "move the root filesystem or choose another WAYPOINT_HOME"
        )
    require_shell([root], str(directory))
    return Base("rootfs", str(root), (root,), StartState(), _identity(root))


def _identity(root: Path) -> str:
    """Where it is and how its landmarks look. Reading every file would take longer than the session's start."""
    digest = hashlib.sha256(str(root).encode(errors="surrogateescape"))
    for name in _LANDMARKS:
        found = find([root], name)
        if found is not None:
            status = found.stat()
            digest.update(f"{name} {status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns}\n".encode())
    return f"sha256:{digest.hexdigest()}"
