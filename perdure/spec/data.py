"""Data of a job: the working directory and volumes of its processes, and the place for its outputs."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .base import AbsolutePath, Integer, Matching, Section, Template
from .object_references import ClaimName

Digest = Annotated[str, Matching(pattern=r"sha256:[0-9a-f]{64}", expected="sha256: and 64 hexadecimal digits")]


class WorkdirArchive(Section):
    """The upload of `path`. Only Perdure's client writes it, when a job is submitted."""

    name: Annotated[str, Matching(pattern=r"perdure-workdir-[0-9a-f]{16}", expected="a name that Perdure has given")]
    """The ConfigMap in the job's namespace that the parts of the upload belong to; each submission has its own."""
    parts: Integer = Field(ge=1, le=64)
    """The number of parts; the largest upload has fewer than the most."""
    digest: Digest
    """The digest of the unpacked tar archive: the same files have the same digest."""


class Workdir(Section):
    """The folder that commands run in, `{path: …}` on the submitting machine."""

    path: str
    """A folder, copied to the nodes if they are on other machines; relative paths count from the specification's
    file."""
    exclude: list[str] = Field(default=[])
    """Patterns as in .gitignore of files that are not copied, in addition to `.git/`, `.venv/` and `__pycache__/`."""
    archive: WorkdirArchive | None = None
    """The upload of `path`; written by Perdure."""


class Volume(Section):
    """A persistent volume claim, mounted in every node."""

    mount_path: AbsolutePath
    """The path at which processes find the volume."""
    pvc: ClaimName
    """The claim's name, in the job's namespace."""
    read_only: bool = False
    """Processes cannot write to it."""


class Outputs(Section):
    """The place for the job's outputs. `${job.name}` and `${job.namespace}` are filled in."""

    logs: Template | None = None
    """URL of a folder, as fsspec takes it (`s3://…`, `gs://…`, `file:///…`), to which the nodes' logs are copied."""
    archive: Template | None = None
    """URL of a folder in which the job is kept for after its end: what it knows of itself, its specification, a report
    and, unless `logs` names another place, its nodes' logs: docs/archive.md. Jobs may share one; each run has a folder
    of its own below it."""
