"""A deep agent with its file and shell tools over our backend; the model is scripted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from deepagents import create_deep_agent
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, ToolMessage

from statefork import Environment
from statefork.integrations.deepagents import StateforkBackend

pytestmark = pytest.mark.anyio


class Scripted(GenericFakeChatModel):
    def bind_tools(self, tools: Sequence[Any], **_: Any) -> Scripted:
        return self


def _calls(*calls: tuple[str, dict[str, Any]]) -> Scripted:
    turns = [
        AIMessage(content="", tool_calls=[{"name": name, "args": args, "id": f"c{number}", "type": "tool_call"}])
        for number, (name, args) in enumerate(calls)
    ]
    return Scripted(messages=iter([*turns, AIMessage(content="done")]))


def _answers(state: dict[str, Any]) -> list[str]:
    return [str(message.content) for message in state["messages"] if isinstance(message, ToolMessage)]


def test_an_agent_works_in_it(environment: Environment) -> None:
    backend = StateforkBackend(environment)
    model = _calls(
        ("write_file", {"file_path": "/srv/app.py", "content": "print('one')\n"}),
        ("execute", {"command": "cd /srv && export WORD=kept && python3 app.py"}),
        ("edit_file", {"file_path": "/srv/app.py", "old_string": "one", "new_string": "two"}),
        ("execute", {"command": "pwd; echo $WORD; python3 app.py; exit_with() { return 3; }; exit_with"}),
        ("ls", {"path": "/srv"}),
        ("grep", {"pattern": "two", "path": "/srv"}),
        ("glob", {"pattern": "*.py", "path": "/srv"}),
        ("read_file", {"file_path": "/srv/app.py"}),
        ("read_file", {"file_path": "/srv/missing"}),
    )
    said = _answers(create_deep_agent(model=model, backend=backend).invoke({"messages": [("user", "go")]}))
    assert len(said) == 9
    assert "one" in said[1]
    assert "/srv\nkept\ntwo" in said[3], "one shell for all commands"
    assert "3" in said[3].splitlines()[-1]
    assert "/srv/app.py" in said[4]
    assert "app.py" in said[5]
    assert "/srv/app.py" in said[6]
    assert "print('two')" in said[7]
    assert "rror" in said[8]


async def test_going_back_and_forks(environment: Environment) -> None:
    backend = StateforkBackend(environment)
    first = _calls(("execute", {"command": "cd /var/tmp; X=1; echo first > f"}))
    await create_deep_agent(model=first, backend=backend).ainvoke({"messages": [("user", "go")]})
    taken = backend.snapshot()
    (fork,) = backend.fork()
    with fork.environment:
        second = _calls(("execute", {"command": "echo $X; X=2; rm f; pwd"}))
        answers = _answers(await create_deep_agent(model=second, backend=fork).ainvoke({"messages": [("user", "go")]}))
        assert answers[0].startswith("1\n/var/tmp")
        assert fork.download_files(["/var/tmp/f"])[0].error == "file_not_found"
    assert backend.download_files(["/var/tmp/f", "/var/tmp"])[1].error == "is_directory"
    backend.restore(taken)
    assert environment.exec_command("echo $X; cat f").stdout == "1\nfirst\n"


def test_errors_and_timeouts(environment: Environment) -> None:
    backend = StateforkBackend(environment)
    assert [answer.error for answer in backend.upload_files([("/a/b", b"\0"), ("relative", b"")])] == [
        None,
        "invalid_path",
    ]
    assert backend.download_files(["/a/b"])[0].content == b"\0"
    ended = backend.execute("echo so far; sleep 100", timeout=1)
    assert ended.exit_code == 124
    assert ended.output.startswith("so far")
