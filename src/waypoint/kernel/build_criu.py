"""Build the engine's own CRIU: a released one with our patch (quick/), linked into one static program.

It saves and restores the same, and its images are CRIU's; it asks the kernel fewer questions (docs/decisions/quick-criu.md). Where it
cannot be built, the engine uses the CRIU that it has: nothing depends on this one but time.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

from waypoint.errors import HostUnsupported, KernelError
from waypoint.kernel import tools
from waypoint.kernel.fetch import fetch_source
from waypoint.kernel.programs import run_program

__all__ = ["build_criu"]

_NEEDS = ("gcc", "make", "patch", "pkg-config", "protoc", "protoc-c")
_FIX = "waypoint setup --system-packages"
_BUILD_TIMEOUT_S = 1200.0


def build_criu(where: Path, progress: Callable[[str], None]) -> None:
    """Fetch, patch, compile and check it; it appears in the prefix whole or not at all.

    The caller holds `locked_prefix`. HostUnsupported or KernelError say why it could not be built.
    """
    missing = [name for name in _NEEDS if shutil.which(name) is None]
    if missing:
        raise HostUnsupported(f"CRIU cannot be built without {', '.join(missing)}; run `{_FIX}`", fix=_FIX)
    staging = where / f".staging-{os.getpid()}"
    staging.mkdir()
    try:
        archive = fetch_source(staging, "criu", tools.QUICK_VERSION, progress)
        built = _build(_unpacked(archive, staging / "source"), progress)
        tools.check_criu((str(built),))
        target = tools.binary_path(tools.QUICK)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.sync()  # the rename must not reach the disk before the file does
        built.replace(target)
    except (OSError, tarfile.TarError, ValueError) as error:
        raise KernelError(f"CRIU could not be built: {error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _unpacked(archive: Path, into: Path) -> Path:
    with tarfile.open(archive) as tar:
        tar.extractall(into, filter="data")
    (source,) = into.iterdir()
    patch = tools.QUICK.source
    done = run_program(["patch", "-p1", "--batch", "--input", str(patch)], timeout=60, cwd=source)
    if done.exit_code != 0:
        raise KernelError(f"{patch.name} does not fit {archive.name}:\n{done.text}")
    for ours in patch.parent.glob("*.c"):
        shutil.copy(ours, source / "criu")
    return source


def _build(source: Path, progress: Callable[[str], None]) -> Path:
    progress(f"building CRIU {tools.QUICK_VERSION} with Waypoint's changes (a minute)")
    jobs = len(os.sched_getaffinity(0))
    # a static program cannot load plugins, and Waypoint uses none: they are looked for where there are none
    done = run_program(["make", f"-j{jobs}", "PLUGINDIR=/nonexistent", "criu/criu"], timeout=_BUILD_TIMEOUT_S, cwd=source)
    if done.exit_code != 0:
        raise KernelError(f"CRIU does not compile; `{_FIX}` brings what it needs:\n{done.tail()}")
    built = source / "criu" / "criu"
    run_program(["strip", str(built)], timeout=60).check("stripping criu")
    return built
