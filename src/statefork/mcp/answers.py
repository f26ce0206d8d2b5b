"""What the tools answer: the structured output of each, as small as it can be."""

from __future__ import annotations

import json
from typing import ClassVar

from pydantic import BaseModel, Field

__all__ = [
    "Answer",
    "Change",
    "Content",
    "Created",
    "Done",
    "EnvironmentInfo",
    "EnvironmentList",
    "ExecAnswer",
    "FileEntry",
    "FileListing",
    "Forks",
    "Job",
    "JobState",
    "Page",
    "Restored",
    "SnapshotInfo",
    "TreeAnswer",
    "Written",
]


class Answer(BaseModel):
    """Answered twice: as structured output, and as text for hosts that show a model nothing else."""

    body_member: ClassVar[str | None] = None
    """The member that is long text: it stands below the others, without JSON's quoting."""

    def as_text(self) -> str:
        told = self.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        if self.body_member is None:
            return json.dumps(told, ensure_ascii=False)
        body = told.pop(self.body_member, "")
        return f"{json.dumps(told, ensure_ascii=False)}\n\n{body}"


class EnvironmentInfo(Answer):
    environment: str = Field(description="Its id: what the other tools take.")
    name: str | None = None
    state: str = Field(description="live, paused (the next call may have to resume it) or lost.")
    backend: str
    snapshot: str | None = Field(None, description="The snapshot that its present state grew from.")
    lost: str | None = Field(None, description="Why it is lost; destroy it.")


class Created(EnvironmentInfo):
    restores: list[str] = Field(description="What restore brings back here: files, processes, memory, shell, terminal.")


class EnvironmentList(Answer):
    environments: list[EnvironmentInfo]
    cursor: str | None = Field(None, description="There are more: call again with it.")


class ExecAnswer(Answer):
    body_member = "output"

    exit_code: int
    output: str = Field(description="stdout and stderr as they came; the middle is left out when it is long.")
    cwd: str
    cursor: str | None = Field(None, description="For read_output: the part that was left out.")
    timed_out: bool = False
    shell_restarted: bool = Field(False, description="True: variables, cwd and jobs of earlier commands are gone.")
    advice: str | None = None


class Page(Answer):
    body_member = "text"

    text: str
    cursor: str | None = Field(None, description="Call again with it for what follows; null: that was all.")
    left_characters: int = 0


class Job(Answer):
    job: str = Field(description="Its name, for wait_for_text.")
    pid: int
    log: str = Field(description="The file that holds its output, inside the environment.")


class JobState(Answer):
    body_member = "output"

    found: bool = Field(description="Whether the text came.")
    line: str | None = Field(None, description="The line with it.")
    state: str = Field(description="running, exited, or lost: its process is gone and nobody knows how it ended.")
    exit_code: int | None = None
    output: str = Field(description="The end of what it has printed.")
    cursor: str | None = Field(None, description="For read_output: its output from the beginning.")


class FileEntry(BaseModel):
    name: str
    kind: str
    size_bytes: int


class FileListing(Answer):
    path: str
    entries: list[FileEntry]
    total: int
    cursor: str | None = Field(None, description="There are more: call again with it.")


class Content(Answer):
    body_member = "text"

    path: str
    text: str
    encoding: str = Field("utf-8", description="base64 for what is no text.")
    size_bytes: int
    cursor: str | None = Field(None, description="There is more: call again with it.")


class Written(Answer):
    path: str
    size_bytes: int


class SnapshotInfo(Answer):
    snapshot: str = Field(description="Its id: for restore, fork and diff.")
    name: str | None = None
    duration_ms: float
    captured: list[str]
    not_captured: list[str] = Field(default_factory=list, description="What a restore will not bring back.")


class Restored(Answer):
    environment: str
    snapshot: str
    restored: list[str]
    shell_restarted: bool = Field(description="True: the shell is a new one; set variables and cwd again.")
    duration_ms: float


class Forks(Answer):
    snapshot: str = Field(description="What they all started from.")
    environments: list[str]


class Change(Answer):
    body_member = "changes"

    a: str
    b: str
    added: int
    changed: int
    removed: int
    changes: str = Field(description="A line each: + added, ~ changed, - removed.")
    cursor: str | None = None
    processes_added: list[str] = Field(default_factory=list)
    processes_removed: list[str] = Field(default_factory=list)


class TreeAnswer(Answer):
    body_member = "tree"

    tree: str = Field(description="Drawn: snapshots, and which environment stands on which.")
    cursor: str | None = None


class Done(Answer):
    environment: str
    state: str
