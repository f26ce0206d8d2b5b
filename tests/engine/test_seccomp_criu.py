"""A filtered process goes through CRIU: it is dumped although its filter forbids much of what CRIU makes it do, and
comes back with the same filter, refused what it was refused before and able to work as before.

The process is set up as the launcher does it (filter loaded by root, capabilities dropped after it, no_new_privs off)
and judges itself when asked, before and after.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from waypoint.errors import HostUnsupported
from waypoint.kernel.capabilities import DEFAULT_CAPABILITIES, capability_mask
from waypoint.kernel.seccomp import filter_program
from waypoint.kernel.tools import criu_argv

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the judge calls by x86-64 numbers"),
]

JUDGE = """
import ctypes, json, os, resource, signal, socket, subprocess, sys, threading, time

folder, flavour, capabilities = sys.argv[1], sys.argv[2], int(sys.argv[3])
libc = ctypes.CDLL(None, use_errno=True)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # waited for, not handled: a handler may miss it

class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))

def load(program):
    assert libc.prctl(22, 2, ctypes.byref(Program(len(program) // 8, program)), 0, 0) == 0, ctypes.get_errno()

def drop():
    for bit in range(64):
        if not capabilities >> bit & 1:
            libc.prctl(24, bit, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    low, high = capabilities & 0xFFFFFFFF, capabilities >> 32
    assert libc.capset(header, (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)) == 0

filter = open(folder + "/filter", "rb").read()
idle = threading.Event()
if flavour == "thread":
    threading.Thread(target=idle.wait, daemon=True).start()
    program = Program(len(filter) // 8, filter)
    assert libc.syscall(317, 1, 1, ctypes.byref(program)) == 0, ctypes.get_errno()  # SECCOMP_FILTER_FLAG_TSYNC
else:
    load(filter)
if flavour == "no_new_privs":
    assert libc.prctl(38, 1, 0, 0, 0) == 0
drop()
if flavour == "stacked":  # as a browser or sshd in a session does: its own, stricter filter on top
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    refuse_uname = bytes.fromhex("2000000000000000" "150000013f000000" "0600000001000500" "060000000000ff7f")
    load(refuse_uname)

child = os.fork()
if child == 0:
    while True:
        signal.pause()
listener = socket.create_server(("127.0.0.1", 0))
counter = 0

def status(*names):
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return {name: lines[name].strip() for name in names if name in lines}

def errno_of(nr, *args):
    ctypes.set_errno(0)
    return ctypes.get_errno() if libc.syscall(nr, *map(ctypes.c_long, args)) == -1 else 0

def judge():
    global counter
    counter += 1
    box = []
    worker = threading.Thread(target=box.append, args=(1,))
    worker.start()
    worker.join()
    verdict = {
        "counter": counter,
        "status": status("Seccomp", "Seccomp_filters", "NoNewPrivs", "CapEff", "CapPrm", "CapBnd"),
        "mount": errno_of(165, 0, 0, 0, 0, 0),
        "unshare": errno_of(272, 0x10000000),
        "clone3": errno_of(435, 0, 0),
        "keyctl": errno_of(250, 0),
        "uname": errno_of(63, 0),
        "newer": errno_of(1500),
        "command": subprocess.run(["echo", "works"], capture_output=True, text=True).stdout,
        "thread": box,
        "child": os.path.exists(f"/proc/{child}"),
        "port": listener.getsockname()[1] > 0,
    }
    with open(folder + "/verdict.new", "w") as file:
        json.dump(verdict, file)
    os.rename(folder + "/verdict.new", folder + f"/verdict.{counter}")

with open(folder + "/ready.new", "w") as file:
    file.write(str(os.getpid()))
os.rename(folder + "/ready.new", folder + "/ready")
while True:
    signal.sigwait([signal.SIGUSR1])
    judge()
"""


REAPER = """
import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("up", flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def enter() -> Iterator[list[str]]:
    """How to run something in a process namespace of this test alone, where nobody takes a pid that CRIU wants back."""
    argv = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", REAPER]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == b"up\n"
            children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
            yield ["nsenter", "-t", children[0], "-p", "-m", "--"]
        finally:
            holder.kill()


def wait_for(path: Path, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not appear: {(path.parent / 'errors').read_text()}"
        time.sleep(0.005)


def criu(enter: list[str], folder: Path, *words: str) -> None:
    try:
        prefix = criu_argv()
    except HostUnsupported as error:
        pytest.skip(error.message)
    options = ["-D", str(folder), "-v4", "-o", "criu.log", "--manage-cgroups=ignore", "--network-lock", "skip"]
    done = subprocess.run([*enter, *prefix, *words, *options], timeout=120, capture_output=True)
    log = (folder / "criu.log").read_text(errors="replace") if (folder / "criu.log").exists() else ""
    assert done.returncode == 0, done.stderr.decode() + "\n".join(line for line in log.splitlines() if "Error" in line)


def start_judge(enter: list[str], folder: Path, flavour: str) -> str:
    """Its pid, in its own namespace."""
    (folder / "filter").write_bytes(filter_program())
    mask = str(capability_mask(DEFAULT_CAPABILITIES))
    # opened inside: a file of another mount namespace would be no part of what is dumped
    shell = 'cd /; errors=$1; shift; exec setsid --fork "$@" </dev/null >/dev/null 2>"$errors"'
    judge = [sys.executable, "-c", JUDGE, str(folder), flavour, mask]
    subprocess.run([*enter, "sh", "-c", shell, "sh", str(folder / "errors"), *judge], check=True, timeout=60)
    wait_for(folder / "ready")
    return (folder / "ready").read_text()


@pytest.mark.parametrize("flavour", ["plain", "no_new_privs", "stacked", "thread"])
def test_a_filtered_process_comes_back_filtered_and_working(flavour: str, enter: list[str], tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    pid = start_judge(enter, tmp_path, flavour)
    subprocess.run([*enter, "kill", "-USR1", pid], check=True)
    wait_for(tmp_path / "verdict.1")
    criu(enter, images, "dump", "-t", pid)
    criu(enter, images, "restore", "-d")
    subprocess.run([*enter, "kill", "-USR1", pid], check=True)
    wait_for(tmp_path / "verdict.2")
    before, after = (json.loads((tmp_path / f"verdict.{n}").read_text()) for n in (1, 2))
    assert after.pop("counter") == before.pop("counter") + 1
    assert after == before
    assert before["status"]["Seccomp"] == "2"
    assert before["status"]["Seccomp_filters"] == ("2" if flavour == "stacked" else "1")
    assert before["status"]["NoNewPrivs"] == ("1" if flavour in ("no_new_privs", "stacked") else "0")
    assert int(before["status"]["CapEff"], 16) == capability_mask(DEFAULT_CAPABILITIES)
    uname = 1 if flavour == "stacked" else 14
    refused = {"mount": 1, "unshare": 1, "keyctl": 1, "clone3": 38, "newer": 38, "uname": uname}
    assert {name: before[name] for name in refused} == refused
    assert before["command"] == "works\n" and before["thread"] == [1] and before["child"]
