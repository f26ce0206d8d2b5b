"""Tools that run something."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Annotated, Any

from mcp.server.mcpserver import Context
from pydantic import Field

from statefork.errors import UsageError
from statefork.mcp import jobs
from statefork.mcp.answers import ExecAnswer, Job, JobState, Page
from statefork.mcp.desk import DEFAULT_LIMIT, Desk, EnvironmentId, Limit
from statefork.mcp.registering import Registrar
from statefork.mcp.verbs import Remote

__all__ = ["register"]

_LOOK_BYTES = 1 << 20
_POLL_SECONDS = 0.25
_JOB_CURSOR = re.compile(r"job:([^:]+):([^:]+):(\d+)")

JobName = Annotated[str, Field(description="The job's name, as run_in_background gave it.")]


def register(tool: Registrar, desk: Desk) -> None:
    @tool("Run a command", destructive=True, open_world=True)
    async def exec(
        environment: EnvironmentId,
        command: Annotated[str, Field(description="Any shell text, several lines included.")],
        ctx: Context[Any, Any],
        timeout: Annotated[float, Field(description="Seconds; then the command is ended.", gt=0, le=600)] = 50,
        stdin: Annotated[str, Field(description="What the command reads; without it, nothing.")] = "",
        max_characters: Limit = DEFAULT_LIMIT,
    ) -> ExecAnswer:
        """Run a command in the environment's persistent shell and wait for its end.

        cd, export, functions and activated virtualenvs stay for the next exec. A non-zero exit_code is a result, not an
        error of this tool. Commands that ask for input get an end of file: pass stdin, or the option that answers yes.
        Do not start servers with it: use run_in_background. Take a snapshot first if the command could do harm.
        """
        found = await desk.remote(ctx).exec(environment, command, timeout=timeout, stdin=stdin or None)
        excerpt = desk.pages.excerpt(found["output"], desk.owner(ctx), max_characters)
        advice = None
        if found["timed_out"]:
            advice = f"ended after {timeout:g} s; give more time, or use run_in_background and wait_for_text"
        elif found["truncated"]:
            advice = "the output was longer than 4 MiB and its middle is lost; send such output to a file"
        return ExecAnswer(
            exit_code=found["exit_code"],
            output=excerpt.text,
            cwd=found["cwd"],
            cursor=excerpt.cursor,
            timed_out=found["timed_out"],
            shell_restarted=found["shell_restarted"],
            advice=advice,
        )

    @tool("Start a background job", destructive=True, open_world=True)
    async def run_in_background(
        environment: EnvironmentId,
        command: Annotated[str, Field(description="Any shell text; it inherits the shell's variables and directory.")],
        ctx: Context[Any, Any],
        job: Annotated[str | None, Field(description="A name of your choice, such as `server`.")] = None,
    ) -> Job:
        """Start a command that goes on by itself: a server, a watcher, a long build. Returns at once.

        wait_for_text waits until it prints something; read_output reads what it printed. The job is part of the
        environment: a snapshot holds it running, forks have it too, and a restore brings back its state at the snapshot.
        End it with exec: `kill PID`.
        """
        name = jobs.new_name(job)
        remote = desk.remote(ctx)
        if job is not None and await _running(remote, environment, name):
            raise UsageError(f"job {name!r} is running already; choose another name, or end it with kill")
        at = jobs.place(name)
        await remote.write_file(environment, f"{at}/command", f"{command}\n".encode())
        started = await remote.exec(environment, jobs.start_command(name), timeout=30)
        pid = started["stdout"].split()
        if not pid or not pid[-1].isdigit():
            raise UsageError(f"the job could not be started: {started['output'].strip()[:500]}")
        return Job(job=name, pid=int(pid[-1]), log=f"{at}/log")

    @tool("Wait for text", read_only=True)
    async def wait_for_text(
        environment: EnvironmentId,
        job: JobName,
        ctx: Context[Any, Any],
        text: Annotated[str, Field(description="What to wait for; empty: wait for the job's end.")] = "",
        regex: Annotated[bool, Field(description="`text` is a regular expression (Python).")] = False,
        timeout: Annotated[float, Field(description="Seconds to wait at most.", gt=0, le=600)] = 30,
        max_characters: Limit = 2000,
    ) -> JobState:
        """Wait until a background job has printed a text, has ended, or the time is over; whichever comes first.

        Looks at everything that it printed since its start. Not finding the text is an answer (found: false), together
        with the end of the output: look there for what went wrong.
        """
        try:
            wanted = re.compile(text if regex else re.escape(text))
        except re.error as error:
            raise UsageError(f"{text!r} is no regular expression: {error}") from error
        remote, deadline = desk.remote(ctx), time.monotonic() + timeout
        seen, offset = "", 0
        while True:
            look = jobs.parse_look(job, await remote.run(environment, jobs.look_argv(job, offset, _LOOK_BYTES)))
            offset += len(look.data)
            seen = (seen + look.data.decode(errors="replace"))[-_LOOK_BYTES:]
            match = wanted.search(seen) if text else None
            behind = offset < look.size
            over = look.state != "running" or time.monotonic() >= deadline
            if match or (over and not behind):
                break
            if not behind:
                await asyncio.sleep(_POLL_SECONDS)
        return JobState(
            found=bool(match) if text else look.state == "exited",
            line=_line(seen, match.start())[:500] if match else None,
            state=look.state,
            exit_code=look.exit_code,
            output=seen[-max_characters:],
            cursor=f"job:{environment}:{job}:0" if look.size > max_characters else None,
        )

    @tool("Read on", read_only=True)
    async def read_output(
        cursor: Annotated[str, Field(description="As another answer gave it.")],
        ctx: Context[Any, Any],
        max_characters: Limit = DEFAULT_LIMIT,
    ) -> Page:
        """Read what another answer left out: the middle of a long output, the rest of a list, the log of a job.

        Call it again with the new cursor until there is none. Often grep, head or tail through exec are the shorter way.
        """
        if match := _JOB_CURSOR.fullmatch(cursor):
            environment, job, at = match[1], match[2], int(match[3])
            look = jobs.parse_look(
                job, await desk.remote(ctx).run(environment, jobs.look_argv(job, at, max_characters))
            )
            end = at + len(look.data)
            left = max(0, look.size - end)
            more = f"job:{environment}:{job}:{end}" if left or look.state == "running" else None
            return Page(text=look.data.decode(errors="replace"), cursor=more, left_characters=left)
        page = desk.pages.read(cursor, desk.owner(ctx), max_characters)
        return Page(text=page.text, cursor=page.cursor, left_characters=page.left_out)


async def _running(remote: Remote, environment: str, name: str) -> bool:
    printed = await remote.run(environment, jobs.look_argv(name, 0, 1))
    return not printed.startswith(b"absent") and jobs.parse_look(name, printed).state == "running"


def _line(text: str, at: int) -> str:
    start = text.rfind("\n", 0, at) + 1
    end = text.find("\n", at)
    return text[start : end if end >= 0 else len(text)]
