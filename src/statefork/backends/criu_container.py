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

import io
import json
import os
import secrets
import shlex
import shutil
import tarfile
from dataclasses import dataclass
from pathlib import Path

from waypoint.kernel.programs import run_program
from waypoint.kernel.tools import criu_argv

__all__ = ["ANNOTATION", "Setting", "archive_sizes", "have_tools", "shut_connections", "sleeper_archive"]

ANNOTATION = "org.criu.config"
_KEEP, _SHUT = "tcp-keep.conf", "tcp-shut.conf"
"""Two names of one length, so that one can be written over the other inside an archive."""

_OPTIONS = "file-locks\nlink-remap\nghost-limit 4294967295\nnetwork-lock skip\n"
_HOOK = """#!/bin/sh
read -r state
pid=${state##*\\"pid\\":}
exec nsenter -t "${pid%%[,\\}]*}" -n ip link set lo up
"""


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
    """Whole or not at all: another process or thread may be starting a container at this moment."""
    if path.exists() and path.read_text() == text:
        return
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
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


def have_tools() -> list[str]:
    """Programs that are missing."""
    return [name for name in ("podman", "runc", "nsenter", "ip") if shutil.which(name) is None]


def sleeper_archive() -> bytes:
    """The smallest image that runs on this host: its own `sleep` and the libraries that it needs."""
    program = shutil.which("sleep") or "/bin/sleep"
    said = run_program(["ldd", program], timeout=30).check("looking for the libraries of sleep").text
    libraries = [word for word in said.split() if word.startswith("/")]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", dereference=True) as archive:
        archive.add(program, "bin/sleep")
        for library in libraries:
            archive.add(library, library.lstrip("/"))
    return buffer.getvalue()
