"""Kill a caller at a named point, and find whatever it left behind.

`killed` runs one call of the engine in a process of its own that dies, as by kill -9, when it reaches the point. `leftovers`
compares all that a store has on disk and in the kernel with what its rows name: after `gc` the two are the same.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import waypoint
from waypoint.engine import Engine
from waypoint.errors import NotFound
from waypoint.kernel import cgroups, nat, processes
from waypoint.model import Process
from waypoint.session import Session

__all__ = ["SETTING", "check_state", "grow", "killed", "leftovers", "out", "remove_all", "start_call", "until"]

SETTING = (
    "mkdir -p /w; cd /w; V=one; echo one > f; : > log;"
    "(i=0; while :; do i=$((i+1)); echo $i >> /w/log; sleep 0.01; done) &"
)
"""A variable, a directory, a file, and a job whose memory and file tell on each other if they are not of the same instant."""

_CALL = """
import sys
from pathlib import Path
from waypoint import faults
from waypoint.engine import Engine
from waypoint.errors import NotFound
engine = Engine(Path(sys.argv[1]))
session = engine.session(sys.argv[2]) if sys.argv[2] else None
if sys.argv[3]:
    faults.arm(sys.argv[3])
exec(sys.argv[4])
sys.exit(7)
"""


def out(session: Session, command: str) -> str:
    return session.exec(command, timeout=30).stdout.decode()


def until(holds: Callable[[], bool], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def start_call(home: Path, session: str, code: str, point: str = "") -> subprocess.Popen[str]:
    """`code` in a fresh process, with `engine` and `session` at hand."""
    source = str(Path(waypoint.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-c", _CALL, str(home), session, point, code],
        env={"PYTHONPATH": source, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        stderr=subprocess.PIPE,
        text=True,
    )


def killed(home: Path, session: str, point: str, code: str) -> None:
    """Run `code` until it is killed at `point`."""
    call = start_call(home, session, code, point)
    _, said = call.communicate(timeout=50)
    assert call.returncode == -9, f"{code} was not killed at {point} but ended in {call.returncode}:\n{said}"


def grow(session: Session) -> None:
    """Change so many bytes that the next snapshot is sealed by re-homing."""
    session.exec("head -c 64000000 /dev/zero > /w/big", timeout=30)


def check_state(session: Session, value: str = "one") -> None:
    """All of SETTING is there, of one instant, and runs."""
    said = out(session, "echo $V $PWD; cat /w/f; jobs | grep -c Running")
    assert said == f"{value} /w\n{value}\n1\n", said
    before = int(out(session, "wc -l < /w/log"))
    assert until(lambda: int(out(session, "wc -l < /w/log")) > before), "the job stands still"
    torn = out(session, "awk '$1 != NR { print NR, $1; exit }' /w/log")
    assert torn == "", f"the job's file is not of the same instant as its memory: line and number {torn}"


def remove_all(engine: Engine) -> None:
    for record in engine.sessions():
        engine.session(record.id).remove()
    for snapshot in engine.snapshots():
        with contextlib.suppress(NotFound):
            engine.remove_snapshot(snapshot.id, recursive=True)


def leftovers(engine: Engine) -> list[str]:
    """Whatever of this store's no row names, and whatever rows name that is not there."""
    store, tag = engine.store, engine.store.tag
    sessions = [record for record in engine.sessions() if record.state != "dead"]
    live = {Process(record.init_pid, record.init_start) for record in sessions if record.state == "live"}
    uppers = {str(record.upper) for record in sessions if record.state == "live"}
    found = [f"session {record.id} is {record.state}" for record in sessions if record.state not in ("live", "paused")]
    found += [f"stray process {init.pid}" for init in set(processes.inits(tag)) ^ live]
    found += [f"stray helper {pid}" for pid in _helpers(store.paths.home)]
    found += [f"stray cgroup {group}" for name, group in cgroups.list_groups(tag) if name not in uppers]
    found += [f"stray link {key}" for key in nat.nat_keys() if key.startswith(f"{tag}-") and key[9:] not in uppers]
    found += [f"stopped process {pid}" for init in live for pid in processes.namespace_pids(init.pid) if _stopped(pid)]
    found += _differ("layer", store.paths.layers, {str(layer) for layer in store.db.layers_in_use()})
    found += _differ("image", store.paths.images, {record.id for record in engine.snapshots() if record.full})
    found += _differ("session", store.paths.sessions, {record.id for record in engine.sessions()})
    if rows := set(store.db.layers()) ^ store.db.layers_in_use():
        found.append(f"layer rows {rows}")
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    return found + [line for line in mounts if f"{store.paths.home}/" in line]


def _helpers(home: Path) -> list[str]:
    """Processes of the host that hold something of the store open, such as its gate: CRIU, the launcher, their children."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if int(process.name) != os.getpid() and any(_inside(fd, home) for fd in (process / "fd").iterdir()):
                found.append(process.name)
    return found


def _inside(fd: Path, home: Path) -> bool:
    try:
        return fd.readlink().is_relative_to(home)
    except FileNotFoundError:
        return False


def _differ(what: str, directory: Path, named: set[str]) -> list[str]:
    there = {entry.name for entry in directory.iterdir()}
    return [f"stray {what} {name}" for name in there - named] + [f"missing {what} {name}" for name in named - there]


def _stopped(pid: int) -> bool:
    try:
        fields = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return "\nState:\tT" in fields or "\nState:\tt" in fields
