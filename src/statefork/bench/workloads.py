"""What an environment is doing when it is snapshotted.

`setup` runs once; `step` makes round `i` differ from all others; `spoil` destroys what `step` made; `check` proves that round `i`
is back, through the first command in the restored environment. A backend is asked only for what it claims to bring back.
"""

from __future__ import annotations

from dataclasses import dataclass

from statefork.environment import Environment
from statefork.errors import UsageError, WaypointError

__all__ = ["FULL", "QUICK", "Workload", "by_name"]

_HOLDER = r"""
import hashlib, os, sys
size = int(sys.argv[1]) << 20
block = os.urandom(1 << 20)
data = bytearray()
for n in range(size >> 20):
    data += n.to_bytes(8, "little") + block[8:]
seed = 0
print("up", flush=True)
while True:
    with open("/run/ask") as ask:
        words = ask.read().split()
    if words[0] == "dirty":
        seed = int(words[1])
        pages = range(0, len(data), 4096 * 100) if words[2] == "1%" else range(0, len(data), 4096)
        for at in pages:
            data[at + 16] = (data[at + 16] + 1 + seed) % 256
    with open("/run/answer", "w") as answer:
        answer.write(f"{seed} {len(data)} {data[4096 * 100 * 0 + 16]}\n")
"""


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

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"memory"}) if self.memory_mib else frozenset()

    def prepare(self, env: Environment) -> None:
        _sh(env, f"mkdir -p /root /run; {self.setup}")
        if self.memory_mib:
            env.write_file("/root/holder.py", _HOLDER.encode())
            _sh(env, "mkfifo /run/ask /run/answer")
            _sh(env, f"python3 /root/holder.py {self.memory_mib} >/run/holder.log 2>&1 </dev/null & disown")
            _sh(env, "until grep -q up /run/holder.log; do sleep 0.05; done", timeout=300)

    def next_round(self, env: Environment, i: int) -> None:
        _sh(env, f"i={i}; {self.step}; BENCH=$i; echo $i >/root/bench-file", timeout=600)
        if self.memory_mib:
            _ask(env, f"dirty {i} {self.dirty or '1%'}")

    def spoil(self, env: Environment) -> None:
        _sh(env, "BENCH=broken; rm -f /root/bench-file")

    def check(self, env: Environment, i: int, claims: frozenset[str]) -> None:
        """One command: its answer is the first correct one, or it raises Wrong."""
        command, wanted = "cat /root/bench-file", [str(i)]
        if "shell" in claims:
            command, wanted = f"echo $BENCH; {command}", [str(i), *wanted]
        if self.memory_mib and "memory" in claims:
            command, wanted = f"{command}; echo ask >/run/ask; cat /run/answer", [*wanted, str(i)]
        found = env.exec_command(command, timeout=120).stdout.split()
        if found[: len(wanted)] != wanted:
            raise Wrong(f"round {i} of {self.name}: the answer is {found}, not {wanted}")


def _sh(env: Environment, command: str, timeout: float = 120) -> str:
    done = env.exec_command(command, timeout=timeout)
    if not done.ok:
        raise Wrong(f"{command!r} ended in {done.exit_code}: {done.stderr[-500:]}")
    return done.stdout


def _ask(env: Environment, words: str) -> str:
    return _sh(env, f"echo {words} >/run/ask; cat /run/answer", timeout=300)


_MANY = "mkdir -p /root/many/$i; for n in {1..20000}; do echo $n >/root/many/$i/$n; done; rm -rf /root/many/$((i - 1))"
_BIG = "dd if=/dev/urandom of=/root/big bs=1M count=512 status=none"

QUICK = (
    Workload("idle shell", "a shell and nothing else"),
    Workload("shell and job", "a shell with a background job", setup="sleep 1000000 & :"),
    Workload("64 MiB", "a process that has touched 64 MiB", memory_mib=64, dirty="all"),
)
FULL = (
    *QUICK,
    Workload("20,000 files", "20,000 small files just written", step=_MANY, rounds=5),
    Workload("512 MiB of files", "512 MiB of file changes", step=_BIG, rounds=5),
    Workload("512 MiB", "a process that has touched 512 MiB", memory_mib=512, dirty="all", rounds=5),
    Workload("512 MiB, 1% dirty", "the same, 1% changed since the last snapshot", memory_mib=512, dirty="1%", rounds=5),
    Workload("2 GiB", "a process that has touched 2 GiB", memory_mib=2048, dirty="all", rounds=3),
)


def by_name(names: tuple[str, ...], *, quick: bool) -> tuple[Workload, ...]:
    chosen = QUICK if quick else FULL
    if not names:
        return chosen
    known = {workload.name: workload for workload in FULL}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"no workload {', '.join(unknown)}; there are: {', '.join(known)}")
    return tuple(known[name] for name in names)
