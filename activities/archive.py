"""Writes the archive of a job: what it answers about itself, and its specification, to `outputs.archive`.

Each try writes the same files again, so one that was cut off does no harm. Logs are not copied here: agents write them
to the same folder as they are printed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Any, Final
from urllib.parse import urlsplit

from temporalio import activity
from temporalio.client import Client, WorkflowHandle, WorkflowQueryFailedError
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError

from perdure.activities.nodes.backend import NodeBackend
from perdure.activities.site import PolicyBackend
from perdure.agent.local_files import LocalFiles, open_storage
from perdure.base.executions import (
    ExecutionDescription,
    ExecutionStatus,
    QueryRejected,
    find_last_run,
    list_executions,
    query,
    quoted,
)
from perdure.base.own_threads import OwnThreads
from perdure.base.payloads import first_value
from perdure.contract import (
    ArchivedJob,
    ArchivedRole,
    ArchiveRequest,
    DatasetView,
    IncidentView,
    JobPhase,
    JobStatus,
    NodesQuery,
    NodeView,
)
from perdure.contract.archive import ARCHIVED_JOB, archive_folder
from perdure.contract.names import dataset_workflow_id, job_workflow_id, role_of_group
from perdure.spec.job import Backend
from perdure.workflows import options
from perdure.workflows.search_attributes import JOB_OWNER

PLACES_VARIABLE: Final = "PERDURE_ARCHIVE_PLACES"
"""Where a worker may write archives, besides `archive_places` of its site's policy: URLs with spaces between them."""

REPORT: Final = "report.html"

WRITES_AT_ONCE: Final = 32
"""Archives of one namespace that are written at a time: a storage that hangs may hold each try for good."""

Render = Callable[[ArchivedJob], str]
"""Makes the report of a job, as `perdure report` does it."""

_PHASES_OF_ENDS: Final = {
    ExecutionStatus.TERMINATED: JobPhase.CANCELLED,
    ExecutionStatus.CANCELED: JobPhase.CANCELLED,
}
"""The phases of jobs that were ended without telling of it."""

_CALL: Final = options.SIGNAL_TIMEOUT * 5
"""Timeout of a question to a job: one that has closed is first replayed as a whole."""


class ArchivePlaces:
    """The places to which this site's workers write for users.

    A worker writes with its own rights, which users must not be given: to other users' storage, or to the files of its
    machine. Where nodes run on that machine anyway, as the same user, there is nothing to guard.

    Args:
        own_machine: Whether users run nodes on this machine.
        places: URLs; each allows all below it.
    """

    def __init__(self, *, own_machine: bool, places: Iterable[str] = ()) -> None:
        self.own_machine = own_machine
        self._places = tuple(places)

    @classmethod
    def of_site(cls, backends: Iterable[NodeBackend], variables: Mapping[str, str] = os.environ) -> ArchivePlaces:
        """The places that the site's policy and the worker's environment allow."""
        served = tuple(backends)
        policies = [backend.policy().get("archive_places") for backend in served if isinstance(backend, PolicyBackend)]
        allowed = [str(place) for places in policies if isinstance(places, list) for place in places]
        return cls(
            own_machine=any(backend.name == Backend.LOCAL for backend in served),
            places=(*allowed, *variables.get(PLACES_VARIABLE, "").split()),
        )

    def problem(self, url: str) -> str:
        """Why no archive may be at a URL; empty where one may."""
        if self.own_machine or any(_is_below(url, place) for place in self._places):
            return ""
        allowed = " and ".join(self._places) or "no place"
        return f"outputs.archive: got {url}; this site lets its workers write archives to {allowed} (archive_places)"


def _is_below(url: str, place: str) -> bool:
    found, allowed = urlsplit(url), urlsplit(place)
    same = (found.scheme, found.netloc) == (allowed.scheme, allowed.netloc)
    plain = not (found.query or found.fragment or "::" in url or ".." in PurePosixPath(found.path).parts)
    # The text itself, as storages read it: `urlsplit` leaves out tabs, and a question mark that nothing follows.
    return same and plain and f"{url.rstrip('/')}/".startswith(f"{place.rstrip('/')}/")


class ArchiveActivities:
    """Writes archives.

    Args:
        client: A client of the jobs' namespace.
        places: Where it may write.
        render: Makes the report; None: archives have none.
    """

    def __init__(self, client: Client, places: ArchivePlaces, render: Render | None = None) -> None:
        self._client = client
        self._places = places
        self._render = render
        self._writes = OwnThreads("archive", most=WRITES_AT_ONCE)

    @property
    def all(self) -> Sequence[Callable[..., Any]]:
        """The activities to register with the worker."""
        return (self.archive_job,)

    @activity.defn(name="archive_job")
    async def archive_job(self, request: ArchiveRequest) -> None:
        """Writes what is known of a job.

        Raises:
            ApplicationError: if it cannot be written; without retries where another try changes nothing.
        """
        if problem := self._places.problem(request.url):
            raise ApplicationError(problem, type="ArchiveRefused", non_retryable=True)
        record = await read_job(self._client, request)
        files = {ARCHIVED_JOB: record.model_dump_json(indent=1).encode()}
        if self._render is not None and record.is_final:
            files[REPORT] = self._render(record).encode()
        folder = archive_folder(request.url, request.namespace, request.name, request.uid)
        try:
            await self._writes.run(request.namespace, lambda: self._write(folder, files))
        except Exception as error:
            # Each storage behind the URL raises errors of its own.
            words = str(error) or type(error).__name__
            raise ApplicationError(f"{folder} cannot be written: {words}", type="ArchiveFailed") from None

    def _write(self, folder: str, files: Mapping[str, bytes]) -> None:
        storage, root = open_storage(folder, contained=not self._places.own_machine)
        storage.makedirs(root, exist_ok=True)
        for name, content in files.items():
            if isinstance(storage, LocalFiles):
                # A reader finds the old file or the new one; stores of objects do that by themselves.
                storage.pipe_file(f"{root}/{name}.new", content)
                storage.mv(f"{root}/{name}.new", f"{root}/{name}")
            else:
                storage.pipe_file(f"{root}/{name}", content)


async def read_job(client: Client, request: ArchiveRequest) -> ArchivedJob:
    """Reads a job from Temporal; before its end, no more than it was started with.

    Raises:
        ApplicationError: if the server has forgotten it.
        RPCError: if the server or the job does not answer.
    """
    job_id = job_workflow_id(request.namespace, request.name)
    run = await _newest_run(client, job_id, request)
    record = ArchivedJob(
        namespace=request.namespace,
        name=request.name,
        uid=request.uid,
        workflow_id=job_id,
        run_id=run.run_id,
        written_at=datetime.now(UTC),
        owner=run.search_attributes.get(JOB_OWNER) or "",
        started_at=run.began,
        spec=await _spec(client, job_id, run.run_id),
    )
    if not request.is_final:
        return record
    job = client.get_workflow_handle(job_id, run_id=run.run_id)
    leading = await query(job, "status", result_type=JobStatus, rpc_timeout=_CALL)
    names = leading.roles or (leading.role,)
    order = sorted(names, key=lambda role: role != leading.role)
    return record.replace(
        is_final=True,
        phase=leading.phase if leading.finished_at is not None else _PHASES_OF_ENDS.get(run.status, JobPhase.FAILED),
        finished_at=run.close_time,
        roles={role: await _role(client, job, role) for role in order},
        incidents=tuple(await query(job, "incidents", result_type=list[IncidentView], rpc_timeout=_CALL)),
        datasets=await _datasets(client, job_id, request.uid),
    )


async def _newest_run(client: Client, job_id: str, request: ArchiveRequest) -> ExecutionDescription:
    """The newest run of the job that is meant; a later job may have its name by now."""
    newest = await find_last_run(client, job_id, request.first_run_id, rpc_timeout=_CALL)
    if newest is None:
        raise ApplicationError(
            "Temporal has deleted the job before it could be archived", type="JobForgotten", non_retryable=True
        )
    return newest


async def _spec(client: Client, job_id: str, run_id: str) -> dict[str, Any]:
    events = client.get_workflow_handle(job_id, run_id=run_id).fetch_history_events(page_size=1, rpc_timeout=_CALL)
    async for event in events:
        payloads = event.workflow_execution_started_event_attributes.input.payloads
        spec = await first_value(client, job_id, payloads)
        return spec if isinstance(spec, dict) else {}
    return {}


async def _role(client: Client, job: WorkflowHandle[Any, Any], role: str) -> ArchivedRole:
    status = await query(job, "status", args=[role], result_type=JobStatus, rpc_timeout=_CALL)
    nodes: list[NodeView] = []
    for group in (group for group in status.groups if role_of_group(group) == role):
        request = NodesQuery(group=int(group.rpartition("/")[2]), role=role)
        nodes += await query(job, "nodes", args=[request], result_type=list[NodeView], rpc_timeout=_CALL)
    return ArchivedRole(status=status, nodes=tuple(nodes))


async def _datasets(client: Client, job_id: str, uid: str) -> dict[str, DatasetView]:
    prefix = dataset_workflow_id(job_id, uid, "")
    ids = {
        one.id async for one in list_executions(client, f"WorkflowId STARTS_WITH {quoted(prefix)}", rpc_timeout=_CALL)
    }
    found: dict[str, DatasetView] = {}
    for workflow_id in sorted(ids):
        try:
            view = await query(
                client.get_workflow_handle(workflow_id), "progress", result_type=DatasetView, rpc_timeout=_CALL
            )
        except (RPCError, WorkflowQueryFailedError, QueryRejected):
            continue
        found[workflow_id.removeprefix(prefix)] = view
    return found
