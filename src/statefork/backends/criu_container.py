"""What podman, runc and CRIU have to be told so that a container's checkpoint can be brought back under another name.

Found out by trial on podman 4.3 and runc 1.1:
- runc starts the first `criu` of its PATH. Ours may need its own loader and libraries, so a script of that name stands
  in a directory of its own.
- `podman container restore` refuses `--tcp-established` together with `--name`, but runc passes a file named by the
  annotation `org.criu.config` on to CRIU, and that file has the last word.
- A container with `--network none` comes back with its loopback interface down, so that connections inside it cannot
  be restored. An OCI hook runs early enough to put it up.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from waypoint.kernel.tools import criu_argv

__all__ = ["ANNOTATION", "Setting", "archive_sizes", "external_connections", "process_lines", "shut_connections"]

ANNOTATION = "org.criu.config"
_KEEP, _SHUT = "tcp-keep.conf", "tcp-shut.conf"
"""Two names of one length, so that one can be written over the other inside an archive."""

_OPTIONS = "file-locks\nlink-remap\nghost-limit 4294967295\nnetwork-lock skip\n"
_HOOK = """#!/bin/sh
read -r state
pid=${state##*\\"pid\\":}
exec nsenter -t "${pid%%[,\\}]*}" -n ip link set lo up
"""
_TCP_ESTABLISHED = "01"


@dataclass(frozen=True, slots=True)
class Setting:
    """The files that this takes, in the state directory: the same for all containers, written once."""

    directory: Path

    @classmethod
    def prepare(cls, home: Path) -> Setting:
        directory = home / "podman-criu"
        setting = cls(directory)
        (directory / "hooks").mkdir(parents=True, exist_ok=True)
        (directory / "bin").mkdir(exist_ok=True)
        _write(directory / "bin" / "criu", f'#!/bin/sh\nexec {shlex.join(criu_argv())} "$@"\n', 0o755)
        _write(directory / _KEEP, _OPTIONS + "tcp-established\n", 0o644)
        _write(directory / _SHUT, _OPTIONS + "tcp-close\n", 0o644)
        _write(directory / "loopback", _HOOK, 0o755)
        hook = {
            "version": "1.0.0",
            "hook": {"path": str(directory / "loopback")},
            "when": {"annotations": {f"^{ANNOTATION}$": ".*"}},
            "stages": ["createRuntime"],
        }
        _write(directory / "hooks" / "loopback.json", json.dumps(hook), 0o644)
        return setting

    @property
    def env(self) -> dict[str, str]:
        """The caller's own environment but for the PATH: podman finds its storage and configuration by it."""
        return {**os.environ, "PATH": f"{self.directory / 'bin'}:{os.environ.get('PATH', os.defpath)}"}

    @property
    def global_options(self) -> list[str]:
        system = ["/usr/share/containers/oci/hooks.d", "/etc/containers/oci/hooks.d"]
        every = [*(path for path in system if Path(path).is_dir()), str(self.directory / "hooks")]
        return [word for path in every for word in ("--hooks-dir", path)]

    @property
    def run_options(self) -> list[str]:
        return ["--annotation", f"{ANNOTATION}={self.directory / _KEEP}"]


def _write(path: Path, text: str, mode: int) -> None:
    """Whole or not at all: another process may be starting a container at this moment."""
    if path.exists() and path.read_text() == text:
        return
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(text)
    fresh.chmod(mode)
    fresh.replace(path)


def shut_connections(archive: Path) -> None:
    """Have this checkpoint's connections come back closed: a copy of the container has another address."""
    with tarfile.open(archive) as members, open(archive, "r+b") as raw:
        for name in ("spec.dump", "config.dump"):
            member = members.getmember(name)
            raw.seek(member.offset_data)
            data = raw.read(member.size)
            raw.seek(member.offset_data)
            raw.write(data.replace(_KEEP.encode(), _SHUT.encode()))


def archive_sizes(archive: Path) -> tuple[int, int]:
    """Bytes of files and bytes of memory in a checkpoint's archive."""
    files = memory = 0
    with tarfile.open(archive) as members:
        for member in members:
            if member.name == "rootfs-diff.tar":
                files += member.size
            elif member.name.startswith("checkpoint/pages-"):
                memory += member.size
    return files, memory


def external_connections(pid: int) -> tuple[list[str], bool]:
    """Connections that leave the network namespace of `pid`, in words; and whether there are any inside it."""
    external, internal = [], False
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] != _TCP_ESTABLISHED:
                continue
            address, port = _peer(fields[2])
            if address.startswith("127.") or address == "::1":
                internal = True
            else:
                external.append(f"tcp connection to {address} port {port}")
    return external, internal


def _peer(field: str) -> tuple[str, int]:
    """The kernel prints addresses as 32-bit words in the host's byte order."""
    import ipaddress

    address, port = field.split(":")
    raw = b"".join(bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8))
    found = ipaddress.ip_address(raw)
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return str(found), int(port, 16)


def process_lines(root: int) -> tuple[str, ...]:
    """The command lines of a process and all below it."""
    return tuple(line for pid in _tree(root) if (line := _command_line(pid)))


def _tree(root: int) -> Iterator[int]:
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        yield pid
        for task in _listed(Path(f"/proc/{pid}/task")):
            try:
                waiting += map(int, (task / "children").read_text().split())
            except OSError:  # it ended while we looked
                continue


def _listed(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError:
        return []


def _command_line(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return ""
    return " ".join(word.decode(errors="replace") for word in words)[:200]


def have_tools() -> list[str]:
    """Programs that are missing."""
    return [name for name in ("podman", "runc", "nsenter", "ip") if shutil.which(name) is None]
