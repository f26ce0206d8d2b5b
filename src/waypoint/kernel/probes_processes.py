"""Probes of what a session's processes need: namespaces, our own programs, CRIU, confinement, memory."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from waypoint.errors import HostUnsupported, KernelError
from waypoint.kernel import probe_calls, tools
from waypoint.kernel.probes import Probe, mapped_child, poll_until
from waypoint.kernel.programs import run_program

__all__ = ["PROBES"]

_CAP_SYS_ADMIN, _CAP_SYS_RESOURCE = 21, 24
_PRIVILEGED = "run as root outside a container, or: docker run --privileged"


# -- root and namespaces ----------------------------------------------------------------------------------------------


def _root(_: Path) -> str:
    if os.geteuid() != 0:
        raise HostUnsupported(f"running as uid {os.geteuid()}", fix="sudo waypoint doctor")
    status = Path("/proc/self/status").read_text()
    effective = int(next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), 16)
    if not effective >> _CAP_SYS_ADMIN & 1:
        raise HostUnsupported("root without CAP_SYS_ADMIN, as in an unprivileged container", fix=_PRIVILEGED)
    if not effective >> _CAP_SYS_RESOURCE & 1:
        return "root, but without CAP_SYS_RESOURCE: sessions can be dumped only inside their user namespace"
    return "root with CAP_SYS_ADMIN"


def _namespace(name: str, flag: int, _: Path) -> str:
    before = Path(f"/proc/self/ns/{name}").readlink()
    probe_calls.unshare(flag)
    if name == "net" and [link for _, link in socket.if_nameindex()] != ["lo"]:
        raise KernelError("a fresh network namespace does not hold just lo")
    if name == "uts":
        socket.sethostname("waypoint-probe")
    # A process's own PID namespace stays; it is the next child that is in the new one.
    shown = "pid_for_children" if name == "pid" else name
    if name == "pid":
        _first_child_is_one()
    if Path(f"/proc/self/ns/{shown}").readlink() == before:
        raise KernelError(f"unshare did nothing: still in {before}")
    return "can be made"


def _first_child_is_one() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0 if os.getpid() == 1 else 1)
    if os.waitpid(child, 0)[1] != 0:
        raise KernelError("the first process of a fresh PID namespace is not PID 1")


def _user_namespace(_: Path) -> str:
    """With a whole range of ids mapped, which only root may do: daemons that drop to their own user depend on it."""

    def life() -> None:
        os.setgroups([])
        os.setresgid(1000, 1000, 1000)
        os.setresuid(1000, 1000, 1000)
        signal.pause()

    with mapped_child("0 100000 65536\n", life) as child:
        status = Path(f"/proc/{child}/status")
        poll_until(lambda: "Uid:\t101000\t" in status.read_text(), "a change to uid 1000 in a user namespace")
    return "can be made, with 65536 ids"


# -- programs and CRIU ------------------------------------------------------------------------------------------------


def _program(program: tools.Program, _: Path) -> str:
    path = tools.program_path(program)
    if path.read_bytes()[:4] != b"\x7fELF":
        raise KernelError(f"{path} is not a program", fix=f"rm {path}; {tools.SETUP}")
    if program.name.endswith(".so"):  # the loader complains of a library that it cannot load, and goes on
        started = run_program([*tools.criu_argv(), "--version"], timeout=10, env={"LD_PRELOAD": str(path)})
        works = started.exit_code == 0 and not started.stderr
    else:
        started = run_program([str(path)], timeout=10)  # without arguments they only complain about that
        works = started.exit_code not in (126, 127) and started.exit_code >= 0
    if not works:
        raise KernelError(f"{path} does not start: {started.tail()}", fix=f"rm {path}; {tools.SETUP}")
    return str(path)


def _criu_check(_: Path) -> str:
    argv = tools.criu_argv()
    _private_run()
    found = tools.check_criu(argv)
    return f"CRIU {found.version} at {argv[-1]}"


# Counts the lines it is sent in a shell variable: only a process whose memory came back knows the number.
_COUNTER = """
exec 3<>asked
n=0
while read -r name <&3; do
    n=$((n + 1))
    echo $n >"$name.part"
    mv "$name.part" "$name"
done
"""


def _own_criu() -> list[str]:
    found = tools.quick_criu()
    if found is None:
        raise KernelError("it is not built; the plain CRIU is used, which takes longer", fix=f"{tools.SETUP} --system-packages")
    return list(found.argv)


def _criu_dump_and_restore(which: Callable[[], list[str]], where: Path) -> str:
    """Dump a small process for real, kill it, bring it back, and ask it what it remembers."""
    criu = which()  # first of all, whether there is one
    _private_run()
    os.chdir(where)
    os.mkfifo("asked")
    Path("images").mkdir()
    null = subprocess.DEVNULL
    argv = ["/bin/sh", "-c", _COUNTER]
    counter = subprocess.Popen(argv, stdin=null, stdout=null, stderr=null, start_new_session=True)
    _ask("before", "1")
    began = time.monotonic()
    _criu(criu, "dump", "--tree", str(counter.pid))
    dumped = time.monotonic()
    counter.wait()
    _criu(criu, "restore", "--restore-detached")
    restored = time.monotonic()
    _ask("after", "2")
    return f"dump {(dumped - began) * 1000:.0f} ms, restore {(restored - dumped) * 1000:.0f} ms; memory came back"


def _private_run() -> None:
    """CRIU leaves its cache of kernel features in /run; the probe's goes away with this mount."""
    probe_calls.mount("tmpfs", "/run", "tmpfs", 0)


def _ask(name: str, expected: str) -> None:
    # Opened for both: a plain write-only open would wait for ever for a reader that died.
    with open("asked", "r+b", buffering=0) as asked:
        asked.write(f"{name}\n".encode())
        poll_until(Path(name).exists, "an answer of the process")
    if (answer := Path(name).read_text().strip()) != expected:
        raise KernelError(f"the process counted {answer} and not {expected}: its memory did not come back")


def _criu(criu: list[str], verb: str, *arguments: str) -> None:
    argv = [*criu, verb, "--images-dir", "images", "--log-file", f"{verb}.log", *arguments]
    done = run_program(argv, timeout=30)
    if done.exit_code != 0:
        log = Path("images", f"{verb}.log")
        lines = log.read_text(errors="replace").splitlines() if log.exists() else done.tail().splitlines()
        wrong = [line for line in lines if "Error" in line] or lines
        raise KernelError(f"criu {verb} failed: " + "; ".join(wrong[-3:]), fix=tools.SETUP)


# -- confinement and memory -------------------------------------------------------------------------------------------

_PERSONALITY = {"x86_64": 135, "aarch64": 92}
_USERFAULTFD = {"x86_64": 323, "aarch64": 282}
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2


def _seccomp(_: Path) -> str:
    """Load a filter that refuses one harmless call, and see it refused."""
    load, equal, answer = 0x20, 0x15, 0x06
    allow, refuse = 0x7FFF0000, 0x00050000 | errno.EDOM
    number = _PERSONALITY[platform.machine()]
    steps = [(load, 0, 0, 0), (equal, 0, 1, number), (answer, 0, 0, refuse), (answer, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(code)))
    probe_calls.checked("prctl", probe_calls.libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    loaded = probe_calls.libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program)
    probe_calls.checked("loading a seccomp filter", loaded)
    try:
        probe_calls.syscall("personality", number, ctypes.c_ulong(0xFFFFFFFF))
    except OSError as error:
        if error.errno == errno.EDOM:
            return "filters can be loaded"
    raise KernelError("a seccomp filter was loaded but refuses nothing")


def _userfaultfd(_: Path) -> str:
    """Fill a page that was never touched through the descriptor, as a lazy restore does."""
    api, register, copy = 0xC018AA3F, 0xC020AA00, 0xC028AA03
    missing = 1
    number = _USERFAULTFD[platform.machine()]
    fd = probe_calls.syscall("userfaultfd", number, os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        fcntl.ioctl(fd, api, struct.pack("=QQQ", 0xAA, 0, 0))
        page = mmap.PAGESIZE
        memory = mmap.mmap(-1, page)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        source = ctypes.create_string_buffer(b"waypoint", page)
        fcntl.ioctl(fd, register, struct.pack("=QQQQ", address, page, missing, 0))
        fcntl.ioctl(fd, copy, struct.pack("=QQQQq", address, ctypes.addressof(source), page, 0, 0))
        if memory[:8] != b"waypoint":
            raise KernelError("a page filled through userfaultfd does not hold what was put there")
    finally:
        os.close(fd)
    return "pages can be filled on demand"


def _memfd(_: Path) -> str:
    fd = os.memfd_create("waypoint-probe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, b"sealed")
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        try:
            os.write(fd, b"more")
        except PermissionError:
            return "can be made and sealed"
    finally:
        os.close(fd)
    raise KernelError("a sealed memfd could be written to")


_NAMESPACES = (
    ("pid", probe_calls.CLONE_NEWPID),
    ("mnt", probe_calls.CLONE_NEWNS),
    ("net", probe_calls.CLONE_NEWNET),
    ("ipc", probe_calls.CLONE_NEWIPC),
    ("uts", probe_calls.CLONE_NEWUTS),
    ("cgroup", probe_calls.CLONE_NEWCGROUP),
)

PROBES = (
    Probe("root", _root, "sudo waypoint doctor"),
    Probe("namespace-user", _user_namespace, _PRIVILEGED),
    *(Probe(f"namespace-{name}", partial(_namespace, name, flag), _PRIVILEGED) for name, flag in _NAMESPACES),
    *(Probe(f"program-{program.name}", partial(_program, program), tools.SETUP) for program in tools.PROGRAMS),
    Probe("criu-check", _criu_check, tools.SETUP, pid_namespace=True),
    Probe("criu-dump-restore", partial(_criu_dump_and_restore, tools.criu_argv), tools.SETUP, pid_namespace=True),
    Probe("criu-own", partial(_criu_dump_and_restore, _own_criu), tools.SETUP, required=False, pid_namespace=True),
    Probe("seccomp", _seccomp, "use a kernel with CONFIG_SECCOMP_FILTER"),
    Probe("memfd", _memfd, "use a kernel with CONFIG_MEMFD_CREATE"),
    Probe("userfaultfd", _userfaultfd, "use a kernel with CONFIG_USERFAULTFD", required=False),
)
