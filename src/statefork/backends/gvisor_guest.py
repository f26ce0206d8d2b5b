"""What is going on in a sandbox, asked from inside: its processes, and what a checkpoint could not bring back."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass

from statefork.backends.gvisor_sandbox import Sandbox, failure
from statefork.errors import SessionDead

__all__ = ["MARK", "Inside", "look_inside", "named", "outside_connections"]

MARK = "STATEFORK_STARTED"
"""A variable of every process that came in through `runsc exec`, and of all that it starts: `runsc restore` kills them."""

# One program for each question: every start of one costs milliseconds in a sandbox.
_LOOK = r"""
echo "self $$"; ls -l /proc/[0-9]*/fd 2>/dev/null
echo "= tcp"; cat /proc/net/tcp /proc/net/tcp6 2>/dev/null
echo "= commands"; tail -n +1 /proc/[0-9]*/cmdline 2>/dev/null
echo; echo "= variables"; tail -n +1 /proc/[0-9]*/environ 2>/dev/null
exit 0
"""
_LISTEN = "0A"


@dataclass(frozen=True, slots=True)
class Inside:
    processes: tuple[str, ...]
    """Command lines, without the one that asked."""
    outward: tuple[str, ...]
    """Processes that hold a pipe which `runsc exec` handed in."""
    started: Mapping[int, str]
    """Processes that we have started through `runsc exec`, with their command lines."""
    connections: tuple[str, ...]
    """TCP connections that leave the sandbox."""


def look_inside(sandbox: Sandbox, what: str) -> Inside:
    """Raises: SessionDead if it does not answer."""
    done = sandbox.call("exec", "--user", "0:0", "--cwd", "/", sandbox.name, "/bin/sh", "-c", _LOOK)
    if done.exit_code != 0:
        raise failure(what, done.stderr.decode(errors="replace"))
    descriptors, _, rest = done.stdout.decode(errors="replace").partition("= tcp\n")
    tcp, _, rest = rest.partition("= commands\n")
    commands, _, variables = rest.rpartition("\n= variables\n")
    found = re.match(r"self (\d+)\n", descriptors)
    if found is None:
        raise SessionDead(f"{what}: the sandbox does not answer")
    own = int(found[1])
    lines = _by_process(commands, "cmdline")
    marks = _by_process(variables, "environ")
    held = _held(descriptors)
    allowed = held.get(1, set()) | held.get(own, set())
    outward = [named(pid, lines.get(pid, "?")) for pid, hosts in sorted(held.items()) if hosts - allowed]
    started = {pid: lines[pid] for pid, text in sorted(marks.items()) if f" {MARK}=" in f" {text}" and lines.get(pid)}
    asking = {own, *(pid for pid, line in lines.items() if line.startswith("tail -n +1 /proc/"))}
    return Inside(
        processes=tuple(line[:200] for pid, line in sorted(lines.items()) if pid not in asking and line),
        outward=tuple(outward),
        started=started,
        connections=outside_connections(tcp),
    )


def _held(listing: str) -> dict[int, set[str]]:
    """Descriptors of the host by process: those of PID 1 are handed in anew by a restore, no others are."""
    held: dict[int, set[str]] = {}
    pid = 0
    for line in listing.splitlines():
        if found := re.fullmatch(r"/proc/(\d+)/fd:", line):
            pid = int(found[1])
        elif found := re.search(r" -> (host:\[\d+\])$", line):
            held.setdefault(pid, set()).add(found[1])
    return held


def named(pid: int, line: str) -> str:
    return f"process {pid} ({line[:200]})"


def _by_process(listing: str, file: str) -> dict[int, str]:
    """What `tail` says of one file of each process; words are divided by NUL."""
    found = {}
    for part in re.split(r"^==> /proc/(?=\d+/)", listing, flags=re.MULTILINE)[1:]:
        head, _, text = part.partition(f"/{file} <==\n")
        if head.isdigit():
            found[int(head)] = text.rstrip("\n").rstrip("\0").replace("\0", " ")
    return found


def outside_connections(listing: str) -> tuple[str, ...]:
    """Of the lines of /proc/net/tcp and tcp6, those that are neither listening nor within the sandbox."""
    found = []
    for line in listing.splitlines():
        words = line.split()
        if len(words) < 4 or not words[0].rstrip(":").isdigit() or words[3] == _LISTEN:
            continue
        address, port = words[2].split(":")
        remote = _address(address)
        if not (remote.is_loopback or remote.is_unspecified):
            found.append(f"a tcp connection to {remote} port {int(port, 16)}")
    return tuple(found)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Words of four bytes, each the wrong way round."""
    data = bytes.fromhex(text)
    turned = b"".join(data[at : at + 4][::-1] for at in range(0, len(data), 4))
    if len(turned) == 4:
        return ipaddress.IPv4Address(turned)
    address = ipaddress.IPv6Address(turned)
    return address.ipv4_mapped or address
