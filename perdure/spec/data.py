"""What a job's processes find on their nodes, and where its results go."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .base import AbsolutePath, Integer, Matching, Section, Template

Digest = Annotated[str, Matching(pattern=r"sha256:[0-9a-f]{64}", expected="sha256: and 64 hexadecimal digits")]


class WorkdirArchive(Section):
    """What was uploaded of `path`. Only Perdure's client writes it, when a job is submitted."""

    name: Annotated[str, Matching(pattern=r"perdure-workdir-[0-9a-f]{16}", expected="a name that Perdure has given")]
    """The ConfigMap in the job's namespace that its parts belong to; each submission has its own."""
    parts: Integer = Field(ge=1)
    """How many there are."""
    digest: Digest
    """Of the unpacked tar archive: the same files have the same digest."""


class Workdir(Section):
    """The folder that commands run in, `{path: …}` on the submitting machine."""

    path: str
    """A folder, carried to the nodes where they are elsewhere; relative paths count from the specification's file."""
    exclude: list[str] = Field(default=[])
    """Patterns as in .gitignore of what is not carried along, beside `.git/`, `.venv/` and `__pycache__/`."""
    archive: WorkdirArchive | None = None
    """What was uploaded of `path`; written by Perdure."""


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
