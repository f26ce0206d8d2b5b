"""mini-swe-agent's environment: `environment_class: statefork.integrations.mini_swe_agent.StateforkEnvironment`.

Its prompts promise that every command runs in a new shell, so it does by default; what a command leaves running stays.
With `persistent: true` all commands share one shell, and `cd` and `export` last.
"""

from __future__ import annotations

import copy
import json
from typing import Any

from minisweagent.exceptions import Submitted
from minisweagent.utils.serialize import recursive_merge
from pydantic import BaseModel

from statefork.environment import Environment
from statefork.errors import ExecTimeout, SessionDead
from statefork.factory import create_env_manager
from statefork.model import RestoreResult

__all__ = ["StateforkEnvironment", "StateforkEnvironmentConfig"]

_SUBMITTED = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # the line that mini-swe-agent's prompts agree on
_UNAME = """python3 -c 'import json, platform; print(json.dumps(platform.uname()._asdict()))' 2>/dev/null ||
printf '{"system": "%s", "node": "%s", "release": "%s", "version": "%s", "machine": "%s"}' \
"$(uname -s)" "$(uname -n)" "$(uname -r)" "$(uname -v)" "$(uname -m)" """


class StateforkEnvironmentConfig(BaseModel):
    method: str = "waypoint_build"
    """Any of docs/backends.md."""
    arguments: dict[str, Any] = {}
    """What the method takes: dockerfile_dir, rootfs, network, memory, ..."""
    cwd: str = ""
    """Where commands start; by default where the environment's shell does. Not used with `persistent`."""
    env: dict[str, str] = {}
    timeout: int = 30
    interpreter: list[str] = ["bash", "-c"]
    persistent: bool = False


class StateforkEnvironment:
    """An environment of its own, made here and ended by `cleanup`; or one that the caller has and keeps."""

    def __init__(
        self, *, environment: Environment | None = None, config_class: type = StateforkEnvironmentConfig, **kwargs: Any
    ) -> None:
        self.config: StateforkEnvironmentConfig = config_class(**kwargs)
        self._owned = environment is None
        self.environment = environment or create_env_manager(self.config.method, **self.config.arguments)
        for name, value in self.config.env.items() if self.config.persistent else ():
            self.environment.exec_command(f"export {name}={_quoted(value)}")

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        command, seconds = action.get("command", ""), timeout or self.config.timeout
        try:
            if self.config.persistent:
                result = self.environment.exec_command(command, timeout=seconds)
            else:
                result = self.environment.run(
                    [*self.config.interpreter, command],
                    timeout=seconds,
                    cwd=cwd or self.config.cwd or None,
                    env=self.config.env,
                )
            output: dict[str, Any] = {"output": result.output, "returncode": result.exit_code, "exception_info": ""}
        except ExecTimeout as error:
            output = _failed(error, f"it ran for more than {seconds} seconds and was ended", error.result.output)
        except SessionDead as error:
            output = _failed(error, str(error), "")
        first, _, rest = output["output"].lstrip().partition("\n")
        if first.strip() == _SUBMITTED and output["returncode"] == 0:
            extra = {"exit_status": "Submitted", "submission": rest}
            raise Submitted({"role": "exit", "content": rest, "extra": extra})
        return output

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        """Of the machine that the agent works on, which may not be this one."""
        machine = json.loads(self.environment.run(["sh", "-c", _UNAME]).stdout)
        merged: dict[str, Any] = recursive_merge(self.config.model_dump(), machine, kwargs)
        return merged

    def serialize(self) -> dict[str, Any]:
        kind = f"{type(self).__module__}.{type(self).__name__}"
        return {"info": {"config": {"environment": self.config.model_dump(mode="json"), "environment_type": kind}}}

    # -- states -------------------------------------------------------------------------------------------------------

    def snapshot(self, name: str | None = None) -> str:
        return self.environment.snapshot(name)

    def restore(self, snapshot: str) -> RestoreResult:
        return self.environment.restore(snapshot)

    def fork(self, n: int = 1, *, from_snapshot: str | None = None) -> list[StateforkEnvironment]:
        """Environments for N agents that go on from here; end each with `cleanup`."""
        forks = []
        for live in self.environment.fork(n, from_snapshot=from_snapshot):
            fork = copy.copy(self)
            fork.environment, fork._owned = live, True
            forks.append(fork)
        return forks

    def cleanup(self) -> None:
        if self._owned:
            self.environment.destroy()


def _failed(error: Exception, why: str, output: str) -> dict[str, Any]:
    return {
        "output": output,
        "returncode": -1,
        "exception_info": f"An error occurred while executing the command: {why}",
        "extra": {"exception_type": type(error).__name__, "exception": why},
    }


def _quoted(value: str) -> str:
    return "'" + value.replace("'", "'\\''") + "'"
