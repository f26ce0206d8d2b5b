"""Children that have nothing left to do but to end: nobody waits for that, and somebody must reap them.

One thread for all of them, which looks now and then: to start one for each took longer than the restore that it was for.
"""

from __future__ import annotations

import subprocess
import threading
import time

__all__ = ["reap"]

_TICK = 0.04
_IDLE_SECONDS = 10.0

_lock = threading.Lock()
_ending: list[subprocess.Popen[bytes]] = []
_thread: threading.Thread | None = None


def reap(process: subprocess.Popen[bytes]) -> None:
    """When it has ended, some time."""
    global _thread
    with _lock:
        _ending.append(process)
        if _thread is None or not _thread.is_alive():  # after a fork it is not
            _thread = threading.Thread(target=_run, name="reaper", daemon=True)
            _thread.start()


def _run() -> None:
    global _thread
    needed = time.monotonic()
    while True:
        time.sleep(_TICK)
        with _lock:
            _ending[:] = [process for process in _ending if process.poll() is None]
            if _ending:
                needed = time.monotonic()
            elif time.monotonic() - needed > _IDLE_SECONDS:
                _thread = None
                return
