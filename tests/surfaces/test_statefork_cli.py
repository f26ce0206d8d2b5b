"""The `statefork` command as a program, on the criu backend, which needs no service."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

RUN = [sys.executable, "-c", "from statefork.cli.main import main; main()"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    source = str(Path(__file__).parents[2] / "src")
    return {**os.environ, "STATEFORK_HOME": str(tmp_path / "home"), "PYTHONPATH": source, "NO_COLOR": "1"}


def call(environment: dict[str, str], *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RUN, *words], env=environment, input=stdin, capture_output=True, text=True, timeout=120, check=False
    )


def test_backends(environment: dict[str, str]) -> None:
    done = call(environment, "backends", "criu", "--json")
    (found,) = json.loads(done.stdout)["backends"]
    assert found["works"]
    assert found["restores"] == ["memory", "processes", "shell"]
    table = call(environment, "backends", "criu").stdout.splitlines()
    assert table[0].split()[:3] == ["backend", "files", "processes"]
    assert table[1].split()[:3] == ["criu", "no", "yes"]


def test_doctor_says_what_to_install(environment: dict[str, str], tmp_path: Path) -> None:
    done = call(environment, "doctor", "criu")
    assert (done.returncode, "works" in done.stdout) == (0, True)
    without = {**environment, "PATH": str(tmp_path)}
    lacking = call(without, "doctor", "podman", "--json")
    (found,) = json.loads(lacking.stdout)["backends"]
    assert (lacking.returncode, found["works"]) == (1, False)
    assert "apt-get install podman" in found["fix"]
    assert "apt-get install podman" in call(without, "doctor", "podman").stdout


def test_wrong_words(environment: dict[str, str]) -> None:
    assert call(environment).returncode == 2
    assert call(environment, "surely-not").returncode == 2
    unknown = call(environment, "backends", "surely-not", "--json")
    assert unknown.returncode == 2
    assert json.loads(unknown.stderr)["error"]["code"] == "usage"
    shell = call(environment, "shell", "--backend", "criu")
    assert shell.returncode == 2
    assert "criu_build needs command" in shell.stderr
    assert "NAME=VALUE" in call(environment, "shell", "--backend", "criu", "sleep").stderr


SCRIPT = """\
# a comment, and an empty line

cmd A=1; cd /tmp; echo hello
snapshot one
step A=2; echo two >&2
cmd (exit 3)
restore one
! echo "A=$A in $PWD"
fork 2 one
envs
tree
stats
history
storage
help
history {file}
diff one
cmd echo never
"""


def test_shell_reads_a_script_and_stops_at_the_first_error(environment: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    words = ("shell", "--backend", "criu", "command=sleep 600", "work_dir=/tmp")
    done = call(environment, *words, stdin=SCRIPT.format(file=file))
    assert done.returncode == 125
    assert "criu stores no files" in done.stderr
    assert "never" not in done.stdout
    assert "hello\n" in done.stdout
    assert "A=1 in /tmp\n" in done.stdout
    assert "two\n" in done.stderr
    assert "exit code 3" in done.stderr
    assert len(re.findall(r"^[* ] e-[0-9a-f]+  live", done.stdout, re.MULTILINE)) == 3
    assert re.search(r"^s-[0-9a-f]+ \(one\)", done.stdout, re.MULTILINE)
    operations = [json.loads(line)["operation"] for line in file.read_text().splitlines()]
    assert operations == ["start", "exec", "snapshot", "exec", "snapshot", "exec", "restore", "exec", "fork"]
    assert list((tmp_path / "home" / "trees").iterdir()) == []


def test_shell_on_a_terminal_completes_and_survives_errors(environment: dict[str, str]) -> None:
    ours, theirs = pty.openpty()
    argv = [*RUN, "shell", "--backend", "criu", "command=sleep 600", "work_dir=/tmp"]
    child = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, env={**environment, "TERM": "dumb"})
    os.close(theirs)
    try:
        _expect(ours, rb"e-[0-9a-f]+> ")
        os.write(ours, b"snapshot ready\n")
        _expect(ours, rb"s-[0-9a-f]+ .*e-[0-9a-f]+> ")
        os.write(ours, b"resto\tsurely-not\n")
        _expect(ours, rb"no snapshot 'surely-not'.*e-[0-9a-f]+> ")
        os.write(ours, b"restore rea\t\n")
        _expect(ours, rb"processes, memory, shell.*e-[0-9a-f]+> ")
        os.write(ours, b"exit\n")
        assert child.wait(60) == 0
    finally:
        child.kill()
        child.wait()
        os.close(ours)


def _expect(terminal: int, pattern: bytes) -> None:
    """Read until the pattern has come."""
    seen, deadline = b"", time.monotonic() + 60
    while not re.search(pattern, seen, re.DOTALL):
        ready, _, _ = select.select([terminal], [], [], max(deadline - time.monotonic(), 0))
        assert ready, f"{pattern!r} did not come; seen: {seen!r}"
        seen += os.read(terminal, 65536)


def test_gc(environment: dict[str, str], tmp_path: Path) -> None:
    owner = (
        "import os, signal, sys\nfrom statefork import create_env_manager\n"
        "create_env_manager('criu_build', home=sys.argv[1], command='sleep 600')\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    home = tmp_path / "home"
    subprocess.run([sys.executable, "-c", owner, str(home)], env=environment, timeout=120, check=False)
    (pod,) = home.glob("trees/*/*/pod")
    pid = pod.read_text().split()[0]
    assert Path(f"/proc/{pid}").exists()
    removed = json.loads(call(environment, "gc", "--json").stdout)["removed"]
    assert [line.split()[0] for line in removed] == ["criu", "directory"]
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text()
    assert json.loads(call(environment, "gc", "--json").stdout)["removed"] == []
