"""The owner is killed with -9: what it made stays until the collector comes, which removes it and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from statefork.environment import Environment
from statefork.home import collect
from statefork.registry import backends, find_method, methods
from statefork.testing.contract.subject import Contract, Subject, eventually

__all__ = ["CrashContract"]

_OWNER = """
import json, os, signal, sys
from statefork import create_env_manager
method, home, arguments = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
environment = create_env_manager(method, home=home, **arguments)
environment.exec_command("sleep 600 &")
environment.snapshot("s")
forks = environment.fork(2)
environment.restore("s")
print("ready", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


class CrashContract(Contract):
    def test_a_killed_owner_is_cleared_up_after(self, fresh: Environment, subject: Subject, tmp_path: Path) -> None:
        home = tmp_path / "home"
        fresh.exec_command("bystander=alive")
        before = subject.left_behind(home)
        arguments = json.dumps(subject.fresh_arguments(), default=str)
        argv = [sys.executable, "-c", _OWNER, subject.method, str(home), arguments]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=200, check=False)
        assert (done.stdout, done.returncode) == ("ready\n", -9), done.stderr
        assert set(subject.left_behind(home)) > set(before)
        chosen = find_method(subject.method)
        (driver,) = [backend.driver for backend, method in methods() if method is chosen]
        removed = list(collect(home, [driver]))
        assert removed
        eventually("only the bystander is left", lambda: sorted(subject.left_behind(home)) == sorted(before))
        assert len(list((home / "trees").iterdir())) == 1
        assert fresh.exec_command("echo $bystander").stdout == "alive\n"
        assert list(collect(home, [backend.driver for backend in backends().values()])) == []
