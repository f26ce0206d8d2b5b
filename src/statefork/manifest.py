"""Every file of a root with its digest, read from a tar stream, and the comparison of two of them."""

from __future__ import annotations

import hashlib
import os
import tarfile
import threading
from collections.abc import Callable, Mapping
from typing import IO

from statefork.errors import KernelError
from statefork.model import ExecResult, RunRequest, Stream

__all__ = ["Comparison", "Manifest", "compare", "manifest_of_tar", "read_guest_manifest"]

Manifest = Mapping[str, str]
"""Absolute path to a word for all that can differ: kind, mode, owner, and the digest or the link's target."""

Comparison = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
"""Paths added, changed and removed, each sorted."""

KERNEL_DIRECTORIES = ("proc", "sys", "dev")
"""Filled by the kernel, different at every look."""

# Not every tar knows --exclude: busybox's does not.
_SCRIPT = (
    'cd / && set -- && for f in ./* ./.[!.]*; do [ -e "$f" ] || [ -L "$f" ] || continue; case $f in '
    + "|".join(f"./{name}" for name in KERNEL_DIRECTORIES)
    + ') ;; *) set -- "$@" "$f";; esac; done; exec tar -c -f - "$@"'
)


def manifest_of_tar(stream: IO[bytes]) -> dict[str, str]:
    """Read an archive of `/` (as `docker export` writes it) to its end."""
    entries: dict[str, str] = {}
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            name = member.name.removeprefix("./").strip("/")
            if not name or name == "." or name.split("/", 1)[0] in KERNEL_DIRECTORIES:
                continue
            entries["/" + name] = _describe(archive, member, entries)
    return entries


def _describe(archive: tarfile.TarFile, member: tarfile.TarInfo, entries: Mapping[str, str]) -> str:
    facts = f"{member.mode:o} {member.uid}:{member.gid}"
    if member.issym():
        return f"l {member.linkname}"
    if member.isdir():
        return f"d {facts}"
    if member.islnk():
        return entries.get("/" + member.linkname.removeprefix("./").strip("/"), f"h {member.linkname}")
    if not member.isreg():
        return f"o {facts} {member.type!r} {member.devmajor}:{member.devminor}"
    content = archive.extractfile(member)
    digest = hashlib.blake2b(digest_size=16)
    while content is not None and (piece := content.read(1 << 20)):
        digest.update(piece)
    return f"f {facts} {member.size} {digest.hexdigest()}"


def read_guest_manifest(run: Callable[[RunRequest], ExecResult]) -> dict[str, str]:
    """Have the guest's `tar` write its root into a pipe, and read it on the fly: nothing is kept but the digests."""
    reading, writing = os.pipe()
    entries: dict[str, str] = {}
    failures: list[Exception] = []

    def digest() -> None:
        with open(reading, "rb") as stream:
            try:
                entries.update(manifest_of_tar(stream))
            except tarfile.TarError as error:
                failures.append(error)
            while stream.read(1 << 20):  # the padding after the end mark, so that the writer is never blocked
                pass

    reader = threading.Thread(target=digest, name="statefork-manifest")
    reader.start()
    try:
        with open(writing, "wb") as pipe:

            def forward(stream: Stream, data: bytes) -> None:
                if stream == "stdout":
                    pipe.write(data)

            result = run(RunRequest(("sh", "-c", _SCRIPT), on_output=forward))
    finally:
        reader.join()
    # tar ends in 1 when a file changed while it was read: on a live system that is no failure.
    if failures or result.exit_code not in (0, 1):
        cause = failures[0] if failures else result.stderr.strip()
        raise KernelError(f"reading the files for diff failed: {cause}")
    return entries


def compare(a: Manifest, b: Manifest) -> Comparison:
    """Paths added, changed and removed from `a` to `b`."""
    added = tuple(sorted(path for path in b if path not in a))
    removed = tuple(sorted(path for path in a if path not in b))
    changed = tuple(sorted(path for path, facts in b.items() if path in a and a[path] != facts))
    return added, changed, removed
