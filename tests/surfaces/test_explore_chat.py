"""The chat policy against a server that speaks the protocol, over a live environment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chat_server import call, chat_server, words
from statefork.environment import Environment
from statefork.errors import UsageError
from statefork.explore import Action, Budget, ExitCode, Node, best_of_n, mcts, read_trace
from statefork.explore.chat import ChatPolicy, ChatSettings
from statefork.explore.chat_endpoint import ChatError, Endpoint
from statefork.factory import create_env_manager


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory, small_rootfs: Path) -> Iterator[Environment]:
    home = tmp_path_factory.mktemp("chat")
    with create_env_manager("waypoint_build", home=home, store=home / "store", rootfs=small_rootfs) as env:
        env.exec_command("mkdir /srv; echo 'the word is tea' >/srv/hint")
        yield env


def _settings(url: str, **more: Any) -> ChatSettings:
    return ChatSettings(url, "test-model", "secret", **{"retries": 2, "most_proposals": 1, **more})


def test_a_model_looks_acts_and_solves(env: Environment, tmp_path: Path) -> None:
    """It looks at a directory and a file, writes a file with awkward text, and fixes what its first try got wrong."""
    text = "#!/bin/sh\necho \"it's $1\" 'EOF'\n"

    def answer(request: dict[str, Any]) -> Any:
        last = request["messages"][-1]
        outcomes = [message["content"] for message in request["messages"] if message["role"] == "tool"]
        if last["role"] == "user" and "tried already" in last["content"]:
            return words("nothing else comes to mind")
        if not outcomes:
            return call("list_files", "c1", path="/srv")
        if len(outcomes) == 1:
            assert "hint" in outcomes[0]
            return call("read_file", "c2", path="/srv/hint")
        if len(outcomes) == 2:
            assert outcomes[1] == "the word is tea\n"
            return call("write_file", "c3", path="/srv/a b/say", content=text)
        if len(outcomes) == 3:
            return call("exec", "c4", command="sh '/srv/a b/say' coffee | tee /srv/answer; WORD=tea; false")
        assert "it's coffee EOF" in outcomes[3] and "[exit code 1]" in outcomes[3], outcomes
        return call("exec", "c5", command="sh '/srv/a b/say' $WORD >/srv/answer")

    trace = tmp_path / "trace.jsonl"
    with chat_server(answer) as server, ChatPolicy(_settings(server.url), "Say the word of /srv.") as policy:
        judge = ExitCode("grep -q tea /srv/answer")
        outcome = mcts(env, policy, judge, Budget(nodes=12, seconds=50), workers=1, widening=0.1, trace=trace)
    with outcome.environment as live:
        assert outcome.solved
        assert live.read_file("/srv/answer") == b"it's tea EOF\n"
        assert live.read_file("/srv/a b/say").decode() == text
    assert [action.name[:5] for action in outcome.actions] == ["write", "sh '/", "sh '/"]
    first = server.requests[0]
    assert first["model"] == "test-model" and first["temperature"] == 1.0
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert {tool["function"]["name"] for tool in first["tools"]} == {"exec", "write_file", "read_file", "list_files"}
    assert len(read_trace(trace)[0]) == outcome.nodes


def test_several_at_once_and_what_it_is_not_given_twice(env: Environment) -> None:
    said = iter(["echo a", "echo b", "echo a"] + ["echo c"] * 3)
    with chat_server(lambda _: call("exec", command=next(said))) as server:
        with ChatPolicy(_settings(server.url, most_proposals=3), "Go.") as policy:
            root = Node(0)
            first = policy.propose(root, env, 7)
            assert sorted(action.command for action in first) == ["echo a", "echo b"]
            root.children = [Node(n, root, action) for n, action in enumerate(first, 1)]
            assert [action.command for action in policy.propose(root, env, 3)] == ["echo c"]
    told = server.requests[-1]["messages"][-1]["content"]
    assert "- echo a" in told and "- echo b" in told


def test_what_a_model_gets_wrong_is_told_to_it(env: Environment) -> None:
    answers = [
        call("read_file", path="/nowhere"),
        call("fly", path="/"),
        call("exec", wrong="x"),
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "exec", "arguments": "{"}}]},
        call("exec", command="true"),
    ]
    rest = iter(answers)
    with chat_server(lambda _: next(rest)) as server, ChatPolicy(_settings(server.url), "Go.") as policy:
        (found,) = policy.propose(Node(0), env, 1)
    assert found == Action("true", timeout=300)
    told = [message["content"] for message in server.requests[-1]["messages"] if message["role"] == "tool"]
    assert ["no such file" in told[0], "no tool 'fly'" in told[1], "'command' is missing" in told[2], "no JSON" in told[3]] == [True] * 4


def test_after_a_crash_the_talk_is_what_was_done(env: Environment) -> None:
    """The policy of another process knows the nodes only from their trace."""
    node = Node(1, Node(0), Action("make thing"), output="no rule\n", exit_code=2)
    with chat_server(lambda _: words("done")) as server, ChatPolicy(_settings(server.url), "Go.") as policy:
        assert policy.propose(node, env, 1) == []
    assistant, tool = server.requests[0]["messages"][2:]
    assert assistant["tool_calls"][0]["function"]["arguments"] == '{"command": "make thing"}'
    assert tool["content"] == "no rule\n\n[exit code 2]"


def test_patience_and_its_end() -> None:
    waits: list[float] = []
    answers = iter([(429, {"Retry-After": "7"}, "slow down"), (503, {}, ""), words("hello")])
    with chat_server(lambda _: next(answers)) as server:
        endpoint = Endpoint(_settings(server.url), sleep=waits.append)
        assert endpoint.complete([{"role": "user", "content": "hi"}], [])["content"] == "hello"
        assert waits[0] == 7 and 0 < waits[1] < 7
        endpoint.close()
    with chat_server(lambda _: (500, {}, "broken")) as server:
        with pytest.raises(ChatError, match=r"failed 3 times; the last: 500: broken"):
            Endpoint(_settings(server.url), sleep=waits.append).complete([{"role": "user", "content": "hi"}], [])
    with pytest.raises(ChatError, match="failed 1 times"):
        Endpoint(_settings(server.url, retries=0)).complete([{"role": "user", "content": "hi"}], [])
    with chat_server(lambda _: words("never"), key="another") as server:
        with pytest.raises(ChatError, match=r"401: .*Incorrect API key"):
            Endpoint(_settings(server.url), sleep=waits.append).complete([{"role": "user", "content": "hi"}], [])
    with chat_server(lambda _: (200, {}, "<html>")) as server, pytest.raises(ChatError, match="no JSON: <html>"):
        Endpoint(_settings(server.url)).complete([{"role": "user", "content": "hi"}], [])
    with chat_server(lambda _: (200, {}, '{"choices": []}')) as server, pytest.raises(ChatError, match="as a chat endpoint does"):
        Endpoint(_settings(server.url)).complete([{"role": "user", "content": "hi"}], [])


def test_settings() -> None:
    assert "secret" not in repr(_settings("http://localhost/v1"))
    with pytest.raises(UsageError, match="no base URL"):
        ChatSettings("localhost", "m")
    with pytest.raises(UsageError, match="which model"):
        ChatSettings("http://localhost/v1", "")


def test_an_endpoint_that_fails_ends_the_search(env: Environment) -> None:
    before = env.stats.environments
    with chat_server(lambda _: (403, {}, "no")) as server, ChatPolicy(_settings(server.url), "Go.") as policy:
        with pytest.raises(ChatError, match="403"):
            mcts(env, policy, ExitCode("false"), Budget(nodes=5), workers=2)
    assert env.stats.environments == before
    outcome = best_of_n(env, ["true"], ExitCode("true"))
    outcome.environment.destroy()
