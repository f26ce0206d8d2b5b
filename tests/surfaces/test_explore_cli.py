"""`statefork explore`, `trace` and `promote` as a person uses them: files, pipes, a real terminal, a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chat_server import call, chat_server
from statefork.explore import ChatSettings, read_trace
from statefork.explore.drawing import Drawing, fitted, plain
from statefork.explore.picture import as_html, as_svg
from terminal_screen import SOURCE, Screen
from waypoint.bases import base_from_rootfs
from waypoint.engine import Engine

STATEFORK = [sys.executable, "-c", "from statefork.cli.main import main; main()"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("explore-cli")


@pytest.fixture(scope="module")
def variables(place: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCE), "STATEFORK_HOME": str(place / "home"), "WAYPOINT_HOME": str(place / "store")}


def run(variables: dict[str, str], *words: str, code: int = 0, **more: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*STATEFORK, *words], env={**variables, **more}, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, f"{words}: {done.returncode}: {done.stdout}{done.stderr}"
    return done


@pytest.fixture(scope="module")
def plan(place: Path, small_rootfs: Path) -> Path:
    file = place / "plan.toml"
    file.write_text(f"""
backend = "waypoint"
setup = ["mkdir /app && cd /app && echo 1 >n && N=1"]
[arguments]
rootfs = "{small_rootfs}"
[search]
algorithm = "beam"
width = 1
branching = 2
depth = 3
workers = 1
[policy]
scripts = ["N=$((N + 1)); echo $N | tee n", "N=$((N * 3)); echo $N | tee n"]
repeat = true
[scorer]
number = "cat /app/n"
scale = 0.036
[budget]
nodes = 6
storage = "1G"
""")
    return file


@pytest.fixture(scope="module")
def trace(variables: dict[str, str], place: Path, plan: Path) -> Path:
    """Of a beam search that ends at 27 by its depth; and the program says so in plain lines, JSON and its exit code."""
    file = place / "run.jsonl"
    done = run(variables, "explore", str(plan), "--trace", str(file), "--json", code=1)
    document = json.loads(done.stdout)
    assert document | {"seconds": 0} == {
        "solved": False, "score": 27 * 0.036, "node": 6, "nodes": 7, "seconds": 0, "steps": ["N=$((N * 3)); echo $N | tee n"] * 3,
        "output": "27\n", "trace": str(file), "done": {},
    }  # fmt: skip
    assert re.search(r"^node 1 from 0: 0\.072  N=.* \(left: 5 nodes\)$", done.stderr, re.MULTILINE), done.stderr
    assert "\x1b" not in done.stderr
    return file


def test_a_trace_as_text_and_json(variables: dict[str, str], trace: Path) -> None:
    lines = run(variables, "trace", "show", str(trace)).stdout.splitlines()
    assert lines[0].startswith("beam on waypoint, 7 nodes in ") and lines[0].endswith("best 0.972 at node 6")
    drawn = ["* 0", "  ├── 1", "* └── 2", "      ├── 3", "*     └── 4", "          ├── 5", "*         └── 6"]
    assert [re.match(r"[^0-9]*[0-9]+", line)[0] for line in lines[1:]] == drawn  # type: ignore[index]
    document = json.loads(run(variables, "trace", "show", str(trace), "--json").stdout)
    assert [node["output"] for node in document["nodes"]] == ["", "2\n", "3\n", "4\n", "9\n", "10\n", "27\n"]
    assert document["best"] == 6 and document["run"]["note"]["plan"]["backend"] == "waypoint"
    assert all(node["exec_ms"] > 0 for node in document["nodes"][1:])
    assert "no trace" in run(variables, "trace", "show", "/nowhere", code=125).stderr


def test_a_trace_is_taken_again_and_promoted(variables: dict[str, str], trace: Path, tmp_path: Path) -> None:
    assert run(variables, "trace", "replay", str(trace)).stdout == "6 equal, 0 differ, 0 below those untried\n"
    target = tmp_path / "app"
    target.mkdir()
    (target / "n").write_text("1\n")
    words = ["--path", "/app", "--patch", str(tmp_path / "p"), "--apply", str(target), "--json"]
    document = json.loads(run(variables, "promote", str(trace), *words).stdout)
    assert document["done"] == {"patch": str(tmp_path / "p"), "applied": str(target)}
    assert (target / "n").read_text() == "27\n"
    subprocess.run(["git", "apply", "-R", str(tmp_path / "p")], cwd=target, check=True)
    assert (target / "n").read_text() == "1\n"
    run(variables, "promote", str(trace), "--node", "3", "--path", "/app", "--apply", str(target))
    assert (target / "n").read_text() == "4\n"
    lying = tmp_path / "lying.jsonl"
    lying.write_text(re.sub(r'("node": 2, .*?"digest": ")..', r"\1zz", trace.read_text()))
    before = (target / "n").read_bytes()
    done = run(variables, "promote", str(lying), "--path", "/app", "--apply", str(target), "--force", code=125)
    assert "node 2" in done.stderr and "did not print again" in done.stderr
    assert (target / "n").read_bytes() == before
    assert "--apply, --patch, --oci, --keep or --session" in run(variables, "promote", str(trace), code=2).stderr


def test_a_winner_is_kept(variables: dict[str, str], trace: Path) -> None:
    done = json.loads(run(variables, "promote", str(trace), "--keep", "kept", "--json").stdout)["done"]
    assert done == {"kept": f"WAYPOINT_HOME={variables['WAYPOINT_HOME']} waypoint shell kept"}
    run(variables, "gc")
    with Engine(Path(variables["WAYPOINT_HOME"])) as engine:
        session = engine.session("kept")
        try:
            assert session.exec("echo $N $PWD; cat n").stdout == b"27 /app\n27\n"
            session.restore(session.snapshot().id)
            assert "exists already" in run(variables, "promote", str(trace), "--keep", "kept", code=125).stderr
        finally:
            session.remove()


NASTY = "</pre><script>document.title='owned'</script>\x1b[31mred\x1b[0m\x00\x08 &amp; ü"


@pytest.fixture
def nasty(trace: Path, tmp_path: Path) -> Path:
    """The same, but what a program printed tries to be more than text."""
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    for line in lines:
        if line.get("node") == 6 and line["event"] == "node":
            line["output"] = NASTY
            line["action"]["label"] = '"><script>alert(1)</script>'
    file = tmp_path / "nasty.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_a_picture(variables: dict[str, str], nasty: Path, tmp_path: Path) -> None:
    picture = tmp_path / "trace.svg"
    run(variables, "trace", "show", str(nasty), "-o", str(picture))
    root = ET.parse(picture).getroot()
    space = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{space}svg"
    assert len([one for one in root.iter(f"{space}rect") if one.get("class") == "box"]) == 7
    assert len(list(root.iter(f"{space}path"))) == 6
    ways = [one for one in root.iter(f"{space}g") if "way" in one.get("class", "").split()]
    assert len(ways) == 4
    assert "score 0.972" in "".join(ways[-1].itertext())
    assert not list(root.iter(f"{space}script")) and not list(root.iter("script"))
    assert as_svg(Drawing.of(nasty)) == picture.read_text()


def test_a_page_in_a_browser(variables: dict[str, str], nasty: Path, tmp_path: Path) -> None:
    page = tmp_path / "trace.html"
    run(variables, "trace", "show", str(nasty), "--html", "-o", str(page))
    assert "http://" not in page.read_text().replace("http://www.w3.org/2000/svg", "") and "https://" not in page.read_text()
    dom = _browsed(f"file://{page}#n6", tmp_path)
    assert "<title>beam: 7 nodes</title>" in dom, "what a program printed was not obeyed"
    assert re.search(r'<details id="n6" open="">', dom), "the page's own script ran, and opened the node"
    assert dom.count("<details ") == 7
    assert "&lt;/pre&gt;&lt;script&gt;" in dom and "\x1b" not in dom


def _browsed(url: str, scratch: Path) -> str:
    """What the page is once its scripts have run. A browser that does not come up on a busy machine is started again."""
    browser = shutil.which("chromium")
    assert browser, "apt-get install chromium"
    said = ""
    for attempt in range(3):
        profile = scratch / f"profile{attempt}"
        argv = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        argv += [f"--user-data-dir={profile}", "--virtual-time-budget=2000", "--dump-dom", url]
        child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
        try:
            out, said = child.communicate(timeout=17)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            continue
        if "<details" in out:
            return out
    raise AssertionError(f"the browser never showed the page: {said}")


def test_a_page_of_a_search_that_was_killed(trace: Path, tmp_path: Path) -> None:
    lines = trace.read_text().splitlines(keepends=True)
    torn = tmp_path / "torn.jsonl"
    torn.write_text("".join(lines[:4]) + lines[4][:20])
    drawing = Drawing.of(torn)
    assert drawing.end is None and "not ended" in drawing.summary and len(drawing.nodes) == 3
    assert as_html(drawing).count("<details ") == 3
    torn.write_text("")
    assert Drawing.of(torn).text() == "no nodes"
    assert "<svg" in as_svg(Drawing.of(torn))


def test_a_live_tree_on_a_terminal(variables: dict[str, str], plan: Path) -> None:
    words = [*STATEFORK, "explore", str(plan), "--search", "mcts", "--set", "depth=4", "--set", "seed=1", "--nodes", "9"]
    chosen = {name: variables[name] for name in ("STATEFORK_HOME", "WAYPOINT_HOME")}
    plan.with_name("mcts.toml").write_text(re.sub(r"\[search\].*?\[policy\]", "[search]\n[policy]", plan.read_text(), flags=re.DOTALL))
    words[words.index(str(plan))] = str(plan.with_name("mcts.toml"))
    with Screen(words, rows=24, columns=90, **chosen) as screen:
        screen.wait_for(lambda shown: "nodes/s" in shown and "left: " in shown and "├── 1" in shown, 50)
        shown = screen.wait_for("ended with", 50)
    assert shown.count("nodes/s") == 1, "it is redrawn in place"
    assert re.search(r"^\* 0  0\.036  \(start\)", shown, re.MULTILINE), shown
    assert re.search(r"solved: score", shown)


@pytest.fixture
def session(variables: dict[str, str], small_rootfs: Path) -> Iterator[str]:
    with Engine(Path(variables["WAYPOINT_HOME"])) as engine:
        made = engine.new(base=base_from_rootfs(engine.store, small_rootfs))
        made.exec("cd /tmp; N=5")
        yield made.id
        engine.session(made.id).remove()


def test_a_persons_session_and_an_interrupt(variables: dict[str, str], session: str, tmp_path: Path) -> None:
    """Ctrl-C ends the search, nothing is left of it, and --resume goes on; then the session goes on as the winner."""
    file = tmp_path / "run.jsonl"
    common = ["explore", "--attach", "-a", f"session_id={session}", "--trace", str(file), "--search", "best_of_n", "--set", "workers=1"]
    judge = ["--exit-code", "test -e /tmp/seven"]
    scripts = ["-s", "N=6; echo $N", "-s", "N=7; touch /tmp/seven", "-s", "N=8"]
    child = subprocess.Popen([*STATEFORK, *common, *judge, *scripts[:2], "-s", "sleep 1000"], env=variables, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        _poll(lambda: file.exists() and '"node": 1' in file.read_text())
        child.send_signal(signal.SIGINT)
        _, said = child.communicate(timeout=50)
    finally:
        child.kill()
    assert child.returncode == 130, said
    assert f"--resume --trace {file} goes on with it" in said
    assert '"node": 2' not in file.read_text(), "what was interrupted is no node"
    done = run(variables, *common, *judge, *scripts, "--resume", "--promote", "--json")
    document = json.loads(done.stdout)
    assert document["done"] == {"promoted": session} and document["nodes"] == 4
    with Engine(Path(variables["WAYPOINT_HOME"])) as engine:
        live = engine.session(session)
        assert live.exec("echo $N $PWD").stdout == b"7 /tmp\n"
        assert [record.id for record in engine.sessions()] == [session], "nothing else is left"


def _poll(ready: Any) -> None:
    deadline = time.monotonic() + 50
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_model(variables: dict[str, str], small_rootfs: Path, tmp_path: Path) -> None:
    trace = tmp_path / "run.jsonl"
    with chat_server(lambda _: call("exec", command="echo done >/tmp/done"), key="k-secret") as server:
        words = ["explore", "-a", f"rootfs={small_rootfs}", "--task", "Be done.", "--exit-code", "test -e /tmp/done", "--nodes", "3"]
        chat = {"STATEFORK_CHAT_URL": server.url, "STATEFORK_CHAT_MODEL": "m", "STATEFORK_CHAT_KEY": "k-secret"}
        done = run(variables, *words, "--trace", str(trace), "--set", "workers=1", "-q", **chat)
    assert done.stdout.startswith("solved: score 1 at node 1") and done.stderr == ""
    assert "k-secret" not in trace.read_text()
    assert "--base-url and --model" in run(variables, *words, code=2).stderr
    assert "another run" in run(variables, *words, "--trace", str(trace), code=125, **chat).stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-s", "true"], "give what judges"),
        (["--exit-code", "true"], "in one way"),
        (["-s", "true", "--task", "x", "--exit-code", "true"], "scripts and task"),
        (["-s", "true", "--exit-code", "true"], "needs an end"),
        (["-s", "true", "--exit-code", "true", "--number", "x"], "give one of"),
        (["-s", "true", "--exit-code", "true", "--nodes", "1", "--set", "width=3"], "no 'width'"),
        (["-s", "true", "--exit-code", "true", "--nodes", "1", "--patch", "p"], "need --path"),
        (["-s", "true", "--exit-code", "true", "--nodes", "1", "--promote"], "--promote is for --attach"),
        (["-s", "true", "--exit-code", "true", "--nodes", "1", "--resume"], "--resume needs --trace"),
        (["-s", "true", "--exit-code", "true", "--nodes", "1", "-b", "nothing"], "no method 'nothing_build'"),
        (["-s", "true", "--exit-code", "true", "--nodes", "1", "--storage", "lots"], "lots"),
    ],
)
def test_what_makes_no_sense(variables: dict[str, str], words: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: nothing of it may get as far as making an environment."""
    from click.testing import CliRunner

    from statefork.cli.explore import explore
    from statefork.errors import UsageError

    monkeypatch.setenv("STATEFORK_HOME", variables["STATEFORK_HOME"])
    with pytest.raises(UsageError, match=re.escape(said)):
        CliRunner().invoke(explore, words, catch_exceptions=False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("backnd = 'x'", "no 'backnd'"),
        ("policy = 3", "must be a table"),
        ("[policy]\nscript = []", "no 'script'"),
        ("[scorer]\nexit_code = 'a'\nnumber = 'b'", "give one of"),
        ("not toml", "plan.toml"),
    ],
)
def test_a_plan_that_makes_no_sense(tmp_path: Path, text: str, said: str) -> None:
    from statefork.errors import UsageError
    from statefork.explore.plan import read_plan

    file = tmp_path / "plan.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=said):
        read_plan(file)


def test_completion(variables: dict[str, str]) -> None:
    assert "_STATEFORK_COMPLETE" in run(variables, "completion", "bash").stdout

    def complete(line: str) -> list[str]:
        asked = {"_STATEFORK_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        return [item.partition(",")[2] for item in run(variables, **asked).stdout.splitlines()]

    assert complete("statefork expl") == ["explore"]
    assert complete("statefork explore --backend wayp") == ["waypoint"]
    assert complete("statefork explore --search be") == ["beam", "best_of_n"]
    assert complete("statefork trace s") == ["show"]


def test_text_that_fits() -> None:
    assert plain("a\x1b]0;title\x07b\nc\x1b[1;31md") == "ab cd"
    assert fitted("abc", 10) == "abc"
    assert fitted("日本語日本語", 7) == "日本語…"


def test_the_plan_of_the_documentation(tmp_path: Path) -> None:
    from statefork.explore.plan import read_plan

    page = (SOURCE.parent / "docs/explore.md").read_text()
    file = tmp_path / "plan.toml"
    file.write_text(re.search(r"```toml\n(.*?)```", page, re.DOTALL)[1])  # type: ignore[index]
    plan = read_plan(file).checked()
    assert (plan.algorithm, plan.scorer, plan.limits().storage_bytes) == ("mcts", "tests", 4 << 30)
    assert ChatSettings(**plan.chat).temperature == 0.8


def test_a_killed_search_goes_on(variables: dict[str, str], session: str, tmp_path: Path) -> None:
    """SIGKILL in the middle of a step; what it left behind is for `statefork gc`, what it knew is in the trace."""
    file = tmp_path / "run.jsonl"
    common = ["explore", "--attach", "-a", f"session_id={session}", "--trace", str(file), "--repeat", "--set", "workers=1"]
    common += ["--number", "cat /tmp/n 2>/dev/null", "--scale", "0.125", "--nodes", "20", "-q"]
    slow = ["-s", "echo $((N += 1)) | tee /tmp/n; while [ -e /tmp/slow ]; do sleep 0.1; done", "-s", "N=$((N)); touch /tmp/slow"]
    child = subprocess.Popen([*STATEFORK, *common, *slow], env=variables, stdout=subprocess.DEVNULL)
    try:
        _poll(lambda: file.exists() and '"node": 3' in file.read_text())
    finally:
        child.kill()
        child.wait()
    known = len(read_trace(file)[0])
    with file.open("a") as torn:
        torn.write('{"event": "no')
    quick = ["-s", slow[1], "-s", "rm -f /tmp/slow; N=8; echo 8 >/tmp/n"]
    document = json.loads(run(variables, *common, *quick, "--resume", "--json").stdout)
    assert document["solved"]
    nodes, events = read_trace(file)
    assert len(nodes) > known >= 4 and [event["event"] for event in events].count("run") == 2
    assert "waypoint session" in run(variables, "gc").stdout
