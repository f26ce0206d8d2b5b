"""Files in and out of an environment, written once over `run`: a guest needs `sh`, `cat`, `find`, `stat` and `tar`.

A backend with a better way (a shared file system, an archive call) overrides single methods. Paths are absolute inside
the environment. Copies have the name that the caller gave: `upload("a", "/x/b")` makes `/x/b`, never `/x/b/a`.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import stat
import tarfile
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO

from statefork.errors import ExecTimeout, KernelError, NotFound, UsageError
from statefork.model import ExecResult, FileInfo, FileKind, RunRequest, Stream

__all__ = ["GuestFiles", "absolute", "unpack_into"]

_MISSING, _NOT_A_FILE, _NOT_A_DIRECTORY, _NOT_EMPTY = 81, 82, 83, 84
_SPOOL_BYTES = 8 * 1024 * 1024

_READ = (
    f'[ -e "$1" ] || exit {_MISSING}; [ -d "$1" ] && exit {_NOT_A_FILE};'
    f' [ -z "$2" ] && exec cat < "$1"; [ -f "$1" ] || exit {_NOT_A_FILE}; exec head -c "$2" < "$1"'
)
_STAT = (
    f'[ -e "$1" ] || [ -L "$1" ] || exit {_MISSING};'
    ' if [ -n "$2" ] && [ -e "$1" ]; then exec stat -L -c "%f %s %Y ./" -- "$1"; fi; exec stat -c "%f %s %Y ./" -- "$1"'
)
_MOVE = (
    f'[ -e "$1" ] || [ -L "$1" ] || exit {_MISSING}; if [ -d "$2" ] && ! [ -L "$2" ]; then exit {_NOT_A_FILE}; fi;'
    ' exec mv -f -- "$1" "$2"'
)
_REMOVE = (
    f'[ -e "$1" ] || [ -L "$1" ] || exit {_MISSING}; [ -n "$2" ] && exec rm -r -f -- "$1";'
    f' if [ -d "$1" ] && ! [ -L "$1" ]; then rmdir -- "$1" 2>/dev/null || exit {_NOT_EMPTY}; else exec rm -f -- "$1"; fi'
)
_MAKE = f'[ -d "$1" ] && exit; [ -e "$1" ] && exit {_NOT_A_DIRECTORY}; exec mkdir -p -- "$1"'
_OPEN_ARCHIVE = f'if [ -e "$1" ] && ! [ -d "$1" ]; then exit {_NOT_A_DIRECTORY}; fi; mkdir -p -- "$1" && exec tar -x -o -f - -C "$1"'
_MAKE_ARCHIVE = (
    f'[ -e "$1" ] || exit {_MISSING}; if [ -d "$1" ]; then cd -- "$1" && exec tar -c -f - .; fi;'
    ' cd -- "$2" && exec tar -c -h -f - "./$3"'
)
_SCAN = (
    f'[ -e "$1" ] || exit {_MISSING}; [ -d "$1" ] || exit {_NOT_A_DIRECTORY}; cd -- "$1" || exit;'
    ' find . -mindepth 1 $2 -exec stat -c "%f %s %Y.%Z %n" {} + 2>/dev/null; exit 0'
)
_WRITE = f'[ -d "$1" ] && exit {_NOT_A_FILE}; mkdir -p -- "$2" && cat > "$1" && {{ [ -z "$3" ] || chmod "$3" "$1"; }}'
_LIST = (
    f'[ -e "$1" ] || exit {_MISSING}; [ -d "$1" ] || exit {_NOT_A_DIRECTORY}; cd -- "$1" || exit;'
    ' exec find . -mindepth 1 -maxdepth 1 -exec stat -c "%f %s %Y %n" {} +'
)
_PACK = f'[ -e "$1/$2" ] || [ -L "$1/$2" ] || exit {_MISSING}; cd -- "$1" && exec tar -c -f - "./$2"'
_UNPACK = f'[ -d "$1/$2" ] && [ "$3" = file ] && exit {_NOT_A_FILE}; mkdir -p -- "$1" && exec tar -x -o -f - -C "$1"'

# A name cannot hold a slash, so " ./" begins no line but a record, whatever newlines the names themselves hold.
_RECORD = re.compile(rb"^([0-9a-f]+) (\d+) (-?\d+) \./", re.MULTILINE)
_SCANNED = re.compile(rb"^([0-9a-f]+ \d+ -?\d+\.-?\d+) \./", re.MULTILINE)


def absolute(path: str) -> str:
    """The path in its plain form; UsageError unless it is absolute and free of NUL."""
    if not path.startswith("/") or "\0" in path:
        raise UsageError(f"{path!r} is not an absolute path inside the environment")
    return posixpath.normpath("/" + path.lstrip("/"))


class GuestFiles(ABC):
    """The file methods of a Live."""

    @abstractmethod
    def run(self, request: RunRequest) -> ExecResult: ...

    def read_file(self, path: str, limit_bytes: int | None = None) -> bytes:
        """Raises: NotFound, UsageError for a directory, or a file that is larger than the limit."""
        path = absolute(path)
        most = "" if limit_bytes is None else str(limit_bytes + 1)
        data = self._output(f"read {path}", "sh", "-c", _READ, "sh", path, most)
        if limit_bytes is not None and len(data) > limit_bytes:
            raise UsageError(f"{path} is larger than {limit_bytes} bytes; download it as an archive")
        return data

    def write_file(self, path: str, data: bytes, mode: int | None = None) -> None:
        """Make or overwrite a file and the directories above it; an existing one keeps its mode if none is given."""
        path = absolute(path)
        argv = ("sh", "-c", _WRITE, "sh", path, posixpath.dirname(path), f"{mode:o}" if mode is not None else "")
        self._script(f"write {path}", RunRequest(argv, stdin=data))

    def list_files(self, path: str) -> list[FileInfo]:
        """What is directly in a directory, by name."""
        path = absolute(path)
        data = self._output(f"list {path}", "sh", "-c", _LIST, "sh", path)
        return sorted(_parse_listing(data), key=lambda info: info.name)

    def stat_file(self, path: str, *, follow: bool = True) -> FileInfo:
        """One name; a link that leads nowhere is told as the link that it is."""
        path = absolute(path)
        data = self._output(f"stat {path}", "sh", "-c", _STAT, "sh", path, "y" if follow else "")
        (info,) = _parse_listing(data)
        return replace(info, name=posixpath.basename(path) or "/")

    def move_file(self, source: str, target: str) -> None:
        """`target` is the new name itself; a file there is replaced, a directory is not."""
        source, target = absolute(source), absolute(target)
        self._script(f"move {source} to {target}", RunRequest(("sh", "-c", _MOVE, "sh", source, target)))

    def remove_file(self, path: str, *, recursive: bool = False) -> None:
        path = absolute(path)
        if path == "/":
            raise UsageError("/ cannot be removed; destroy the environment")
        argv = ("sh", "-c", _REMOVE, "sh", path, "y" if recursive else "")
        self._script(f"remove {path}", RunRequest(argv))

    def make_directory(self, path: str) -> None:
        """With those above it; no error if it is there."""
        path = absolute(path)
        self._script(f"make directory {path}", RunRequest(("sh", "-c", _MAKE, "sh", path)))

    def unpack_archive(self, archive: IO[bytes], target: str) -> None:
        """Unpack a tar stream into a directory, which is made. The guest's own `tar` does it: nothing leaves the guest."""
        target = absolute(target)
        self._script(f"unpack into {target}", RunRequest(("sh", "-c", _OPEN_ARCHIVE, "sh", target), stdin=archive))

    def pack_archive(self, source: str, sink: Callable[[bytes], None]) -> None:
        """A directory's contents, or one file under its name, as a tar stream; links in a directory are stored as links."""
        source = absolute(source)

        def forward(stream: Stream, data: bytes) -> None:
            if stream == "stdout":
                sink(data)

        argv = ("sh", "-c", _MAKE_ARCHIVE, "sh", source, *posixpath.split(source))
        self._script(f"pack {source}", RunRequest(argv, on_output=forward), changing=True)

    def scan(self, path: str, *, recursive: bool = False) -> dict[str, str]:
        """Names below a directory, each with a word that changes when the file does: to watch it, look again."""
        path = absolute(path)
        data = self._output(f"watch {path}", "sh", "-c", _SCAN, "sh", path, "" if recursive else "-maxdepth 1")
        return _parse_scan(data)

    def upload(self, source: Path, target: str) -> None:
        """Copy a file or a whole directory in; a directory is merged into one that exists."""
        target = absolute(target)
        if not source.exists():
            raise NotFound(f"upload {source}: there is no such file on this host")
        parent, name = posixpath.split(target)
        with tempfile.SpooledTemporaryFile(_SPOOL_BYTES) as spool:
            with tarfile.open(fileobj=spool, mode="w|") as archive:
                archive.add(source, arcname=name or ".")
            spool.seek(0)
            kind = "directory" if source.is_dir() else "file"
            argv = ("sh", "-c", _UNPACK, "sh", parent, name, kind)
            self._script(f"upload to {target}", RunRequest(argv, stdin=spool))

    def download(self, source: str, target: Path) -> None:
        """Copy a file or a directory out. Device nodes are left behind, and nothing is written outside of `target`."""
        source = absolute(source)
        parent, name = posixpath.split(source)
        with tempfile.SpooledTemporaryFile(_SPOOL_BYTES) as spool:

            def keep(stream: Stream, data: bytes) -> None:
                if stream == "stdout":
                    spool.write(data)

            request = RunRequest(("sh", "-c", _PACK, "sh", parent, name or "."), on_output=keep)
            self._script(f"download {source}", request)
            spool.seek(0)
            unpack_into(spool, name or ".", target)

    def _output(self, what: str, *argv: str) -> bytes:
        """What the script prints, all of it, whatever limit a result has."""
        pieces: list[bytes] = []

        def keep(stream: Stream, data: bytes) -> None:
            if stream == "stdout":
                pieces.append(data)

        self._script(what, RunRequest(argv, on_output=keep))
        return b"".join(pieces)

    def _script(self, what: str, request: RunRequest, *, changing: bool = False) -> None:
        """`changing`: tar says 1 when a file changed while it was read, which on a live system is no failure."""
        try:
            result = self.run(request)
        except ExecTimeout as error:  # these requests have no timeout: a backend that invents one must not go unseen
            raise KernelError(f"{what}: timed out") from error
        if result.exit_code == 0 or (changing and result.exit_code == 1):
            return
        if result.exit_code == _MISSING:
            raise NotFound(f"{what}: there is no such file in the environment")
        if result.exit_code == _NOT_A_FILE:
            raise UsageError(f"{what}: it is a directory; name the file itself")
        if result.exit_code == _NOT_A_DIRECTORY:
            raise UsageError(f"{what}: it is not a directory")
        if result.exit_code == _NOT_EMPTY:
            raise UsageError(f"{what}: it is a directory that is not empty; ask for recursive")
        raise KernelError(f"{what}: {result.stderr.strip() or f'ended in {result.exit_code}'}")


def _parse_listing(data: bytes) -> list[FileInfo]:
    found = list(_RECORD.finditer(data))
    infos = []
    for record, following in zip(found, [*found[1:], None], strict=False):
        end = following.start() if following else len(data)
        mode = int(record[1], 16)
        name = data[record.end() : end - 1].decode(errors="surrogateescape")
        infos.append(FileInfo(name, _kind(mode), int(record[2]), stat.S_IMODE(mode), float(record[3])))
    return infos


def _parse_scan(data: bytes) -> dict[str, str]:
    found = list(_SCANNED.finditer(data))
    ends = [following.start() for following in found[1:]] + [len(data)]
    return {
        data[record.end() : end - 1].decode(errors="surrogateescape"): record[1].decode()
        for record, end in zip(found, ends, strict=False)  # of an empty directory there is only the end
    }


def _kind(mode: int) -> FileKind:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "directory"
    return "symlink" if stat.S_ISLNK(mode) else "other"


def unpack_into(spool: IO[bytes], name: str, target: Path) -> None:
    """The archive comes from inside and is not trusted: it is opened in a directory of its own, beside the target."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".statefork-", dir=target.parent) as fresh:
        with tarfile.open(fileobj=spool, mode="r|") as archive:
            archive.extractall(fresh, filter=_guarded)
        arrived = Path(fresh, name)
        if arrived.is_dir() and not arrived.is_symlink():
            shutil.copytree(arrived, target, symlinks=True, dirs_exist_ok=True)
        elif target.is_dir():
            raise UsageError(f"download to {target}: it is a directory; name the file itself")
        else:
            arrived.replace(target)


def _guarded(member: tarfile.TarInfo, destination: str) -> tarfile.TarInfo | None:
    if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
        return None
    kept = tarfile.tar_filter(member, destination)
    return kept.replace(uid=None, gid=None, uname=None, gname=None, deep=False)  # type: ignore[arg-type]
