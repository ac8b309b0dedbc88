"""The worker's node activities: create, delete, describe and watch the nodes of a NodeGroup through their backend."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from temporalio import activity
from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
from temporalio.client import Client
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory
from temporalio.service import RPCError, RPCStatusCode

from perdure.activities.nodes.backend import (
    JobRevoked,
    NodeBackend,
    NodeNotYet,
    NodeRefused,
    RemovalDenied,
    ResizingBackend,
    Revocation,
    SharingBackend,
)
from perdure.activities.nodes.origin import check_group, check_new, check_nodes
from perdure.agent.job_liveness import JobLiveness, OwnerLiveness
from perdure.base.backoff import Backoff
from perdure.contract import (
    CreatedNode,
    GroupRef,
    NodeEvent,
    NodeEventKind,
    NodeEvents,
    NodeRef,
    NodeRequest,
    NodeResize,
    NodeResized,
    NodesCreated,
    NodesDeleted,
    NodesRef,
    NodesRequest,
    WatchRequest,
    identity_of,
)
from perdure.contract.names import REMOVAL_DENIED

logger = logging.getLogger(__name__)

_CALL_TIMEOUT = timedelta(seconds=5)
"""Timeout of one signal or query; both are retried."""
_GATHER = 0.5
"""Minimum seconds between two signals to a group. Each signal is an event of the group's history and a decision of its
worker, and a thousand pods produce thousands of events while they start. The first signal goes out at once, and so
does the loss of a node."""
_LONGEST_REASON = 300
_MOST_WAITING = 10_000
"""Number of nodes whose reason to wait is remembered. Forgetting one costs a repeated signal."""
_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 5.0
_DENIED_ATTEMPTS = 4
"""Attempts of a removal that is denied, with pauses of 0.5 to 2 s beside the backend's own retries of 8 s: enough for a
binding that an administrator replaces."""
_LONGEST_POLL = 65.0
"""Seconds. A worker that lives has begun a poll within this time: the server ends each after a minute."""
_BEAT = timedelta(seconds=2)
"""Heartbeat interval of a long activity, unless its heartbeat timeout requires a shorter one."""


class NodeActivities:
    """Activities over the backends that this worker serves."""

    def __init__(self, client: Client, backends: Iterable[NodeBackend]) -> None:
        self._client = client
        self._backends = {backend.name: backend for backend in backends}
        self._waits_for: dict[str, str] = {}
        """The reason last signaled to the group, by the name of each node that does not exist yet."""

    @property
    def short(self) -> Sequence[Callable[..., Any]]:
        """Activities for the task queue of workflows and short activities."""
        return (
            self.create_node,
            self.create_nodes,
            self.delete_nodes,
            self.clear_group,
            self.describe_node,
            self.resize_node,
        )

    @property
    def watches(self) -> Sequence[Callable[..., Any]]:
        """Activities for the task queue of long watches, which would otherwise occupy the short activities' slots."""
        return (self.watch_nodes,)

    @activity.defn(name="create_node")
    async def create_node(self, request: NodeRequest) -> CreatedNode:
        """Creates the node.

        Raises:
            ApplicationError: `NodeRefused`, not retried, if the backend can never create the node; `JobRevoked` if the
                job is no longer desired, in which case it is cancelled; `NodeNotYet` if the node has to wait.
        """
        backend = await self._backend_for_new(request)
        check_new(request)
        async with _heartbeats():
            try:
                return await backend.create(request)
            except NodeRefused as refused:
                raise ApplicationError(str(refused), type="NodeRefused", non_retryable=True) from refused
            except JobRevoked as revoked:
                await self._cancel_job(request.job_id, request.job_first_run_id, str(revoked))
                # Retryable, so that the job ends as cancelled and not because a node was refused.
                raise ApplicationError(str(revoked), type="JobRevoked") from revoked
            except NodeNotYet as waiting:
                await self._report_waits([(request, waiting)])
                # Benign: workers neither log nor count it as an error.
                benign = ApplicationErrorCategory.BENIGN
                raise ApplicationError(str(waiting), type="NodeNotYet", category=benign) from None
            except Exception as error:
                await self._report_waits([(request, error)])
                raise

    @activity.defn(name="create_nodes")
    async def create_nodes(self, request: NodesRequest) -> NodesCreated:
        """Creates many nodes in one attempt. The group requests each node that is missing from the result again by
        itself.

        Raises:
            ApplicationError: `NodeRefused`, not retried, if this worker does not serve the backend.
        """
        requests = request.each
        backend = await self._backend_for_new(*requests)
        check_new(*requests)
        async with _heartbeats():
            outcomes = await asyncio.gather(*map(backend.create, requests), return_exceptions=True)
        created: dict[int, CreatedNode] = {}
        refused: dict[int, str] = {}
        waiting: list[tuple[NodeRequest, Exception]] = []
        for one, outcome in zip(requests, outcomes, strict=True):
            match outcome:
                case CreatedNode():
                    created[one.node.rank] = outcome
                case NodeRefused():
                    refused[one.node.rank] = str(outcome)
                case JobRevoked():
                    logger.info("%s was not created with the others: %s", one.name, outcome)
                case Exception():
                    waiting.append((one, outcome))
                case _:
                    raise outcome
        if waiting:
            await self._report_waits(waiting)
        return NodesCreated(created=created, refused=refused)

    @activity.defn(name="delete_nodes")
    async def delete_nodes(self, request: NodesRef) -> NodesDeleted:
        """Ends nodes. Returns when none of their processes runs.

        Raises:
            ApplicationError: `RemovalDenied`, retried for about half a minute, if a permission or a rule denies it.
        """
        check_nodes(*request.nodes)
        async with _heartbeats(), _retry_denials():
            left = await self._backend(request.nodes[0].backend).delete(*request.nodes)
        return NodesDeleted(left=dict(left))

    @activity.defn(name="clear_group")
    async def clear_group(self, group: GroupRef) -> None:
        """Ends all remaining nodes of a group, and removes the objects that the job's nodes share if no other group has
        nodes. Returns when nothing remains.

        Raises:
            ApplicationError: as `delete_nodes`.
        """
        backend = self._backend(group.backend)
        check_group(group)
        if isinstance(backend, SharingBackend):
            async with _heartbeats(), _retry_denials():
                await backend.clear(group)

    @activity.defn(name="describe_node")
    async def describe_node(self, node: NodeRef) -> NodeEvent | None:
        """Returns the node's current state; None if it does not exist."""
        check_nodes(node)
        return await self._backend(node.backend).describe(node)

    @activity.defn(name="resize_node")
    async def resize_node(self, node: NodeResize) -> NodeResized:
        """Gives a node that runs more memory. Returns when it has it, or will not have it soon."""
        check_nodes(node)
        backend = self._backend(node.backend)
        if not isinstance(backend, ResizingBackend):
            return NodeResized(problem=f"nodes of backend: {node.backend} keep the memory that they have")
        async with _heartbeats():
            return NodeResized(problem=await backend.resize(node))

    @activity.defn(name="watch_nodes")
    async def watch_nodes(self, request: WatchRequest) -> None:
        """Signals the group each event of its backend, and that its job has closed. Ends with the group."""
        refuse_outdated_watch()
        backend = self._backend(request.backend)
        check_group(request)
        telling = _Telling(self._client, request.group_id)
        async with _heartbeats():
            tasks = [
                asyncio.create_task(task)
                for task in (
                    telling.run(),
                    self._follow(backend, request, telling),
                    self._ask_after_job(request, telling),
                )
            ]
            try:
                # The signaling task ends first, when the group has closed, unless another task fails.
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            except asyncio.CancelledError:
                # The group's run is over, or another attempt watches: no workflow waits for a result.
                details = activity.cancellation_details()
                if details is None or not (details.not_found or details.timed_out):
                    raise
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _report_waits(self, waiting: Sequence[tuple[NodeRequest, Exception]]) -> None:
        """Signals the group why nodes do not exist yet, if the reason has changed: a failed attempt of an activity is
        not visible to its workflow. If the signal fails, the next attempt sends it again."""
        events: list[NodeEvent] = []
        for request, error in waiting:
            reason = _why_waiting(error)
            logger.info("%s waits: %s", request.name, reason)
            if self._waits_for.get(request.name) != reason:
                events.append(
                    NodeEvent(
                        **identity_of(request.node),
                        kind=NodeEventKind.PENDING,
                        time=datetime.now(UTC),
                        reason=reason,
                        queued=isinstance(error, NodeNotYet) and error.queued,
                        absent=True,
                    )
                )
        if not events:
            return
        group = self._client.get_workflow_handle(waiting[0][0].group_id)
        try:
            await group.signal("node_events", NodeEvents(events=tuple(events)), rpc_timeout=_CALL_TIMEOUT)
        except RPCError as error:
            logger.info("%s could not be signaled: %s", group.id, error)
            return
        if len(self._waits_for) > _MOST_WAITING:
            self._waits_for.clear()
        self._waits_for |= {request.name: _why_waiting(error) for request, error in waiting}

    async def _follow(self, backend: NodeBackend, request: WatchRequest, telling: _Telling) -> None:
        async with contextlib.aclosing(backend.watch(request)) as batches:
            async for batch in batches:
                for fact in batch:
                    if isinstance(fact, Revocation):
                        await self._cancel_job(request.job_id, request.job_first_run_id, fact.reason)
                telling.events(fact for fact in batch if isinstance(fact, NodeEvent))

    async def _cancel_job(self, job_id: str, first_run_id: str, reason: str) -> None:
        """Cancels the job as a user would, with the reason. Retries until the job is cancelled or already closed."""
        logger.warning("%s is cancelled: %s", job_id, reason)
        job = self._client.get_workflow_handle(job_id, first_execution_run_id=first_run_id)
        backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        while True:
            try:
                await job.cancel(reason=reason, rpc_timeout=_CALL_TIMEOUT)
            except RPCError as error:
                if error.status is RPCStatusCode.NOT_FOUND:
                    return
                pause = backoff.next_pause()
                logger.info("%s could not be cancelled, retrying in %.1f s: %s", job_id, pause, error)
                await asyncio.sleep(pause)
            else:
                return

    async def _ask_after_job(self, request: WatchRequest, telling: _Telling) -> None:
        reported = False
        owner = OwnerLiveness(
            self._client,
            job_id=request.job_id,
            first_run_id=request.job_first_run_id,
            owned_id=request.group_id,
            rpc_timeout=_CALL_TIMEOUT,
        )
        while True:
            try:
                liveness = await owner.query()
            except Exception as error:
                logger.info("the state of %s could not be queried; nothing is done: %s", request.job_id, error)
            else:
                if liveness is JobLiveness.CLOSED and not reported:
                    reported = True
                    telling.owner_closed()
            await asyncio.sleep(request.owner_check.total_seconds())

    def _backend(self, name: str) -> NodeBackend:
        """The backend of that name.

        Raises:
            ApplicationError: if this worker does not serve it. It is retried: nodes exist there, so another worker has
                served it, and may take the next attempt.
        """
        backend = self._backends.get(name)
        if backend is None:
            raise ApplicationError(self._not_served(name), type="BackendNotServed")
        return backend

    async def _backend_for_new(self, *requests: NodeRequest) -> NodeBackend:
        """The backend of nodes that are to be created.

        Raises:
            ApplicationError: if this worker does not serve it; `NodeRefused`, not retried, if it is the only one, and
                the job has had no such nodes. A job that has had some waits for a worker that serves them.
        """
        name = requests[0].spec.backend
        if name in self._backends:
            return self._backends[name]
        problem = self._not_served(name)
        waits = ApplicationError(problem, type="BackendNotServed")
        if await self._others_poll():
            raise waits
        if all(request.node.incarnation == 1 for request in requests):
            raise ApplicationError(problem, type="NodeRefused", non_retryable=True)
        await self._report_waits([(request, waits) for request in requests])
        raise waits

    def _not_served(self, name: str) -> str:
        served = ", ".join(sorted(self._backends)) or "none"
        return (
            f"backend is {str(name)!r}, which this worker does not serve (it serves {served}); "
            "choose another backend, or start a worker with this one"
        )

    async def _others_poll(self) -> bool:
        """Whether other workers take activities of this one's queue, as far as the server answers."""
        request = DescribeTaskQueueRequest(
            namespace=self._client.namespace,
            task_queue=TaskQueue(name=activity.info().task_queue),
            task_queue_type=TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY,
        )
        try:
            answer = await self._client.workflow_service.describe_task_queue(request, timeout=_CALL_TIMEOUT)
        except RPCError:
            return True
        since = time.time() - _LONGEST_POLL
        others = (poller for poller in answer.pollers if poller.identity != self._client.identity)
        return any(poller.last_access_time.ToSeconds() > since for poller in others)


def refuse_outdated_watch() -> None:
    """Ends a watch that an operator has reset, or paused and unpaused in Temporal, so that the group begins a new one.

    A further attempt would compare the nodes with those that the group knew when it began the watch, and would miss the
    loss of newer ones.

    Raises:
        ApplicationError: `OutdatedWatch`, not retried.
    """
    info = activity.info()
    if info.current_attempt_scheduled_time > info.scheduled_time:
        raise ApplicationError("it was interrupted in Temporal", type="OutdatedWatch", non_retryable=True)


def _why_waiting(error: Exception) -> str:
    """Returns a message for users that says why the node does not exist yet."""
    if isinstance(error, NodeNotYet):
        return str(error)[:_LONGEST_REASON]
    return f"it could not be created yet: {str(error) or type(error).__name__}"[:_LONGEST_REASON]


def _is_end(event: NodeEvent) -> bool:
    return event.kind is NodeEventKind.GONE


class _Telling:
    """Sends signals to one group: in order, batched, and retried until they arrive.

    Each end of a node is told, and of its other states the newest of each kind.
    """

    def __init__(self, client: Client, group_id: str) -> None:
        self._group = client.get_workflow_handle(group_id)
        self._waiting: list[NodeEvent] = []
        self._owner_closed = False
        self._changed = asyncio.Event()
        self._urgent = asyncio.Event()

    def events(self, batch: Iterable[NodeEvent]) -> None:
        events = tuple(batch)
        # While the group cannot be reached, what is known of a node replaces what was known before: a scheduler changes
        # its words every few seconds, and the server takes no signal of more than 2 MB.
        newest = {(event.key, event.kind): event for event in (*self._waiting, *events) if not _is_end(event)}
        kept = {id(event) for event in newest.values()}
        self._waiting = [event for event in (*self._waiting, *events) if _is_end(event) or id(event) in kept]
        self._changed.set()
        if any(map(_is_end, events)):
            self._urgent.set()

    def owner_closed(self) -> None:
        self._owner_closed = True
        self._changed.set()

    async def run(self) -> None:
        """Sends pending signals. Returns when the group has closed."""
        backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._urgent.clear()
            message = NodeEvents(events=tuple(self._waiting), owner_closed=self._owner_closed)
            try:
                await self._group.signal("node_events", message, rpc_timeout=_CALL_TIMEOUT)
            except Exception as error:
                if isinstance(error, RPCError) and error.status is RPCStatusCode.NOT_FOUND:
                    logger.info("%s has closed, so its watch ends", self._group.id)
                    return
                pause = backoff.next_pause()
                logger.info("%s could not be signaled, retrying in %.1f s: %s", self._group.id, pause, error)
                self._changed.set()
                await asyncio.sleep(pause)
            else:
                backoff.reset()
                sent = set(map(id, message.events))
                self._waiting = [event for event in self._waiting if id(event) not in sent]
                if message.owner_closed:
                    self._owner_closed = False
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_GATHER):
                        await self._urgent.wait()


@contextlib.asynccontextmanager
async def _retry_denials() -> AsyncGenerator[None]:
    """Has Temporal retry a denied removal a few times; then the group decides whether it waits or closes without it."""
    try:
        yield
    except RemovalDenied as denied:
        final = activity.info().attempt >= _DENIED_ATTEMPTS
        raise ApplicationError(str(denied), type=REMOVAL_DENIED, non_retryable=final) from denied


@contextlib.asynccontextmanager
async def _heartbeats() -> AsyncGenerator[None]:
    """Heartbeats while the body runs, so that the server detects a dead worker and delivers cancellations."""
    timeout = activity.info().heartbeat_timeout
    interval = (min(timeout / 3, _BEAT) if timeout else _BEAT).total_seconds()

    async def beat() -> None:
        while True:
            activity.heartbeat()
            await asyncio.sleep(interval)

    beating = asyncio.create_task(beat())
    try:
        yield
    finally:
        beating.cancel()
