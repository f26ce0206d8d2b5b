"""What crosses the wire. Requests refuse members that they do not know: a misspelt option is an error, not a default."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

__all__ = [
    "Backend", "BackendPage", "Capabilities", "Command", "CommandPage", "CreateEnvironment", "CreateSnapshot", "Diff",
    "Environment", "EnvironmentPage", "Exec", "ExecResult", "FileInfo", "FileList", "Fork", "ForkError", "Forked",
    "MakeDirectory", "MoveFile", "Operation", "OperationPage", "OwnerUsage", "PatchEnvironment", "PatchSnapshot", "Pool", "PoolList",
    "PutPool", "Restore", "Restored", "Run", "Signal", "Snapshot", "SnapshotDetail", "SnapshotPage", "Stdin", "Tree", "TreeNode",
    "Usage", "UsageReport",
]  # fmt: skip

Seconds = Annotated[float, Field(gt=0, le=10 * 365 * 86400, allow_inf_nan=False)]
Word = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Metadata = Annotated[dict[Word, Annotated[str, StringConstraints(max_length=4096)]], Field(max_length=64)]
Encoding = Literal["utf-8", "base64"]


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Terms(Request):
    metadata: Metadata = Field(default_factory=dict, description="Words of your own; lists can be filtered by them.")
    ttl_seconds: Seconds | None = Field(None, description="It is deleted when this time is over. PATCH starts it anew.")
    idle_pause_seconds: Seconds | None = Field(
        None, description="It is paused when nobody has used it for this long; the next call resumes it."
    )


class CreateEnvironment(Terms):
    method: Word = Field(
        "waypoint_build",
        description="How to make it: `waypoint_build`, `docker_build`, ... as in `create_env_manager`; see /v1/backends.",
    )
    arguments: dict[str, Any] = Field(
        default_factory=dict,
        description="The method's own: for waypoint_build `dockerfile_dir` or `dockerfile` (its text), `rootfs`, or neither for "
        "the host's own root; `network`, `memory`, `cpus`, `env`, ... Those that name files of the host need the scope admin.",
        examples=[{"network": "none", "memory": "512M"}],
    )
    snapshot: Word | None = Field(
        None, description="Instead of both: a snapshot, by id or unique prefix. The new environment joins its tree."
    )


class PatchEnvironment(Request):
    metadata: Metadata | None = Field(None, description="Replaces all of it.")
    ttl_seconds: Seconds | None = Field(None, description="From now on; null: no end.")
    idle_pause_seconds: Seconds | None = Field(None, description="null: it is not paused by itself.")


class Capabilities(BaseModel):
    """What `restore` brings back on this host."""

    restores: list[str]
    full: bool
    pause_releases_memory: bool
    snapshot_during_exec: bool
    durable: bool = Field(description="It outlives the daemon's own end.")
    missing: dict[str, str] = Field(description="Why something is not among `restores`, where the host is the reason.")
    versions: dict[str, str]


class Environment(BaseModel):
    id: str
    state: Literal["live", "paused", "lost", "destroyed"]
    lost: str | None = Field(description="Why it is lost: its processes ended without being asked to.")
    backend: str
    method: str
    owner: str = Field(description="The id of the token that made it.")
    metadata: dict[str, str]
    created_at: datetime
    used_at: datetime
    expires_at: datetime | None
    ttl_seconds: float | None
    idle_pause_seconds: float | None
    paused_by: Literal["caller", "idle"] | None = Field(description="`idle`: the next call resumes it.")
    tree: str = Field(description="Environments with the same one share their snapshots.")
    snapshot: str | None = Field(description="The parent of its next snapshot.")
    description: str = Field(description="What to look for on the host: a session, a container.")
    commands: int = Field(description="Commands under way.")
    capabilities: Capabilities | None


class EnvironmentPage(BaseModel):
    items: list[Environment]
    next_cursor: str | None


class Program(Request):
    timeout: Seconds | None = Field(
        None, description="Seconds; then it is ended, and the answer is a problem `timeout`."
    )
    stdin: str | None = Field(None, description="Text; without it the command reads from /dev/null.")
    stdin_base64: str | None = Field(None, description="The same as bytes.")
    encoding: Encoding = Field("utf-8", description="Of the output in the answer; `base64` keeps every byte.")
    output_limit_bytes: Annotated[int, Field(ge=1024, le=16 << 20)] | None = Field(
        None, description="Of each stream in the answer; head and tail are kept. 1 MiB by default."
    )
    background: bool = Field(False, description="Answer 202 with the command as soon as it is under way.")
    interactive: bool = Field(False, description="With `background`: stdin comes later, see POST .../stdin.")


class Exec(Program):
    command: str | None = Field(
        None, description="Evaluated in the persistent shell: cd, export, functions and jobs stay.", examples=["ls -l"]
    )
    command_base64: str | None = Field(None, description="The same as bytes, instead.")
    wait: bool = Field(True, description="False: answer `busy` if another command runs in the shell.")


class Run(Program):
    argv: list[str] = Field(min_length=1, max_length=4096, description="A program and its arguments, beside the shell.")
    cwd: str | None = None
    env: dict[str, str] = Field(default_factory=dict)


class ExecResult(BaseModel):
    command: str = Field(description="The command's id.")
    exit_code: int
    stdout: str
    stderr: str
    output: str = Field(description="Both in the order of their arrival.")
    encoding: Encoding
    cwd: str
    duration_ms: float
    timed_out: bool
    truncated: bool
    shell_restarted: bool = Field(description="This shell knows nothing of earlier commands.")


class Command(BaseModel):
    id: str
    environment: str
    kind: Literal["exec", "run"]
    state: Literal["running", "suspended", "exited", "failed"]
    started_at: datetime
    stdout_bytes: int = Field(description="How much it has printed: where to go on from.")
    stderr_bytes: int
    result: ExecResult | None = Field(description="When it has ended.")
    problem: dict[str, Any] | None = Field(description="Why it has no result, or was ended.")


class CommandPage(BaseModel):
    items: list[Command]
    next_cursor: str | None


class Signal(Request):
    signal: Annotated[str, StringConstraints(pattern=r"^(SIG)?[A-Z0-9+]{2,10}$")] = Field(
        "INT", examples=["INT", "SIGTERM"]
    )


class Stdin(Request):
    data: str = ""
    data_base64: str | None = None
    end: bool = Field(False, description="No more will come.")


class FileInfo(BaseModel):
    name: str
    kind: Literal["file", "directory", "symlink", "other"]
    size_bytes: int
    mode: int = Field(description="Permission bits, as a number: 420 is 0644.")
    modified_at: datetime


class FileList(BaseModel):
    path: str
    items: list[FileInfo]


class MoveFile(Request):
    source: str
    target: str = Field(description="The new name itself, not a directory to put it in.")


class MakeDirectory(Request):
    path: str


class CreateSnapshot(Request):
    name: Word | None = Field(None, description="Unique in its tree.")
    mode: Literal["auto", "full", "files"] = Field(
        "auto", description="All that the backend can; files, processes and memory or an error; only files."
    )


class Snapshot(BaseModel):
    id: str
    name: str | None
    parent: str | None
    environment: str = Field(description="The environment that it was taken of.")
    tree: str
    pinned: bool
    created_at: datetime
    duration_ms: float
    paused_ms: float
    files_bytes: int
    memory_bytes: int
    captured: list[str]
    not_captured: list[str]
    processes: list[str]


class SnapshotDetail(Snapshot):
    manifest: dict[str, Any] = Field(
        description="What the backend wrote down about it: processes, open files, versions."
    )


class SnapshotPage(BaseModel):
    items: list[Snapshot]
    next_cursor: str | None


class PatchSnapshot(Request):
    name: Word | None = Field(None, description="null takes the name away.")
    pinned: bool | None = Field(
        None, description="A pinned snapshot cannot be deleted, and its tree outlives its environments."
    )


class TreeNode(BaseModel):
    snapshot: Snapshot
    environments: list[str] = Field(description="Whose present state grew from it.")
    children: list[str] = Field(description="Ids; the nodes themselves are in the list beside.")


class Tree(BaseModel):
    """Flat, since a chain may be thousands deep."""

    id: str
    roots: list[str]
    nodes: list[TreeNode] = Field(description="Parents before their children.")
    environments: list[str] = Field(description="Those that have no snapshot yet.")
    text: str = Field(description="The same, drawn.")


class Restore(Request):
    snapshot: Word = Field(description="By id, name or unique prefix.")


class Restored(BaseModel):
    environment: str
    snapshot: str
    duration_ms: float
    restored: list[str]
    shell_restarted: bool


class Fork(Terms):
    n: Annotated[int, Field(ge=1, le=256)] = 1
    snapshot: Word | None = Field(
        None, description="By id, name or unique prefix; without it a new one is taken first."
    )
    return_errors: bool = Field(False, description="Keep those that came up, and say of the others why they did not.")


class ForkError(BaseModel):
    index: int
    code: str
    detail: str


class Forked(BaseModel):
    snapshot: str = Field(description="What they came from.")
    environments: list[Environment]
    errors: list[ForkError]


class Diff(BaseModel):
    a: str
    b: str
    added: list[str]
    changed: list[str]
    removed: list[str]
    processes_added: list[str]
    processes_removed: list[str]


class Usage(BaseModel):
    cpu_seconds: float
    memory_byte_seconds: float
    live_seconds: float
    stored_bytes: int
    snapshots: int


class OwnerUsage(Usage):
    owner: str
    environments: int


class UsageReport(BaseModel):
    items: list[OwnerUsage]


class Operation(BaseModel):
    number: int
    operation: str
    started_at: datetime
    duration_ms: float
    error: str | None
    snapshot: str | None
    files_bytes: int
    memory_bytes: int
    details: dict[str, Any]


class OperationPage(BaseModel):
    items: list[Operation]
    next_cursor: str | None


class Backend(BaseModel):
    name: str
    summary: str
    durable: bool
    methods: dict[str, list[str]] = Field(description="Each with the arguments that it takes.")


class BackendPage(BaseModel):
    items: list[Backend]


class PutPool(Request):
    method: Word = "waypoint_build"
    arguments: dict[str, Any] = Field(default_factory=dict)
    size: Annotated[int, Field(ge=0, le=1000)] = 1


class Pool(BaseModel):
    name: str
    method: str
    arguments: dict[str, Any]
    size: int
    ready: int
    problem: str | None = Field(description="Why the last one could not be made.")


class PoolList(BaseModel):
    items: list[Pool]
