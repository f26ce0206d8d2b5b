"""A guest's memory, read from and written to the VMM's own address space, as whole files and as differences.

QEMU maps the guest's memory from a file, privately: a page that the guest has written to is an anonymous page of QEMU's,
all others are still the file's, shared in the page cache by every machine that was made from it. `/proc/PID/pagemap`
tells which is which. So what a snapshot has to store is what differs from that file, and a revival is a mapping
of the file plus the writing of a few pages, before the machine runs.

The file of differences: the number of runs, then for each run its first page and how many there are, then the pages.
"""

from __future__ import annotations

import array
import errno
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from statefork.errors import KernelError, StoreError

__all__ = [
    "PAGE",
    "overlay_data",
    "read_differences",
    "save_differences",
    "save_whole",
    "sparse_copy",
    "stored_bytes",
]

PAGE = 4096
_STEP = 256
"""Pages that are read at once."""
_ZEROES = bytes(_STEP * PAGE)
_MAGIC = b"sfmem1\0\0"
_COUNT = struct.Struct("<8sQ")
_RUN = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True)
class _Area:
    """A part of the file, as it is mapped in a process."""

    start: int
    pages: int
    file_page: int


def _areas(pid: int, mapped: Path) -> list[_Area]:
    found = []
    wanted = str(mapped.resolve())
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        fields = line.split(None, 5)
        if len(fields) == 6 and fields[5] in (wanted, f"{wanted} (deleted)"):
            start, end = (int(part, 16) for part in fields[0].split("-"))
            found.append(_Area(start, (end - start) // PAGE, int(fields[2], 16) // PAGE))
    if not found:
        raise KernelError(f"process {pid} does not map {mapped}: it is not the machine that it was taken for")
    return found


def _own_runs(pid: int, area: _Area) -> Iterator[tuple[int, int]]:
    """Runs of pages, counted from the area's start, that are the process's own and not the file's."""
    entries = array.array("Q")
    with open(f"/proc/{pid}/pagemap", "rb") as pagemap:
        pagemap.seek(area.start // PAGE * 8)
        entries.frombytes(pagemap.read(area.pages * 8))
    began = -1
    for page, entry in enumerate(entries):
        own = entry >> 62 and not entry >> 61 & 1
        if own and began < 0:
            began = page
        elif not own and began >= 0:
            yield began, page
            began = -1
    if began >= 0:
        yield began, len(entries)


def _own_pieces(pid: int, mapped: Path) -> Iterator[tuple[int, bytes]]:
    """The page of the file, and up to _STEP pages of the process's own from there on."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for area in _areas(pid, mapped):
            for began, ended in _own_runs(pid, area):
                for page in range(began, ended, _STEP):
                    count = min(ended - page, _STEP)
                    data = os.pread(memory.fileno(), count * PAGE, area.start + page * PAGE)
                    if len(data) != count * PAGE:
                        raise KernelError(f"the memory of process {pid} cannot be read: is it still there?")
                    yield area.file_page + page, data


def save_whole(pid: int, mapped: Path, target: Path, size_bytes: int) -> None:
    """All of the guest's memory; pages of zeros stay holes."""
    sparse_copy(mapped, target)
    with open(target, "r+b", buffering=0) as file:
        file.truncate(size_bytes)
        overwrite = mapped.stat().st_blocks > 0
        for first, data in _own_pieces(pid, mapped):
            _write_changed(file.fileno(), first, data, None if overwrite else _ZEROES)


def save_differences(pid: int, mapped: Path, reference: Path, target: Path) -> None:
    """What differs from `reference`, which is `mapped` itself or an earlier state of the same machine."""
    runs: list[tuple[int, int]] = []
    data_at = 0
    pages = target.with_name(f"{target.name}.pages")
    with open(reference, "rb", buffering=0) as known, open(pages, "wb") as body:
        for first, data in _own_pieces(pid, mapped):
            before = os.pread(known.fileno(), len(data), first * PAGE).ljust(len(data), b"\0")
            for began, ended in _changed_runs(data, before):
                body.write(data[began * PAGE : ended * PAGE])
                if runs and sum(runs[-1]) == first + began:
                    runs[-1] = (runs[-1][0], runs[-1][1] + ended - began)
                else:
                    runs.append((first + began, ended - began))
                data_at += (ended - began) * PAGE
    with open(target, "wb") as file, open(pages, "rb") as body:
        file.write(_COUNT.pack(_MAGIC, len(runs)) + b"".join(_RUN.pack(*run) for run in runs))
        file.flush()
        _copy_range(body.fileno(), file.fileno(), 0, file.tell(), data_at)
    pages.unlink()


def read_differences(pid: int, mapped: Path, differences: Path) -> None:
    """Write the stored pages into a machine that has not begun to run."""
    areas = _areas(pid, mapped)
    with open(differences, "rb") as file, open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        magic, count = _COUNT.unpack(_exactly(file.read(_COUNT.size), _COUNT.size, differences))
        if magic != _MAGIC:
            raise StoreError(f"{differences} is damaged: it does not begin as a file of memory pages does")
        table = _exactly(file.read(count * _RUN.size), count * _RUN.size, differences)
        for first, length in _RUN.iter_unpack(table):
            while length:
                step = min(length, _STEP)
                data = _exactly(file.read(step * PAGE), step * PAGE, differences)
                os.pwrite(memory.fileno(), data, _address(areas, first, step, differences))
                first, length = first + step, length - step


def _address(areas: list[_Area], first: int, length: int, source: Path) -> int:
    for area in areas:
        if area.file_page <= first and first + length <= area.file_page + area.pages:
            return area.start + (first - area.file_page) * PAGE
    raise StoreError(f"{source} is damaged: it holds page {first}, which the machine does not have")


def _exactly(data: bytes, size: int, source: Path) -> bytes:
    if len(data) != size:
        raise StoreError(f"{source} is damaged: it ends too early")
    return data


def _changed_runs(data: bytes, before: bytes) -> Iterator[tuple[int, int]]:
    if data == before:
        return
    began = -1
    count = len(data) // PAGE
    for page in range(count):
        part = slice(page * PAGE, (page + 1) * PAGE)
        if data[part] != before[part]:
            began = page if began < 0 else began
        elif began >= 0:
            yield began, page
            began = -1
    if began >= 0:
        yield began, count


def _write_changed(descriptor: int, first: int, data: bytes, before: bytes | None) -> None:
    runs = [(0, len(data) // PAGE)] if before is None else _changed_runs(data, before[: len(data)])
    for began, ended in runs:
        piece = memoryview(data)[began * PAGE : ended * PAGE]
        at = (first + began) * PAGE
        while piece:
            written = os.pwrite(descriptor, piece, at)
            piece, at = piece[written:], at + written


def sparse_copy(source: Path, target: Path) -> None:
    """Holes stay holes; where the file system can share blocks between files, they are shared."""
    with open(source, "rb") as old, open(target, "wb") as new:
        os.ftruncate(new.fileno(), os.fstat(old.fileno()).st_size)
        for begin, end in _data(old.fileno()):
            _copy_range(old.fileno(), new.fileno(), begin, begin, end - begin)


def overlay_data(source: Path, target: Path) -> None:
    """Write what is not a hole in `source` over `target`: how Firecracker's diff snapshots are meant."""
    with open(source, "rb") as changes, open(target, "r+b") as file:
        for begin, end in _data(changes.fileno()):
            _copy_range(changes.fileno(), file.fileno(), begin, begin, end - begin)


def _data(descriptor: int) -> Iterator[tuple[int, int]]:
    size, at = os.fstat(descriptor).st_size, 0
    while at < size:
        try:
            begin = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError:  # ENXIO: nothing but a hole follows
            return
        at = os.lseek(descriptor, begin, os.SEEK_HOLE)
        yield begin, at


def _copy_range(source: int, target: int, read_at: int, write_at: int, length: int) -> None:
    while length:
        try:
            done = os.copy_file_range(source, target, length, read_at, write_at)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            done = os.pwrite(target, os.pread(source, min(length, _STEP * PAGE), read_at), write_at)
        if not done:
            raise KernelError("a file became shorter while it was copied")
        read_at, write_at, length = read_at + done, write_at + done, length - done


def stored_bytes(path: Path) -> int:
    """What a file takes on the disk."""
    return path.stat().st_blocks * 512
