"""Children that have nothing left to do but to end: nobody waits for that, and somebody must reap them.

One thread for all of them. A thread for each took longer to start than the restore that it was for.
"""

from __future__ import annotations

import subprocess
import threading
import time

__all__ = ["reap"]

_PATIENCE = 0.02
"""By then they have ended; until then the thread would only be in the way of whoever goes on."""
_IDLE_SECONDS = 5.0

_change = threading.Condition()
_ending: list[subprocess.Popen[bytes]] = []
_thread: threading.Thread | None = None


def reap(process: subprocess.Popen[bytes]) -> None:
    """When it has ended, some time."""
    global _thread
    with _change:
        _ending.append(process)
        if _thread is None or not _thread.is_alive():  # after a fork it is not
            _thread = threading.Thread(target=_run, name="reaper", daemon=True)
            _thread.start()
        elif len(_ending) == 1:
            _change.notify()


def _run() -> None:
    global _thread
    while True:
        time.sleep(_PATIENCE)
        with _change:
            _ending[:] = [process for process in _ending if process.poll() is None]
            if not _ending and not _change.wait_for(lambda: bool(_ending), _IDLE_SECONDS):
                _thread = None
                return
