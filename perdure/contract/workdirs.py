"""Messages that bring code to a job's nodes: from the client to the upload workflow, and from there to a backend."""

from __future__ import annotations

from perdure.contract.base import Message
from perdure.spec.data import WorkdirArchive
from perdure.spec.job import Backend

__all__ = ["WorkdirRequest"]


class WorkdirRequest(Message):
    """Argument of `WorkdirUpload` and of its activities: the code of one submission, before its job exists."""

    archive: WorkdirArchive
    backend: Backend
    namespace: str
    """The job's namespace."""
    job_id: str
    """The workflow ID of the job that will be started with the code; its memo then names the archive."""
    source: str = ""
    """The folder from which the code was packed, for people."""
