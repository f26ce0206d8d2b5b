"""What an environment is doing when it is snapshotted.

`setup` runs once; `step` makes round `i` differ from all others; `spoil` destroys what `step` made; `check` proves that round `i`
is back, through the first command in the restored environment. A backend is asked only for what it claims to bring back.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from statefork.environment import Environment
from statefork.errors import UsageError, WaypointError

__all__ = ["FULL", "QUICK", "Workload", "by_name", "packages_for"]

_GUEST = Path(__file__).with_name("guest")
_ROOT = ("python3-minimal", "procps")
_POSTGRES = "/usr/lib/postgresql/15/bin"


class Wrong(WaypointError):
    """What came back is not what was saved: no figure of this backend is worth anything."""

    code = "wrong"


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    summary: str
    setup: str = ":"
    """Shell, once."""
    step: str = ":"
    """Shell, before each snapshot; `$i` is the round."""
    memory_mib: int = 0
    """A process that has touched this much memory."""
    dirty: str = ""
    """How much of it each round changes: `1%` or `all`."""
    rounds: int = 0
    """Fewer than usual, where one takes long."""
    shares: int = 1
    """Of the time of a run, beside those of the others."""
    program: str = ""
    """A file of `guest/` that runs in the background and says `up`."""
    ask: str = ""
    """Shell: its first word is `$i`, from the memory of a process."""
    packages: tuple[str, ...] = ()
    """What the root needs beside Python."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"memory"}) if self.memory_mib or self.ask else frozenset()

    def prepare(self, env: Environment) -> None:
        _sh(env, f"mkdir -p /root /run; {self.setup}", timeout=300)
        program = "holder.py" if self.memory_mib else self.program
        if program:
            env.write_file(f"/root/{program}", (_GUEST / program).read_bytes())
            _sh(env, "mkfifo /run/ask /run/answer")
            started = f"python3 /root/{program} {self.memory_mib} >/run/program.log 2>&1 </dev/null & PROGRAM=$!; disown"
            _sh(env, started)
            _sh(env, "until grep -q up /run/program.log; do kill -0 $PROGRAM || break; sleep 0.05; done", timeout=300)
            _sh(env, "cat /run/program.log >&2; grep -q up /run/program.log")

    def next_round(self, env: Environment, i: int) -> None:
        _sh(env, f"i={i}; {self.step}; BENCH=$i; echo $i >/root/bench-file", timeout=600)
        if self.memory_mib:
            _sh(env, f"echo dirty {i} {self.dirty or '1%'} >/run/ask; cat /run/answer", timeout=300)

    def spoil(self, env: Environment) -> None:
        _sh(env, "BENCH=broken; rm -f /root/bench-file")

    def check(self, env: Environment, i: int, claims: frozenset[str]) -> None:
        """One command: its answer is the first correct one, or it raises Wrong. The shell itself answers: no program is started."""
        command, wanted = "read -r found </root/bench-file; echo $found", [str(i)]
        if "shell" in claims:
            command, wanted = f"echo $BENCH; {command}", [str(i), *wanted]
        if self.needs and "memory" in claims:
            command, wanted = f"{command}; {self.ask or _ASK}", [*wanted, str(i)]
        found = env.exec_command(command, timeout=120).stdout.split()
        if found[: len(wanted)] != wanted:
            raise Wrong(f"round {i} of {self.name}: the answer is {found}, not {wanted}")


def _sh(env: Environment, command: str, timeout: float = 120) -> str:
    done = env.exec_command(command, timeout=timeout)
    if not done.ok:
        raise Wrong(f"{command!r} ended in {done.exit_code}: {done.stderr[-500:]}")
    return done.stdout


_ASK = "echo ask >/run/ask; cat /run/answer"
# in a shell of its own: the session's would keep the memory that its list took. Those of earlier rounds stay: to remove as many
# files of a lower layer is another load
_MANY = "mkdir -p /root/many/$i; (for n in {1..%d}; do echo $n >/root/many/$i/$n; done)"
_SQL = f"su postgres -c \"{_POSTGRES}/psql -qtAh /tmp -c '%s' postgres\""
_WEB = "exec 9<>/dev/tcp/127.0.0.1/8000; echo %s >&9; read -r said <&9; exec 9>&-; echo $said"
_BIG = "dd if=/dev/urandom of=/root/big bs=1M count=512 status=none"

QUICK = (
    Workload("idle shell", "a shell and nothing else"),
    Workload("shell and job", "a shell with a background job", setup="sleep 1000000 & :"),
    Workload("64 MiB", "a process that has touched 64 MiB", memory_mib=64, dirty="all"),
)
FULL = (
    *QUICK,
    Workload("1,000 files", "1,000 small files just written", step=_MANY % 1000, rounds=5),
    Workload("20,000 files", "20,000 small files just written", step=_MANY % 20000, rounds=5),
    Workload("512 MiB of files", "512 MiB of file changes", step=_BIG, rounds=5),
    Workload("512 MiB", "a process that has touched 512 MiB", memory_mib=512, dirty="all", rounds=5),
    Workload("512 MiB, 1% dirty", "the same, 1% changed since the last snapshot", memory_mib=512, dirty="1%", rounds=5),
    Workload("2 GiB", "a process that has touched 2 GiB", memory_mib=2048, dirty="all", rounds=3, shares=3),
    Workload("2 GiB, 1% dirty", "the same, 1% changed since the last snapshot", memory_mib=2048, dirty="1%", rounds=3, shares=3),
    Workload(
        "numpy and pandas", "a warm interpreter with a frame of a million rows",
        program="frames.py", step="echo dirty $i >/run/ask; cat /run/answer", ask=_ASK, packages=("python3-pandas",),
    ),
    Workload(
        "PostgreSQL", "a server with pgbench's tables (scale 5) and what each round wrote, in its buffers",
        setup=(
            f"mkdir -p /db && chown postgres /db && su postgres -c '{_POSTGRES}/initdb -A trust -D /db >/dev/null && "
            f"{_POSTGRES}/pg_ctl -D /db -o \"-k /tmp -c autovacuum=off\" -l /db/log -w start >/dev/null && "
            f"/usr/lib/postgresql/15/bin/pgbench -h /tmp -qi -s 5 postgres >/dev/null 2>&1' && "
            + _SQL % "create table round (i int); insert into round values (0)"
        ),
        step=_SQL % "update round set i = $i; update pgbench_branches set bbalance = $i", ask=_SQL % "select i from round",
        packages=("postgresql",),
    ),
    Workload(
        "web stack", "five processes with connections to each other: a front, three workers, a store",
        program="web.py", step=_WEB % '"set $i"', ask=_WEB % "get",
    ),
)  # fmt: skip


def packages_for(workloads: tuple[Workload, ...]) -> tuple[str, ...]:
    """Of the one root in which all of them run."""
    return (*_ROOT, *dict.fromkeys(name for workload in workloads for name in workload.packages))


def by_name(names: tuple[str, ...], *, quick: bool) -> tuple[Workload, ...]:
    chosen = QUICK if quick else FULL
    if not names:
        return chosen
    known = {workload.name: workload for workload in FULL}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"no workload {', '.join(unknown)}; there are: {', '.join(known)}")
    return tuple(known[name] for name in names)
