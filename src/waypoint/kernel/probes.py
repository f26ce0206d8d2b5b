"""What this host can do, found out by doing it. Versions and configuration files lie; a mount that worked does not.

A probe is a function that tries one feature in a scratch directory and says what it saw, or raises. It runs in a child
with a private mount namespace (and a PID namespace of its own when it starts processes), so that whatever it leaves
behind is gone with the child. The children are forks: call this from a process without other threads.
"""

from __future__ import annotations

import errno
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from waypoint.errors import KernelError, WaypointError
from waypoint.kernel import probe_calls, tools

__all__ = ["Feature", "Probe", "in_child", "mapped_child", "poll_until", "probe_all"]

_DEADLINE_S = 60.0
_GRACE_S = 5.0
_NO_USER_NAMESPACE = "sysctl -w user.max_user_namespaces=15000; in a container: docker run --privileged"

Attempt = Callable[[Path], str]


@dataclass(frozen=True, slots=True)
class Feature:
    """One line of `waypoint doctor`: `fix` is the command or the step that mends it, empty when it works."""

    feature: str
    status: Literal["works", "missing"]
    why: str
    fix: str
    required: bool


@dataclass(frozen=True, slots=True)
class Probe:
    """A feature and how to try it. `pid_namespace`: the attempt starts processes, and is itself PID 1 for them."""

    feature: str
    attempt: Attempt
    fix: str
    required: bool = True
    pid_namespace: bool = False

    def run(self, scratch: Path) -> Feature:
        """Try it below `scratch`, which is on the file system that the store will be on."""
        where = Path(tempfile.mkdtemp(prefix=f"{self.feature}-", dir=scratch))
        try:
            seen = in_child(self.attempt, where, pid_namespace=self.pid_namespace)
            return Feature(self.feature, "works", seen, "", self.required)
        except WaypointError as error:
            fix = str(error.details.get("fix") or self.fix)
            if os.geteuid() != 0 and fix != tools.SETUP:
                fix = "sudo waypoint doctor"
            return Feature(self.feature, "missing", error.message, fix, self.required)
        finally:
            shutil.rmtree(where, ignore_errors=True)


def probe_all(probes: Iterable[Probe], scratch: Path) -> list[Feature]:
    """Every probe in turn; a probe that cannot even be started counts as missing, with the reason."""
    return [probe.run(scratch) for probe in probes]


def in_child(attempt: Attempt, where: Path, *, pid_namespace: bool = False, timeout: float = _DEADLINE_S) -> str:
    """Run `attempt` in a child with private mounts; KernelError with its reason if it raised, died or hung."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _child(attempt, where, pid_namespace, writer)
    os.close(writer)
    try:
        said = _read_until(reader, time.monotonic() + timeout)
    finally:
        os.close(reader)
        _end(child)
    try:
        outcome = json.loads(said)
    except ValueError:
        raise KernelError(f"the attempt did not end within {timeout:g} s, or was killed") from None
    if outcome["failed"]:
        raise KernelError(outcome["text"], fix=outcome["fix"])
    return str(outcome["text"])


def poll_until(done: Callable[[], bool], what: str, timeout: float = 10.0) -> None:
    """Look every few milliseconds; KernelError at the deadline."""
    deadline = time.monotonic() + timeout
    while not done():
        if time.monotonic() > deadline:
            raise KernelError(f"{what} did not happen within {timeout:g} s")
        time.sleep(0.002)


@contextmanager
def mapped_child(id_map: str, life: Callable[[], object]) -> Iterator[int]:
    """A process in a user namespace with `id_map`, written from outside as only root can; it runs `life`."""
    ready, mapped = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            probe_calls.unshare(probe_calls.CLONE_NEWUSER)
            os.write(ready[1], b"x")
            os.read(mapped[0], 1)
            life()
        finally:
            os._exit(0)
    try:
        os.close(ready[1])
        if os.read(ready[0], 1) != b"x":
            raise KernelError("unshare refused a user namespace", fix=_NO_USER_NAMESPACE)
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{child}/{name}").write_text(id_map)
        os.write(mapped[1], b"x")
        yield child
    finally:
        os.close(ready[0])
        os.close(mapped[0])
        os.close(mapped[1])
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _child(attempt: Attempt, where: Path, pid_namespace: bool, writer: int) -> NoReturn:
    """Never returns into the caller's stack, whatever happens: there are two of us now."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        private = _private_mounts()
        if private and pid_namespace:
            probe_calls.unshare(probe_calls.CLONE_NEWPID)
            inner = os.fork()
            if inner:
                os.close(writer)
                # With PID 1 the kernel ends the whole namespace; it is reaped here, and not left to the host's init.
                signal.signal(signal.SIGTERM, lambda *_: os.kill(inner, signal.SIGKILL))
                os.waitpid(inner, 0)
                os._exit(0)
            probe_calls.die_with_parent()
            probe_calls.mount("proc", "/proc", "proc", 0)
        outcome = {"failed": False, "text": attempt(where), "fix": ""}
        code = 0
    except WaypointError as error:
        outcome = {"failed": True, "text": error.message, "fix": error.details.get("fix", "")}
    except OSError as error:
        text = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
        outcome = {"failed": True, "text": text, "fix": _fix_of(error)}
    except BaseException as error:  # noqa: BLE001 - a bug in a probe is a line in the table, not a second doctor
        outcome = {"failed": True, "text": f"{type(error).__name__}: {error}", "fix": ""}
    try:
        os.write(writer, json.dumps(outcome).encode())
    finally:
        os._exit(code)


def _end(child: int) -> None:
    """Its PID namespace, if it has one, goes with it, and its mounts with the last process that holds them."""
    os.kill(child, signal.SIGTERM)
    ended = os.pidfd_open(child)
    try:
        if not select.select([ended], [], [], _GRACE_S)[0]:
            os.kill(child, signal.SIGKILL)
    finally:
        os.close(ended)
    os.waitpid(child, 0)


def _private_mounts() -> bool:
    """False where that is not allowed; then no mount is allowed either, and those probes that need one say so."""
    try:
        probe_calls.unshare(probe_calls.CLONE_NEWNS)
    except PermissionError:
        return False
    probe_calls.mount(None, "/", None, probe_calls.MS_REC | probe_calls.MS_PRIVATE)
    return True


def _fix_of(error: OSError) -> str:
    if error.errno == errno.EPERM:
        return "run as root outside a container, or give the container CAP_SYS_ADMIN (docker run --privileged)"
    if error.errno == errno.ENOSPC:
        return "raise the limits under /proc/sys/user/, such as max_user_namespaces"
    return ""


def _read_until(reader: int, deadline: float) -> bytes:
    said = b""
    while (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select([reader], [], [], left)
        if not ready:
            break
        chunk = os.read(reader, 1 << 16)
        if not chunk:
            break
        said += chunk
    return said
