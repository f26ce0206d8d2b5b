"""A policy that asks a model behind any OpenAI-compatible chat endpoint.

The model has four tools. `read_file` and `list_files` look: they are answered at once, in the environment that stands at the
node, and the model goes on. `exec` and `write_file` change something: such a call ends the talk and becomes an action of the
search, so that its outcome is a node, with a snapshot. When a node is gone on from, the model is shown the talk that led to it:
what it said, what it saw, what its actions printed. One that answers without a call has nothing to try.
"""

from __future__ import annotations

import json
import shlex
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from statefork.environment import Environment
from statefork.errors import UsageError, WaypointError
from statefork.explore.chat_endpoint import ChatSettings, Endpoint
from statefork.explore.model import Action, Node

__all__ = ["ChatPolicy", "ChatSettings"]

Message = dict[str, Any]

SYSTEM = """\
You work in a live Linux environment through tools, one call at a time. `exec` evaluates a command in one persistent shell: \
directories, variables and jobs stay from call to call. Every call's outcome is stored, and several continuations may be tried \
side by side; you see only the one that you are in. When nothing is left to do, answer without a call."""


def _tool(name: str, about: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


TOOLS = [
    _tool("exec", "Evaluate a command in the persistent shell.", command="a command line, several lines if need be"),
    _tool("write_file", "Make or overwrite a file.", path="absolute path", content="all of its text"),
    _tool("read_file", "Read a text file.", path="absolute path"),
    _tool("list_files", "List a directory.", path="absolute path"),
]


class ChatPolicy:
    """Used by any number of threads. Close it, or use it as a context manager, to let its connections go."""

    def __init__(
        self,
        settings: ChatSettings,
        task: str,
        *,
        system: str = SYSTEM,
        timeout: float | None = 300,
        most_looks: int = 8,
        most_output: int = 8000,
    ) -> None:
        """`timeout` is that of each command in the environment; of what files and commands print the model sees no more than
        `most_output` characters, half from the head and half from the tail. After `most_looks` it has to act."""
        self._endpoint = Endpoint(settings)
        self._settings = settings
        self._opening: list[Message] = [{"role": "system", "content": system}, {"role": "user", "content": task}]
        self._timeout = timeout
        self._most_looks = most_looks
        self._most_output = most_output
        self._talks: dict[tuple[Action, ...], list[Message]] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> ChatPolicy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._endpoint.close()

    def propose(self, node: Node, environment: Environment, count: int) -> Sequence[Action]:
        """Asks `count` times, at once, and drops what was named before."""
        count = min(count, self._settings.most_proposals)
        path = tuple(node.history())
        before = [*self._opening, *self._talk(node)]
        tried = [child.action for child in node.children if child.action is not None]
        if tried:
            names = "\n".join(f"- {_brief(action)}" for action in tried)
            before.append(
                {"role": "user", "content": f"From here these were tried already; do something else:\n{names}"}
            )
        with ThreadPoolExecutor(max(count, 1), thread_name_prefix="explore-chat") as pool:
            found = list(pool.map(lambda _: self._ask(before, environment), range(count)))
        fresh: dict[Action, list[Message]] = {}
        for action, said in filter(None, found):
            if action not in tried:
                fresh.setdefault(action, said)
        with self._lock:
            for action, said in fresh.items():
                self._talks.setdefault((*path, action), said)
        return list(fresh)

    def _talk(self, node: Node) -> list[Message]:
        """What was said on the way to a node; of a run before a crash, or of other policies, only what was done."""
        messages: list[Message] = []
        for step in node.path():
            assert step.action is not None
            with self._lock:
                said = self._talks.get(tuple(step.history()))
            said = said or [_call(f"call_{step.id}", "exec", {"command": step.action.command})]
            number = said[-1]["tool_calls"][0]["id"]
            printed = self._shortened(step.output) or "(it printed nothing)"
            code = f"\n[exit code {step.exit_code}]" if step.exit_code else ""
            messages += [*said, {"role": "tool", "tool_call_id": number, "content": printed + code}]
        return messages

    def _ask(self, before: list[Message], environment: Environment) -> tuple[Action, list[Message]] | None:
        """One talk, until it names an action; None: it names none."""
        said: list[Message] = []
        for look in range(self._most_looks + 1):
            tools = TOOLS if look < self._most_looks else TOOLS[:2]
            answer = self._endpoint.complete([*before, *said], tools)
            calls = answer.get("tool_calls") or []
            if not calls:
                return None
            first = _sayable(
                calls[0]
            )  # what it asked for beside that, it may ask again when it has seen this one's outcome
            said.append({"role": "assistant", "content": answer.get("content") or "", "tool_calls": [first]})
            try:
                name, given = first["function"]["name"], _arguments(calls[0]["function"].get("arguments"))
                action = self._action(name, given)
                if action is not None:
                    return action, said
                seen = self._look(environment, name, given)
            except WaypointError as error:
                seen = f"error: {error.message}"
            said.append({"role": "tool", "tool_call_id": first["id"], "content": seen})
        return None

    def _action(self, name: str, given: Mapping[str, str]) -> Action | None:
        if name == "exec":
            return Action(_given(given, "command"), timeout=self._timeout)
        if name == "write_file":
            path, content = _given(given, "path"), _given(given, "content")
            return Action(_writing(path, content), f"write {path} ({len(content.encode())} bytes)", self._timeout)
        return None

    def _look(self, environment: Environment, name: str, given: Mapping[str, str]) -> str:
        if name == "read_file":
            return self._shortened(
                environment.read_file(_given(given, "path"), limit_bytes=4 << 20).decode(errors="replace")
            )
        if name == "list_files":
            lines = [f"{one.kind} {one.size_bytes} {one.name}" for one in environment.list_files(_given(given, "path"))]
            return self._shortened("\n".join(lines) or "(empty)")
        raise UsageError(f"there is no tool {name!r}; there are: exec, write_file, read_file, list_files")

    def _shortened(self, text: str) -> str:
        half = self._most_output // 2
        if len(text) <= 2 * half:
            return text
        return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def _arguments(text: object) -> dict[str, Any]:
    """Some servers send the object itself instead of its text."""
    try:
        found = json.loads(text) if isinstance(text, str) else text
    except json.JSONDecodeError as error:
        raise UsageError(f"the arguments are no JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError("the arguments must be an object")
    return found


def _sayable(call: Message) -> Message:
    """The call as it may be shown to the endpoint again: with arguments that are the text of an object, whatever they were."""
    try:
        arguments = json.dumps(_arguments(call["function"].get("arguments")))
    except UsageError:
        arguments = "{}"
    function = {"name": call["function"]["name"], "arguments": arguments}
    return {"id": call["id"], "type": "function", "function": function}


def _given(arguments: Mapping[str, Any], name: str) -> str:
    value = arguments.get(name)
    if not isinstance(value, str) or (name != "content" and not value.strip()):
        raise UsageError(f"{name!r} is missing, or no text")
    return value


def _call(number: str, name: str, arguments: Mapping[str, str]) -> Message:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": number, "type": "function", "function": function}],
    }


def _writing(path: str, content: str) -> str:
    """As a command, so that a trace can take it again; `printf` is the shell's own, so that no length is too much for it."""
    if "\0" in content:
        raise UsageError("content has NUL bytes; make such a file with exec")
    target = shlex.quote(path)
    return f'mkdir -p -- "$(dirname -- {target})" && printf %s {shlex.quote(content)} >{target}'


def _brief(action: Action) -> str:
    return action.label or action.command[:500]
