"""smolagents' CodeAgent, whose Python lives inside an environment; the model is scripted."""

from __future__ import annotations

from typing import Any

import pytest
from smolagents import ChatMessage, CodeAgent, MessageRole, Model, tool
from smolagents.utils import AgentExecutionError

from statefork import Environment
from statefork.integrations.smolagents import StateforkExecutor


class Scripted(Model):
    def __init__(self, *codes: str) -> None:
        super().__init__(model_id="scripted")
        self._codes = iter(codes)

    def generate(self, *_: Any, **__: Any) -> ChatMessage:
        return ChatMessage(role=MessageRole.ASSISTANT, content=f"Thought: next\n<code>\n{next(self._codes)}\n</code>")


@tool
def twice(number: int) -> int:
    """Doubles a number.

    Args:
        number: The number.
    """
    return 2 * number


def test_an_agent_computes_in_it(environment: Environment) -> None:
    executor = StateforkExecutor(environment)
    agent = CodeAgent(
        tools=[twice],
        model=Scripted(
            "n = twice(10)\nopen('/tmp/made', 'w').write(str(n))",
            "1 / 0",
            "print(n + 1)",
            "final_answer({'n': n + given})",
        ),
        executor=executor,
        verbosity_level=0,
    )
    assert agent.run("go", additional_args={"given": 2}) == {"n": 22}
    assert environment.read_file("/tmp/made") == b"20"
    assert "ZeroDivisionError" in str(agent.memory.steps[2].error)
    agent.cleanup()
    assert environment.state == "live"


def test_variables_go_back_and_are_forked(environment: Environment) -> None:
    executor = StateforkExecutor(environment)
    executor("import threading\nn = 1\nkept = open('/tmp/kept', 'w')\nkept.write('a')")
    taken = executor.snapshot()
    executor("n = 100\nkept.close()")
    one, two = executor.fork(2, from_snapshot=taken)
    with one.environment, two.environment:
        one("n += 1")
        assert (one("n").output, two("n").output) == ("2", "1")
    executor.restore(taken)
    assert executor("kept.write('b'); kept.flush(); n").output == "1"
    assert environment.read_file("/tmp/kept") == b"ab"


def test_code_that_takes_too_long_or_ends_itself(environment: Environment) -> None:
    executor = StateforkExecutor(environment, timeout=2)
    executor("kept = 5")
    with pytest.raises(AgentExecutionError, match="more than 2 seconds"):
        executor("import time\ntime.sleep(100)")
    assert executor("kept").output == "5", "the variables are still there"
    with pytest.raises(AgentExecutionError, match="SystemExit"):
        executor("raise SystemExit(1)")
    assert executor("print('to the log'); kept").logs == "to the log\n"
    assert executor("!echo out; echo err >&2").logs == "out\nerr\n"
    environment.run(["kill", "-9", executor._pid])
    with pytest.raises(AgentExecutionError, match="gone"):
        executor("kept")
