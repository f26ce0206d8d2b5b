"""Agents for check_harbor.py, named by `harbor run -a harbor_agents:NAME`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from harbor.agents.base import BaseAgent
from harbor.models.agent.context import AgentContext

from statefork.integrations.harbor import WaypointEnvironment


class Branching(BaseAgent):
    """Solves kv-in-memory by trying: a server with data in memory, a wrong step taken back, the right one found in forks."""

    @staticmethod
    def name() -> str:
        return "branching"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: WaypointEnvironment) -> None:
        pass

    async def run(self, instruction: str, environment: WaypointEnvironment, context: AgentContext) -> None:
        async def step(command: str, where: WaypointEnvironment = environment) -> str:
            done = await where.exec(command)
            return f"{done.stdout}{done.stderr}".strip()

        facts: dict[str, Any] = {}
        await step("./kv.py >var/log 2>&1 & ./wait-for 7001")
        await step("./ask 7001 load spool/a; ./ask 7001 load spool/b")
        loaded = await environment.snapshot("loaded")
        before = await step("./ask 7001 sum")
        await step("./ask 7001 scale 2")
        facts["wrong"] = await step("./ask 7001 sum")
        facts["restored"] = list((await environment.restore(loaded)).restored)
        facts["back"] = await step("./ask 7001 sum") == before

        forks = await environment.fork(2)
        for fork, factor in zip(forks, (2, 3), strict=True):
            await step(f"./ask 7001 scale {factor}", fork)
        facts["forks"] = [await step("./ask 7001 get alpha", fork) for fork in forks]
        facts["names"] = [fork.session_id for fork in forks]
        await forks[0].stop(delete=True)  # the other one is left for the environment to end

        await step(f"./ask 7001 scale {2 + facts['forks'].index('30')}; ./ask 7001 drop obsolete")

        facts["users"] = [await step("id -un"), (await environment.exec("id -un; echo $HOME", user="nobody")).stdout]
        facts["cwd"] = await step("pwd")
        facts["env"] = (await environment.exec("echo $A", env={"A": "b c"}, cwd="/tmp")).stdout
        try:
            await environment.exec("sleep 60", timeout_sec=1)
        except RuntimeError as error:
            facts["timeout"] = str(error)
        task = asyncio.create_task(environment.exec("touch /tmp/begun; sleep 60; touch /tmp/survived"))
        while await step("ls /tmp/begun 2>/dev/null") == "":
            await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while await step("pgrep -x sleep") != "":  # a generous deadline is the agent's own timeout
            await asyncio.sleep(0.05)
        facts["survived"] = (await environment.is_file("/tmp/survived"), await environment.is_dir("/tmp"))
        pieces: list[str] = []

        async def heard(text: str, stream: str) -> None:
            pieces.append(f"{stream}:{text.strip()}")

        with environment.scoped_output_callback(heard):
            await environment.exec("echo told")
        facts["heard"] = pieces
        (self.logs_dir / "facts.json").write_text(json.dumps(facts))
