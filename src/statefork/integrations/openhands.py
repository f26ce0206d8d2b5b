"""Tools for agents of the OpenHands SDK over an environment:

    Agent(llm=..., tools=register_tools(environment))

`terminal` is evaluated in the environment's persistent shell, `file` reads and writes, `snapshot` and `restore` take the
whole machine back. The SDK's workspace is where the conversation keeps its own files; the agent works in the environment.
"""

from __future__ import annotations

from collections.abc import Sequence
from signal import SIGINT
from typing import Any, Literal, Self
from weakref import WeakValueDictionary

from openhands.sdk.tool import Action, Observation, Tool, ToolAnnotations, ToolDefinition, ToolExecutor, register_tool
from pydantic import Field

from statefork.environment import Environment
from statefork.errors import ExecTimeout, NotFound, WaypointError

__all__ = ["StateforkFileTool", "StateforkStateTool", "StateforkTerminalTool", "register_tools"]

_environments: WeakValueDictionary[str, Environment] = WeakValueDictionary()
"""Conversations are stored as text, in which an environment can be named only by its id."""


def register_tools(environment: Environment, *, timeout: float = 600) -> list[Tool]:
    """What goes into `Agent(tools=...)`. The caller ends the environment."""
    _environments[environment.id] = environment
    kinds: tuple[type[ToolDefinition[Any, Any]], ...] = (StateforkTerminalTool, StateforkFileTool, StateforkStateTool)
    for kind in kinds:
        register_tool(kind.name, kind)
    return [Tool(name=kind.name, params={"environment": environment.id, "timeout": timeout}) for kind in kinds]


def _found(identifier: str) -> Environment:
    try:
        return _environments[identifier]
    except KeyError as error:
        raise NotFound(f"environment {identifier} is not in this process; call register_tools with it first") from error


# -- terminal ---------------------------------------------------------------------------------------------------------


class StateforkTerminalAction(Action):
    command: str = Field(description="What to run, as one would type it into bash")
    timeout: float | None = Field(default=None, description="After how many seconds to end it")


class StateforkTerminalObservation(Observation):
    exit_code: int | None = Field(default=None, description="None: it had to be ended")


class _TerminalExecutor(ToolExecutor[StateforkTerminalAction, StateforkTerminalObservation]):
    def __init__(self, environment: Environment, timeout: float) -> None:
        self._environment, self._timeout = environment, timeout

    def __call__(self, action: StateforkTerminalAction, conversation: Any = None) -> StateforkTerminalObservation:
        seconds = action.timeout or self._timeout
        try:
            result = self._environment.exec_command(action.command, timeout=seconds)
        except ExecTimeout as error:
            said = f"{error.result.output}\n[ended after {seconds:g} seconds]"
            return StateforkTerminalObservation.from_text(said, is_error=True)
        said = result.output if result.ok else f"{result.output}\n[exit code {result.exit_code}]"
        return StateforkTerminalObservation.from_text(said, exit_code=result.exit_code)

    def interrupt(self) -> None:
        self._environment.signal_command(SIGINT)


class StateforkTerminalTool(ToolDefinition[StateforkTerminalAction, StateforkTerminalObservation]):
    name = "terminal"

    @classmethod
    def create(cls, conv_state: Any = None, *, environment: str, timeout: float) -> Sequence[Self]:
        return [
            cls(
                description="Run a command in the machine's shell. It is one shell: directory, variables and jobs stay.",
                action_type=StateforkTerminalAction,
                observation_type=StateforkTerminalObservation,
                annotations=ToolAnnotations(title="terminal"),
                executor=_TerminalExecutor(_found(environment), timeout),
            )
        ]


# -- files ------------------------------------------------------------------------------------------------------------


class StateforkFileAction(Action):
    operation: Literal["read", "write"] = Field(description="write makes or overwrites the file")
    path: str = Field(description="The absolute path")
    content: str = Field(default="", description="All that shall be in it, for write")


class StateforkFileObservation(Observation):
    pass


class _FileExecutor(ToolExecutor[StateforkFileAction, StateforkFileObservation]):
    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def __call__(self, action: StateforkFileAction, conversation: Any = None) -> StateforkFileObservation:
        try:
            if action.operation == "write":
                self._environment.write_file(action.path, action.content)
                return StateforkFileObservation.from_text(f"{action.path} written")
            text = self._environment.read_file(action.path).decode(errors="replace")
        except WaypointError as error:
            return StateforkFileObservation.from_text(error.message, is_error=True)
        return StateforkFileObservation.from_text(text)


class StateforkFileTool(ToolDefinition[StateforkFileAction, StateforkFileObservation]):
    name = "file"

    @classmethod
    def create(cls, conv_state: Any = None, *, environment: str, timeout: float) -> Sequence[Self]:
        return [
            cls(
                description="Read or write a text file of the machine.",
                action_type=StateforkFileAction,
                observation_type=StateforkFileObservation,
                executor=_FileExecutor(_found(environment)),
            )
        ]


# -- states -----------------------------------------------------------------------------------------------------------


class StateforkStateAction(Action):
    operation: Literal["snapshot", "restore"] = Field(description="snapshot remembers the machine, restore goes back")
    name: str = Field(description="The snapshot's name")


class StateforkStateObservation(Observation):
    pass


class _StateExecutor(ToolExecutor[StateforkStateAction, StateforkStateObservation]):
    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def __call__(self, action: StateforkStateAction, conversation: Any = None) -> StateforkStateObservation:
        try:
            if action.operation == "snapshot":
                self._environment.snapshot(action.name)
                return StateforkStateObservation.from_text(f"snapshot {action.name} taken")
            result = self._environment.restore(action.name)
        except WaypointError as error:
            return StateforkStateObservation.from_text(error.message, is_error=True)
        lost = "; the shell began anew" if result.shell_restarted else ""
        return StateforkStateObservation.from_text(f"the machine is as it was at {action.name}{lost}")


class StateforkStateTool(ToolDefinition[StateforkStateAction, StateforkStateObservation]):
    name = "machine_state"

    @classmethod
    def create(cls, conv_state: Any = None, *, environment: str, timeout: float) -> Sequence[Self]:
        return [
            cls(
                description="Remember the whole machine as it is (files, running programs, memory, the shell) under a "
                "name, before something risky, or put it back to such a name: all that happened since is undone.",
                action_type=StateforkStateAction,
                observation_type=StateforkStateObservation,
                executor=_StateExecutor(_found(environment)),
            )
        ]
