"""Unpack a tar archive with the system's own `tar`, in a place where it cannot reach anything else.

tar runs chrooted into a small read-only tmpfs that holds the host's programs (read-only) and the target directory, in a
mount namespace of its own, without the capabilities that unpacking does not need. The archive comes in through a pipe.
So a name that escapes from the target has nothing to escape to, whatever tar makes of it; and when anyone involved is
killed, the mounts are gone with the namespace. See docs/decisions/tar-unpacking.md.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from waypoint.errors import HostUnsupported, KernelError
from waypoint.kernel.programs import run_program

__all__ = ["untar"]

_CHUNK = 1 << 18
_MAGIC = (  # first bytes, program that tar starts to read it, Debian package of that program
    (b"\x1f\x8b", "gzip", "gzip"),
    (b"\xfd7zXZ\x00", "xz", "xz-utils"),
    (b"\x28\xb5\x2f\xfd", "zstd --long=31", "zstd"),
    (b"BZh", "bzip2", "bzip2"),
)
_CAPABILITIES = "-all,+chown,+dac_override,+dac_read_search,+fowner,+fsetid,+mknod,+setfcap"
_TAR = (
    "tar",
    "--extract",
    "--file=-",
    "--directory=/out",
    "--numeric-owner",
    "--same-owner",
    "--preserve-permissions",
    "--delay-directory-restore",
    "--acls",
    "--xattrs",
    # The others belong to the kernel that made the archive: labels, measurements, overlay's own marks.
    "--xattrs-include=user.*",
    "--xattrs-include=security.capability",
    "--xattrs-include=system.posix_acl_*",
    "--warning=no-unknown-keyword",
    "--warning=no-timestamp",
)
_JAIL = """
set -e
jail=$1 out=$2
shift 2
mount -n -t tmpfs -o mode=755,size=1m tmpfs "$jail"
for name in usr bin sbin lib lib32 lib64 libx32; do
    if [ -L "/$name" ]; then
        cp -P "/$name" "$jail/$name"
    elif [ -d "/$name" ]; then
        mkdir "$jail/$name"
        mount -n --bind "/$name" "$jail/$name"
        mount -n -o remount,bind,ro "$jail/$name"
    fi
done
mkdir "$jail/out" "$jail/dev"
touch "$jail/dev/null"
mount -n --bind /dev/null "$jail/dev/null"
mount -n --bind "$out" "$jail/out"
mount -n -o remount,ro "$jail"
umask 022
exec chroot "$jail" "$@"
"""


def untar(
    archive: Path, into: Path, *, jail: Path, timeout: float, on_bytes: Callable[[int], None] | None = None
) -> tuple[str, tuple[str, ...]]:
    """Unpack `archive` into the empty directory `into`; what came before a fault in the archive stays there.

    `jail` is an empty directory that serves as a mount point while tar runs. `on_bytes` is told how many bytes of the
    file have been read, now and then. Returns the file's sha256 in hex and what tar warned about.
    Raises KernelError quoting tar, HostUnsupported if the program for its compression is missing.
    """
    digest = hashlib.sha256()

    def chunks() -> Iterator[bytes]:
        done = 0
        with archive.open("rb") as opened:
            while chunk := opened.read(_CHUNK):
                digest.update(chunk)
                done += len(chunk)
                yield chunk
                if on_bytes is not None:
                    on_bytes(done)

    argv = (
        *("setpriv", "--pdeathsig", "KILL", "--"),
        *("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--"),
        *("sh", "-c", _JAIL, "sh", str(jail), str(into)),
        *("setpriv", "--no-new-privs", "--bounding-set", _CAPABILITIES, "--"),
        *_TAR,
        *_decompression(archive),
    )
    fed = chunks()
    try:
        finished = run_program(argv, timeout=timeout, stdin=fed, keep_bytes=1 << 16)
    except KernelError as error:  # its message shows the whole command line, jail and all
        raise KernelError(f"tar did not end within {timeout:g} s", timed_out=True) from error
    if finished.exit_code != 0:
        raise KernelError(f"tar cannot unpack it: {finished.tail()}", exit_code=finished.exit_code)
    for _ in fed:  # tar stops at its end mark; the padding behind it belongs to the digest
        pass
    warnings = finished.stderr.decode(errors="replace").splitlines()
    return digest.hexdigest(), tuple(line for line in warnings if line.strip())


def _decompression(archive: Path) -> tuple[str, ...]:
    """By the first bytes, not by the name: names lie, and a layer inside an image archive has none."""
    with archive.open("rb") as opened:
        head = opened.read(8)
    for magic, program, package in _MAGIC:
        if head.startswith(magic):
            if shutil.which(program.split()[0]) is None:
                raise HostUnsupported(
                    f"{archive} is compressed, and {program.split()[0]} is not installed",
                    fix=f"apt-get install -y {package}",
                )
            return (f"--use-compress-program={program}",)
    return ()
