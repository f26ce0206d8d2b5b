"""Files in and out of an environment, as steps. What is large goes as a tar stream, through a file of this host."""

from __future__ import annotations

import io
import posixpath
import tarfile
import tempfile
from pathlib import Path
from typing import IO

from statefork.client import parsing
from statefork.client.handle import Handle
from statefork.client.steps import Call, Request, Work
from statefork.errors import NotFound, UsageError
from statefork.files import absolute, unpack_into
from statefork.model import FileInfo

__all__ = [
    "download", "list_files", "make_directory", "move_file", "read_file", "remove_file", "stat_file", "upload", "write_file",
]  # fmt: skip

_SPOOL_BYTES = 8 << 20
_ONE_BODY_BYTES = 8 << 20
"""Larger ones are sent as archives: the daemon holds other bodies in memory, and limits them."""


def read_file(handle: Handle, path: str, *, limit_bytes: int | None = None) -> Call[bytes]:
    path = absolute(path)
    if limit_bytes is not None:
        found = yield from stat_file(handle, path)
        if found.size_bytes > limit_bytes:
            raise UsageError(f"{path} is larger than {limit_bytes} bytes; download it")
    answer = yield Request("GET", handle.path("files", "content"), query={"path": path})
    data: bytes = answer.body
    return data


def write_file(handle: Handle, path: str, data: bytes | str, mode: int | None = None) -> Call[None]:
    """Make or overwrite a file; missing directories above it are made."""
    path, content = absolute(path), data.encode() if isinstance(data, str) else data
    if len(content) > _ONE_BODY_BYTES:
        yield from _write_large(handle, path, content, mode)
        return
    query: dict[str, str | int | float | list[str]] = {"path": path}
    if mode is not None:
        query["mode"] = mode
    yield Request("PUT", handle.path("files", "content"), query=query, content=content)


def _write_large(handle: Handle, path: str, content: bytes, mode: int | None) -> Call[None]:
    """An existing file keeps its mode, as when it is written in one piece."""
    kept = yield from _looked_at(handle, path)
    if kept is not None and kept.kind == "directory":
        raise UsageError(f"write {path}: it is a directory; name the file itself")
    parent, name = posixpath.split(path)
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), mode if mode is not None else kept.mode if kept else 0o644
    with tempfile.SpooledTemporaryFile(_SPOOL_BYTES) as spool:
        yield Work(lambda: _pack_bytes(spool, member, content))
        yield Request("PUT", handle.path("files", "archive"), query={"path": parent}, content=spool)


def upload(handle: Handle, source: Path | str, target: str) -> Call[None]:
    """Copy a file or directory of this host to exactly the path `target`."""
    source, target = Path(source), absolute(target)
    if not source.exists():
        raise NotFound(f"upload {source}: there is no such file on this host")
    if not source.is_dir():
        there = yield from _looked_at(handle, target)
        if there is not None and there.kind == "directory":
            raise UsageError(f"upload to {target}: it is a directory; name the file itself")
    parent, name = posixpath.split(target)
    with tempfile.SpooledTemporaryFile(_SPOOL_BYTES) as spool:
        yield Work(lambda: _pack(spool, source, name or "."))
        yield Request("PUT", handle.path("files", "archive"), query={"path": parent}, content=spool)


def download(handle: Handle, source: str, target: Path | str) -> Call[None]:
    """Copy a file or directory out, to exactly the path `target` on this host."""
    source = absolute(source)
    with tempfile.SpooledTemporaryFile(_SPOOL_BYTES) as spool:
        yield Request("GET", handle.path("files", "archive"), query={"path": source}, sink=spool)
        yield Work(lambda: _unpack(spool, source, Path(target)))


def list_files(handle: Handle, path: str) -> Call[list[FileInfo]]:
    answer = yield Request("GET", handle.path("files"), query={"path": absolute(path)})
    return [parsing.file_info(one) for one in answer.json()["items"]]


def stat_file(handle: Handle, path: str, *, follow: bool = True) -> Call[FileInfo]:
    query = {"path": absolute(path), "follow": "true" if follow else "false"}
    return parsing.file_info((yield Request("GET", handle.path("files", "stat"), query=query)).json())


def move_file(handle: Handle, source: str, target: str) -> Call[None]:
    """`target` is the new name itself."""
    yield Request("POST", handle.path("files", "move"), body={"source": source, "target": target})


def remove_file(handle: Handle, path: str, *, recursive: bool = False) -> Call[None]:
    query = {"path": absolute(path), "recursive": "true" if recursive else "false"}
    yield Request("DELETE", handle.path("files"), query=query)


def make_directory(handle: Handle, path: str) -> Call[None]:
    """With those above it; no error if it is there."""
    yield Request("POST", handle.path("files", "directory"), body={"path": path})


def _looked_at(handle: Handle, path: str) -> Call[FileInfo | None]:
    try:
        return (yield from stat_file(handle, path))
    except NotFound:
        return None


def _pack(spool: IO[bytes], source: Path, name: str) -> None:
    with tarfile.open(fileobj=spool, mode="w|") as archive:
        archive.add(source, arcname=name)


def _pack_bytes(spool: IO[bytes], member: tarfile.TarInfo, content: bytes) -> None:
    with tarfile.open(fileobj=spool, mode="w|") as archive:
        archive.addfile(member, io.BytesIO(content))


def _unpack(spool: IO[bytes], source: str, target: Path) -> None:
    """A directory's archive begins with `.`, that of a file has the file alone."""
    spool.seek(0)
    with tarfile.open(fileobj=spool, mode="r:") as archive:
        first = archive.next()
    spool.seek(0)
    single = first is not None and posixpath.normpath(first.name) != "."
    unpack_into(spool, posixpath.basename(source) if single else ".", target)
