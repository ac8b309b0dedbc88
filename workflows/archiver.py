"""Archiver: has a job archived at `outputs.archive`, apart from the job, which waits for no storage.

The job starts it. It has a first record written at once, so that a place that cannot be written is told while the job
runs, and the whole one when the job has ended, in whatever way: the job itself need not say so.
"""

from __future__ import annotations

import asyncio

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from perdure.contract import ArchiveReport, ArchiveRequest, Message
    from perdure.contract.archive import archive_folder
    from perdure.contract.names import ARCHIVER, archiver_workflow_id, job_workflow_id
    from perdure.spec.job import JobSpec
    from perdure.workflows import options
    from perdure.workflows.companion import JobOwner, accompany, start_companion


class ArchiverInput(Message):
    """The argument of an Archiver."""

    owner: JobOwner
    request: ArchiveRequest
    report: ArchiveReport


@workflow.defn(name=ARCHIVER)
class Archiver:
    """The workflow of one job's archive; see the module."""

    @workflow.init
    def __init__(self, archive: ArchiverInput) -> None:
        self._input = archive
        self._report = archive.report

    @workflow.run
    async def run(self, archive: ArchiverInput) -> ArchiveReport:
        beginning = asyncio.create_task(self._begin())
        ended = await accompany(archive.owner)
        beginning.cancel()
        await asyncio.gather(beginning, return_exceptions=True)
        if not ended:
            workflow.continue_as_new(archive.replace(report=self._report))
        await self._write(archive.request.replace(is_final=True))
        return self._report

    @workflow.query(description="Where the archive is, and whether it could be written")
    def report(self) -> ArchiveReport:
        return self._report

    async def _begin(self) -> None:
        if self._report.begun_at is None:
            await self._write(self._input.request)

    async def _write(self, request: ArchiveRequest) -> None:
        when = "the end" if request.is_final else "the beginning"
        try:
            await workflow.execute_activity(
                "archive_job",
                request,
                start_to_close_timeout=options.ARCHIVE_ATTEMPT,
                schedule_to_close_timeout=options.ARCHIVE_PATIENCE,
                retry_policy=options.ARCHIVE_RETRY,
                summary=f"{when} of {request.namespace}/{request.name}",
            )
        except ActivityError as error:
            if is_cancelled_exception(error) and not request.is_final:
                return  # The job has ended meanwhile.
            reason = error.cause.message if isinstance(error.cause, ApplicationError) else str(error.cause or error)
            self._report = self._report.replace(problem=reason)
            return
        time = "complete_at" if request.is_final else "begun_at"
        self._report = self._report.replace(problem="", **{time: workflow.now()})


async def start_archiver(job: JobSpec, uid: str) -> None:
    """Starts the workflow of a job's archive on behalf of the job; does nothing where the job has none."""
    url = job.outputs.archive
    if url is None:
        return
    job_id, first_run = job_workflow_id(job.namespace, job.name), workflow.info().first_execution_run_id
    owner = JobOwner(job_id=job_id, job_first_run_id=first_run, check=job.timing.owner_check)
    await start_companion(
        ARCHIVER,
        ArchiverInput(
            owner=owner,
            request=ArchiveRequest(namespace=job.namespace, name=job.name, uid=uid, first_run_id=first_run, url=url),
            report=ArchiveReport(folder=archive_folder(url, job.namespace, job.name, uid)),
        ),
        owner=owner,
        workflow_id=archiver_workflow_id(job_id, uid),
        summary=f"archive of {job_id}",
    )
