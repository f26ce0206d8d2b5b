"""Archives on their way into an environment: looked through first, on this host, without unpacking anything here.

What could lead out of the directory that it is meant for is refused: absolute names, `..`, NULs, hard links to elsewhere, and
names that pass through a symbolic link of the same archive. A symbolic link itself may point anywhere: it is unpacked by the
environment's own `tar`, and whoever follows it is inside the environment, too. Devices are left to that `tar`, which may not.
"""

from __future__ import annotations

import posixpath
import tarfile
from typing import IO

from statefork.errors import UsageError

__all__ = ["check_archive"]


def check_archive(archive: IO[bytes]) -> int:
    """The number of members. UsageError on one that is not as it should be, or if it is no tar archive."""
    links: set[str] = set()
    count = 0
    try:
        with tarfile.open(fileobj=archive, mode="r:") as opened:
            for member in opened:
                count += 1
                name = _inside(member.name, "member")
                if any(above in links for above in _above(name)):
                    raise UsageError(f"the archive's {name!r} lies behind a symbolic link of the archive itself")
                if member.issym():
                    if "\0" in member.linkname:
                        raise UsageError("a link's target cannot hold a NUL")
                    links.add(name)
                elif member.islnk():
                    target = _inside(member.linkname, "hard link")
                    if target in links or any(above in links for above in _above(target)):
                        raise UsageError(f"the archive's hard link {name!r} lies behind a symbolic link of the archive")
                else:
                    links.discard(name)
                opened.members.clear()  # type: ignore[attr-defined]  # or a million names would be kept
    except tarfile.ReadError as error:
        raise UsageError(f"that is not an uncompressed tar archive: {error}") from error
    except (tarfile.TarError, UnicodeError, ValueError, EOFError) as error:
        raise UsageError(f"the tar archive is damaged: {error}") from error
    return count


def _inside(name: str, what: str) -> str:
    if "\0" in name or not name:
        raise UsageError(f"the name of a {what} in the archive is empty or holds a NUL")
    if name.startswith("/"):
        raise UsageError(f"the archive's {what} {name!r} has an absolute name; names are relative to the directory")
    if ".." in name.split("/"):
        raise UsageError(f"the archive's {what} {name!r} leads out of the directory")
    return posixpath.normpath(name)


def _above(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]
