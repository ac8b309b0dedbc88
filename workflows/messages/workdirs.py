"""How code comes to a job's nodes: from the client to the upload's workflow, and from there to a backend."""

from __future__ import annotations

from perdure.spec.data import WorkdirArchive
from perdure.spec.job import Backend
from workflows.messages.base import Message


class WorkdirRequest(Message):
    """Argument of `WorkdirUpload` and of its activities: one submission's code, before there is a job for it."""

    archive: WorkdirArchive
    backend: Backend
    namespace: str
    """The job's."""
    job_id: str
    """The workflow that is going to be started with it; its memo then names the archive."""
    source: str = ""
    """Where it was packed, for people."""
