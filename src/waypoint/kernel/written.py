"""Which pages of a process were written since a moment: the kernel write-protects them and forgets that at the first write.

This is userfaultfd's asynchronous write-protection, with PAGEMAP_SCAN to ask for it: no handler, no message, and nothing that the
process could notice but a minor fault at its first write to a page. The descriptor has to be made by the process itself, which is
made to (inject.py), and is then ours: when we end, however we end, the kernel forgets all of it. A page that was mapped anew, moved,
copied by a fork or changed in any other way counts as written.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from waypoint.errors import HostUnsupported, KernelError
from waypoint.kernel.inject import Injection, inside
from waypoint.kernel.processes import state
from waypoint.kernel.regions import WRITTEN, Range, Regions
from waypoint.kernel.syscalls import pidfd_getfd

__all__ = ["PAGE", "Watch", "anonymous", "can_be_tracked", "clean_elsewhere", "halved", "united", "within", "without"]

PAGE = 4096
_LEAST = 1 << 18
"""Smaller mappings are saved whole: they are not worth a call each."""
_USERFAULTFD, _CLOSE = 323, 3
_USER_MODE_ONLY = 1
_API, _REGISTER, _UNREGISTER, _WRITEPROTECT = 0xC018AA3F, 0xC020AA00, 0x8010AA01, 0xC018AA06
_API_VERSION, _WP_ASYNC, _MODE_WP = 0xAA, 1 << 15, 1 << 1
_SCAN = 0xC0606610
_SCAN_WP, _SCAN_CHECK = 1, 2
_ALLOWED, _FILE, _PRESENT, _SWAPPED, _ZERO, _GUARD = 1, 1 << 2, 1 << 3, 1 << 4, 1 << 5, 1 << 8
_REGIONS = 1024
_MANY_REGIONS = 16384
_LOOKS, _LOOKED_AT = 64, 256 << 10
_WORTH_TWO = 256 << 20
_TOP = (1 << 47) - PAGE
_REGION = struct.Struct("=QQQ")


class Watch:
    """Over one process. `areas` are the mappings that are tracked; what is clean elsewhere is not our doing."""

    def __init__(self, pid: int) -> None:
        """KernelError where it cannot be had: the process is traced by another, has no descriptor left, or is not x86-64's."""
        self.areas: list[Range] = []
        if not _interruptible(pid):
            raise KernelError(f"process {pid} is stopped, or waits for something that cannot be interrupted")
        self._fd = _make(pid)

    def begin(self, pid: int) -> Regions:
        """Track all that can be; what is told of it is clean until it is written to."""
        self._follow(pid)
        halves = halved(self.areas, _WORTH_TWO)
        with ThreadPoolExecutor(2, thread_name_prefix="protect") as pool:
            found = pool.map(lambda areas: _take_written(pid, areas), halves)
            return Regions(bytearray().join(found))

    def go_on(self, pid: int, saved: Iterable[Range]) -> None:
        """Track what was mapped since, too; all of that, and what else is `saved`, is clean from now on."""
        before = self.areas
        self._follow(pid)
        with _pagemap(pid) as pagemap:
            for start, end in (*without(self.areas, before), *saved):
                _protect(pagemap, start, end)

    def _follow(self, pid: int) -> None:
        self.areas = []
        for start, end in anonymous(pid, least=_LEAST):
            with contextlib.suppress(OSError):  # of a kind that cannot be tracked, or just unmapped: all of it stays written
                fcntl.ioctl(self._fd, _REGISTER, struct.pack("=QQQQ", start, end - start, _MODE_WP, 0))
                self.areas.append((start, end))

    def take_written(self, pid: int) -> Regions:
        """All that CRIU would save of the tracked mappings; what of it was written counts as clean from now on.

        One look for both: the kernel tells what it protects. What was mapped anew where a tracked mapping was is not in it.
        """
        return Regions(_take_written(pid, self.areas))

    def leave(self, ranges: Iterable[Range]) -> None:
        """These count as written, too."""
        for start, end in ranges:
            with contextlib.suppress(OSError):  # it was just unmapped
                fcntl.ioctl(self._fd, _WRITEPROTECT, struct.pack("=QQQ", start, end - start, 0))

    def mostly_written(self, pid: int) -> bool:
        """Of what is looked at, some places all over it, more than half."""
        step = max(_LOOKED_AT, sum(end - start for start, end in self.areas) // _LOOKS & -PAGE)
        clean = written = skipped = 0
        with _pagemap(pid) as pagemap:
            for start, end in self.areas:
                at = start + skipped
                while at < end:
                    part = pagemap, at, min(end, at + _LOOKED_AT)
                    clean += sum(stop - begin for begin, stop in _pages(*part, _ZERO | WRITTEN, _ZERO | WRITTEN))
                    written += sum(stop - begin for begin, stop in _pages(*part, _ZERO, _ZERO | WRITTEN))
                    at += step
                skipped = at - end
        return written > clean

    def close(self) -> None:
        """All pages count as written from here on."""
        os.close(self._fd)


def _take_written(pid: int, areas: Iterable[Range]) -> bytearray:
    found = bytearray()
    inverted, mask = _ZERO | _GUARD, _ZERO | _GUARD | _ALLOWED
    vector = ctypes.create_string_buffer(_MANY_REGIONS * _REGION.size)
    place, room = ctypes.addressof(vector), _MANY_REGIONS
    with _pagemap(pid) as pagemap:
        for at, end in areas:
            while at < end:
                request = _scan(at, end, _SCAN_WP, inverted, mask, _PRESENT | _SWAPPED, _PRESENT | WRITTEN, place, room)
                try:
                    count = fcntl.ioctl(pagemap, _SCAN, request)
                except OSError as error:
                    if error.errno == errno.EINVAL:
                        raise KernelError("the kernel cannot tell guard regions from pages (before 6.15)") from error
                    raise
                found += memoryview(vector)[: count * _REGION.size]
                if count < room:
                    break
                # how far it came the kernel tells too low if it has emptied its own, smaller vector on the way
                (at,) = struct.unpack_from("=Q", request, 32)
                at = max(at, _REGION.unpack_from(found, len(found) - _REGION.size)[1])
    return found


def _make(pid: int) -> int:
    """The descriptor, made there and taken over."""
    taken: list[int] = []

    def work(process: Injection) -> None:
        there = process.call(_USERFAULTFD, os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY)
        try:
            taken.append(pidfd_getfd(pid, there))
        finally:
            process.call(_CLOSE, there)

    try:
        inside(pid, work)
        fcntl.ioctl(taken[0], _API, struct.pack("=QQQ", _API_VERSION, _WP_ASYNC, 0))
        return taken[0]
    except (OSError, HostUnsupported) as error:
        for fd in taken:
            os.close(fd)
        raise KernelError(f"the memory of process {pid} cannot be tracked: {error}") from error


def _interruptible(pid: int) -> bool:
    """It runs or sleeps: one that waits for the child of a vfork, or for a disk, would keep us waiting, too."""
    return state(pid) in "RS"


def can_be_tracked(pid: int) -> bool:
    """Whether what it writes shows, and whether it could be restored from more than one image.

    For that CRIU maps all private memory a second time, writable: not possible for programs that reserve address space by the
    terabyte (browsers, sanitizers), and all of it would be made real where it is locked. Direct I/O writes past the page tables.
    """
    with open("/proc/sys/vm/overcommit_memory") as setting:
        if setting.read().strip() == "2":
            return False
    with open(f"/proc/{pid}/status") as lines:
        locked = next((line for line in lines if line.startswith("VmLck:")), "0 0 kB").split()[1] != "0"
    with open(f"/proc/{pid}/maps") as lines:
        maps = lines.read()
    size = sum(end - start for start, end in _private(maps))
    return (
        size < os.sysconf("SC_PHYS_PAGES") * PAGE // 2
        and not locked
        and "/[aio]" not in maps
        and not _does_direct_io(pid)
    )


def _does_direct_io(pid: int) -> bool:
    with os.scandir(f"/proc/{pid}/fdinfo") as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError), open(entry.path, "rb") as info:
                flags = next((line for line in info if line.startswith(b"flags:")), b"flags: 0")
                if int(flags.split()[1], 8) & os.O_DIRECT:
                    return True
    return False


def clean_elsewhere(pid: int, areas: list[Range]) -> list[Range]:
    """Pages outside of `areas` that somebody else write-protected: those would be missing in a dump."""
    with _pagemap(pid) as pagemap:
        gaps = without([(0, _TOP)], united(areas))
        return [page for start, end in gaps for page in _clean(pagemap, start, end, _ZERO | _FILE | WRITTEN)]


def _clean(pagemap: int, at: int, end: int, unwanted: int) -> Iterator[Range]:
    return _pages(pagemap, at, end, unwanted, unwanted)


def _pages(pagemap: int, at: int, end: int, unwanted: int, asked: int) -> Iterator[Range]:
    """Pages with all that is `asked` for but not `unwanted`, and nothing that is unwanted."""
    vector = ctypes.create_string_buffer(_REGIONS * _REGION.size)
    while at < end:
        request = _scan(at, end, 0, unwanted, asked, _PRESENT | _SWAPPED, _PRESENT, ctypes.addressof(vector), _REGIONS)
        count = fcntl.ioctl(pagemap, _SCAN, request)
        for start, stop, _ in _REGION.iter_unpack(memoryview(vector)[: count * _REGION.size]):
            yield start, stop
        (at,) = struct.unpack_from("=Q", request, 32)


def _protect(pagemap: int, start: int, end: int) -> None:
    """A place for the answer is given although nobody reads it: without one the kernel protects what is not populated, too, and
    tells of it later as if it were in swap. So it does of guard regions, which are no pages: a kernel that cannot tell them apart
    (before 6.15) refuses the question, and nothing is tracked there.
    """
    vector = ctypes.create_string_buffer(_REGIONS * _REGION.size)
    place = ctypes.addressof(vector)
    while start < end:
        flags, mask = _SCAN_WP | _SCAN_CHECK, WRITTEN | _GUARD
        request = _scan(start, end, flags, _GUARD, mask, _PRESENT | _SWAPPED, _PRESENT, place, _REGIONS)
        fcntl.ioctl(pagemap, _SCAN, request)
        (walked,) = struct.unpack_from("=Q", request, 32)
        if walked <= start:
            raise KernelError("the kernel does not get on with write-protecting a mapping")
        start = walked


def _scan(
    start: int, end: int, flags: int, inverted: int, mask: int, any_of: int, told: int, vector: int, length: int
) -> bytearray:
    return bytearray(struct.pack("=12Q", 96, flags, start, end, 0, vector, length, 0, inverted, mask, any_of, told))


@contextlib.contextmanager
def _pagemap(pid: int) -> Iterator[int]:
    fd = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _private(maps: str) -> Iterator[Range]:
    for line in maps.splitlines():
        place, mode, _ = line.split(maxsplit=2)
        if mode[3] == "p":
            start, end = (int(word, 16) for word in place.split("-"))
            yield start, end


def anonymous(pid: int, *, least: int = 0) -> Iterator[Range]:
    """Mappings of private memory without a file."""
    with open(f"/proc/{pid}/maps") as lines:
        for line in lines:
            place, mode, _, _, inode, *name = line.split(maxsplit=5)
            if mode[3] != "p" or inode != "0" or (name and not name[0].startswith(("[heap]", "[anon:"))):
                continue
            start, end = (int(word, 16) for word in place.split("-"))
            if end - start >= least:
                yield start, end


# -- sets of addresses --------------------------------------------------------------------------------------------------


def united(ranges: Iterable[Range]) -> list[Range]:
    """Sorted, with what touches or overlaps made one."""
    found: list[Range] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def halved(ranges: Sequence[Range], least: int) -> list[list[Range]]:
    """Two parts of the same size; one, if it is less than that altogether."""
    half = sum(end - start for start, end in ranges) // 2 & -PAGE
    if half < least // 2:
        return [list(ranges)]
    lower: list[Range] = []
    upper: list[Range] = []
    for start, end in ranges:
        middle = min(end, start + half)
        if start < middle:
            lower.append((start, middle))
            half -= middle - start
        if middle < end:
            upper.append((middle, end))
    return [lower, upper]


def within(ranges: list[Range], others: list[Range]) -> bool:
    """All of `ranges` is in `others`; both in order, those united."""
    at = 0
    for start, end in ranges:
        while at < len(others) and others[at][1] < end:
            at += 1
        if at == len(others) or others[at][0] > start:
            return False
    return True


def without(ranges: list[Range], others: list[Range]) -> list[Range]:
    """What of `ranges` is not in `others`; both united."""
    found: list[Range] = []
    at = 0
    for start, end in ranges:
        while at < len(others) and others[at][1] <= start:
            at += 1
        here = at
        while start < end and here < len(others) and others[here][0] < end:
            if start < others[here][0]:
                found.append((start, others[here][0]))
            start = max(start, others[here][1])
            here += 1
        if start < end:
            found.append((start, end))
    return found
