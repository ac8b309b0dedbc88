"""The activities of `WorkdirUpload`: store the code of a submission where its job's nodes will find it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

from temporalio import activity
from temporalio.client import Client
from temporalio.exceptions import ApplicationError

from perdure.activities.nodes.backend import NodeBackend, NodeRefused
from perdure.base.executions import find
from perdure.base.payloads import memo_value
from perdure.contract import WorkdirRequest
from perdure.contract.names import WORKDIR_MEMO

_CALL_TIMEOUT = timedelta(seconds=5)


@runtime_checkable
class WorkdirBackend(Protocol):
    """A backend whose nodes cannot see the submitting machine.

    An archive has no owner until a node of its job is created; after that it is deleted together with the job.
    """

    name: str

    async def keep_part(self, request: WorkdirRequest, index: int, content: bytes) -> None:
        """Stores one part; storing the same part twice has no further effect.

        Raises:
            NodeRefused: if the part can never be stored.
        """
        ...

    async def is_adopted(self, request: WorkdirRequest) -> bool:
        """Returns whether a job owns the archive."""
        ...

    async def remove_archive(self, request: WorkdirRequest) -> None:
        """Removes all stored parts of the archive."""
        ...


class WorkdirActivities:
    """The upload activities, for the backends of this worker that support uploads."""

    def __init__(self, client: Client, backends: Iterable[NodeBackend]) -> None:
        self._client = client
        self._backends = {backend.name: backend for backend in backends if isinstance(backend, WorkdirBackend)}

    @property
    def all(self) -> Sequence[Callable[..., Any]]:
        return (self.keep_workdir_part, self.settle_workdir)

    @activity.defn(name="keep_workdir_part")
    async def keep_workdir_part(self, request: WorkdirRequest, index: int, content: bytes) -> None:
        """Stores one part of the archive.

        Raises:
            ApplicationError: `WorkdirRefused`, not retried, if the backend can never store it.
        """
        try:
            await self._backend(request).keep_part(request, index, content)
        except NodeRefused as refused:
            raise ApplicationError(str(refused), type="WorkdirRefused", non_retryable=True) from refused

    @activity.defn(name="settle_workdir")
    async def settle_workdir(self, request: WorkdirRequest) -> str:
        """Leaves the archive to its job if the job has adopted it, and removes it if there is no such job.

        Raises:
            ApplicationError: while the job runs and has not adopted it; retried later.
        """
        name = request.archive.name
        if request.backend not in self._backends:
            return "nothing was kept"
        backend = self._backend(request)
        if await backend.is_adopted(request):
            return f"{name} belongs to {request.job_id}"
        if await self._job_waits(request):
            raise ApplicationError(f"{request.job_id} has not taken {name} yet", type="NotTakenYet")
        await backend.remove_archive(request)
        return f"{name} was removed: no job has taken it"

    async def _job_waits(self, request: WorkdirRequest) -> bool:
        """Returns whether the job that was started with this archive is open; another job may have taken its name."""
        job = await find(self._client, request.job_id, rpc_timeout=_CALL_TIMEOUT)
        if job is None or not job.is_open:
            return False
        return await memo_value(self._client, job, WORKDIR_MEMO) == request.archive.name

    def _backend(self, request: WorkdirRequest) -> WorkdirBackend:
        backend = self._backends.get(request.backend)
        if backend is None:
            raise ApplicationError(
                f"backend is {str(request.backend)!r}, which this worker does not serve; start a worker with it: "
                f"perdure worker --backend {request.backend}",
                type="WorkdirRefused",
                non_retryable=True,
            )
        return backend
