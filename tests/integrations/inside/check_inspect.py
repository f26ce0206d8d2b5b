"""Inspect's own suite for sandboxes over ours, and a whole evaluation with a scripted model."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import Task, eval_async
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog
from inspect_ai.model import GenerateConfig, Model, ModelAPI, ModelOutput, modelapi
from inspect_ai.scorer import Score, Scorer, Target, accuracy, scorer
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver, use_tools
from inspect_ai.tool import bash
from inspect_ai.util import SandboxEnvironmentSpec, sandbox
from inspect_ai.util._sandbox.environment import SandboxUnavailableError
from inspect_ai.util._sandbox.registry import registry_find_sandboxenv
from inspect_ai.util._sandbox.self_check import *  # noqa: F403  the suite: its tests are collected here

from statefork.integrations.inspect_ai import WaypointConfig, WaypointSandbox, _config
from statefork.testing.images import busybox_archive

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
async def sample(home: str, anyio_backend: str) -> AsyncIterator[WaypointSandbox]:
    """As an ordinary user: the suite looks whether permissions are kept, which root is above."""
    config = WaypointConfig(home=home, user="nobody")
    made = await WaypointSandbox.sample_init("suite", config, {})
    yield made["default"].as_type(WaypointSandbox)
    await WaypointSandbox.sample_cleanup("suite", config, made, False)


@pytest.fixture
def sandbox_env(sample: WaypointSandbox) -> WaypointSandbox:
    return sample


def test_found_by_its_entry_point() -> None:
    assert registry_find_sandboxenv("waypoint") is WaypointSandbox


async def test_states_and_a_dead_sandbox(home: str) -> None:
    config = WaypointConfig(home=home, env={"WORD": "from the configuration"})
    (one,) = (await WaypointSandbox.sample_init("states", config, {})).values()
    box = one.as_type(WaypointSandbox)
    assert (await box.exec(["printenv", "WORD"])).stdout == "from the configuration\n"
    await box.write_file("word", "before")
    taken = await box.snapshot()
    await box.write_file("word", "after")
    (fork,) = await box.fork(from_snapshot=taken)
    assert await fork.read_file("word") == "before"
    fork.environment.destroy()
    await box.restore(taken)
    assert await box.read_file("word") == "before"
    assert "waypoint shell" in (await box.connection()).command
    await WaypointSandbox.sample_cleanup("states", config, {"default": box}, False)
    with pytest.raises(SandboxUnavailableError):
        await box.exec(["true"])
    with pytest.raises(ConnectionError):
        await box.connection()


async def test_a_dockerfile(home: str, tmp_path: Path) -> None:
    """Its USER and WORKDIR are where a sample begins, whoever else it acts as."""
    shutil.copy(busybox_archive(), tmp_path / "root.tar")
    (tmp_path / "Dockerfile").write_text(
        "FROM scratch\nADD root.tar /\nRUN mkdir -p /srv && chown user /srv\nUSER user:user\nWORKDIR /srv\n"
    )
    config = WaypointConfig(home=home, dockerfile_dir=str(tmp_path))
    assert WaypointConfig(dockerfile_dir=str(tmp_path)) == _config(str(tmp_path / "Dockerfile"))
    made = await WaypointSandbox.sample_init("dockerfile", config, {})
    box = made["default"].as_type(WaypointSandbox)
    try:
        assert (await box.exec(["sh", "-c", "id -un; pwd"])).stdout == "user\n/srv\n"
        assert (await box.exec(["id", "-un"], user="root")).stdout == "root\n"
        await box.write_file("mine", "x")
        assert (await box.exec(["stat", "-c", "%U", "mine"])).stdout == "user\n"
        with pytest.raises(PermissionError):
            await box.write_file("/etc/theirs", "x")
    finally:
        await WaypointSandbox.sample_cleanup("dockerfile", config, made, False)


@solver
def goes_back() -> Solver:
    """After the model's tool calls: damage, and an undo."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        box = sandbox().as_type(WaypointSandbox)
        taken = await box.snapshot()
        await box.exec(["sh", "-c", "rm -f answer; pkill sleep"])
        await box.restore(taken)
        return state

    return solve


@scorer(metrics=[accuracy()])
def judged() -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        text = await sandbox().read_file("answer")
        runs = await sandbox().exec(["pgrep", "-x", "sleep"])
        return Score(value=text.strip() == target.text and runs.success, explanation=text)

    return score


@modelapi(name="scripted")
class Scripted(ModelAPI):
    """Inspect's own mock model counts tokens with a table that it fetches; this one needs no network."""

    def __init__(self, outputs: list[ModelOutput]) -> None:
        super().__init__("scripted")
        self._outputs = iter(outputs)

    async def generate(self, *_: Any, **__: Any) -> ModelOutput:
        return next(self._outputs)


def _call(number: int, command: str) -> ModelOutput:
    return ModelOutput.for_tool_call("scripted", "bash", {"command": command}, tool_call_id=f"c{number}")


async def test_an_evaluation(home: str, tmp_path: Path) -> None:
    scripted = Scripted(
        [
            _call(1, "echo 41 > answer; nohup sleep 1000 >/dev/null 2>&1 &"),
            _call(2, "echo $(($(cat answer) + 1)) > answer; cat answer"),
            ModelOutput.from_content("scripted", "done"),
        ]
    )
    task = Task(
        dataset=[Sample(input="write 42 into the file answer", target="42")],
        solver=[use_tools(bash()), generate(), goes_back()],
        scorer=judged(),
        sandbox=SandboxEnvironmentSpec("waypoint", WaypointConfig(home=home)),
    )
    (log,) = await eval_async(task, model=Model(scripted, GenerateConfig()), log_dir=str(tmp_path))
    assert isinstance(log, EvalLog)
    assert log.status == "success", log.error
    assert log.results is not None
    assert log.results.scores[0].metrics["accuracy"].value == 1.0, (
        json.dumps(log.samples[0].model_dump(mode="json")["scores"]) if log.samples else ""
    )
