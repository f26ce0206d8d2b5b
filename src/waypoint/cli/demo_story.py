"""What the demo does: a small project with a bug, a server that remembers, a breakage, and three fixes at once."""

from __future__ import annotations

import shlex
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from waypoint.cli.tree import draw
from waypoint.errors import HostUnsupported, VerifyFailed, WaypointError

if TYPE_CHECKING:
    from waypoint.cli.demo import Teller
    from waypoint.engine import Engine
    from waypoint.model import ExecResult
    from waypoint.session import Session

__all__ = ["tell"]

PROJECT = "/opt/waypoint-demo"
SERVER = """\
import http.server

class Counter(http.server.BaseHTTPRequestHandler):
    seen = 0  # only in this process's memory

    def do_GET(self):
        Counter.seen += 1
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"%d\\n" % Counter.seen)

http.server.HTTPServer(("127.0.0.1", 8000), Counter).serve_forever()
"""
MEDIAN = """\
def median(values):
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
"""
TEST = """\
import unittest
from median import median

class Median(unittest.TestCase):
    def test_odd(self):
        self.assertEqual(median([9, 1, 5]), 5)

    def test_even(self):
        self.assertEqual(median([1, 2, 10, 20]), 6)

unittest.main()
"""
FIXES = (
    ("take the lower one", "return ordered[(len(ordered) - 1) // 2]"),
    ("take the mean of the middle two", "return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2"),
    ("take the mean of all", "return sum(ordered) / len(ordered)"),
)
RIGHT_FIX = 1
COUNT = r"count() { exec 3<>/dev/tcp/127.0.0.1/8000 && printf 'GET / HTTP/1.0\r\n\r\n' >&3 && tail -n 1 <&3; exec 3>&-; }"


def tell(engine: Engine, teller: Teller) -> str:
    """Play it in a new session of the engine; returns the tree as text. Whatever happens, nothing of it stays."""
    session: Session | None = None
    try:
        with teller.step("a session over this machine's own root, copy-on-write"):
            session = engine.new()
            teller.check("its shell answers", _ask(session, "echo hello"), "hello")
        return _Story(engine, teller, session).play()
    finally:
        if session is not None:
            _clean_up(engine, session.id)


def _ask(session: Session, command: str) -> str:
    return _done(session, command).stdout.decode(errors="replace").strip()


def _done(session: Session, command: str) -> ExecResult:
    return session.exec(command, timeout=60)


class _Story:
    def __init__(self, engine: Engine, teller: Teller, session: Session) -> None:
        self._engine = engine
        self._teller = teller
        self._session = session
        self._ms: list[tuple[str, float]] = []

    def play(self) -> str:
        self._prepare()
        self._serve()
        self._snapshot("ready")
        self._break()
        self._restore("ready")
        winner = self._race()
        return self._keep(winner)

    def _prepare(self) -> None:
        session, check = self._session, self._teller.check
        with self._teller.step("real shell state: a directory, variables, functions, a virtualenv"):
            files = {"server.py": SERVER, "median.py": MEDIAN, "test_median.py": TEST}
            writing = [f"cat > {name} <<'END'\n{text}END" for name, text in files.items()]
            _succeed(session, "\n".join([f"mkdir -p {PROJECT} && cd {PROJECT}", *writing]))
            _succeed(session, f"{_python(session)} -m venv --without-pip .venv && source .venv/bin/activate")
            _succeed(session, f'export MODE=debug; parts=(one two "three four"); greet() {{ echo "hello, $1"; }}; {COUNT}')
            check("the virtualenv is active", _ask(session, "echo $VIRTUAL_ENV"), f"{PROJECT}/.venv")
            self._check_shell()

    def _check_shell(self) -> None:
        ask = 'pwd; echo "$MODE ${#parts[@]} ${parts[2]}"; greet you; command -v python'
        wanted = f"{PROJECT}\ndebug 3 three four\nhello, you\n{PROJECT}/.venv/bin/python"
        self._teller.check("cwd, variables, array, function and PATH are there", _ask(self._session, ask), wanted)

    def _serve(self) -> None:
        session, check = self._session, self._teller.check
        with self._teller.step("a background server that counts requests in its memory"):
            _succeed(session, "python server.py >server.log 2>&1 &")
            deadline = time.monotonic() + 30
            while _ask(session, "count 2>/dev/null") != "1":
                if time.monotonic() > deadline:
                    raise VerifyFailed(f"demo: the server does not answer: {_ask(session, 'cat server.log')}")
            _succeed(session, "count; count")
            check("it has counted to 4", _ask(session, "count"), "4")

    def _snapshot(self, name: str) -> None:
        with self._teller.step(f"snapshot {name!r}: files, processes, memory, terminal"):
            taken = self._session.snapshot(name)
        self._ms.append((f"snapshot {name}", taken.duration_ms))
        self._teller.say(f"snapshot {taken.id}: the session stood still for {taken.paused_ms:.0f} ms")

    def _break(self) -> None:
        session, check = self._session, self._teller.check
        with self._teller.step("break it: rm -rf the project, kill the server, wipe the shell"):
            _done(session, f"kill %1; wait; cd /; rm -rf {PROJECT}; unset MODE parts VIRTUAL_ENV; unset -f greet; hash -r")
            check("the project is gone", _done(session, f"test -e {PROJECT}").exit_code, 1)
            check("the server is gone", _ask(session, "count 2>/dev/null"), "")
            check("the variables and functions are gone", _ask(session, "greet 2>/dev/null; echo [$MODE$parts]"), "[]")

    def _restore(self, name: str) -> None:
        session, check = self._session, self._teller.check
        began = time.perf_counter()
        with self._teller.step(f"restore {name!r}"):
            session.restore(name)
            check("the server goes on counting where it was", _ask(session, "count"), "5")
            self._ms.append((f"restore {name}, to the first right answer", (time.perf_counter() - began) * 1000))
            self._check_shell()
            check("it is still job 1 of this shell", _ask(session, "jobs -r | cut -d' ' -f1"), "[1]+")

    def _race(self) -> Session:
        session, check = self._session, self._teller.check
        with self._teller.step("the project's test fails"):
            check("test_even fails", _done(session, "python test_median.py 2>&1 | grep -c '^FAIL: test_even'").exit_code, 0)
            check("its exit code says so", _done(session, "python test_median.py 2>/dev/null").exit_code, 1)
        began = time.perf_counter()
        with self._teller.step("three forks of the running session, at once"):
            forks = session.fork(len(FIXES))
            self._ms.append((f"fork {len(FIXES)}", (time.perf_counter() - began) * 1000))
            check("each has its own server, at the same count", [_ask(fork, "count") for fork in forks], ["6"] * len(FIXES))
        with self._teller.step("each tries another fix and runs the test"), ThreadPoolExecutor(len(FIXES)) as pool:
            codes = list(pool.map(_try, forks, [fix for _, fix in FIXES]))
            check("one fix passes, and it is the right one", codes, [int(number != RIGHT_FIX) for number in range(len(FIXES))])
            check("the original still has the bug", _done(session, "python test_median.py 2>/dev/null").exit_code, 1)
            check("and its server saw none of their requests", _ask(session, "count"), "6")
        for fork, (what, _), code in zip(forks, FIXES, codes, strict=True):
            self._teller.say(f"{fork.id}  {what}: {'passed' if code == 0 else 'failed'}")
        return forks[codes.index(0)]

    def _keep(self, winner: Session) -> str:
        check = self._teller.check
        with self._teller.step("keep the winner, remove the others"):
            taken = winner.snapshot("fixed")
            self._ms.append(("snapshot fixed", taken.duration_ms))
            for record in self._engine.sessions():
                if record.tree == self._session.id and record.id != winner.id:
                    self._engine.session(record.id).remove()
            live = [record.id for record in self._engine.sessions() if record.tree == self._session.id]
            check("only the winner is left", live, [winner.id])
            check("its test passes", _done(winner, "python test_median.py").exit_code, 0)
            check("its server counts on", _ask(winner, "count"), "7")
        snapshots = [record for record in self._engine.snapshots(self._session.id) if not record.pinned]
        sessions = [record for record in self._engine.sessions() if record.tree == self._session.id]
        tree = draw(snapshots, sessions, time.time())
        self._teller.title("The tree")
        self._teller.show(tree)
        self._teller.title("Times")
        self._teller.show("\n".join(f"{what:<45} {ms:7.1f} ms" for what, ms in self._ms))
        return tree


def _try(fork: Session, fix: str) -> int:
    _succeed(fork, f"sed -i {shlex.quote(f's|return .*|{fix}|')} median.py")
    return _done(fork, "python test_median.py 2>/dev/null").exit_code


def _succeed(session: Session, command: str) -> None:
    done = _done(session, command)
    if done.exit_code != 0:
        said = done.output.decode(errors="replace").strip()
        raise VerifyFailed(f"demo: {command.splitlines()[0]}: exit code {done.exit_code}: {said}")


def _python(session: Session) -> str:
    """A Python that a session over the host's root can start. Ours may come from a virtualenv that lies in a masked place."""
    for candidate in ("python3", str(Path(sys.executable).resolve())):
        if _done(session, f"{shlex.quote(candidate)} -c 'import venv, http.server'").exit_code == 0:
            return shlex.quote(candidate)
    raise HostUnsupported("the demo needs a python3 in this machine's own root", fix="apt-get install python3")


def _clean_up(engine: Engine, tree: str) -> None:
    """Everything that grew out of the demo's session, and nothing else."""
    for record in engine.sessions():
        if record.tree == tree:
            with suppress(WaypointError):
                engine.session(record.id).remove()
    for snapshot in engine.snapshots(tree):
        if snapshot.parent is None:
            with suppress(WaypointError):
                engine.remove_snapshot(snapshot.id, recursive=True)
