"""A Python executor for smolagents' CodeAgent: `CodeAgent(model=..., tools=[...], executor=StateforkExecutor(environment))`.

The agent's code runs in one Python process inside the environment, which keeps its variables from step to step; it is
part of every snapshot, so `executor.restore(...)` takes variables, open files and started programs back together.
The environment needs python3.
"""

from __future__ import annotations

import json
import re
import secrets
from importlib.resources import files
from typing import Any

from smolagents.local_python_executor import CodeOutput
from smolagents.monitoring import AgentLogger, LogLevel
from smolagents.remote_executors import RemotePythonExecutor
from smolagents.tools import Tool
from smolagents.utils import AgentExecutionError

from statefork.environment import Environment
from statefork.errors import ExecTimeout, HostUnsupported
from statefork.model import RestoreResult

__all__ = ["StateforkExecutor"]

_MODULES = {"pillow": "PIL", "scikit-learn": "sklearn", "beautifulsoup4": "bs4", "pyyaml": "yaml"}
_INSTALL = """\
import importlib.util, subprocess, sys
missing = [name for name in sys.argv[1:] if importlib.util.find_spec({modules}.get(name, name.replace("-", "_"))) is None]
pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "1"]
sys.exit(subprocess.call(pip + missing) if missing else 0)
"""


class StateforkExecutor(RemotePythonExecutor):
    """The caller ends the environment; `cleanup`, which smolagents calls, ends only the Python in it."""

    def __init__(
        self,
        environment: Environment,
        additional_imports: list[str] | None = None,
        logger: AgentLogger | None = None,
        *,
        timeout: float | None = 600,
        allow_pickle: bool = False,
        python: str = "python3",
    ) -> None:
        super().__init__(additional_imports or [], logger or AgentLogger(level=LogLevel.ERROR), allow_pickle)
        self.environment = environment
        self._timeout = timeout
        self._allow_pickle = allow_pickle
        self._socket = f"/tmp/.statefork-python-{secrets.token_hex(6)}"
        self._python = python
        self._spare: set[str] = set()
        self._program = [python, "-c", files("statefork.integrations").joinpath("python_inside.py").read_text()]
        started = environment.run([*self._program, "serve", self._socket])
        if not started.ok:
            raise HostUnsupported(
                f"{python} does not run in the environment: {started.stderr.strip()}",
                fix="install it there, or name another: StateforkExecutor(environment, python=...)",
            )
        self._pid = started.stdout.strip()
        self.installed_packages = self.install_packages(additional_imports or [])

    def run_code_raise_errors(self, code: str) -> CodeOutput:
        for module in self._spare:
            code = re.sub(f"^import {module}$", f"try: import {module}\nexcept ImportError: pass", code, flags=re.M)
        try:
            asked = self.environment.run(
                [*self._program, "ask", self._socket, self._pid], stdin=code, timeout=self._timeout
            )
        except ExecTimeout as error:
            raise AgentExecutionError(f"the code ran for more than {self._timeout:g} seconds", self.logger) from error
        if not asked.ok:
            raise AgentExecutionError(f"the Python in the environment is gone: {asked.stderr.strip()}", self.logger)
        answer: dict[str, Any] = json.loads(asked.stdout_bytes)
        raised = answer["error"]
        if raised is None:
            return CodeOutput(output=answer["result"], logs=answer["logs"], is_final_answer=False)
        if raised["name"] == RemotePythonExecutor.FINAL_ANSWER_EXCEPTION:
            final = self._deserialize_final_answer(raised["value"], self._allow_pickle)
            return CodeOutput(output=final, logs=answer["logs"], is_final_answer=True)
        said = f"{answer['logs']}\nExecuting code yielded an error:\n{raised['name']}: {raised['value']}\n{raised['traceback']}"
        raise AgentExecutionError(said, self.logger)

    def send_tools(self, tools: dict[str, Tool]) -> None:
        """smolagents writes `import numpy` and `import PIL` above its answer tool, which can do without either. Unless a
        tool of the agent's own needs them, they are neither installed nor insisted on."""
        others = [tool for name, tool in tools.items() if name != "final_answer"]
        self._spare = {"numpy", "PIL"} - {need for tool in others for need in tool.to_dict()["requirements"]}
        try:
            super().send_tools(tools)
        finally:
            self._spare = set()

    def install_packages(self, additional_imports: list[str]) -> list[str]:
        """What is missing, as far as it can be had: code that needs the rest fails at its import, where the model sees it."""
        spare = {_MODULES.get(name, name) for name in additional_imports} & self._spare
        wanted = [name for name in additional_imports if _MODULES.get(name, name) not in spare]
        if wanted:
            code = _INSTALL.format(modules=_MODULES)
            installed = self.environment.run([self._python, "-c", code, *wanted], timeout=self._timeout)
            self.logger.log(installed.output, level=LogLevel.DEBUG if installed.ok else LogLevel.INFO)
        return additional_imports

    def cleanup(self) -> None:
        if self.environment.state == "live":
            self.environment.run(["sh", "-c", 'kill "$1"; rm -f -- "$2"', "sh", self._pid, self._socket])

    # -- states -------------------------------------------------------------------------------------------------------

    def snapshot(self, name: str | None = None) -> str:
        return self.environment.snapshot(name)

    def restore(self, snapshot: str) -> RestoreResult:
        return self.environment.restore(snapshot)

    def fork(self, n: int = 1, *, from_snapshot: str | None = None) -> list[StateforkExecutor]:
        """Executors for N agents that go on with the same variables; the caller ends their environments."""
        forks = []
        for environment in self.environment.fork(n, from_snapshot=from_snapshot):
            fork = object.__new__(StateforkExecutor)
            fork.__dict__.update(self.__dict__, environment=environment)
            forks.append(fork)
        return forks
