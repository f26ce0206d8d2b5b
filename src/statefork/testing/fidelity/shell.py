"""The persistent shell: everything that a person would lose if it were a new one."""

from __future__ import annotations

from statefork.testing.fidelity.case import SCRATCH, Case, ShellCase
from statefork.testing.fidelity.shell_running import RUNNING
from statefork.testing.fidelity.subject import CaseFailed, Inside

__all__ = ["CASES"]

_PROCESSES = frozenset({"shell", "processes", "memory"})


class LastStatus(Case):
    """`$?` is the status of the last command, so looking at it must put it back."""

    name, kind, summary = "last-status", "shell", "$? of the last command"

    def setup(self, inside: Inside) -> None:
        inside.subject.exec_command("(exit 42)", timeout=10)

    def observe(self, inside: Inside) -> str:
        return inside.subject.exec_command('last=$?; echo "$last"; (exit "$last")', timeout=10).stdout

    def perturb(self, inside: Inside) -> None:
        inside.sh("true")


class Gone(Case):
    """A directory that was removed under the shell."""

    name, kind, summary = "deleted-cwd", "shell", "a working directory that is deleted"
    needs = frozenset({"shell", "files"})

    def setup(self, inside: Inside) -> None:
        inside.sh("mkdir -p /tmp/gone/here && cd /tmp/gone/here && rmdir /tmp/gone/here")

    def observe(self, inside: Inside) -> str:
        return inside.sh("echo $PWD; readlink /proc/$$/cwd; stat -c %h .")

    def perturb(self, inside: Inside) -> None:
        inside.sh("cd /")

    def works(self, inside: Inside) -> None:
        if inside.status("touch new 2>/dev/null") == 0:
            raise CaseFailed("a file could be made in a directory that is deleted")
        inside.equal("cd .. && pwd", "/tmp/gone")


CASES: tuple[Case, ...] = (
    ShellCase(
        "cwd",
        "the working directory, and the one before",
        kind="shell",
        make=f"mkdir -p {SCRATCH}/'a b/c' && cd {SCRATCH}/'a b' && cd c",
        same="pwd; echo $OLDPWD; dirs -p",
        spoil="cd /; cd /usr",
        use=f"cd - && [ \"$PWD\" = {SCRATCH}/'a b' ]",
    ),
    Gone(),
    ShellCase(
        "variables",
        "variables: bytes of any kind, integers, read-only, references",
        kind="shell",
        make="plain=$'a\\tb\\n\\xff\\xfe'; declare -i number=41; readonly fixed=1; declare -n ref=plain; empty=; unset none",
        same="declare -p plain number fixed ref empty | od -An -c; echo ${none-unset}",
        spoil="plain=; number=0; unset -n ref; none=here",
        use="number+=1; [ $number = 42 ]; ref=new; [ $plain = new ]; ! (fixed=2) 2>/dev/null",
    ),
    ShellCase(
        "exported-variables",
        "exported variables, as programs see them",
        kind="shell",
        make="export TOKEN='x=y \"z\"' PATH=/opt/none:$PATH; export -n HOME_PAGE; LOCAL=1",
        same="env | grep -E '^(TOKEN|PATH|LOCAL|HOME)=' | sort",
        spoil="export TOKEN=other LOCAL; unset HOME",
        use="[ \"$(sh -c 'echo $TOKEN')\" = 'x=y \"z\"' ]",
    ),
    ShellCase(
        "arrays",
        "arrays and associative arrays",
        kind="shell",
        make="list=(one 'two words' [7]=seven); declare -A map=([key]=value ['odd key']=$'a\\nb')",
        same='declare -p list; for k in "${!map[@]}"; do printf \'%q=%q\\n\' "$k" "${map[$k]}"; done | sort',
        spoil="list=(); unset 'map[key]'",
        use="list+=(eight); [ ${list[8]} = eight ]; map[more]=1; [ ${#map[@]} = 3 ]",
    ),
    ShellCase(
        "functions",
        "functions, with what they call",
        kind="shell",
        make="greet() { local who=${1:-you}; printf 'hello %s\\n' \"$who\"; }; twice() { greet a; greet b; }; export -f greet",
        same="declare -f greet twice; twice; bash -c 'greet exported'",
        spoil="greet() { echo bye; }; unset -f twice",
    ),
    ShellCase(
        "aliases",
        "aliases",
        kind="shell",
        make="alias ll='ls -l --' say='echo said'",
        same="alias ll say",
        spoil="alias ll=ls; unalias say",
        use="[ \"$(say it)\" = 'said it' ]",
    ),
    ShellCase(
        "options",
        "set -o and shopt",
        kind="shell",
        make="set -o pipefail -o noclobber -f; shopt -s extglob nullglob dotglob",
        same="set +o; shopt -p; echo $-",
        spoil="set +o pipefail +f; shopt -u extglob",
        use="! (false | true); ! (: >/etc/passwd) 2>/dev/null",
    ),
    ShellCase(
        "traps",
        "traps, and that they fire",
        kind="shell",
        make=f"trap 'echo usr1 >>{SCRATCH}/fired' USR1; trap '' TERM; trap 'echo bye' EXIT",
        same="trap -p",
        spoil="trap - USR1 TERM EXIT",
        use=f'kill -USR1 $$; kill -TERM $$; [ "$(cat {SCRATCH}/fired)" = usr1 ]',
    ),
    ShellCase(
        "umask",
        "umask",
        kind="shell",
        make="umask 027",
        same="umask -S",
        spoil="umask 0",
        use=f"touch {SCRATCH}/masked && [ $(stat -c %a {SCRATCH}/masked) = 640 ]",
    ),
    ShellCase(
        "ulimit",
        "resource limits",
        kind="shell",
        make="ulimit -Sn 200; ulimit -c 0; ulimit -S -s 4096; ulimit -f 100000; ulimit -t 5000",
        same="ulimit -Sa; ulimit -Ha",
        spoil="ulimit -Sn 100; ulimit -t 4000",
        use="[ $(sh -c 'ulimit -n') = 200 ]",
    ),
    LastStatus(),
    ShellCase(
        "special-parameters",
        "$$, $!, $PPID and $BASHPID",
        kind="shell",
        needs=_PROCESSES,
        make="sleep 1000 & :",
        same="echo $$ $! $PPID $BASHPID",
        spoil="kill $!; sleep 1000 & :",
        use="kill -0 $!; kill $!",
    ),
    ShellCase(
        "random-sequence",
        "the sequence that $RANDOM is in the middle of",
        kind="shell",
        make="RANDOM=42; : $RANDOM",
        same="next=$RANDOM; RANDOM=42; : $RANDOM; echo $next",
        spoil=": $RANDOM $RANDOM",
    ),
    ShellCase(
        "seconds",
        "$SECONDS goes on from where it was",
        kind="shell",
        make="SECONDS=5000",
        same="((SECONDS >= 5000 && SECONDS < 5300)) && echo goes on || echo $SECONDS",
        spoil="SECONDS=3",
    ),
    ShellCase(
        "history",
        "the history of commands",
        kind="shell",
        make="history -c; history -s 'echo first'; history -s $'echo \"second\"\\nline'; HISTSIZE=77",
        same="history; echo $HISTSIZE",
        spoil="history -d 1; HISTSIZE=10",
        use="history -s third; history | grep -q third; [ \"$(fc -ln -3 -3)\" = $'\\t echo first' ]",
    ),
    ShellCase(
        "positional-parameters",
        "positional parameters",
        kind="shell",
        make="set -- a 'b c' '' d",
        same='printf \'<%s>\' "$#" "$@"',
        spoil="set -- x",
        use="shift; [ \"$1\" = 'b c' ]",
    ),
    ShellCase(
        "descriptors",
        "descriptors made with exec, and their offsets",
        kind="shell",
        needs=frozenset({"shell", "files"}),
        make="printf '%s\\n' one two three >/tmp/in; exec 3>/tmp/out 4</tmp/in {log}>>/tmp/log; echo abc >&3; read -r _ <&4",
        same="grep -h pos: /proc/$$/fdinfo/3 /proc/$$/fdinfo/4; cat /tmp/out; echo $log; readlink /proc/$$/fd/$log",
        spoil="echo more >&3; read -r _ <&4; exec 3>&- {log}>&-",
        use="echo def >&3; [ \"$(cat /tmp/out)\" = $'abc\\ndef' ]; read -r x <&4; [ $x = two ]; echo l >&$log; [ -s /tmp/log ]",
    ),
    ShellCase(
        "activated-venv",
        "an activated Python venv",
        kind="shell",
        programs=("python3",),
        packages=("python3-venv",),
        modules=("venv",),
        make=f"python3 -m venv --without-pip {SCRATCH}/venv && . {SCRATCH}/venv/bin/activate",
        same="echo $VIRTUAL_ENV; command -v python; python -c 'import sys; print(sys.prefix)'; echo \"$PS1\"",
        spoil="deactivate",
        use='deactivate && [ -z "${VIRTUAL_ENV-}" ] && [ "$(type -t deactivate)" != function ]',
    ),
    ShellCase(
        "sourced-environment",
        "what a sourced file left behind",
        kind="shell",
        make=f"printf '%s\\n' 'set -a; REGION=north; set +a' 'tool() {{ echo \"$REGION $1\"; }}' >{SCRATCH}/env.sh; . {SCRATCH}/env.sh; rm {SCRATCH}/env.sh",
        same="tool x; sh -c 'echo $REGION'",
        spoil="REGION=south",
    ),
    *RUNNING,
)
