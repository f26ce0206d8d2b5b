"""Compile Waypoint's own C programs into the prefix.

They are compiled on the host instead of shipped: the package stays free of binaries and fits any architecture. A static
link is not an economy but a need: PID 1 runs in root file systems that may have another libc, or none.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from waypoint.errors import HostUnsupported, KernelError
from waypoint.kernel import tools
from waypoint.kernel.programs import run_program

__all__ = ["compile_program"]

_COMPILERS = ("gcc", "cc", "clang")
_FIX = "apt-get install gcc libc6-dev"


def compile_program(program: tools.Program) -> Path:
    """Compile unless the binary of this very source is there; it appears whole or not at all."""
    target = tools.binary_path(program)
    if target.exists():
        return target
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise HostUnsupported(
            f"no C compiler to compile {program.source.name} with; run `{_FIX}`, then `{tools.SETUP}`",
            fix=_FIX,
            feature="compiler",
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        argv = [compiler, *program.flags, "-o", str(fresh), program.source.name]
        done = run_program(argv, timeout=300, cwd=program.source.parent)
        if done.exit_code != 0 and _no_static_libc(done.stderr):
            raise HostUnsupported(
                f"no static C library to link {program.name} with; run `{_FIX}`, then `{tools.SETUP}`:\n{done.tail()}",
                fix=_FIX,
                feature="static libc",
            )
        if done.exit_code != 0:
            raise KernelError(f"{program.source} does not compile:\n{done.tail()}", argv=argv)
        fresh.chmod(0o755)
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)
    return target


def _no_static_libc(stderr: bytes) -> bool:
    return b"cannot find -lc" in stderr or b".h: No such file" in stderr
