"""mini-swe-agent's own agent, its scripted model, and our environment as its settings name it."""

from __future__ import annotations

from typing import Any

import pytest
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments import get_environment
from minisweagent.models.test_models import DeterministicModel

from statefork import Environment
from statefork.integrations.mini_swe_agent import StateforkEnvironment

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat"


def _agent(env: StateforkEnvironment, *commands: str) -> DefaultAgent:
    outputs = [{"role": "assistant", "content": c, "extra": {"actions": [{"command": c}]}} for c in commands]
    return DefaultAgent(
        DeterministicModel(outputs=outputs, cost_per_call=0.0),
        env,
        system_template="You work on {{system}} {{machine}}.",
        instance_template="{{task}}",
    )


def test_a_run_by_settings(home: str) -> None:
    settings: dict[str, Any] = {
        "environment_class": "statefork.integrations.mini_swe_agent.StateforkEnvironment",
        "arguments": {"home": home},
        "cwd": "/tmp",
        "env": {"WORD": "it's here"},
        "timeout": 20,
    }
    env = get_environment(settings)
    try:
        agent = _agent(env, 'echo "$WORD" > note; (sleep 1000 >/dev/null 2>&1 &)', "cd /; pwd; false", f"{SUBMIT} note")
        ended = agent.run("write a note")
        assert ended == {"exit_status": "Submitted", "submission": "it's here\n"}
        assert agent.messages[0]["content"].startswith("You work on Linux")
        assert "<returncode>1</returncode>" in str(agent.messages)
        assert env.environment.run(["pgrep", "-x", "sleep"]).ok
        assert agent.serialize()["info"]["config"]["environment_type"].endswith("StateforkEnvironment")
    finally:
        env.cleanup()
    assert env.environment.state == "destroyed"


def test_agents_go_on_from_one_state(environment: Environment) -> None:
    env = StateforkEnvironment(environment=environment, persistent=True, env={"WORD": "kept"})
    env.execute({"command": "cd /var/tmp; export MORE=too; echo base > file"})
    taken = env.snapshot()
    env.execute({"command": "rm file; cd /"})
    one, two = env.fork(2, from_snapshot=taken)
    try:
        for fork, mark in ((one, "one"), (two, "two")):
            ended = _agent(fork, f"echo {mark} >> file", 'echo "$WORD $MORE" >> file', f"{SUBMIT} file").run("go on")
            assert ended["submission"] == f"base\n{mark}\nkept too\n"
    finally:
        one.cleanup()
        two.cleanup()
    env.restore(taken)
    assert env.execute({"command": "cat file; pwd"})["output"] == "base\n/var/tmp\n"
    env.cleanup()
    assert environment.state == "live", "it belongs to the caller"


@pytest.mark.parametrize("persistent", [True, False])
def test_a_command_that_takes_too_long(environment: Environment, persistent: bool) -> None:
    env = StateforkEnvironment(environment=environment, persistent=persistent, timeout=1)
    output = env.execute({"command": "echo so far; sleep 100"})
    assert output["returncode"] == -1
    assert output["output"] == "so far\n"
    assert output["extra"]["exception_type"] == "ExecTimeout"
    assert env.execute({"command": "echo usable"})["output"] == "usable\n"
