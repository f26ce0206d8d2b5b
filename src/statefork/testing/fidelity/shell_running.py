"""The shell's children: jobs in every state, and commands that a snapshot finds in the middle."""

from __future__ import annotations

import threading

from statefork.errors import WaypointError
from statefork.testing.fidelity.case import SCRATCH, Case, ShellCase
from statefork.testing.fidelity.subject import CaseFailed, Inside

__all__ = ["RUNNING"]

_NEEDS = frozenset({"shell", "processes", "memory"})


class ForegroundLoop(Case):
    """The snapshot falls into a loop that a caller is waiting for; everywhere it goes on with the next round."""

    name, kind, summary = "foreground-command", "shell", "a running command: the loop goes on at the right iteration"
    needs = _NEEDS | {"files"}
    rounds = 80

    def setup(self, inside: Inside) -> None:
        loop = f"mark=set; for ((i = 1; i <= {self.rounds}; i++)); do echo $i >>/tmp/rounds; sleep 0.01; done; (exit 9)"

        def caller() -> None:
            try:
                inside.subject.exec_command(loop, timeout=120)
            except WaypointError:
                return  # the environment was restored, forked from or destroyed under the command

        threading.Thread(target=caller, daemon=True, name="fidelity-foreground").start()
        inside.until("[ $(wc -l </tmp/rounds) -gt 3 ]", "the loop begins")

    def observe(self, inside: Inside) -> str:
        """The numbers so far are 1, 2, 3 …: a round that was lost or done twice shows."""
        return inside.beside(
            'awk \'$1 != NR { bad = 1; print "round", $1, "as line", NR } END { if (!bad) print "in order" }\' /tmp/rounds'
        )

    def perturb(self, inside: Inside) -> None:
        inside.beside("echo 0 >>/tmp/rounds")

    def works(self, inside: Inside) -> None:
        inside.until(f"[ $(wc -l </tmp/rounds) -ge {self.rounds} ]", "the loop ends")
        status = inside.subject.exec_command("echo $? $mark $i", timeout=30).stdout.strip()
        if status != f"9 set {self.rounds + 1}":
            raise CaseFailed(f"after the loop the shell says {status!r}, not '9 set {self.rounds + 1}'")
        inside.equal("wc -l </tmp/rounds", str(self.rounds))


RUNNING: tuple[Case, ...] = (
    ShellCase(
        "process-substitution",
        "a process substitution that is being read",
        kind="shell",
        needs=_NEEDS,
        make=f"mkfifo {SCRATCH}/gate; exec 5<>{SCRATCH}/gate; exec 4< <(echo one; read -r word <&5; echo two $word); read -r first <&4",
        same="echo $first; readlink /proc/$$/fd/4 | cut -d: -f1",
        spoil="echo wrong >&5; read -r first <&4; exec 4<&-",
        use="echo right >&5; read -r second <&4; [ \"$second\" = 'two right' ]; ! read -r third <&4",
    ),
    ShellCase(
        "coproc",
        "a coprocess",
        kind="shell",
        needs=_NEEDS,
        make='coproc UP { n=0; while read -r line; do echo "${line^^}$n"; ((n++)); done; }; echo a >&${UP[1]}; read -r x <&${UP[0]}',
        same="echo $x $UP_PID ${UP[*]}; jobs %1",
        spoil="echo b >&${UP[1]}; read -r x <&${UP[0]}",
        use="echo next >&${UP[1]}; read -r x <&${UP[0]}; [ $x = NEXT1 ]",
    ),
    ShellCase(
        "background-jobs",
        "background jobs: the list, wait and the right status",
        kind="shell",
        needs=_NEEDS,
        make=(
            f"mkfifo {SCRATCH}/one {SCRATCH}/two",
            f"(read -r _ <{SCRATCH}/one; exit 5) & (read -r _ <{SCRATCH}/two; exit 6) & sleep 1000 & :",
        ),
        same="jobs -l",
        spoil=f"echo >{SCRATCH}/one; wait %1; kill %3",
        use=f"echo >{SCRATCH}/two; wait %2; [ $? = 6 ]; echo >{SCRATCH}/one; wait %1; [ $? = 5 ]; kill %3; wait %3; [ $? = 143 ]",
    ),
    ShellCase(
        "job-to-foreground",
        "fg of a background job",
        kind="shell",
        needs=_NEEDS | {"terminal"},  # without one a shell has no job control
        make=("mkfifo /tmp/one", "(read -r _ </tmp/one; exit 7) & :"),
        same="jobs",
        spoil="kill %1; wait %1 || :",
        use="(echo >/tmp/one) & fg %1; [ $? = 7 ]",
    ),
    ShellCase(
        "stopped-jobs",
        "stopped jobs stay stopped, and go on when told",
        kind="shell",
        needs=_NEEDS | {"terminal"},  # without one a shell has no job control
        programs=("ps",),
        packages=("procps",),
        make="sleep 1000 & sleep 1001 & kill -STOP %1; while [[ $(ps -o stat= -p $(jobs -p %1)) != T* ]]; do sleep 0.01; done; jobs",
        same="jobs -l; ps -o stat= -p $(jobs -p %1)",
        spoil="kill -CONT %1; kill %2",
        use="bg %1; while [[ $(ps -o stat= -p $(jobs -p %1)) != S* ]]; do sleep 0.01; done; kill %1 %2",
    ),
    ForegroundLoop(),
)
