"""Find out, by building something, how buildah works on this host.

Two things differ between hosts: which way of running RUN steps works (an OCI runtime wants cgroups in a shape that it
knows, and limits that it may set), and whether the storage marks deletions as a plain overlay mount understands them.
The answer is kept in the storage until the host boots again or one of the programs changes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path

from waypoint.errors import HostUnsupported, KernelError
from waypoint.kernel.buildah import FIX, Isolation, Storage

__all__ = ["isolation_of", "try_isolation"]

_DOCKERFILE = """\
FROM scratch
COPY tree /
RUN ["/bin/sh", "-c", "rm /gone && rm -r /hidden && mkdir /hidden"]
"""
_PROGRAMS = ("bin", "lib", "lib32", "lib64", "usr")


def isolation_of(storage: Storage, timeout: float = 120) -> Isolation:
    """The first way that works, the strongest tried first; HostUnsupported with each one's own words if none does."""
    memory = storage.home / "probe.json"
    host = _host()
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(memory.read_bytes())
        if known["host"] == host:
            return Isolation(known["kind"], known["runtime"])
    candidates = [Isolation("oci", name) for name in ("runc", "crun") if shutil.which(name)] + [Isolation("chroot")]
    refusals = []
    for candidate in candidates:
        try:
            try_isolation(storage, candidate, timeout)
        except KernelError as error:
            refusals.append(f"{' '.join((candidate.kind, candidate.runtime)).strip()}: {error.message}")
            continue
        answer = {"host": host, "kind": candidate.kind, "runtime": candidate.runtime}
        fresh = memory.with_suffix(".new")
        fresh.write_text(json.dumps(answer) + "\n")
        fresh.replace(memory)
        return candidate
    raise HostUnsupported(
        "buildah cannot build here; each way was tried:\n" + "\n".join(refusals), fix=FIX, feature="buildah"
    )


def try_isolation(storage: Storage, isolation: Isolation, timeout: float) -> None:
    """Build a two-layer image in a storage that is thrown away, its RUN step served by the host's own shell."""
    trial = Storage(storage.home / "probe")
    shutil.rmtree(trial.home, ignore_errors=True)
    trial.create()
    try:
        context = trial.home / "context"
        (context / "tree/hidden").mkdir(parents=True)
        (context / "tree/hidden/below").touch()
        (context / "tree/gone").touch()
        (context / "Dockerfile").write_text(_DOCKERFILE)
        present = [name for name in _PROGRAMS if Path("/", name).is_dir()]
        volumes = [f"--volume=/{name}:/{name}:ro" for name in present]
        said, image_id = trial.build(
            context,
            context / "Dockerfile",
            isolation=isolation,
            extra=volumes,
            timeout=timeout,
            on_output=lambda data: None,
        )
        if not image_id:
            raise KernelError(said.tail(4))
        top = next(image for image in trial.images() if image.id == image_id).layers[0]
        gone, hidden = (top / "gone").lstat(), os.getxattr(top / "hidden", "trusted.overlay.opaque")
        if (gone.st_rdev, hidden) != (0, b"y") or not (top / "gone").is_char_device():
            raise KernelError(f"its layers mark deletions in a way that overlay does not understand ({top})")
    except OSError as error:
        raise KernelError(f"its layers do not look as they should: {error}") from error
    finally:
        shutil.rmtree(trial.home)


def _host() -> str:
    """Changes with a boot and with every exchange of a program that matters."""
    parts = [Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
    for name in ("buildah", "runc", "crun"):
        found = shutil.which(name)
        status = Path(found).stat() if found else None
        parts.append(f"{name}={status.st_ino}/{status.st_size}/{status.st_mtime_ns}" if status else f"{name}=none")
    return " ".join(parts)
