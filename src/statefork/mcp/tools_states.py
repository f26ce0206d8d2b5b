"""Tools for what this is all about: snapshots, and what grows from them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from mcp.server.mcpserver import Context
from pydantic import Field

from statefork.mcp import jobs
from statefork.mcp.answers import Change, Forks, Restored, SnapshotInfo, TreeAnswer
from statefork.mcp.desk import DEFAULT_LIMIT, Desk, EnvironmentId, Limit
from statefork.mcp.registering import Registrar
from statefork.mcp.tools_environments import IDLE_PAUSE_SECONDS

__all__ = ["register"]

SnapshotId = Annotated[
    str, Field(description="A snapshot's name, id, or a beginning of it that fits only one.", min_length=1)
]
_PROCESSES = 20


def register(tool: Registrar, desk: Desk) -> None:
    @tool("Take a snapshot")
    async def snapshot(
        environment: EnvironmentId,
        ctx: Context[Any, Any],
        name: Annotated[
            str, Field(description="What works in this state, such as `tests-green`; unique in its tree.")
        ] = "",
        mode: Annotated[
            Literal["auto", "full", "files"],
            Field(
                description="auto: all that the backend can; full: processes and memory or an error; files: only files."
            ),
        ] = "auto",
    ) -> SnapshotInfo:
        """Save the environment as it is now: files, running processes, their memory, the shell. It goes on undisturbed.

        Take one before a risky step and after a slow one that worked; it costs a fraction of a second and little space,
        since only what changed is stored. restore comes back to it, fork starts copies from it, diff compares with it.
        """
        body = {"mode": mode, **({"name": name} if name else {})}
        taken = await desk.remote(ctx).snapshot(environment, body)
        return SnapshotInfo(
            snapshot=taken["id"],
            name=taken["name"],
            duration_ms=taken["duration_ms"],
            captured=taken["captured"],
            not_captured=taken["not_captured"][:_PROCESSES],
        )

    @tool("Restore a snapshot", destructive=True, idempotent=True)
    async def restore(environment: EnvironmentId, snapshot: SnapshotId, ctx: Context[Any, Any]) -> Restored:
        """Put an environment back to the moment of a snapshot: every file, process, variable and open program of then.

        What happened in it since is undone and gone, background jobs and their output included; take a snapshot first if
        you may want it back. Other environments and all snapshots stay, so you can go back, forward and sideways in the
        tree. Not undone: what left the environment, such as network requests, pushes or mails. If the restore fails, the
        environment goes on as it is.
        """
        found = await desk.remote(ctx).restore(environment, snapshot)
        return Restored(**{name: found[name] for name in Restored.model_fields})

    @tool("Fork an environment")
    async def fork(
        environment: EnvironmentId,
        ctx: Context[Any, Any],
        n: Annotated[int, Field(description="How many copies.", ge=1, le=32)] = 1,
        snapshot: Annotated[
            str, Field(description="Start them from this snapshot; without it, from this moment.")
        ] = "",
    ) -> Forks:
        """Make live, independent copies of an environment: same files, same running programs, same shell.

        To try several ideas: fork one copy per idea, work in each by its own id, compare them (run the tests in each; diff),
        go on in the best and destroy the rest. The original is untouched and can be one of the candidates. The copies' first
        state is stored as a snapshot, to which each can be restored.
        """
        body: dict[str, Any] = {"n": n, "idle_pause_seconds": IDLE_PAUSE_SECONDS}
        if snapshot:
            body["snapshot"] = snapshot
        made = await desk.remote(ctx).fork(environment, body)
        return Forks(snapshot=made["snapshot"], environments=[one["id"] for one in made["environments"]])

    @tool("Compare states", read_only=True)
    async def diff(
        environment: EnvironmentId,
        a: SnapshotId,
        ctx: Context[Any, Any],
        b: Annotated[str, Field(description="Another snapshot; without it, the environment's present state.")] = "",
        max_characters: Limit = DEFAULT_LIMIT,
    ) -> Change:
        """Which files were added, changed and removed from snapshot `a` to snapshot `b`, or to now.

        Use it to see what a command or an install really did, or how two branches differ: take a snapshot of each and
        compare the two. Contents are not shown; read_file shows them.
        """
        found = await desk.remote(ctx).diff(environment, a, b or None)
        for member in ("added", "changed", "removed"):
            found[member] = [path for path in found[member] if not path.startswith(jobs.DIRECTORY)]
        marks = (("+", "added"), ("~", "changed"), ("-", "removed"))
        lines = [f"{mark} {path}\n" for mark, member in marks for path in found[member]]
        excerpt = desk.pages.following("".join(lines), desk.owner(ctx), max_characters)
        return Change(
            a=found["a"],
            b=found["b"],
            added=len(found["added"]),
            changed=len(found["changed"]),
            removed=len(found["removed"]),
            changes=excerpt.text,
            cursor=excerpt.cursor,
            processes_added=found["processes_added"][:_PROCESSES],
            processes_removed=found["processes_removed"][:_PROCESSES],
        )

    @tool("Show the tree", read_only=True)
    async def tree(
        environment: EnvironmentId, ctx: Context[Any, Any], max_characters: Limit = DEFAULT_LIMIT
    ) -> TreeAnswer:
        """Draw the snapshots of an environment and of everything forked from it, and which environment stands where."""
        found = await desk.remote(ctx).tree(environment)
        excerpt = desk.pages.following(found["text"], desk.owner(ctx), max_characters)
        return TreeAnswer(tree=excerpt.text, cursor=excerpt.cursor)
