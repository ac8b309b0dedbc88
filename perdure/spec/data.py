"""What a job's processes find on their nodes, and where its results go."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, model_validator

from .base import AbsolutePath, Integer, Matching, SecretReference, Section, Template

Digest = Annotated[str, Matching(pattern=r"sha256:[0-9a-f]{64}", expected="sha256: and 64 hexadecimal digits")]


class WorkdirArchive(Section):
    """What was uploaded of `path`. Perdure's client writes it when a job is submitted; nobody else does."""

    name: Annotated[str, Matching(pattern=r"perdure-workdir-[0-9a-f]{16}", expected="a name that Perdure has given")]
    """The ConfigMap in the job's namespace that its parts belong to; each submission has its own."""
    parts: Integer = Field(ge=1)
    """How many there are."""
    digest: Digest
    """Of the unpacked tar archive: the same files have the same digest."""


class Workdir(Section):
    """The folder that commands run in: `{path: …}` on the submitting machine, or `{git: URL, ref: SHA}`."""

    path: str | None = None
    """A folder, carried to the nodes where they are elsewhere; relative paths count from the specification's file."""
    exclude: list[str] = Field(default=[])
    """Patterns as in .gitignore of what is not carried along, beside `.git/`, `.venv/` and `__pycache__/`."""
    archive: WorkdirArchive | None = None
    """What was uploaded of `path`; written by Perdure."""
    git: str | None = None
    """URL of a repository that nodes check out instead."""
    ref: str | None = None
    """The commit, tag or branch of `git`."""

    @model_validator(mode="after")
    def _has_one_source(self) -> Workdir:
        if (self.path is None) == (self.git is None):
            raise ValueError("expected exactly one of path and git")
        if (self.git is None) != (self.ref is None):
            raise ValueError("expected git and ref together")
        return self


class Volume(Section):
    """A persistent volume claim, mounted in every node."""

    mount_path: AbsolutePath
    """Where processes find it."""
    pvc: str
    """The claim's name, in the job's namespace."""
    read_only: bool = False
    """Processes cannot write to it."""


class Outputs(Section):
    """Where what a job leaves behind is kept. `${job.name}` and `${job.namespace}` are filled in."""

    logs: Template | None = None
    """URL of a folder, as fsspec takes it (`s3://…`, `gs://…`, `file:///…`), that the nodes' logs are copied to."""
    archive: Template | None = None
    """URL of a folder that the job's history and report are written to when it ends."""


class NotificationEvent(StrEnum):
    """What people may want to hear of."""

    FAILED = "failed"
    STUCK = "stuck"
    SUCCEEDED = "succeeded"


class SecretSource(Section):
    """A value that stays in a secret; it never enters Temporal."""

    secret: SecretReference
    """The secret's name and key, such as hooks/slack."""


class Notification(Section):
    """A message to people when something happens to the job."""

    events: Annotated[list[NotificationEvent], Field(min_length=1)]
    """When: `failed`, `stuck`, `succeeded`."""
    slack: SecretSource
    """The Slack webhook that it goes to."""
