"""The Agents SDK's runner over our tools; the model is scripted."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from agents import Agent, ModelResponse, RunConfig, Runner, Usage, set_tracing_disabled
from agents.items import TResponseInputItem, TResponseOutputItem
from agents.models.interface import Model
from agents.run_config import SandboxRunConfig
from agents.sandbox import LocalSnapshotSpec, Manifest, SandboxAgent
from agents.sandbox.capabilities import Shell
from agents.sandbox.entries import File
from agents.sandbox.errors import (
    ExecTimeoutError,
    ExecTransportError,
    InvalidManifestPathError,
    WorkspaceReadNotFoundError,
)
from agents.sandbox.manifest import Environment as ManifestEnvironment
from openai.types.responses import (
    ResponseFunctionShellToolCall,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
)

from statefork import Environment
from statefork.integrations.openai_agents import StateforkTools
from statefork.integrations.openai_sandbox import StateforkSandboxClient, StateforkSandboxClientOptions

pytestmark = pytest.mark.anyio
set_tracing_disabled(True)


class Scripted(Model):
    """Says the next item of the script, whatever it is asked; keeps what it was sent."""

    def __init__(self, *script: TResponseOutputItem) -> None:
        self._script = iter(script)
        self.sent: list[TResponseInputItem] = []

    async def get_response(self, system_instructions: Any, input: Any, *_: Any, **__: Any) -> ModelResponse:
        self.sent = list(input)
        return ModelResponse(output=[next(self._script)], usage=Usage(), response_id=None)

    def stream_response(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        raise NotImplementedError

    def outputs(self) -> list[Any]:
        return [item["output"] for item in self.sent if isinstance(item, dict) and "output" in item]


def _function(name: str, /, **arguments: str) -> ResponseFunctionToolCall:
    return ResponseFunctionToolCall(
        type="function_call",
        call_id=f"c-{name}-{len(json.dumps(arguments))}",
        name=name,
        arguments=json.dumps(arguments),
    )


def _shell(number: int, *commands: str, timeout_ms: int | None = None) -> ResponseFunctionShellToolCall:
    return ResponseFunctionShellToolCall.model_validate(
        {
            "id": f"s{number}",
            "call_id": f"s{number}",
            "type": "shell_call",
            "status": "completed",
            "environment": None,
            "action": {"commands": commands, "timeout_ms": timeout_ms, "max_output_length": None},
        }
    )


def _patch(kind: str, path: str, diff: str | None = None) -> Any:
    operation = {"type": kind, "path": path, **({"diff": diff} if diff else {})}
    return {
        "type": "apply_patch_call",
        "id": f"p-{kind}",
        "call_id": f"p-{kind}",
        "status": "completed",
        "operation": operation,
    }


def _said(text: str) -> ResponseOutputMessage:
    return ResponseOutputMessage(
        id="m",
        role="assistant",
        status="completed",
        type="message",
        content=[ResponseOutputText(text=text, type="output_text", annotations=[])],
    )


async def test_function_tools_and_states(environment: Environment) -> None:
    tools = StateforkTools(environment)
    model = Scripted(
        _function("write_file", path="/srv/word", content="first"),
        _function("run_command", command="cd /srv; X=1; cat word"),
        _function("snapshot", name="clean"),
        _function("run_command", command="rm word; X=2; cd /; exit_with() { return 4; }; exit_with"),
        _function("restore", name="clean"),
        _function("run_command", command="echo $X $PWD"),
        _function("read_file", path="/srv/word"),
        _said("done"),
    )
    agent = Agent(name="a", model=model, tools=[*tools.functions, *tools.states])
    result = await Runner.run(agent, "go")
    assert result.final_output == "done"
    said = model.outputs()
    assert said[1] == "first"
    assert "[exit code 4]" in said[3]
    assert "as it was at clean" in said[4]
    assert said[5].strip() == "1 /srv"
    assert said[6] == "first"


async def test_the_sdks_own_shell_and_patches(environment: Environment) -> None:
    tools = StateforkTools(environment, workdir="/srv")
    environment.make_directory("/srv")
    model = Scripted(
        _patch("create_file", "app.py", "+print('one')\n+print('end')\n"),
        _shell(1, "cd /srv && export WORD=kept", "python3 app.py; echo $WORD; false"),
        _patch("update_file", "app.py", "@@\n-print('one')\n+print('two')\n print('end')\n"),
        _shell(2, "python3 app.py", "sleep 100", "echo never", timeout_ms=2000),
        _patch("delete_file", "app.py"),
        _shell(3, "ls; echo usable"),
        _said("done"),
    )
    result = await Runner.run(Agent(name="a", model=model, tools=[tools.shell, tools.apply_patch]), "go")
    assert result.final_output == "done"
    shells = [output for output in model.outputs() if isinstance(output, list)]
    assert [one["outcome"] for one in shells[0]] == [{"type": "exit", "exit_code": 0}, {"type": "exit", "exit_code": 1}]
    assert shells[0][1]["stdout"] == "one\nend\nkept\n"
    assert [one["outcome"]["type"] for one in shells[1]] == ["exit", "timeout"], "what follows a timeout is not started"
    assert shells[1][0]["stdout"] == "two\nend\n"
    assert shells[2][0]["stdout"] == "usable\n"


# -- the SDK's sandboxes ----------------------------------------------------------------------------------------------


async def test_a_sandbox_agent(home: str) -> None:
    """The runner makes the sandbox, fills it from the manifest, gives its tools to the model, and ends it."""
    client = StateforkSandboxClient()
    model = Scripted(
        _function("exec_command", cmd="pwd; cat task.txt; echo $WORD; echo done > answer; false"),
        _function("exec_command", cmd="cat answer", workdir="/workspace"),
        _said("done"),
    )
    agent = SandboxAgent(
        name="a",
        model=model,
        default_manifest=Manifest(
            entries={"task.txt": File(content=b"the task\n")}, environment=ManifestEnvironment(value={"WORD": "kept"})
        ),
        capabilities=[Shell()],
    )
    options = StateforkSandboxClientOptions(arguments={"home": home})
    config = RunConfig(sandbox=SandboxRunConfig(client=client, options=options))
    result = await Runner.run(agent, "go", run_config=config)
    assert result.final_output == "done"
    first, second = model.outputs()
    assert "exited with code 1" in first
    assert "/workspace\nthe task\nkept\n" in first
    assert second.endswith("done\n")
    assert client._environments == {}, "the runner has ended what it made"


async def test_sandbox_sessions(home: str, tmp_path: Path) -> None:
    """Files, users, timeouts, the SDK's snapshots, and ours."""
    client = StateforkSandboxClient()
    options = StateforkSandboxClientOptions(arguments={"home": home})
    session = await client.create(options=options, snapshot=LocalSnapshotSpec(base_path=tmp_path))
    await session.start()
    environment = client.environment(session)
    await session.write(Path("a/b"), io.BytesIO(b"first"))
    assert (await session.read(Path("a/b"))).read() == b"first"
    with pytest.raises(WorkspaceReadNotFoundError):
        await session.read(Path("missing"))
    await session.exec("ln -s /etc out")
    with pytest.raises(InvalidManifestPathError):
        await session.read(Path("out/passwd"))
    await session.exec("rm out")
    assert (await session.exec("id -un; pwd", user="nobody")).stdout == b"nobody\n/workspace\n"
    with pytest.raises(ExecTimeoutError):
        await session.exec("sleep 100", timeout=1)

    taken = environment.snapshot()
    await session.exec("rm -r a; (sleep 1000 >/dev/null 2>&1 &)")
    environment.restore(taken)
    assert [entry.path.rpartition("/")[2] for entry in await session.ls("a")] == ["b"]

    state = client.serialize_session_state(session.state)
    await session.stop()
    await client.delete(session)
    assert environment.state == "destroyed"
    again = await client.resume(client.deserialize_session_state(state))
    await again.start()
    assert client.environment(again) is not environment
    assert (await again.read(Path("a/b"))).read() == b"first", "in a new environment, from the SDK's snapshot"
    same = await client.resume(again.state)
    assert client.environment(same) is client.environment(again)
    await client.delete(again)
    with pytest.raises(ExecTransportError):
        await again.exec("true")
