"""The filter in the kernel: what a filtered process may call, what it is told otherwise, and that programs still work.

Calls are made with arguments that no kernel accepts, so an answer other than the filter's own EPERM or ENOSYS shows
that the call got past it; nothing is done to the machine even where the filter lets a call through.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from waypoint.errors import HostUnsupported, UsageError
from waypoint.kernel import seccomp, seccomp_profile
from waypoint.kernel.capabilities import (
    ALL_CAPABILITIES,
    DEFAULT_CAPABILITIES,
    capability_mask,
    parse_caps,
    require_shifted_ids,
)
from waypoint.kernel.seccomp import filter_key, filter_program

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

libc = ctypes.CDLL(None, use_errno=True)
NEW_IPC = 0x08000000
BAD = -1 & 0xFFFFFFFFFFFFFFFF
"""As a pointer, a descriptor or a set of flags: refused by everything."""

x86_only = pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 only")


class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def load(program: bytes) -> None:
    """As the launcher does it: by root, so without no_new_privs."""
    loaded = Program(len(program) // 8, program)
    if libc.prctl(22, 2, ctypes.byref(loaded), 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")


def number(name: str) -> int:
    found: int = seccomp._load().seccomp_syscall_resolve_name(name.encode())
    assert found >= 0, name
    return found


def call(nr: int, *arguments: int) -> int:
    """0 or the errno."""
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(nr), *(ctypes.c_ulong(argument) for argument in arguments))
    return ctypes.get_errno() if result == -1 else 0


def filtered(work: Callable[[], object], capabilities: Iterable[str] | None = DEFAULT_CAPABILITIES) -> object:
    """The result of `work` in a child under the filter; without one if `capabilities` is None."""
    program = None if capabilities is None else filter_program(capabilities)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if libc.unshare(NEW_IPC):  # no flags are too many for msgget: it makes a queue
                raise OSError(ctypes.get_errno(), "unshare")
            if program is not None:
                load(program)
            os.write(writer, json.dumps(work()).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        text = answer.read()
    assert os.waitpid(child, 0)[1] == 0
    return json.loads(text)


def answers(names: Iterable[str], capabilities: Iterable[str] | None = DEFAULT_CAPABILITIES) -> dict[str, int]:
    wanted = {name: number(name) for name in names}
    result = filtered(
        lambda: {name: call(nr, BAD, BAD, BAD, BAD, BAD, BAD) for name, nr in wanted.items()}, capabilities
    )
    assert isinstance(result, dict)
    return result


REFUSED = """
    acct add_key bpf delete_module fanotify_init finit_module fsconfig fsmount fsopen fspick init_module io_uring_enter
    io_uring_register io_uring_setup kcmp kexec_load keyctl mbind mount mount_setattr move_mount open_by_handle_at
    open_tree perf_event_open pidfd_getfd pivot_root process_madvise quotactl reboot request_key set_mempolicy
    setdomainname sethostname setns settimeofday swapoff swapon syslog umount2 unshare userfaultfd vhangup
"""


def test_what_docker_refuses_is_refused() -> None:
    names = [*REFUSED.split(), *(["ioperm", "iopl"] if platform.machine() == "x86_64" else [])]
    assert answers(names) == dict.fromkeys(names, errno.EPERM)


def test_what_a_snapshot_cannot_carry_does_not_exist() -> None:
    known = [
        name
        for name in seccomp_profile.NOT_IN_A_SNAPSHOT
        if seccomp._load().seccomp_syscall_resolve_name(name.encode()) >= 0
    ]
    assert "memfd_secret" in known
    assert answers(known) == dict.fromkeys(known, errno.ENOSYS)


NEEDED = """
    membarrier rseq set_robust_list get_robust_list timer_create timer_settime timerfd_create clock_nanosleep
    epoll_pwait2 statx openat2 close_range faccessat2 pidfd_open prlimit64 seccomp ptrace process_vm_readv capset
    mknodat chroot io_setup mq_open semget shmget msgget signalfd4 inotify_add_watch name_to_handle_at futex_waitv
"""


def test_calls_that_the_c_library_and_criu_depend_on_get_through() -> None:
    got = answers(NEEDED.split())
    assert got == answers(NEEDED.split(), None)
    assert not {errno.EPERM, errno.ENOSYS} & set(got.values())


def test_clone_refuses_namespaces_and_clone3_is_not_there() -> None:
    def work() -> list[int]:
        flags = (0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000, 0x10020000)
        return [call(clone, flag, 0, 0, 0, 0) for flag in flags] + [call(clone3, 0, 0)]

    clone, clone3 = number("clone"), number("clone3")
    assert filtered(work) == [errno.EPERM] * 8 + [errno.ENOSYS]


def test_socket_families() -> None:
    nr = number("socket")
    result = filtered(lambda: [call(nr, family, BAD, 0) for family in range(64)])
    assert isinstance(result, list)
    refused = {family for family, code in enumerate(result) if code == errno.EPERM}
    assert refused == set(seccomp_profile.REFUSED_SOCKET_FAMILIES) | set(range(46, 64))
    assert {38, 40} <= refused
    assert not refused & {1, 2, 10, 16, 17}


def test_personality() -> None:
    nr = number("personality")
    values = (0xFFFFFFFF, 0x0, 0x8, 0x20000, 0x20008, 0x40000, 0x0400000, 0x8000000)
    assert filtered(lambda: [call(nr, value) for value in values]) == [0] * 5 + [errno.EPERM] * 3


def test_calls_newer_than_libseccomp_do_not_exist() -> None:
    last = seccomp._last_known(seccomp._architectures()[0])
    assert filtered(lambda: [call(last + 1), call(last + 500), call(0x7FFFFFFF)]) == [errno.ENOSYS] * 3


# -- the other doors of an x86-64 kernel ------------------------------------------------------------------------------


def through_int80(nr: int, first: int, second: int) -> int:
    """Make a 32-bit system call from this 64-bit process; the errno or 0."""
    code = bytes.fromhex("53 89f8 89f3 89d1 31d2 31f6 31ff cd80 5b c3")
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint)(address)
    result: int = function(nr, first, second)
    return -min(result, 0)


@x86_only
def test_32_bit_calls_are_filtered_by_their_own_numbers() -> None:
    getpid, mount, unshare, keyctl, clone, clone3, beyond = 20, 21, 310, 288, 120, 435, 1500

    def work() -> list[int]:
        return [
            through_int80(getpid, 0, 0),
            through_int80(mount, 0xFFFFFFFF, 0xFFFFFFFF),
            through_int80(unshare, 0x10000000, 0),
            through_int80(keyctl, 0, 0),
            through_int80(clone, 0x10000000, 0),
            through_int80(clone3, 0, 0),
            through_int80(beyond, 0, 0),
        ]

    assert filtered(work) == [0] + [errno.EPERM] * 4 + [errno.ENOSYS] * 2


@x86_only
def test_x32_calls_are_no_way_around() -> None:
    x32, mount, unshare = 0x40000000, 165, 272
    assert filtered(lambda: [call(x32 | nr, BAD) for nr in (0, mount, unshare)]) == [errno.ENOSYS] * 3


# -- more capabilities, more calls ------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", sorted(seccomp_profile.BY_CAPABILITY))
def test_a_capability_brings_its_calls(capability: str) -> None:
    known = seccomp._load().seccomp_syscall_resolve_name
    names = [
        name
        for name in seccomp_profile.BY_CAPABILITY[capability]
        - {"clone", "clone3", "reboot", "vhangup", "stime", "iopl"}
        if 0 <= known(name.encode()) < 1000
    ]
    without = answers(names, DEFAULT_CAPABILITIES - {capability})
    assert without == dict.fromkeys(names, errno.EPERM)
    assert answers(names, DEFAULT_CAPABILITIES | {capability}) == answers(names, None)


def test_the_administrator_may_make_namespaces() -> None:
    """A child of the filtered child enters new namespaces and mounts in them."""

    def work() -> int:
        if libc.unshare(0x00020000):
            return ctypes.get_errno()
        return 0 if libc.mount(None, b"/", None, 1 << 18 | 16384, None) == 0 else ctypes.get_errno()

    assert filtered(work) == errno.EPERM
    assert filtered(work, parse_caps(["+SYS_ADMIN"])) == 0


# -- real programs ----------------------------------------------------------------------------------------------------

PYTHON = """
import asyncio, concurrent.futures, multiprocessing, os, signal, socket, sqlite3, subprocess, tempfile, threading
box = []
threads = [threading.Thread(target=box.append, args=(n,)) for n in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
assert sorted(box) == list(range(8))
with concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
    assert list(pool.map(abs, [-1, -2])) == [1, 2]
assert subprocess.run(["true"]).returncode == 0
async def main():
    child = await asyncio.create_subprocess_exec("echo", "hi", stdout=subprocess.PIPE)
    assert (await child.communicate())[0] == b"hi\\n"
asyncio.run(main())
with tempfile.TemporaryDirectory() as folder:
    db = sqlite3.connect(folder + "/db"); db.execute("create table t(x)"); db.commit(); db.close()
a, b = socket.socketpair(); a.send(b"x"); assert b.recv(1) == b"x"
server = socket.create_server(("127.0.0.1", 0)); client = socket.create_connection(server.getsockname())
signal.setitimer(signal.ITIMER_REAL, 0.01); signal.sigwait([signal.SIGALRM])
print("fine")
"""


def run(*argv: str, cwd: Path | None = None) -> str:
    program = filter_program()
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, preexec_fn=lambda: load(program), cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_python_with_threads_pools_and_servers() -> None:
    assert run(sys.executable, "-c", "import signal; signal.pthread_sigmask(0, [14])\n" + PYTHON) == "fine\n"


def test_a_shell_with_jobs_and_pipes(tmp_path: Path) -> None:
    jobs = "set -m; sleep 0.05 & (cd /; ls | sort | head -2 >/dev/null); wait; trap 'echo bye' EXIT; ulimit -n"
    script = f"{jobs}; umask 027; mkdir d; ln -s d e; cp -a d f"
    assert run("bash", "-c", script, cwd=tmp_path).endswith("bye\n")


def test_another_user(tmp_path: Path) -> None:
    assert run("su", "nobody", "-s", "/bin/sh", "-c", "id -un") == "nobody\n"


def test_a_compiler_and_its_program(tmp_path: Path) -> None:
    (tmp_path / "hello.c").write_text('#include <stdio.h>\nint main(void) { puts("hello"); }\n')
    run("gcc", "-o", "hello", "hello.c", cwd=tmp_path)
    assert run("./hello", cwd=tmp_path) == "hello\n"


def test_git(tmp_path: Path) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    run("git", "init", "-q", cwd=tmp_path)
    (tmp_path / "file").write_text("text")
    run("git", "add", "file", cwd=tmp_path)
    run("git", *identity, "commit", "-qm", "first", cwd=tmp_path)
    assert run("git", "log", "--format=%s", cwd=tmp_path) == "first\n"


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_a_debugger() -> None:
    run("strace", "-f", "-o", "/dev/null", "sh", "-c", "true")


# -- the program as a thing -------------------------------------------------------------------------------------------


def test_the_program_is_whole_small_and_the_same_every_time() -> None:
    program = filter_program()
    assert len(program) % 8 == 0 and 100 < len(program) // 8 < 4096
    assert filter_program(sorted(DEFAULT_CAPABILITIES, reverse=True)) == program
    assert len(filter_program(ALL_CAPABILITIES)) // 8 < 4096


def test_the_key_tells_programs_apart() -> None:
    keys = {filter_key(), filter_key(parse_caps(["+SYS_ADMIN"])), filter_key([])}
    assert len(keys) == 3
    assert filter_key() == filter_key(sorted(DEFAULT_CAPABILITIES))


# -- capabilities -----------------------------------------------------------------------------------------------------


def test_the_default_set_is_dockers() -> None:
    assert len(DEFAULT_CAPABILITIES) == 14
    assert capability_mask(DEFAULT_CAPABILITIES) == 0xA80425FB
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    assert capability_mask(ALL_CAPABILITIES) & ((1 << last + 1) - 1) == (1 << last + 1) - 1 or last > 40


def test_changes_are_applied_in_order() -> None:
    assert parse_caps([]) == DEFAULT_CAPABILITIES
    assert parse_caps(["+SYS_ADMIN", "-cap_net_raw"]) == DEFAULT_CAPABILITIES - {"CAP_NET_RAW"} | {"CAP_SYS_ADMIN"}
    assert parse_caps(["-ALL", "+CAP_KILL"]) == {"CAP_KILL"}
    assert parse_caps(["+all"]) == ALL_CAPABILITIES
    assert parse_caps(["+CHOWN"], start=[]) == {"CAP_CHOWN"}


@pytest.mark.parametrize("wrong", ["SYS_ADMIN", "+NO_SUCH", "", "+", "*KILL"])
def test_a_wrong_name_is_refused(wrong: str) -> None:
    with pytest.raises(UsageError):
        parse_caps([wrong])


def test_a_session_that_could_take_off_its_masks_needs_shifted_ids() -> None:
    require_shifted_ids(DEFAULT_CAPABILITIES)
    require_shifted_ids(ALL_CAPABILITIES - {"CAP_SYS_ADMIN"})
    with pytest.raises(HostUnsupported, match="CAP_SYS_ADMIN"):
        require_shifted_ids(parse_caps(["+SYS_ADMIN"]))
