"""Directory trees as the kernel has them: copied with everything (links, owners, xattrs, holes, nodes), measured, removed."""

from __future__ import annotations

import os
import shutil
import subprocess
from hashlib import blake2b
from pathlib import Path

from waypoint.errors import DiskFull, KernelError

__all__ = ["Measure", "allocated_bytes", "copy_tree", "discard_tree", "fingerprint", "measure"]

_INLINE_ENTRIES = 500


class Measure:
    """How much a layer holds, counted up to a limit."""

    __slots__ = ("entries", "over", "size_bytes")

    def __init__(self) -> None:
        self.entries = 0
        self.size_bytes = 0
        self.over = False


def measure(root: Path, *, most_entries: int, most_bytes: int) -> Measure:
    """Count entries and allocated bytes; stops, with `over` set, as soon as either limit is passed."""
    found = Measure()
    stack = [str(root)]
    while stack:
        with os.scandir(stack.pop()) as entries:
            for entry in entries:
                found.entries += 1
                if entry.is_dir(follow_symlinks=False):
                    stack.append(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    found.size_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
                if found.entries > most_entries or found.size_bytes > most_bytes:
                    found.over = True
                    return found
    return found


def fingerprint(root: Path, skip: str) -> str:
    """A digest of names, inodes, sizes and times: equal means that no file in it was touched through a descriptor."""
    digest = blake2b(digest_size=16)
    stack = [str(root)]
    while stack:
        directory = stack.pop()
        with os.scandir(directory) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        for entry in entries:
            if directory == str(root) and entry.name == skip:
                continue
            st = entry.stat(follow_symlinks=False)
            digest.update(
                os.fsencode(entry.path)
                + b"%d %d %d %d %d\n" % (st.st_ino, st.st_mode, st.st_size, st.st_mtime_ns, st.st_ctime_ns)
            )
            if entry.is_dir(follow_symlinks=False):
                stack.append(entry.path)
    return digest.hexdigest()


def copy_tree(source: Path, target: Path) -> None:
    """`target` becomes the same as `source`, sharing blocks where the file system can. `target` must not exist."""
    done = subprocess.run(
        ["cp", "-a", "--reflink=auto", "--sparse=auto", "-T", "--", str(source), str(target)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
    )
    if done.returncode != 0:
        discard_tree(target)
        said = done.stderr.decode(errors="replace").strip().splitlines()
        if any("No space left" in line for line in said):
            raise DiskFull(f"no space to copy {source}; nothing was lost")
        raise KernelError(f"copying {source} failed: {'; '.join(said[-3:])}")


def allocated_bytes(root: Path) -> int:
    """What the tree takes on disk, each hard link counted once."""
    total = 0
    seen: set[int] = set()
    for directory, _, files in os.walk(root):
        for name in files:
            st = os.lstat(os.path.join(directory, name))
            if st.st_nlink == 1 or st.st_ino not in seen:
                seen.add(st.st_ino)
                total += st.st_blocks * 512
    return total


def discard_tree(root: Path) -> None:
    """Remove a tree that nothing names any more. A big one is left to a child that outlives us; gc finds what is left over."""
    if not root.exists():
        return
    if measure(root, most_entries=_INLINE_ENTRIES, most_bytes=1 << 40).over:
        subprocess.Popen(
            ["rm", "-rf", "--", str(root)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    else:
        shutil.rmtree(root, ignore_errors=True)
