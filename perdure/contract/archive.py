"""About the archive of a job: what is kept of it at `outputs.archive`, and whether it could be written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from perdure.contract.base import Message, ShortText, Time
from perdure.contract.datasets import DatasetView
from perdure.contract.incidents import IncidentView
from perdure.contract.views import JobStatus, NodeView
from perdure.contract.vocabulary import JobPhase

if TYPE_CHECKING:
    from perdure.spec.job import JobSpec

__all__ = ["ArchiveReport", "ArchiveRequest", "ArchivedJob", "ArchivedRole"]

ARCHIVED_JOB = "job.json"
"""The file of an archive that holds an `ArchivedJob`."""

FORMAT = 1
"""Grows with a change that readers of an older release would misread."""


def archive_folder(url: str, namespace: str, name: str, uid: str) -> str:
    """The folder of one run of a job below `outputs.archive`; no other run, and no other namespace, has it."""
    return f"{url.rstrip('/')}/{namespace}/{name}/{uid}"


def archived_logs(folder: str) -> str:
    """The folder of the nodes' logs in an archive."""
    return f"{folder}/logs"


def archived_events(folder: str) -> str:
    """The folder of the nodes' event files in an archive."""
    return f"{folder}/events"


def job_archive(job: JobSpec, uid: str) -> str | None:
    """The folder of the archive of a run of a job; None where it has none."""
    url = job.outputs.archive
    return None if url is None else archive_folder(url, job.namespace, job.name, uid)


def logs_place(job: JobSpec, uid: str) -> str | None:
    """The folder to which the nodes' logs are copied; None where they are not."""
    archive = job_archive(job, uid)
    return job.outputs.logs or (None if archive is None else archived_logs(archive))


class ArchivedRole(Message):
    """One role of a job as it was at the end."""

    status: JobStatus
    nodes: tuple[NodeView, ...] = ()


class ArchivedJob(Message):
    """All that is kept of a job but its logs and event files.

    It holds what the job answers about itself, and no history of Temporal: that has the tokens of nodes. Secrets are in
    neither, as specifications name them only.
    """

    format: int = FORMAT
    namespace: str
    name: str
    uid: str
    workflow_id: str
    run_id: str = ""
    """The newest run in Temporal."""
    written_at: Time
    is_final: bool = False
    """Whether the job has ended; otherwise this was written when it began."""
    owner: str = ""
    phase: JobPhase | None = None
    """How it has ended; None before the end."""
    started_at: Time
    finished_at: Time | None = None
    spec: dict[str, Any] = Field(default={})
    """The specification, as the job was started with."""
    roles: dict[str, ArchivedRole] = Field(default={})
    """By their names, the leading one first; empty before the end."""
    incidents: tuple[IncidentView, ...] = ()
    datasets: dict[str, DatasetView] = Field(default={})


class ArchiveRequest(Message):
    """The argument of the activity that writes a job's archive."""

    namespace: str
    name: str
    uid: str
    first_run_id: str
    url: str
    """`outputs.archive`."""
    is_final: bool = Field(default=False)
    """Whether the job has ended."""


class ArchiveReport(Message):
    """Answer to the query `report` of the workflow that has a job archived, and its result."""

    folder: str = ""
    """Where the archive is."""
    begun_at: Time | None = None
    """When the place was seen to work, as the job began."""
    complete_at: Time | None = None
    """When it was written after the job's end."""
    problem: ShortText = ""
    """Why it could not be written; empty where it was, or is still tried."""
