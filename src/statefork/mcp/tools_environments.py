"""Tools for environments as a whole: they come, wait and go."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from mcp.server.mcpserver import Context
from pydantic import Field

from statefork.errors import UsageError
from statefork.mcp.answers import Created, Done, EnvironmentInfo, EnvironmentList
from statefork.mcp.desk import Desk, EnvironmentId
from statefork.mcp.registering import Registrar

__all__ = ["IDLE_PAUSE_SECONDS", "info", "register"]

IDLE_PAUSE_SECONDS = 3600.0
"""A model may forget an environment, or its host may close: an hour later it costs nothing but disk."""
_LISTED = 50


def register(tool: Registrar, desk: Desk) -> None:
    @tool("Create an environment")
    async def create_environment(
        ctx: Context[Any, Any],
        name: Annotated[str, Field(description="A word of yours, to find it again in list_environments.")] = "",
        dockerfile: Annotated[str, Field(description="The text of a Dockerfile to build it from.")] = "",
        rootfs: Annotated[
            str, Field(description="A directory or tar archive on the host with a root file system.")
        ] = "",
        snapshot: Annotated[str, Field(description="A snapshot's id: start from that state.")] = "",
        network: Annotated[
            Literal["none", "nat", "host"],
            Field(description="none: no network; nat: it can reach out; host: the host's."),
        ] = "none",
        memory: Annotated[str, Field(description="A limit, such as 2G.")] = "",
        backend: Annotated[
            str, Field(description="waypoint keeps processes and memory in snapshots; docker and podman only files.")
        ] = "waypoint",
    ) -> Created:
        """Make a Linux machine of your own, with one persistent shell.

        Give at most one of dockerfile, rootfs and snapshot; with none it is a copy of the host's own system (same programs
        and files, but nothing that you do reaches the host). It lives until destroy, also when this conversation ends. When
        it has not been used for an hour it is paused, and the next call resumes it.
        """
        body: dict[str, Any] = {"idle_pause_seconds": IDLE_PAUSE_SECONDS, "metadata": {"name": name} if name else {}}
        if sum(map(bool, (dockerfile, rootfs, snapshot))) > 1:
            raise UsageError("give only one of dockerfile, rootfs and snapshot")
        if snapshot:
            body["snapshot"] = snapshot
        else:
            given = {"dockerfile": dockerfile, "rootfs": rootfs, "memory": memory}
            arguments = {key: value for key, value in given.items() if value}
            if backend == "waypoint" or network != "none":
                arguments["network"] = network
            body |= {"method": f"{backend}_build", "arguments": arguments}
        made = await desk.remote(ctx).create(body)
        restores = (made.get("capabilities") or {}).get("restores", [])
        return Created(**info(made).model_dump(), restores=restores)

    @tool("List environments", read_only=True)
    async def list_environments(
        ctx: Context[Any, Any],
        cursor: Annotated[str, Field(description="Of the answer before, for what follows.")] = "",
    ) -> EnvironmentList:
        """All your environments, oldest first: those of earlier conversations too. Look here before you create another."""
        found = await desk.remote(ctx).environments(_LISTED, cursor or None)
        return EnvironmentList(environments=[info(one) for one in found["items"]], cursor=found["next_cursor"])

    @tool("Pause an environment", idempotent=True)
    async def pause(environment: EnvironmentId, ctx: Context[Any, Any]) -> Done:
        """Stop everything in an environment where it is and free its CPU and memory, until resume.

        Nothing is lost: running programs go on afterwards as if nothing had been, but connections to the outside may have
        timed out. For what you will need later and not now.
        """
        remote = desk.remote(ctx)
        found = await remote.environment(environment)
        if found["state"] != "paused" or found["paused_by"] != "caller":
            found = await remote.pause(environment) if found["state"] != "paused" else found
        return Done(environment=found["id"], state=found["state"])

    @tool("Resume an environment", idempotent=True)
    async def resume(environment: EnvironmentId, ctx: Context[Any, Any]) -> Done:
        """Let a paused environment go on where it was. One that was paused only for not being used resumes by itself."""
        remote = desk.remote(ctx)
        found = await remote.environment(environment)
        if found["state"] == "paused":
            found = await remote.resume(environment)
        return Done(environment=found["id"], state=found["state"])

    @tool("Destroy an environment", destructive=True)
    async def destroy(environment: EnvironmentId, ctx: Context[Any, Any]) -> Done:
        """End an environment and remove its files. There is no way back.

        Its snapshots stay as long as another environment of its tree lives (a fork of it, or what it was forked from);
        the last one takes them along. Copy out what you need first, with read_file.
        """
        remote = desk.remote(ctx)
        found = await remote.environment(environment)
        await remote.destroy(found["id"])
        return Done(environment=found["id"], state="destroyed")


def info(document: dict[str, Any]) -> EnvironmentInfo:
    return EnvironmentInfo(
        environment=document["id"],
        name=document["metadata"].get("name"),
        state=document["state"],
        backend=document["backend"],
        snapshot=document["snapshot"],
        lost=document["lost"],
    )
