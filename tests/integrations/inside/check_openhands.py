"""An OpenHands conversation over our tools, with the SDK's own scripted model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from openhands.sdk import Agent, Conversation
from openhands.sdk.event import ObservationEvent
from openhands.sdk.llm import Message, MessageToolCall, TextContent
from openhands.sdk.testing import TestLLM

from statefork import Environment
from statefork.integrations.openhands import register_tools


def _call(number: int, name: str, /, **arguments: Any) -> Message:
    call = MessageToolCall(id=f"c{number}", name=name, arguments=json.dumps(arguments), origin="completion")
    return Message(role="assistant", content=[TextContent(text="")], tool_calls=[call])


def test_a_conversation(environment: Environment, tmp_path: Path) -> None:
    script = [
        ("file", {"operation": "write", "path": "/srv/word", "content": "first"}),
        ("terminal", {"command": "cd /srv; X=1; (sleep 1000 &); cat word"}),
        ("machine_state", {"operation": "snapshot", "name": "clean"}),
        ("terminal", {"command": "rm word; X=2; pkill sleep; (exit 4)"}),
        ("file", {"operation": "read", "path": "/srv/word"}),
        ("machine_state", {"operation": "restore", "name": "clean"}),
        ("terminal", {"command": "echo $X $PWD; pgrep -x sleep >/dev/null && echo runs"}),
        ("terminal", {"command": "sleep 100", "timeout": 1}),
        ("file", {"operation": "read", "path": "/srv/word"}),
        ("machine_state", {"operation": "restore", "name": "never taken"}),
    ]
    llm = TestLLM.from_messages(
        [
            *(_call(number, name, **arguments) for number, (name, arguments) in enumerate(script)),
            _call(99, "finish", message="done"),
        ]
    )
    seen: list[ObservationEvent] = []

    def watch(event: Any) -> None:
        if isinstance(event, ObservationEvent):
            seen.append(event)

    conversation = Conversation(
        agent=Agent(llm=llm, tools=register_tools(environment)),
        workspace=str(tmp_path),
        callbacks=[watch],
        visualizer=None,
    )
    conversation.send_message("go")
    conversation.run()
    conversation.close()
    said = [event.observation for event in seen]
    assert len(said) >= len(script)
    assert said[1].text == "first"
    assert said[3].exit_code == 4
    assert said[4].is_error
    assert said[6].text == "1 /srv\nruns\n"
    assert said[7].is_error and "ended after 1 seconds" in said[7].text
    assert said[8].text == "first"
    assert said[9].is_error
    assert list(tmp_path.glob("word")) == [], "the agent works in the environment"
