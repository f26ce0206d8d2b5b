"""Tools for the OpenAI Agents SDK over an environment.

    tools = StateforkTools(environment)
    Agent(name="...", tools=[tools.shell, tools.apply_patch, *tools.states])    # OpenAI's Responses models
    Agent(name="...", tools=[*tools.functions, *tools.states])                  # any model that calls functions

`shell` and `apply_patch` are the SDK's own tools, of which the models of OpenAI know the form; `functions` are ordinary
function tools. All commands are evaluated in the environment's persistent shell.
"""

from __future__ import annotations

import asyncio
import posixpath
from functools import partial

from agents import ApplyPatchTool, ShellTool, Tool, apply_diff, function_tool
from agents.editor import ApplyPatchOperation, ApplyPatchResult
from agents.tool import ShellCallOutcome, ShellCommandOutput, ShellCommandRequest, ShellResult

from statefork.environment import Environment
from statefork.errors import ExecTimeout, WaypointError

__all__ = ["StateforkTools"]


class StateforkTools:
    def __init__(self, environment: Environment, *, timeout: float | None = 600, workdir: str = "/") -> None:
        """`workdir` is what relative paths in patches start from."""
        self.environment = environment
        """For forks and the rest; the caller ends it."""
        self._timeout = timeout
        self.shell = ShellTool(executor=self._execute)
        self.apply_patch = ApplyPatchTool(editor=_Editor(environment, workdir))
        self.functions: list[Tool] = [
            function_tool(self.run_command),
            function_tool(self.read_file),
            function_tool(self.write_file),
        ]
        self.states: list[Tool] = [function_tool(self.snapshot), function_tool(self.restore)]

    async def _execute(self, request: ShellCommandRequest) -> ShellResult:
        """One command after the other; those that follow one that had to be ended are not started."""
        action = request.data.action
        seconds = action.timeout_ms / 1000 if action.timeout_ms else self._timeout
        outputs: list[ShellCommandOutput] = []
        for command in action.commands:
            try:
                call = partial(self.environment.exec_command, command, timeout=seconds)
                result, outcome = await asyncio.to_thread(call), "exit"
            except ExecTimeout as error:
                result, outcome = error.result, "timeout"
            code = result.exit_code if outcome == "exit" else None
            ended = ShellCallOutcome(type=outcome, exit_code=code)
            outputs.append(ShellCommandOutput(result.stdout, result.stderr, ended, command))
            if outcome == "timeout":
                break
        return ShellResult(output=outputs, max_output_length=action.max_output_length)

    # -- function tools: their docstrings are what the model reads ----------------------------------------------------

    async def run_command(self, command: str) -> str:
        """Run a command in the machine's shell. The shell is the same for all commands: directory and variables stay.

        Args:
            command: What to run, as one would type it into bash.
        """
        try:
            call = partial(self.environment.exec_command, command, timeout=self._timeout)
            result = await asyncio.to_thread(call)
        except ExecTimeout as error:
            return f"{error.result.output}\n[ended after {self._timeout:g} seconds]"
        return result.output if result.ok else f"{result.output}\n[exit code {result.exit_code}]"

    async def read_file(self, path: str) -> str:
        """Read a text file.

        Args:
            path: Its absolute path.
        """
        return (await asyncio.to_thread(self.environment.read_file, path)).decode(errors="replace")

    async def write_file(self, path: str, content: str) -> str:
        """Make or overwrite a file, and the directories above it.

        Args:
            path: Its absolute path.
            content: All that shall be in it.
        """
        await asyncio.to_thread(self.environment.write_file, path, content)
        return f"{path} written"

    async def snapshot(self, name: str) -> str:
        """Remember the whole machine as it is now (files, running programs, memory, the shell), to go back to it later.

        Args:
            name: A short name for it.
        """
        await asyncio.to_thread(self.environment.snapshot, name)
        return f"snapshot {name} taken"

    async def restore(self, name: str) -> str:
        """Put the whole machine back to a snapshot. All that happened since is undone.

        Args:
            name: The snapshot's name.
        """
        result = await asyncio.to_thread(self.environment.restore, name)
        lost = "; the shell began anew" if result.shell_restarted else ""
        return f"the machine is as it was at {name}{lost}"


class _Editor:
    """Applies the SDK's diffs to files of the environment."""

    def __init__(self, environment: Environment, workdir: str) -> None:
        self._environment = environment
        self._workdir = workdir

    async def create_file(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        return await asyncio.to_thread(self._patch, operation, creating=True)

    async def update_file(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        return await asyncio.to_thread(self._patch, operation, creating=False)

    async def delete_file(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        path = self._path(operation.path)
        try:
            await asyncio.to_thread(self._environment.remove_file, path)
        except WaypointError as error:
            return ApplyPatchResult(status="failed", output=error.message)
        return ApplyPatchResult(status="completed", output=f"{path} deleted")

    def _patch(self, operation: ApplyPatchOperation, *, creating: bool) -> ApplyPatchResult:
        path = self._path(operation.path)
        try:
            old = "" if creating else self._environment.read_file(path).decode()
            new = apply_diff(old, operation.diff or "", mode="create" if creating else "default")
            self._environment.write_file(path, new)
            if operation.move_to:
                self._environment.move_file(path, self._path(operation.move_to))
        except (WaypointError, ValueError) as error:  # ValueError: the diff does not fit the file
            return ApplyPatchResult(status="failed", output=str(error))
        return ApplyPatchResult(status="completed", output=f"{path} {'created' if creating else 'updated'}")

    def _path(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self._workdir, path))
