"""Programs as people use them."""

from __future__ import annotations

from statefork.testing.fidelity.case import Case, ShellCase
from statefork.testing.fidelity.guest import applications
from statefork.testing.fidelity.programs_inside import probe_cases
from statefork.testing.fidelity.programs_servers import SERVERS
from statefork.testing.fidelity.programs_terminal import TERMINAL

__all__ = ["CASES"]

_NEEDS = frozenset({"shell", "files", "processes", "memory"})

_GIT = ShellCase(
    "git-rebase",
    "git rebase stopped half-way at a conflict",
    kind="programs",
    needs=frozenset({"files"}),
    programs=("git",),
    packages=("git",),
    make="""
        mkdir -p /var/tmp/git && cd /var/tmp/git && git init -q -b main && git config user.name a && git config user.email a@b
        echo base >f && git add f && git commit -qm base
        git checkout -qb side && echo side >f && git commit -qam side && echo more >g && git add g && git commit -qm more
        git checkout -q main && echo main >f && git commit -qam main && git checkout -q side
        ! git rebase main 2>/dev/null
    """,
    same="cd /var/tmp/git && git status | head -20; cat f; git stash list; ls .git/rebase-merge",
    spoil="cd /var/tmp/git && git rebase --abort",
    use="cd /var/tmp/git && echo both >f && git add f && GIT_EDITOR=true git rebase --continue && "
    "[ \"$(git log --format=%s | tr '\\n' ' ')\" = 'more side main base ' ] && git fsck --strict",
)

_MAKE = ShellCase(
    "make-in-parallel",
    "make -j in the middle of a build",
    kind="programs",
    needs=_NEEDS,
    programs=("make",),
    packages=("make",),
    make=(
        "mkdir -p /var/tmp/mk && cd /var/tmp/mk && mkfifo gate-d gate-e gate-f && exec 5<>gate-d 6<>gate-e 7<>gate-f && "
        "printf '%b\\n' 'all: a b c d e f' 'a b c:' '\\t@touch $@' 'd e f: a' '\\t@read x <gate-$@; echo $$x >$@' >Makefile",
        "make -j4 >log 2>&1 & while [ $(pgrep -xc -f \"/bin/sh -c read x <gate.*\") -lt 3 ]; do sleep 0.02; done",
    ),
    same="ls; jobs %1; pgrep -xc -f '/bin/sh -c read x <gate.*'",
    spoil="echo 1 >&5; while [ $(pgrep -xc -f '/bin/sh -c read x <gate.*') -gt 2 ]; do sleep 0.02; done",
    use="echo 1 >&5; echo 2 >&6; echo 3 >&7; wait %1 && [ $(cat d e f | sort | tr -d '\\n') = 123 ] && make -q",
)

_PYTEST = ShellCase(
    "pytest-run",
    "pytest in the middle of a run",
    kind="programs",
    needs=_NEEDS,
    programs=("python3",),
    modules=("pytest",),
    packages=("python3", "python3-pytest"),
    make=(
        "mkdir -p /var/tmp/pt && cd /var/tmp/pt && mkfifo gate && printf '%s\\n' 'import pytest' 'seen = []' "
        "'@pytest.mark.parametrize(\"n\", range(6))' 'def test_n(n, tmp_path):' '    seen.append(n)' "
        "'    if n == 3:' '        open(\"gate\").read()' '    assert seen == list(range(n + 1))' >test_it.py",
        "$(for p in /usr/bin/python3 python3; do $p -c 'import pytest' && echo $p && break; done) -m pytest -v -p no:cacheprovider >log 2>&1 & until grep -q '2.*PASSED' log; do sleep 0.05; done",
    ),
    same="grep -c PASSED /var/tmp/pt/log; jobs %1",
    spoil="kill %1; wait %1; echo PASSED >>/var/tmp/pt/log",
    use="echo >/var/tmp/pt/gate; wait %1 && grep -q '6 passed' /var/tmp/pt/log",
)

_SUPERVISOR = ShellCase(
    "process-manager",
    "a process manager that restarts its children (supervisord)",
    kind="programs",
    needs=_NEEDS,
    programs=("supervisord", "supervisorctl"),
    packages=("supervisor",),
    make="""
        mkdir -p /var/tmp/sv && cd /var/tmp/sv && printf '%s\\n' '[supervisord]' 'nodaemon=true' 'pidfile=/var/tmp/sv/pid' \
            '[unix_http_server]' 'file=/var/tmp/sv/sock' '[supervisorctl]' 'serverurl=unix:///var/tmp/sv/sock' \
            '[rpcinterface:supervisor]' 'supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface' \
            '[program:one]' 'command=sleep 1000' 'startsecs=0' '[program:two]' 'command=sleep 1001' 'startsecs=0' >conf
        supervisord -c conf >log 2>&1 &
        until [ $(supervisorctl -c conf status 2>/dev/null | grep -c RUNNING) = 2 ]; do sleep 0.1; done
    """,
    same="cd /var/tmp/sv; supervisorctl -c conf status | awk '{print $1, $2, $4}'",
    spoil="cd /var/tmp/sv; supervisorctl -c conf stop two",
    use="cd /var/tmp/sv; old=$(supervisorctl -c conf pid one); kill $old; "
    "until new=$(supervisorctl -c conf pid one) && [ $new != $old ] && [ $new != 0 ]; do sleep 0.05; done",
)

CASES: tuple[Case, ...] = (
    *TERMINAL,
    *SERVERS,
    *probe_cases("programs", applications),
    _GIT,
    _MAKE,
    _PYTEST,
    _SUPERVISOR,
)
