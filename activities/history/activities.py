"""What a worker that keeps a history serves: one activity that records without an end, and one that answers.

Nothing waits for the recording: a job does not know of it. What could not be written is written later, as long as
Temporal still knows the job.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

from temporalio import activity
from temporalio.client import Client, WorkflowQueryFailedError
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode
from temporalio.worker import PollerBehaviorSimpleMaximum, Worker

from perdure.activities.history.answers import NoSuchJob, answer
from perdure.activities.history.records import JobRecord, record_of
from perdure.activities.history.settings import HistorySettings
from perdure.activities.history.store import HistoryStore, HistoryUnavailable, NotRecorded
from perdure.activities.recorded_spec import recorded_spec
from perdure.base.executions import (
    OPEN,
    Execution,
    ExecutionDescription,
    ExecutionStatus,
    QueryRejected,
    describe,
    describe_all,
    find,
    list_executions,
    query,
)
from perdure.base.leases import lease_reports
from perdure.contract import HistoryAnswer, HistoryRequest, IncidentView, JobShape, JobStatus, LeaseView, Peaks
from perdure.contract.names import (
    HISTORY_RECORDER,
    TRAINING_JOB,
    history_task_queue,
    recorder_workflow_id,
    role_of_group,
)
from perdure.contract.peaks import join_peaks

logger = logging.getLogger(__name__)

_ResultT = TypeVar("_ResultT")

INTERVAL: Final = timedelta(seconds=30)
"""The time between two looks at all jobs."""
_LOOK_AGAIN: Final = timedelta(minutes=5)
"""The time after which an open job is read although its search attributes have not changed."""
_OVERLAP: Final = timedelta(minutes=10)
"""The server's lists show an end later than it happened."""
_TIDIED_EVERY: Final = timedelta(hours=1)
_CALL: Final = timedelta(seconds=10)
"""The longest wait for a job's answer: a worker may have to replay it first."""
PATIENCE: Final = timedelta(minutes=10)
"""The time for which a job that has ended is asked again and again, while others answer. Then it is recorded without
what it would say, so that it does not keep the history from being complete."""
_PATIENCE_WITH_ALL: Final = timedelta(days=1)
"""The same where no other job answers: the workers may be busy, or away."""
_THREADS: Final = 4
"""Calls of the database at a time; one of them records."""
_JOBS_AT_ONCE: Final = 8
"""Jobs that are asked at a time: each of those that do not answer takes as long as a call may."""
_AT_ONCE: Final = 100
"""Activities of the queue at a time; one of them records."""


class HistoryActivities:
    """Records what happens to the jobs of one task queue, and answers questions about the past."""

    def __init__(
        self,
        client: Client,
        store: HistoryStore,
        *,
        task_queue: str,
        retention: timedelta,
        interval: timedelta = INTERVAL,
        patience: timedelta = PATIENCE,
    ) -> None:
        """Creates the object.

        Args:
            client: A client of the namespace whose jobs are recorded.
            store: Where they are recorded.
            task_queue: The queue of the jobs: several sites may share a namespace.
            retention: How long jobs are kept after their end.
            interval: The time between two looks.
            patience: As in `PATIENCE`.
        """
        self._client = client
        self._store = store
        self._task_queue = task_queue
        self._retention = retention
        self._interval = interval
        self._patience = patience
        self._silent_since: dict[str, datetime] = {}
        """When each run that has ended and does not answer was asked first."""
        self._answered_at: datetime | None = None
        """When a job has answered last."""
        # A database that does not answer must not take the threads with which the worker starts nodes.
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="history")
        self._writing = asyncio.Lock()
        self._tidied_at: datetime | None = None
        self._seen: dict[str, tuple[Any, datetime]] = {}
        """What lists showed of each open run when it was read last, and when that was."""

    @property
    def all(self) -> list[Callable[..., Any]]:
        """The activities to register with the worker."""
        return [self.record_history, self.read_history]

    @activity.defn(name="record_history")
    async def record_history(self) -> None:
        """Records until it is cancelled."""
        # Another attempt may have left off anywhere.
        self._seen.clear()
        try:
            await self._in_thread(self._store.prepare)
            while True:
                await self.look()
                activity.heartbeat(datetime.now(UTC).isoformat(timespec="seconds"))
                await asyncio.sleep(self._interval.total_seconds())
        except HistoryUnavailable as error:
            # Without its cause, whose text holds what jobs have said.
            raise ApplicationError(f"the history cannot be written: {error}", type="HistoryUnavailable") from None

    @activity.defn(name="read_history")
    async def read_history(self, request: HistoryRequest) -> HistoryAnswer:
        """Answers a question."""
        try:
            return await self._in_thread(answer, self._store, request)
        except (HistoryUnavailable, NoSuchJob) as error:
            raise ApplicationError(str(error), type=type(error).__name__, non_retryable=True) from None
        except ValueError as error:
            text = f"its database holds what it cannot have written: {error}"
            raise ApplicationError(text, type=HistoryUnavailable.__name__, non_retryable=True) from None

    def close(self) -> None:
        """Gives up what has not been answered; what runs ends with its database."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[..., _ResultT], *arguments: Any) -> _ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    async def look(self) -> None:
        """Records all jobs that have ended or changed since the last look.

        Raises:
            HistoryUnavailable: if the database cannot be written.
            RPCError: if the server does not answer.
        """
        began = datetime.now(UTC)
        silent = await self._record_ended()
        await self._record_open(began)
        # Jobs that did not answer are looked for again.
        complete = min([began, *(job.close_time for job in silent if job.close_time is not None)])
        await self._in_thread(self._store.set_complete_until, self._task_queue, complete)
        if self._tidied_at is None or began - self._tidied_at >= _TIDIED_EVERY:
            await self._in_thread(self._store.forget_before, began - self._retention)
            self._tidied_at = began

    async def _record_ended(self) -> list[Execution]:
        """Records the jobs that have ended; returns those of which the server does not tell."""
        since = await self._in_thread(self._store.complete_until, self._task_queue)
        after = f" AND CloseTime >= '{(since - _OVERLAP).isoformat()}'" if since is not None else ""
        listed = [one async for one in self._list(f"CloseTime IS NOT NULL{after}")]
        ended = [one for one in listed if one.status is not ExecutionStatus.CONTINUED_AS_NEW]
        known = await self._in_thread(self._store.recorded, [one.run_id for one in ended])
        silent = await self._record_all([one for one in ended if one.run_id not in known])
        now = datetime.now(UTC)
        self._silent_since = {one.run_id: self._silent_since.get(one.run_id, now) for one in silent}
        given_up = [one for one in silent if self._is_given_up(self._silent_since[one.run_id], now)]
        for one in given_up:
            logger.warning("%s does not answer: it is recorded without what it would say", one.id)
        still = await self._record_all(given_up, asks=False)
        return [one for one in silent if one not in given_up or one in still]

    def _is_given_up(self, since: datetime, now: datetime) -> bool:
        others_answer = self._answered_at is not None and self._answered_at >= since
        return now - since >= (self._patience if others_answer else _PATIENCE_WITH_ALL)

    async def _record_open(self, now: datetime) -> None:
        listed = [one async for one in self._list(OPEN)]
        shown = {one.run_id: one.info.search_attributes.SerializeToString(deterministic=True) for one in listed}
        before = {run: at for run, (known, at) in self._seen.items() if shown.get(run) == known}
        due = [one for one in listed if (at := before.get(one.run_id)) is None or now - at >= _LOOK_AGAIN]
        looked = before | {one.run_id: now for one in due}
        self._seen = {run: (known, looked[run]) for run, known in shown.items()}
        for silent in await self._record_all(due):
            del self._seen[silent.run_id]

    async def _record_all(self, jobs: Sequence[Execution], *, asks: bool = True) -> list[Execution]:
        """Records jobs, several at a time; returns those of which the server does not tell.

        Args:
            jobs: The jobs.
            asks: Whether they are asked what became of them.

        Raises:
            HistoryUnavailable: if the database cannot be written.
            RPCError: if the server is away.
        """
        slots, silent = asyncio.Semaphore(_JOBS_AT_ONCE), list[Execution]()

        async def record(job: Execution) -> None:
            async with slots:
                try:
                    await self._record(job, asks=asks)
                except RPCError as error:
                    if error.status is RPCStatusCode.UNAVAILABLE:
                        raise
                    logger.warning("%s cannot be recorded in the history now: %s", job.id, error)
                    silent.append(job)

        try:
            async with asyncio.TaskGroup() as tasks:
                for job in jobs:
                    tasks.create_task(record(job))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        return silent

    def _list(self, condition: str) -> AsyncGenerator[Execution]:
        jobs = f"WorkflowType = '{TRAINING_JOB}' AND TaskQueue = '{self._task_queue}' AND {condition}"
        return list_executions(self._client, jobs, rpc_timeout=_CALL)

    async def _record(self, execution: Execution, *, asks: bool) -> None:
        """Records one job. What one job says, or does not say, keeps no other from being recorded."""
        if activity.in_activity():
            activity.heartbeat()
        try:
            described = await describe(self._client, execution.id, run_id=execution.run_id, rpc_timeout=_CALL)
            if await self._was_reset(described):
                return
            record = await (self._read(execution, described) if asks else self._read_without_answer(described))
            async with self._writing:
                await self._in_thread(self._store.write, record)
        except (NotRecorded, ValueError) as error:
            logger.warning("%s cannot be recorded in the history: %s", execution.id, error)
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise

    async def _was_reset(self, described: ExecutionDescription) -> bool:
        """Whether the job goes on, or has ended, in a run after this one, which a reset has terminated."""
        if described.is_open:
            return False
        newest = await find(self._client, described.id, rpc_timeout=_CALL)
        if newest is None or newest.first_run_id != described.first_run_id:
            return False
        return newest.run_id != described.run_id

    async def _read(self, execution: Execution, described: ExecutionDescription) -> JobRecord:
        shape = await self._shape(execution)
        handle = self._client.get_workflow_handle(execution.id, run_id=execution.run_id)
        status: JobStatus | None = None
        incidents: Sequence[IncidentView] = ()
        try:
            status = await query(handle, "status", result_type=JobStatus, rpc_timeout=_CALL)
            incidents = await query(handle, "incidents", result_type=list[IncidentView], rpc_timeout=_CALL)
            self._answered_at = datetime.now(UTC)
        except (WorkflowQueryFailedError, QueryRejected) as error:
            logger.info("%s does not answer: %s", execution.id, error)
        live = await self._live_peaks(status) if status is not None and execution.is_open else {}
        return record_of(execution, described.first_run_id, described.began, shape, status, incidents, live)

    async def _read_without_answer(self, described: ExecutionDescription) -> JobRecord:
        shape = await self._shape(described)
        return record_of(described, described.first_run_id, described.began, shape, None)

    async def _live_peaks(self, status: JobStatus) -> dict[str, Peaks]:
        """What the nodes of each role have used until now, as their agents report it in their leases."""
        found: defaultdict[str, list[Peaks | None]] = defaultdict(list)
        for group in await describe_all(self._client, status.groups, rpc_timeout=_CALL):
            reports = await lease_reports(self._client, group, LeaseView)
            found[role_of_group(group.id)] += [one.view.peaks for one in reports if one.view is not None]
        joined = {role: join_peaks(peaks) for role, peaks in found.items()}
        return {role: peaks for role, peaks in joined.items() if peaks is not None}

    async def _shape(self, execution: Execution) -> JobShape:
        try:
            return JobShape.of(await recorded_spec(self._client, execution, rpc_timeout=_CALL))
        except ValueError as error:
            logger.info("%s has a specification that cannot be read: %s", execution.id, error)
            return JobShape()


@asynccontextmanager
async def keeping_history(
    client: Client, settings: HistorySettings, *, task_queue: str
) -> AsyncGenerator[HistoryActivities]:
    """Keeps a history while the context is open.

    Its activities have a queue of their own, since not every worker has a database; with one poller, since hardly
    anything comes.

    Raises:
        Refused: if the database's address cannot be used.
    """
    store = HistoryStore(settings.url, tenant=client.namespace)
    activities = HistoryActivities(client, store, task_queue=task_queue, retention=settings.retention)
    try:
        async with Worker(
            client,
            task_queue=history_task_queue(task_queue),
            activities=activities.all,
            max_concurrent_activities=_AT_ONCE,
            activity_task_poller_behavior=PollerBehaviorSimpleMaximum(maximum=1),
        ):
            await start_recorder(client, task_queue=task_queue)
            yield activities
    finally:
        activities.close()
        store.close()


async def start_recorder(client: Client, *, task_queue: str) -> None:
    """Starts the workflow that records, where it does not run yet."""
    try:
        await client.start_workflow(
            HISTORY_RECORDER,
            id=recorder_workflow_id(task_queue),
            task_queue=task_queue,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            static_summary="records jobs for `perdure history`",
            rpc_timeout=_CALL,
        )
    except RPCError as error:
        logger.warning("no history is recorded: its workflow cannot be started: %s", error.message)
