"""One gVisor sandbox on this host: how it is started, asked, and ended. Nothing of it is anywhere but in its directory.

Found out by trial on runsc 20240729:
- What is written to the root (`--overlay2=root:dir=`) is part of a checkpoint, like memory: files and processes cannot
  disagree, and the same read-only base serves every copy.
- Descriptors that `runsc exec` hands in (its pipes) can be stored but not brought back, so the shell behind `exec` is a
  part of the sandbox and is spoken to over FIFOs of the host. With `--directfs` a checkpoint then hangs; without, the
  FIFOs are opened anew in whatever directory the restored sandbox has in their place.
- `runsc delete` waits seconds for its processes to be reaped. They are killed here, and there is nothing else to delete.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from statefork.backends.fifos import FIFO_DIRECTORY, loop_argv, make_fifos
from statefork.errors import DiskFull, KernelError, SessionDead, WaypointError
from waypoint.build.base import Base
from waypoint.build.lookup import find
from waypoint.kernel.programs import Finished, run_program

__all__ = ["CAPABILITIES", "Sandbox", "kill_sandboxes", "launch", "sandbox_processes", "summary", "write_bundle"]

CALL_TIMEOUT = 300.0
_KILL_TIMEOUT = 30.0
_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_EMPTY_MARK = ".statefork"

CAPABILITIES = (
    "CAP_AUDIT_WRITE",
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_MKNOD",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_RAW",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
)
"""Docker's default. They count in the sandbox's own kernel only."""

# The root is an overlay that exists in the mount namespace of the sandbox's processes and nowhere else.
_LAUNCH = r"""
log=$1 layers=$2 lower=$3 root=$4; shift 4
cd "$layers" && { [ -z "$lower" ] || mount -t overlay -o "ro,lowerdir=$lower" overlay "$root"; } && cd / || exit
exec "$@" </dev/null >"$log" 2>&1
"""
# runsc mounts a tmpfs over an empty /tmp; a mark kept it from that.
_INIT = 'rm -f -- "$0"; exec "$@"'


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A running one, by what `runsc` has to be told to find it."""

    runsc: Path
    state: Path
    """Its `--root`."""
    name: str
    flags: tuple[str, ...]
    user: str
    cwd: str

    def argv(self, *arguments: str) -> list[str]:
        return [str(self.runsc), f"--root={self.state}", *self.flags, *arguments]

    def exec_arguments(self, argv: Sequence[str], env: Mapping[str, str], cwd: str | None) -> list[str]:
        """As the user whose shell it is; runsc would take root."""
        options = [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
        return ["exec", "--user", self.user, "--cwd", cwd or self.cwd, *options, self.name, *argv]

    def call(self, *arguments: str, timeout: float = CALL_TIMEOUT) -> Finished:
        return run_program(self.argv(*arguments), timeout=timeout)

    def ask(self, what: str, *arguments: str) -> str:
        done = self.call(*arguments)
        if done.exit_code != 0:
            raise failure(what, done.stderr.decode(errors="replace") or done.text)
        return done.text

    def files_bytes(self) -> int:
        """What the root's changes take up on disk: a file without a name, which the sandbox holds open."""
        for pid in sandbox_processes(self.state):
            with contextlib.suppress(OSError):
                for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                    with contextlib.suppress(OSError):
                        if "runsc-filestore-" in str(descriptor.readlink()):
                            return descriptor.stat().st_blocks * 512
        return 0


def failure(what: str, said: str) -> WaypointError:
    said = summary(said)
    lowered = said.lower()
    if "no space left on device" in lowered:
        return DiskFull(f"{what}: {said}; free some space, the sandbox goes on")
    if "loading sandbox" in lowered or "connecting to control server" in lowered or "is not running" in lowered:
        return SessionDead(f"{what}: {said}")
    return KernelError(f"{what}: {said}")


def summary(said: str) -> str:
    """runsc prints the state of its goroutines after what it has to say."""
    return said.split(":\ngoroutine ", 1)[0].strip()[:2000]


# -- making -----------------------------------------------------------------------------------------------------------


def write_bundle(directory: Path, base: Base, hostname: str) -> tuple[str, str]:
    """Lay out a sandbox's directory: FIFOs, layers by short names, and the OCI description. Returns user and cwd."""
    make_fifos(directory / "io")
    (directory / "io").chmod(0o777)  # the shell's user removes what was staged for it
    for name in ("state", "bundle", "root", "files", "layers", "guest"):
        (directory / name).mkdir()
    for mount_point in (FIFO_DIRECTORY.lstrip("/"), "proc", "dev", "sys", "tmp"):
        (directory / "guest" / mount_point).mkdir()
    (directory / "guest/tmp").chmod(0o1777)
    _make_workdir(directory / "guest", base)
    for number, layer in enumerate((directory / "guest", *base.layers)):
        (directory / "layers" / str(number)).symlink_to(layer)
    uid, gid, home = _account(base)
    (directory / "guest/tmp" / _EMPTY_MARK).touch()
    os.chown(directory / "guest/tmp" / _EMPTY_MARK, uid, gid)
    env = {"PATH": _DEFAULT_PATH, "HOME": home, "TERM": "dumb", **dict(base.start.env)}
    capabilities = list(CAPABILITIES)
    process = {
        "user": {"uid": uid, "gid": gid},
        "args": ["/bin/sh", "-c", _INIT, f"/tmp/{_EMPTY_MARK}", *loop_argv()],
        "env": [f"{name}={value}" for name, value in env.items()],
        "cwd": base.start.workdir,
        "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
        "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 65536, "soft": 65536}],
    }
    mounts = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
        {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", "ro"]},
        {"destination": FIFO_DIRECTORY, "type": "bind", "source": str(directory / "io"), "options": ["rbind", "rw"]},
    ]
    document = {
        "ociVersion": "1.0.0",
        "process": process,
        "root": {"path": str(directory / "root"), "readonly": False},
        "hostname": hostname,
        "mounts": mounts,
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "network")]},
    }
    (directory / "bundle/config.json").write_text(json.dumps(document))
    return f"{uid}:{gid}", base.start.workdir


def _make_workdir(guest: Path, base: Base) -> None:
    """A Dockerfile's WORKDIR need not be in the image. Directories above it that are there keep their owner and mode."""
    if find(list(base.layers), base.start.workdir) is not None:
        return
    here = guest
    for part in Path(base.start.workdir).parts[1:]:
        here = here / part
        here.mkdir(exist_ok=True)
        known = find(list(base.layers), f"/{here.relative_to(guest)}")
        if known is not None:
            facts = known.stat()
            os.chown(here, facts.st_uid, facts.st_gid)
            here.chmod(stat.S_IMODE(facts.st_mode))


def launch(sandbox: Sandbox, directory: Path, verb: Sequence[str], what: str) -> None:
    """`run` or `restore` it; on failure nothing is left running. Without layers the root is where its bundle says."""
    layers = sorted((entry.name for entry in (directory / "layers").iterdir()), key=int)
    log = directory / "runsc.log"
    arguments = [str(log), str(directory / "layers"), ":".join(layers), str(directory / "root")]
    own = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _LAUNCH, "sh", *arguments]
    options = ["--detach", "--bundle", str(directory / "bundle")]
    done = run_program([*own, *sandbox.argv(*verb, *options, sandbox.name)], timeout=CALL_TIMEOUT)
    if done.exit_code != 0:
        kill_sandboxes(sandbox.state)
        said = log.read_text(errors="replace") if log.exists() else ""
        raise failure(what, said or done.tail())


def _account(base: Base) -> tuple[int, int, str]:
    """uid, gid and home of the image's user, by the root's own lists."""
    user, _, group = base.start.user.partition(":")
    rows = {name: rest for name, *rest in _rows(base, "/etc/passwd", 7)}
    row = rows.get(user) or next((rest for rest in rows.values() if rest[1] == user), None)
    if row is None and not user.isdigit():
        raise KernelError(f"{base.source}: its user {user!r} is not in /etc/passwd")
    uid = int(row[1]) if row else int(user)
    gid = int(row[2]) if row else 0
    if group:
        groups = {name: rest for name, *rest in _rows(base, "/etc/group", 3)}
        gid = int(groups[group][1]) if group in groups else int(group)
    return uid, gid, row[4] if row else "/"


def _rows(base: Base, path: str, fields: int) -> Iterator[list[str]]:
    found = find(list(base.layers), path)
    for line in found.read_text(errors="replace").splitlines() if found else ():
        if len(row := line.split(":")) >= fields:
            yield row


# -- ending -----------------------------------------------------------------------------------------------------------


def sandbox_processes(state: Path) -> list[int]:
    """Of one sandbox, or of all whose state is below the directory: found by their command lines."""
    mark = f"--root={state}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if words[0].endswith((b"runsc-sandbox", b"runsc-gofer")) and any(
                word == mark or word.startswith(mark + b"/") for word in words
            ):
                found.append(int(entry.name))
    return found


def kill_sandboxes(state: Path) -> int:
    """Returns how many processes there were, when the kernel has ended them all."""
    doomed = sandbox_processes(state)
    for pid in doomed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + _KILL_TIMEOUT
    while sandbox_processes(state):  # the command line of a zombie is empty
        if time.monotonic() > deadline:
            raise KernelError(f"the sandbox at {state} does not end")
        time.sleep(0.005)
    return len(doomed)
