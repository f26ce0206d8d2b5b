"""Directory trees as the kernel has them: copied with everything (links, owners, xattrs, holes, nodes), measured, removed."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import subprocess
from hashlib import blake2b
from pathlib import Path

from waypoint.errors import DiskFull, KernelError
from waypoint.kernel.small_trees import MOST_BYTES, MOST_ENTRIES, copy_small

__all__ = [
    "Measure",
    "allocated_bytes",
    "carry_links",
    "changed_since",
    "copy_listed",
    "copy_tree",
    "digest",
    "discard_tree",
    "fingerprint",
    "measure",
]

_INLINE_ENTRIES = 500


class Measure:
    """How much a layer holds, counted up to a limit."""

    __slots__ = ("entries", "over", "size_bytes")

    def __init__(self) -> None:
        self.entries = 0
        self.size_bytes = 0
        self.over = False


def measure(root: Path, *, most_entries: int, most_bytes: int) -> Measure:
    """Count entries and allocated bytes; stops, with `over` set, as soon as either limit is passed.

    The tree may be in use: what is removed while it is counted does not count.
    """
    found = Measure()
    stack = [str(root)]
    while stack:
        with contextlib.suppress(FileNotFoundError), os.scandir(stack.pop()) as entries:
            for entry in entries:
                found.entries += 1
                if entry.is_dir(follow_symlinks=False):
                    stack.append(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
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


def changed_since(root: Path, since_ns: int, skip: str) -> bool:
    """Something in the tree was written, made, renamed or removed after `since_ns` (epoch)."""
    stack = [str(root)]
    while stack:
        directory = stack.pop()
        if os.lstat(directory).st_ctime_ns > since_ns:
            return True
        with os.scandir(directory) as found:
            for entry in found:
                if directory == str(root) and entry.name == skip:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    stack.append(entry.path)
                elif entry.stat(follow_symlinks=False).st_ctime_ns > since_ns:
                    return True
    return False


def digest(root: Path, skip: str) -> str:
    """Of what the tree looks like to a program, wherever it lies: no inode numbers, no times of directories and nodes.

    survey.c says the same of big trees.
    """
    found = blake2b(digest_size=16)
    stack = [str(root)]
    while stack:
        directory = stack.pop()
        with os.scandir(directory) as listing:
            entries = sorted(listing, key=lambda entry: os.fsencode(entry.name))
        for entry in entries:
            if (directory == str(root) and entry.name == skip) or entry.name.startswith("link_remap."):
                continue
            st = entry.stat(follow_symlinks=False)
            regular = stat.S_ISREG(st.st_mode)
            time_ns = st.st_mtime_ns if regular else 0
            size = st.st_size if regular else 0
            found.update(os.fsencode(os.path.relpath(entry.path, root)) + b"\0")
            found.update(b"%d %d %d %d %d\n" % (st.st_mode, st.st_uid, st.st_gid, size, time_ns))
            if entry.is_symlink():
                found.update(os.fsencode(os.readlink(entry.path)) + b"\0")
            if entry.is_dir(follow_symlinks=False):
                stack.append(entry.path)
    return found.hexdigest()


def copy_tree(source: Path, target: Path) -> None:
    """`target` becomes the same as `source`, sharing blocks where the file system can. `target` must not exist."""
    if not measure(source, most_entries=MOST_ENTRIES, most_bytes=MOST_BYTES).over:
        try:
            copy_small(str(source), str(target))
        except OSError as error:
            discard_tree(target)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFull(f"no space to copy {source}; nothing was lost") from error
            raise KernelError(f"copying {source} failed: {error}") from error
        return
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


def copy_listed(root: int, paths: list[str], target: Path) -> None:
    """Copy exactly these entries of the tree at descriptor `root` into `target`, hard links among them kept.

    tar leaves sockets out, so those are made by hand.
    """
    sockets = {path for path in paths if stat.S_ISSOCK(os.lstat(f"/proc/self/fd/{root}/{path}").st_mode)}
    listed = b"".join(os.fsencode(f"./{path}") + b"\0" for path in paths if path not in sockets)
    keep = ["--xattrs", "--xattrs-include=*", "--acls", "--numeric-owner"]
    packer = subprocess.Popen(
        ["tar", "-C", f"/proc/self/fd/{root}", "-S", *keep, "--null", "--no-recursion", "-cf", "-", "-T", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(root,),
    )
    unpacker = subprocess.Popen(
        ["tar", "-C", str(target), *keep, "--same-permissions", "--same-owner", "-xf", "-"],
        stdin=packer.stdout,
        stderr=subprocess.PIPE,
    )
    assert packer.stdout is not None and packer.stdin is not None and packer.stderr is not None
    packer.stdout.close()
    with packer.stdin as names:
        names.write(listed)
    said = unpacker.communicate()[1] + packer.stderr.read()
    packer.stderr.close()
    if packer.wait() or unpacker.returncode:
        discard_tree(target)
        text = said.decode(errors="replace").strip()
        raise (
            DiskFull("no space to merge layers")
            if "No space left" in text
            else KernelError(f"merging layers failed: {text}")
        )
    for path in sockets:
        st = os.lstat(f"/proc/self/fd/{root}/{path}")
        os.mknod(target / path, st.st_mode)
        os.chown(target / path, st.st_uid, st.st_gid)
        (target / path).chmod(st.st_mode & 0o7777)


def carry_links(source: Path, target: Path, prefix: str) -> None:
    """Give `target`, a copy of `source`, the names with `prefix` that were linked into `source` since it was copied."""
    names: dict[int, list[str]] = {}
    missing: dict[str, int] = {}
    for directory, _, files in os.walk(source):
        for name in files:
            path = os.path.join(directory, name)
            st = os.lstat(path)
            inside = os.path.relpath(path, source)
            if not name.startswith(prefix):
                if st.st_nlink > 1:
                    names.setdefault(st.st_ino, []).append(inside)
            elif not (target / inside).exists():
                missing[inside] = st.st_ino
    for inside, inode in missing.items():
        other = next((name for name in names.get(inode, ()) if (target / name).exists()), None)
        if other is not None:
            (target / inside).hardlink_to(target / other)
        else:
            copy_tree(source / inside, target / inside)


def allocated_bytes(root: Path, *, own: bool = False) -> int:
    """What the tree takes on disk, each hard link counted once; `own`: without the files that have other links."""
    total = 0
    seen: set[int] = set()
    for directory, _, files in os.walk(root):
        for name in files:
            try:
                st = os.lstat(os.path.join(directory, name))
            except FileNotFoundError:
                continue  # the child of `discard_tree` is still at it
            if st.st_nlink == 1 or (not own and st.st_ino not in seen):
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
