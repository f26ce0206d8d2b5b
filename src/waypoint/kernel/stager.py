"""The program that mounts a session's root where a CRIU that runs already looks for it. Started ahead, as CRIU is."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess

from waypoint.errors import CriuError, DiskFull
from waypoint.kernel import later, tools
from waypoint.kernel.launch import ID_BASE, Overlay

__all__ = ["Stager"]


class Stager:
    """For one root. It waits for what to mount, and ends when that is done or when nobody is left who could say."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [str(tools.launch_path()), "stage", "--idmap", str(ID_BASE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={},
            bufsize=0,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def waits(self) -> bool:
        return self._process.poll() is None

    def mount(self, pid: int, overlay: Overlay) -> None:
        """In the mount namespace of that process. Once."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        words = [*overlay.options(), "--enter", str(pid)]
        with contextlib.suppress(BrokenPipeError):  # it has ended, and says why
            self._process.stdin.write(b"".join(os.fsencode(word) + b"\0" for word in words))
        self._process.stdin.close()
        if self._process.stdout.read(1) == b"1":
            return
        assert self._process.stderr is not None
        said = self._process.stderr.read().decode(errors="replace").strip()
        if os.strerror(errno.ENOSPC) in said:
            raise DiskFull(f"no space left on the store's disk; nothing was lost: {said}")
        raise CriuError(f"the session's root could not be mounted: {said}")

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        later.reap(self._process)
