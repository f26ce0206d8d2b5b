"""Files that a process holds open or mapped."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import termios

from .probe import Probe


def _offset(fd: int) -> int:
    return os.lseek(fd, 0, os.SEEK_CUR)


class DeletedButOpen(Probe):
    """Files that are deleted but open, with and without another name, of 3 MiB and empty."""

    needs = ("files", "processes", "memory")

    def __init__(self) -> None:
        self.fds = []
        for name, content in (("big", b"0123456789abcdef" * 196608), ("small", b"text"), ("empty", b"")):
            fd = os.open(f"{self.directory}/{name}", os.O_RDWR | os.O_CREAT, 0o640)
            os.write(fd, content)
            os.lseek(fd, len(content) // 2, os.SEEK_SET)
            os.unlink(f"{self.directory}/{name}")
            self.fds.append(fd)
        os.mkdir(f"{self.directory}/d")
        self.fds.append(os.open(f"{self.directory}/d/linked", os.O_RDWR | os.O_CREAT))
        os.write(self.fds[-1], b"linked")
        os.link(f"{self.directory}/d/linked", f"{self.directory}/d/other")
        os.unlink(f"{self.directory}/d/linked")

    def observe(self) -> object:
        seen = []
        for fd in self.fds:
            st = os.fstat(fd)
            content = os.pread(fd, 1 << 23, 0)
            seen.append((st.st_nlink, oct(st.st_mode), st.st_size, content[-8:], _offset(fd)))
        return seen, sorted(os.listdir(f"{self.directory}/d"))

    def perturb(self) -> None:
        for fd in self.fds:
            os.ftruncate(fd, 1)

    def works(self) -> None:
        for fd in self.fds[:3]:
            at = _offset(fd)
            os.write(fd, b"new")
            assert os.pread(fd, 3, at) == b"new"
        os.pwrite(self.fds[3], b"LINKED", 0)
        with open(f"{self.directory}/d/other") as other:
            assert other.read() == "LINKED", "the other name is not the same file any more"


class OpenForWriting(Probe):
    """Files held open: offsets, append mode, flags, descriptors that share one offset."""

    needs = ("files", "processes", "memory")

    def __init__(self) -> None:
        path = f"{self.directory}/f"
        self.write = os.open(path, os.O_RDWR | os.O_CREAT)
        os.write(self.write, b"first line\n")
        self.same = os.dup(self.write)
        self.append = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC)
        self.read = os.open(path, os.O_RDONLY)
        os.read(self.read, 3)
        self.listing = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)

    def observe(self) -> object:
        import fcntl

        flags = [(oct(fcntl.fcntl(fd, fcntl.F_GETFL)), fcntl.fcntl(fd, fcntl.F_GETFD)) for fd in (self.write, self.append, self.read)]
        return flags, [_offset(fd) for fd in (self.write, self.same, self.append, self.read)], os.pread(self.read, 99, 0)

    def perturb(self) -> None:
        os.write(self.append, b"more")
        os.lseek(self.same, 0, os.SEEK_SET)

    def works(self) -> None:
        os.write(self.same, b"A")
        os.write(self.write, b"B")
        os.write(self.append, b"C")
        assert os.pread(self.read, 99, 0) == b"first line\nABC"
        assert os.read(self.read, 7) == b"st line"
        assert "f" in os.listdir(self.listing)


class SharedMapping(Probe):
    """A file mapped shared by two processes, changed through the mapping only."""

    needs = ("files", "processes", "memory")

    def __init__(self) -> None:
        self.path = f"{self.directory}/shared"
        with open(self.path, "wb") as out:
            out.write(bytes(1 << 20))
        self.file = os.open(self.path, os.O_RDWR)
        self.map = mmap.mmap(self.file, 1 << 20)
        self.map[5000:5005] = b"first"
        ask, self.ask = os.pipe()
        self.answer, answer = os.pipe()
        if os.fork() == 0:
            while os.read(ask, 1):
                os.write(answer, self.map[5000:5005])

    def other(self) -> bytes:
        os.write(self.ask, b"?")
        return os.read(self.answer, 5)

    def observe(self) -> object:
        with open(self.path, "rb") as file:
            file.seek(5000)
            return self.map[5000:5005], file.read(5), self.other()

    def perturb(self) -> None:
        self.map[5000:5005] = b"other"

    def works(self) -> None:
        self.map[5000:5005] = b"third"
        assert self.other() == b"third", "the two processes do not share the mapping any more"
        with open(self.path, "rb") as file:
            file.seek(5000)
            assert file.read(5) == b"third", "the mapping and the file are not the same any more"


class PrivateMapping(Probe):
    """A file mapped privately: changed pages are the process's own, the others are the file's."""

    needs = ("files", "processes", "memory")

    def __init__(self) -> None:
        self.path = f"{self.directory}/private"
        with open(self.path, "wb") as out:
            out.write(b"a" * 65536)
        self.file = os.open(self.path, os.O_RDWR)
        self.map = mmap.mmap(self.file, 65536, mmap.MAP_PRIVATE)
        self.map[100:104] = b"MINE"

    def observe(self) -> object:
        return self.map[98:106], self.map[60000:60004], os.pread(self.file, 8, 98)

    def perturb(self) -> None:
        self.map[100:104] = b"lost"

    def works(self) -> None:
        self.map[60000:60004] = b"MORE"
        assert os.pread(self.file, 4, 60000) == b"aaaa", "a private page reached the file"


class DeletedMapping(Probe):
    """A mapped file that is deleted, and a program that runs though its file is replaced."""

    needs = ("files", "processes", "memory")

    def __init__(self) -> None:
        path = f"{self.directory}/library"
        with open(path, "wb") as out:
            out.write(b"code" * 4096)
        fd = os.open(path, os.O_RDWR)
        self.map = mmap.mmap(fd, 16384)
        os.close(fd)
        os.unlink(path)
        with open(path, "wb") as out:
            out.write(b"newer")
        self.path = path

    def observe(self) -> object:
        with open("/proc/self/maps") as maps:
            mapped = ["(deleted)" in line for line in maps if "library" in line]
        with open(self.path) as new:
            return self.map[:8], mapped, new.read()

    def perturb(self) -> None:
        self.map[:4] = b"gone"

    def works(self) -> None:
        self.map[4:8] = b"live"
        assert self.map[:8] == b"codelive"


class Rootless(Probe):
    """A process whose root directory is another one (chroot)."""

    needs = ("files", "processes", "memory")

    def __init__(self) -> None:
        os.makedirs(f"{self.directory}/jail/inner")
        with open(f"{self.directory}/jail/here", "w") as out:
            out.write("in jail")
        ask, self.ask = os.pipe()
        self.answer, answer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.chroot(f"{self.directory}/jail")
            os.chdir("/inner")
            while os.read(ask, 1):
                with open("/here") as here:
                    os.write(answer, f"{os.getcwd()} {here.read()}".encode())

    def observe(self) -> object:
        os.write(self.ask, b"?")
        return os.read(self.answer, 99), os.readlink(f"/proc/{self.pid}/root")

    def perturb(self) -> None:
        with open(f"{self.directory}/jail/here", "w") as out:
            out.write("changed")


class CopiedUp(Probe):
    """A file of the base that is open for reading while another process changes it."""

    needs = ("files", "processes", "memory")

    def __init__(self) -> None:
        self.file = os.open("/etc/profile", os.O_RDONLY)
        os.read(self.file, 16)
        self.before = os.pread(self.file, 64, 0)

    def observe(self) -> object:
        return _offset(self.file), os.pread(self.file, 64, 0) == self.before, os.path.exists("/etc/profile")

    def perturb(self) -> None:
        os.lseek(self.file, 0, os.SEEK_SET)

    def works(self) -> None:
        with open("/etc/profile", "a") as out:
            out.write("new 1/tcp\n")
        assert os.pread(self.file, 64, 0) == self.before


class Inotify(Probe):
    """inotify watches on a file and a directory."""

    needs = ("files", "processes", "memory")

    def __init__(self) -> None:
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.fd = self.libc.inotify_init1(os.O_NONBLOCK)
        os.mkdir(f"{self.directory}/watched")
        with open(f"{self.directory}/file", "w"):
            pass
        self.dir_watch = self.libc.inotify_add_watch(self.fd, f"{self.directory}/watched".encode(), 0x100 | 0x200)
        self.file_watch = self.libc.inotify_add_watch(self.fd, f"{self.directory}/file".encode(), 0x2)
        assert self.dir_watch > 0, "inotify_add_watch"
        assert self.file_watch > 0, "inotify_add_watch"

    def observe(self) -> object:
        unread = fcntl.ioctl(self.fd, termios.FIONREAD, bytes(4))
        with open(f"/proc/self/fdinfo/{self.fd}") as info:
            watches = sorted(" ".join(line.split()[1:2] + [word for word in line.split() if word.startswith("mask")]) for line in info if line.startswith("inotify"))
        return watches, unread

    def perturb(self) -> None:
        self.libc.inotify_rm_watch(self.fd, self.dir_watch)

    def works(self) -> None:
        import struct

        with open(f"{self.directory}/watched/new", "w"):
            pass
        with open(f"{self.directory}/file", "w") as out:
            out.write("x")
        events = []
        data = os.read(self.fd, 4096)
        while data:
            watch, mask, _, size = struct.unpack_from("iIII", data)
            events.append((watch, mask, data[16 : 16 + size].rstrip(b"\0")))
            data = data[16 + size :]
        assert (self.dir_watch, 0x100, b"new") in events, events
        assert (self.file_watch, 0x2, b"") in events, events


class InodeNumbers(Probe):
    """The inode number of a file is what it was, by descriptor and by name."""

    needs = ("files", "processes", "memory", "inodes")

    def __init__(self) -> None:
        self.fd = os.open(f"{self.directory}/file", os.O_RDWR | os.O_CREAT)

    def observe(self) -> object:
        return os.fstat(self.fd).st_ino, os.stat(f"{self.directory}/file").st_ino

    def perturb(self) -> None:
        os.rename(f"{self.directory}/file", f"{self.directory}/other")
        with open(f"{self.directory}/file", "w"):
            pass
