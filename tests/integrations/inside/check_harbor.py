"""Harbor's command line over our environment: its oracle, its tmux agent with a scripted model, and an agent that branches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
TASKS = HERE.parents[2] / "experiments/tasks"


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    return tmp_path / "jobs"


def _harbor(jobs: Path, home: str, tasks: Path, *arguments: str | Path) -> dict[tuple[str, str], float]:
    """Rewards by agent and task."""
    fixed = ["-e", "statefork.integrations.harbor:WaypointEnvironment", "--ek", f"home={home}", "-y", "-q", "-n", "2"]
    ended = subprocess.run(
        [
            Path(sys.executable).parent / "harbor",
            "run",
            "-p",
            tasks,
            "-o",
            jobs,
            "--job-name",
            "job",
            *fixed,
            *arguments,
        ],
        env={**os.environ, "PYTHONPATH": str(HERE), "OPENAI_API_KEY": "none"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stdout
    rewards = {}
    for file in sorted((jobs / "job").glob("*/result.json")):
        result = json.loads(file.read_text())
        assert result["exception_info"] is None, json.dumps(result["exception_info"])[:8000]
        task = file.parent.name.partition("__")[0]
        rewards[result["agent_info"]["name"], task] = result["verifier_result"]["rewards"]["reward"]
    assert rewards, ended.stdout
    return rewards


def test_the_oracle_solves_the_shipped_tasks(jobs: Path, home: str) -> None:
    names = sorted(path.parent.name for path in TASKS.glob("*/task.toml"))
    rewards = _harbor(jobs, home, TASKS, "-a", "oracle")
    assert rewards == {("oracle", name): 1.0 for name in names}


def test_agents_that_branch_type_or_do_nothing(jobs: Path, home: str, tmp_path: Path) -> None:
    """One job, three agents on one task."""
    with _chat_endpoint() as (url, asked):
        terminus = {"api_base": url, "record_terminal_session": False, "enable_summarize": False}
        agents = [
            {"name": "nop"},
            {"import_path": "harbor_agents:Branching"},
            {"name": "terminus-2", "model_name": "openai/scripted", "kwargs": terminus},
        ]
        config = tmp_path / "job.json"
        config.write_text(json.dumps({"agents": agents}))
        rewards = _harbor(jobs, home, TASKS / "kv-in-memory", "-c", config)
    (file,) = jobs.glob("job/*/agent/facts.json")
    facts, seen = json.loads(file.read_text()), json.dumps(asked[-1]["messages"])
    wanted = {"nop": 0.0, "branching": 1.0, "terminus-2": 1.0}
    assert rewards == {(name, "kv-in-memory"): reward for name, reward in wanted.items()}, (facts, seen)
    _check_branching(facts)
    assert "^C" in seen, "what is typed reaches the program in the pane"


def _check_branching(facts: dict[str, Any]) -> None:
    assert facts["back"] and facts["wrong"] != "100"
    assert {"files", "processes", "memory", "terminal"} <= set(facts["restored"])
    assert facts["forks"] == ["20", "30"]
    assert facts["names"][0].endswith("__fork1")
    assert facts["users"] == ["root", "nobody\n/nonexistent\n"]
    assert facts["cwd"] == "/app"
    assert facts["env"] == "b c\n"
    assert facts["timeout"] == "Command timed out after 1 seconds"
    assert facts["survived"] == [False, True]
    assert facts["heard"] == ["stdout:told"]


# -- Terminus: types into tmux, inside --------------------------------------------------------------------------------


def _typed(keys: str, duration: float = 0.1) -> dict[str, Any]:
    return {"keystrokes": keys, "duration": duration}


SCRIPT: list[dict[str, Any]] = [
    {"commands": [_typed("sleep 1000\n", 1), _typed("C-c")]},
    {"commands": [_typed("./kv.py >var/log 2>&1 & ./wait-for 7001\n")]},
    {"commands": [_typed(f"./ask 7001 load spool/{name}\n") for name in "ab"]},
    {"commands": [_typed("./ask 7001 scale 3 && ./ask 7001 drop obsolete; echo all-$((1 + 1))-done\n")]},
    {"commands": [], "task_complete": True},
    {"commands": [], "task_complete": True},  # it is asked whether it is sure
]
WAIT = {"commands": [_typed("", 0.3)]}
DONE = "all-2-done"  # on the screen when the last command has ended, however slow the machine is


@contextmanager
def _chat_endpoint() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Says the script's lines, one for each request; says that it is complete only when it is."""
    asked: list[dict[str, Any]] = []
    script = iter(SCRIPT)
    last = SCRIPT[0]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            nonlocal last
            if "all-" not in json.dumps(last) or DONE in json.dumps(asked[-1]["messages"]):
                last = next(script, last)
                turn = last
            else:
                turn = WAIT
            said = {"analysis": "", "plan": "", **turn}
            choice = {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": json.dumps(said)},
            }
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            body = json.dumps(
                {
                    "id": "x",
                    "object": "chat.completion",
                    "created": 0,
                    "model": "scripted",
                    "choices": [choice],
                    "usage": usage,
                }
            ).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
