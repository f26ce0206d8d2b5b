"""The process tree: who is whose child, and what each process is allowed to do."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import struct

from .probe import Probe, wait_until

_libc = ctypes.CDLL(None, use_errno=True)


def _stat(pid: int) -> tuple[str, str, str, str]:
    """State, parent, process group, session. Whether one that lives runs or waits at this instant is left open: `S`."""
    with open(f"/proc/{pid}/stat") as stat:
        words = stat.read().rpartition(") ")[2].split()
    return words[0].replace("R", "S").replace("D", "S"), words[1], words[2], words[3]


def _status(pid: int | str, *keys: str) -> list[str]:
    with open(f"/proc/{pid}/status") as status:
        return [line.strip() for line in status if line.split(":")[0] in keys]


def _rest() -> None:
    while True:
        signal.pause()


class TreeShape(Probe):
    """Pids, parents, process groups and sessions of a small tree."""

    def __init__(self) -> None:
        read, write = os.pipe()
        self.root = os.fork()
        if self.root == 0:
            os.setsid()
            for branch in range(3):
                if os.fork() == 0:
                    if branch:
                        os.setpgid(0, 0)
                    os.fork()
                    os.write(write, b"!")
                    _rest()
            os.write(write, b"!")
            _rest()
        for _ in range(7):
            os.read(read, 1)

    def _family(self, pid: int) -> list[object]:
        with open(f"/proc/{pid}/task/{pid}/children") as children:
            below = sorted(int(word) for word in children.read().split())
        return [pid, _stat(pid), [self._family(child) for child in below]]

    def observe(self) -> object:
        return self._family(self.root)

    def perturb(self) -> None:
        with open(f"/proc/{self.root}/task/{self.root}/children") as children:
            os.kill(int(children.read().split()[1]), signal.SIGKILL)

    def works(self) -> None:
        os.killpg(self.root, signal.SIGKILL)
        assert os.waitpid(self.root, 0)[1] == signal.SIGKILL


class Zombies(Probe):
    """Zombies whose status has not been collected."""

    def __init__(self) -> None:
        self.pids = []
        for code in (3, None):
            pid = os.fork()
            if pid == 0:
                if code is not None:
                    os._exit(code)
                os.kill(os.getpid(), signal.SIGTERM)
                _rest()
            self.pids.append(pid)
        wait_until(lambda: all(_stat(pid)[0] == "Z" for pid in self.pids), "both are zombies")

    def observe(self) -> object:
        return self.pids, [_stat(pid) for pid in self.pids]

    def perturb(self) -> None:
        os.waitpid(self.pids[0], 0)

    def works(self) -> None:
        statuses = [os.waitpid(pid, 0)[1] for pid in self.pids]
        assert statuses == [3 << 8, signal.SIGTERM], statuses


class StoppedProcess(Probe):
    """A stopped process stays stopped, and its parent is not told twice."""

    def __init__(self) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
            os._exit(7)
        assert os.WIFSTOPPED(os.waitpid(self.pid, os.WUNTRACED)[1])

    def observe(self) -> object:
        return _stat(self.pid)

    def perturb(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def works(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
        assert os.waitpid(self.pid, 0)[1] == 7 << 8


class Daemon(Probe):
    """A double-forked daemon in a session of its own, adopted by PID 1 or whoever adopts orphans there."""

    def __init__(self) -> None:
        server = socket.socket(socket.AF_UNIX)
        server.bind(f"{self.directory}/daemon")
        server.listen()
        between = os.fork()
        if between == 0:
            os.setsid()
            if os.fork() == 0:
                os.chdir("/")
                os.umask(0)
                count = 0
                while True:
                    with server.accept()[0] as client:
                        count += len(client.recv(1))
                        client.sendall(f"{os.getpid()} {os.getppid()} {os.getsid(0)} {count}".encode())
            os._exit(0)
        os.wait()
        server.close()
        self.pid = int(self._ask(b"").split()[0])
        wait_until(lambda: self._ask(b"").split()[1] != str(between), "the daemon is adopted")

    def _ask(self, what: bytes) -> str:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(f"{self.directory}/daemon")
            client.sendall(what)
            client.shutdown(socket.SHUT_WR)
            return client.recv(99).decode()

    def observe(self) -> object:
        return self._ask(b""), _stat(self.pid)[1:]

    def perturb(self) -> None:
        self._ask(b"+")

    def works(self) -> None:
        self._ask(b"+")
        assert self._ask(b"+").endswith(" 2")


class Nohup(Probe):
    """A process that ignores the hang-up, in a session of its own."""

    programs = ("nohup", "setsid")
    packages = ("coreutils", "util-linux")

    def __init__(self) -> None:
        import subprocess

        self.child = subprocess.Popen(
            ["setsid", "nohup", "sh", "-c", 'while read -r line; do echo "$line"; done'],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        wait_until(lambda: _status(self.child.pid, "Name") == ["Name:\tsh"], "the shell runs")

    def observe(self) -> object:
        return _stat(self.child.pid)[1:], _status(self.child.pid, "SigIgn", "Name")

    def perturb(self) -> None:
        self.child.kill()
        self.child.wait()

    def works(self) -> None:
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        os.kill(self.child.pid, signal.SIGHUP)
        self.child.stdin.write(b"alive\n")
        assert self.child.stdout.read(6) == b"alive\n"


class Priorities(Probe):
    """Nice value, scheduling policy and their inheritance."""

    def __init__(self) -> None:
        os.nice(7)
        self.pid = os.fork()
        if self.pid == 0:
            os.nice(4)
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            _rest()
        wait_until(lambda: os.sched_getscheduler(self.pid) == os.SCHED_BATCH, "the child is ready")

    def observe(self) -> object:
        return [(os.getpriority(os.PRIO_PROCESS, pid), os.sched_getscheduler(pid)) for pid in (0, self.pid)]

    def perturb(self) -> None:
        os.setpriority(os.PRIO_PROCESS, self.pid, 19)
        os.sched_setscheduler(self.pid, os.SCHED_OTHER, os.sched_param(0))


class OomScore(Probe):
    """The score for the out-of-memory killer."""

    def __init__(self) -> None:
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("321")

    def observe(self) -> object:
        with open("/proc/self/oom_score_adj") as score:
            return score.read()

    def perturb(self) -> None:
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("555")


class ResourceLimits(Probe):
    """Resource limits, soft and hard."""

    def __init__(self) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, 400))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 4096))
        resource.setrlimit(resource.RLIMIT_CPU, (9000, 9001))

    def observe(self) -> object:
        with open("/proc/self/limits") as limits:
            return limits.read()

    def perturb(self) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))

    def works(self) -> None:
        fds = []
        try:
            while True:
                fds.append(os.dup(0))
        except OSError:
            assert 250 < len(fds) < 300, len(fds)
        for fd in fds:
            os.close(fd)


class Identity(Probe):
    """A process with other users and groups, capabilities, no_new_privs, a parent-death signal and a name."""

    def __init__(self) -> None:
        read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _libc.prctl(8, 1, 0, 0, 0)  # keep capabilities over the change of user
            os.setgroups([50, 60])
            os.setresgid(1001, 1002, 1003)
            os.setresuid(1001, 1001, 1003)
            header = struct.pack("Ii", 0x20080522, 0)
            assert _libc.capset(header, struct.pack("IIIIII", 1 << 10, 1 << 10 | 1, 1 << 10, 0, 0, 0)) == 0
            _libc.prctl(38, 1, 0, 0, 0)
            _libc.prctl(1, signal.SIGUSR2, 0, 0, 0)
            _libc.prctl(15, b"some name", 0, 0, 0)
            os.write(write, b"!")
            _rest()
        os.read(read, 1)

    def observe(self) -> object:
        keys = ("Name", "Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs")
        return self.pid, _status(self.pid, *keys)

    def perturb(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


class SeccompFiltered(Probe):
    """A process under a seccomp filter of its own, and one in strict mode."""

    def __init__(self) -> None:
        self.ask, self.answer = [], []
        for strict in (False, True):
            ask, answer = os.pipe(), os.pipe()
            pid = os.fork()
            if pid == 0:
                self._filter() if not strict else _libc.prctl(22, 1, 0, 0, 0)
                while True:
                    os.read(ask[0], 1)
                    allowed = strict or _libc.syscall(39 + 71) > 0  # getppid
                    os.write(answer[1], b"yes" if allowed else b"no!")
            os.close(answer[1])
            self.ask.append(ask[1])
            self.answer.append(answer[0])
            self.last = pid
        self.observe()

    def _filter(self) -> None:
        """getppid answers EPERM, all else is allowed."""
        program = struct.pack("HBBI", 0x20, 0, 0, 0) + struct.pack("HBBI", 0x15, 0, 1, 110)
        program += struct.pack("HBBI", 0x06, 0, 0, 0x00050001) + struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)
        code = ctypes.create_string_buffer(program)
        head = struct.pack("HxxxxxxQ", 4, ctypes.addressof(code))
        _libc.prctl(38, 1, 0, 0, 0)
        assert _libc.prctl(22, 2, head, 0, 0) == 0

    def observe(self) -> object:
        said = []
        for ask, answer in zip(self.ask, self.answer, strict=True):
            os.write(ask, b"?")
            said.append(os.read(answer, 3))
        return said, _status(self.last, "Seccomp")

    def perturb(self) -> None:
        os.kill(self.last, signal.SIGKILL)
        os.waitpid(self.last, 0)


class ManyDescriptors(Probe):
    """A process that holds 10,000 descriptors."""

    needs = ("files", "processes", "memory")

    def __init__(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < 10_100:
            resource.setrlimit(resource.RLIMIT_NOFILE, (12_000, max(hard, 12_000)))  # root may raise the hard one
        self.path = f"{self.directory}/many"
        with open(self.path, "wb") as out:
            out.write(bytes(range(256)) * 64)
        self.fds = []
        while len(self.fds) < 10_000:  # of pipes fewer: CRIU carries 1024 of them
            number = len(self.fds)
            kind = number % 4 if number < 400 else number % 2 * 3
            if kind == 0:
                self.fds.append(os.open(self.path, os.O_RDONLY))
                os.lseek(self.fds[-1], len(self.fds), os.SEEK_SET)
            elif kind == 1:
                self.fds.append(os.open("/dev/null", os.O_RDWR))
            elif kind == 2:
                self.fds += os.pipe()
            else:
                self.fds += [end.detach() for end in socket.socketpair()]

    def observe(self) -> object:
        kinds: dict[str, int] = {}
        for fd in os.listdir("/proc/self/fd"):
            try:
                kind = os.readlink(f"/proc/self/fd/{fd}").split(":[")[0]
            except FileNotFoundError:
                continue
            kinds[kind] = kinds.get(kind, 0) + 1
        offsets = sum(os.lseek(fd, 0, os.SEEK_CUR) for fd in self.fds if os.path.samestat(os.fstat(fd), os.stat(self.path)))
        return kinds, offsets

    def perturb(self) -> None:
        for fd in self.fds[:500]:
            os.close(fd)


class Environ(Probe):
    """argv, environ and the working directory, as /proc shows them."""

    def __init__(self) -> None:
        os.environ["PROBE"] = "set later"
        os.makedirs(f"{self.directory}/here")
        os.chdir(f"{self.directory}/here")

    def observe(self) -> object:
        with open("/proc/self/cmdline") as line, open("/proc/self/environ") as environ:
            return line.read(), sorted(environ.read().split("\0")), os.environ["PROBE"], os.getcwd(), os.readlink("/proc/self/exe")

    def perturb(self) -> None:
        os.environ["PROBE"] = "other"
        os.chdir("/")


class AddressSpace(Probe):
    """Address space layout, and who adopts orphans."""

    def __init__(self) -> None:
        _libc.prctl(36, 1, 0, 0, 0)
        self.address = id(self)

    def observe(self) -> object:
        subreaper = ctypes.c_int()
        _libc.prctl(37, ctypes.byref(subreaper), 0, 0, 0)
        with open("/proc/self/maps") as maps:
            return subreaper.value, self.address == id(self), maps.readline().split("-")[0]

    def perturb(self) -> None:
        _libc.prctl(36, 0, 0, 0, 0)
