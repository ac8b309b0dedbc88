"""The activity that watches a cluster without an end, and what a worker serves for it.

Its heartbeats hold the view that `perdure cluster` shows: they are the newest of what is known, add nothing to a
history, and can be read while no worker runs. The workflow is told what jobs that share are to be advised by, and only
when that has changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from temporalio import activity
from temporalio.client import Client
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.service import RPCError
from temporalio.worker import PollerBehaviorSimpleMaximum, Worker

from perdure.activities.cluster.jobs import OpenJobs
from perdure.activities.cluster.room import RoomTeller
from perdure.activities.cluster.view import joined_machines, summary_of, view_of, with_machines
from perdure.activities.nodes.backend import NodeBackend
from perdure.activities.nodes.machines import Machines, MachinesUnknown, MonitoredBackend
from perdure.contract import ClusterRef, ClusterSummary, ClusterView, SharingPolicy
from perdure.contract.names import CLUSTER, WATCH_CLUSTER, cluster_task_queue, cluster_workflow_id

logger = logging.getLogger(__name__)

VIEW_EVERY: Final = 2.0
"""Seconds between two views at least, while something changes. One of ten thousand machines takes 50 ms and is a
heartbeat of 110 kB."""
_STILL_HERE: Final = 15.0
"""Seconds after which the view is told again although nothing has changed: its age is the age of what it shows."""
_JOBS_EVERY: Final = 10.0
"""Seconds between two looks at the list of jobs, for which the server has no watch."""
_TELL_EVERY: Final = 10.0
"""Seconds between two signals to the workflow: each costs four events of its history."""
_TELL_AGAIN: Final = 300.0
"""Seconds after which jobs that share are told again, whose times have passed."""
_REFUSED_AGAIN: Final = 60.0
"""Seconds after which a refused list of machines is requested again."""
_CALL: Final = timedelta(seconds=10)
_LISTING: Final = "its machines are being listed"


class ClusterActivities:
    """Watches the machines of one backend, and the jobs of one task queue on them."""

    def __init__(
        self, client: Client, backend: NodeBackend, *, task_queue: str, sharing: SharingPolicy | None = None
    ) -> None:
        """Creates the object.

        Args:
            client: A client of the namespace of the jobs.
            backend: Where their nodes are.
            task_queue: The queue of the jobs: several sites may share a namespace.
            sharing: What the nodes are shared for; None where jobs are not advised.
        """
        self._client = client
        self._backend = backend
        self._task_queue = task_queue
        self._sharing = sharing

    @property
    def all(self) -> list[Callable[..., Any]]:
        """The activities to register with the worker."""
        return [self.watch_cluster]

    @activity.defn(name=WATCH_CLUSTER)
    async def watch_cluster(self, ref: ClusterRef) -> None:
        """Watches until it is cancelled."""
        info = activity.info()
        assert info.workflow_id is not None
        workflow = self._client.get_workflow_handle(info.workflow_id, run_id=info.workflow_run_id)
        told: ClusterSummary | None = None
        told_at, rooms = 0.0, RoomTeller(self._client)
        before = info.heartbeat_details
        watched = watch(self._client, self._backend, ref, task_queue=self._task_queue, sharing=self._sharing)
        async with contextlib.aclosing(watched) as views:
            async for view, summary in views:
                if summary is None:
                    # What an earlier attempt has seen is worth more than nothing: its time says how old it is.
                    activity.heartbeat(*(before or (view,)))
                    continue
                activity.heartbeat(view)
                await rooms.tell(view.jobs)
                now = time.monotonic()
                changed = _changed(told, summary) and now - told_at >= _TELL_EVERY
                if changed or (len(summary.jobs) > 1 and now - told_at >= _TELL_AGAIN):
                    await workflow.signal("observed", summary, rpc_timeout=_CALL)
                    told, told_at = summary, now


async def watch(
    client: Client, backend: NodeBackend, ref: ClusterRef, *, task_queue: str, sharing: SharingPolicy | None = None
) -> AsyncGenerator[tuple[ClusterView, ClusterSummary | None]]:
    """Yields views of a cluster until it is closed: soon after a change, and now and then without one. No summary comes
    with those that lack the machines because these are still being listed."""
    sees = isinstance(backend, MonitoredBackend)
    jobs = OpenJobs(client, task_queue=task_queue, backend=backend.name, with_nodes=not sees)
    seen, changed = _Seen(), asyncio.Event()
    tasks = [asyncio.create_task(_look_at_jobs(jobs, changed))]
    if isinstance(backend, MonitoredBackend):
        tasks.append(asyncio.create_task(_follow_machines(backend, seen, changed)))
    try:
        while True:
            began = time.monotonic()
            machines = seen.machines if sees else joined_machines(jobs.nodes)
            roles = with_machines(jobs.roles, machines)
            problem = (seen.problem if sees else "") or jobs.problem
            view = view_of(ref, machines, roles, datetime.now(UTC), sharing=sharing, problem=problem)
            is_listing = sees and seen.is_listing
            yield view, None if is_listing else summary_of(view, roles)
            if not is_listing:
                await asyncio.sleep(max(VIEW_EVERY - (time.monotonic() - began), 0.0))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STILL_HERE - VIEW_EVERY):
                    await changed.wait()
            changed.clear()
            for task in tasks:
                if task.done():
                    task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Seen:
    def __init__(self) -> None:
        self.machines = Machines()
        self.problem = _LISTING

    @property
    def is_listing(self) -> bool:
        """Whether the machines are not known yet."""
        return self.problem == _LISTING


async def _look_at_jobs(jobs: OpenJobs, changed: asyncio.Event) -> None:
    while True:
        before = jobs.roles, jobs.problem
        try:
            await jobs.look()
        except RPCError as error:
            jobs.problem = f"the jobs cannot be listed: {error.message}"
        if (jobs.roles, jobs.problem) != before:
            changed.set()
        await asyncio.sleep(_JOBS_EVERY)


async def _follow_machines(backend: MonitoredBackend, seen: _Seen, changed: asyncio.Event) -> None:
    while True:
        try:
            async with contextlib.aclosing(backend.machines()) as followed:
                async for seen.machines in followed:
                    seen.problem = ""
                    changed.set()
        except MachinesUnknown as error:
            seen.problem = str(error)
            changed.set()
        await asyncio.sleep(_REFUSED_AGAIN)


def _changed(told: ClusterSummary | None, summary: ClusterSummary) -> bool:
    """Whether the workflow may decide otherwise."""
    if told is None:
        return True
    return told.replace(seen_at=summary.seen_at, machines=0, unusable=0) != summary.replace(machines=0, unusable=0)


@asynccontextmanager
async def watching_clusters(
    client: Client, backends: Sequence[NodeBackend], *, task_queue: str, sharing: SharingPolicy | None
) -> AsyncGenerator[None]:
    """Watches the machines of these backends while the context is open.

    Each has a queue of its own, since not every worker can see its machines; with one poller, since one activity runs
    on it without an end.
    """
    async with contextlib.AsyncExitStack() as workers:
        for backend in backends:
            worker = Worker(
                client,
                task_queue=cluster_task_queue(task_queue, backend.name),
                activities=ClusterActivities(client, backend, task_queue=task_queue, sharing=sharing).all,
                max_concurrent_activities=2,
                activity_task_poller_behavior=PollerBehaviorSimpleMaximum(maximum=1),
                max_heartbeat_throttle_interval=timedelta(seconds=VIEW_EVERY),
            )
            await workers.enter_async_context(worker)
            await start_watch(client, ClusterRef(backend=backend.name), task_queue=task_queue)
        yield


async def start_watch(client: Client, ref: ClusterRef, *, task_queue: str) -> None:
    """Starts the workflow that watches, where it does not run yet."""
    try:
        await client.start_workflow(
            CLUSTER,
            ref,
            id=cluster_workflow_id(task_queue, ref.backend),
            task_queue=task_queue,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            static_summary=f"watches the machines of {ref.backend} for `perdure cluster`",
            rpc_timeout=_CALL,
        )
    except RPCError as error:
        logger.warning("the machines of %s are not watched: the workflow cannot be started: %s", ref.backend, error)
