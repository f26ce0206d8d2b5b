"""Small root file systems for tests, made from Debian packages: no image registry is asked.

    busybox   one static program under all its names; 2 MB, at once
    debian    mmdebstrap's minbase with python3: a real bash, coreutils and libc; 190 MB, half a minute, then cached;
              or with other packages

Each is a tar archive in a cache directory that test runs share; a container tool imports it.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from statefork.errors import HostUnsupported
from waypoint.kernel.programs import run_program

__all__ = ["busybox_archive", "cache_directory", "debian_archive"]

_SUITE = "bookworm"
_PACKAGES = ("python3-minimal", "procps")
_BUILD_TIMEOUT = 900.0

_PASSWD = "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/home/user:/bin/sh\n"
_GROUP = "root:x:0:\nuser:x:1000:\n"


def cache_directory() -> Path:
    return Path("/var/cache/statefork") if os.geteuid() == 0 else Path.home() / ".cache/statefork"


def busybox_archive(cache: Path | None = None) -> Path:
    """Needs the package busybox-static."""
    program = Path("/bin/busybox")
    if not program.exists():
        raise HostUnsupported("busybox-static is not installed", fix="apt-get install busybox-static")
    data = program.read_bytes()
    with _made_once(cache, f"busybox-{hashlib.sha256(data).hexdigest()[:16]}.tar") as (target, fresh):
        if fresh is not None:
            applets = run_program([str(program), "--list"], timeout=30).check("busybox --list").text.split()
            with tarfile.open(fresh, "w") as archive:
                _skeleton(archive)
                _add(archive, "bin/busybox", data, 0o755)
                for name in applets:
                    if name != "busybox":
                        link = tarfile.TarInfo(f"bin/{name}")
                        link.type, link.linkname = tarfile.SYMTYPE, "busybox"
                        archive.addfile(link)
        return target


def debian_archive(
    cache: Path | None = None, packages: Sequence[str] = _PACKAGES, *, more_options: Sequence[str] = ()
) -> Path:
    """Needs the package mmdebstrap and a Debian mirror, the first time. `more_options` are mmdebstrap's."""
    if shutil.which("mmdebstrap") is None:
        raise HostUnsupported("mmdebstrap is not installed", fix="apt-get install mmdebstrap")
    key = hashlib.sha256(" ".join((_SUITE, *packages, *more_options)).encode()).hexdigest()[:16]
    with _made_once(cache, f"debian-{key}.tar") as (target, fresh):
        if fresh is not None:
            options = ["--variant=minbase", "--format=tar", f"--include={','.join(packages)}", *more_options]
            argv = ["mmdebstrap", *options, _SUITE, str(fresh)]
            run_program(argv, timeout=_BUILD_TIMEOUT).check("making the Debian image for tests")
        return target


@contextmanager
def _made_once(cache: Path | None, name: str) -> Iterator[tuple[Path, Path | None]]:
    """The finished file's path, and where to write it if it is not there yet. Two test runs make it one after the other."""
    directory = (cache or cache_directory()) / "images"
    directory.mkdir(parents=True, exist_ok=True)
    target, fresh = directory / name, directory / f".{name}.new"
    lock = os.open(directory / f".{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = not target.exists()
        yield target, fresh if missing else None
        if missing:
            fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)
        os.close(lock)


def _skeleton(archive: tarfile.TarFile) -> None:
    for name, mode in (
        ("bin", 0o755),
        ("etc", 0o755),
        ("root", 0o700),
        ("home", 0o755),
        ("tmp", 0o1777),
        ("run", 0o755),
    ):
        entry = tarfile.TarInfo(name)
        entry.type, entry.mode = tarfile.DIRTYPE, mode
        archive.addfile(entry)
    for name in ("dev", "proc", "sys", "mnt", "usr", "var"):
        entry = tarfile.TarInfo(name)
        entry.type, entry.mode = tarfile.DIRTYPE, 0o755
        archive.addfile(entry)
    _add(archive, "etc/passwd", _PASSWD.encode(), 0o644)
    _add(archive, "etc/group", _GROUP.encode(), 0o644)


def _add(archive: tarfile.TarFile, name: str, data: bytes, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), mode
    archive.addfile(entry, io.BytesIO(data))
