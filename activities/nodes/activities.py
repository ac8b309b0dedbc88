"""The worker's activities for nodes: what NodeGroup asks of a backend, and what a backend's watch tells it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from temporalio import activity
from temporalio.client import Client
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory
from temporalio.service import RPCError, RPCStatusCode

from activities.nodes.backend import JobRevoked, NodeBackend, NodeNotYet, NodeRefused, Revocation, SharingBackend
from agent.job_liveness import JobLiveness, query_job_liveness
from workflows.messages import (
    CreatedNode,
    GroupRef,
    NodeEvent,
    NodeEventKind,
    NodeEvents,
    NodeRef,
    NodeRequest,
    NodesCreated,
    NodesRef,
    NodesRequest,
    WatchRequest,
)

logger = logging.getLogger(__name__)

_CALL_TIMEOUT = timedelta(seconds=5)
"""For one signal or question; both are repeated."""
_GATHER = 0.5
"""Seconds between two messages to a group: each is an event of its history and a decision of its worker, and a thousand
pods have thousands of things to say while they start. The first goes at once, and so does the loss of a node."""
_LONGEST_REASON = 300
_MOST_WAITING = 10_000
"""Nodes whose reason to wait is remembered; forgetting one costs a repeated signal."""
_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 5.0
_BEAT = timedelta(seconds=2)
"""Heartbeat of a long activity where its timeout does not ask for a faster one."""


class NodeActivities:
    """Activities over the backends that this worker serves."""

    def __init__(self, client: Client, backends: Iterable[NodeBackend]) -> None:
        self._client = client
        self._backends = {backend.name: backend for backend in backends}
        self._waits_for: dict[str, str] = {}
        """By node that is not there yet: why, as its group was told."""

    @property
    def short(self) -> Sequence[Callable[..., Any]]:
        """For the queue of workflows and short activities."""
        return (self.create_node, self.create_nodes, self.delete_nodes, self.clear_group, self.describe_node)

    @property
    def watches(self) -> Sequence[Callable[..., Any]]:
        """For the queue of long watches, which would take the short activities' slots."""
        return (self.watch_nodes,)

    @activity.defn(name="create_node")
    async def create_node(self, request: NodeRequest) -> CreatedNode:
        """Makes the node exist.

        Raises:
            ApplicationError: `NodeRefused`, not retried, if the backend never will; `JobRevoked` if the job is not
                desired any more, which is cancelled then; `NodeNotYet` if it is not the node's turn.
        """
        backend = self._backend(request.spec.backend)
        async with _beating():
            try:
                return await backend.create(request)
            except NodeRefused as refused:
                raise ApplicationError(str(refused), type="NodeRefused", non_retryable=True) from refused
            except JobRevoked as revoked:
                await self._cancel_job(request.job_id, request.job_first_run_id, str(revoked))
                # Retried, so that the job ends as cancelled and not by a node that was refused.
                raise ApplicationError(str(revoked), type="JobRevoked") from revoked
            except NodeNotYet as waiting:
                await self._tell_what_it_waits_for([(request, waiting)])
                # No error: workers neither log nor count it.
                benign = ApplicationErrorCategory.BENIGN
                raise ApplicationError(str(waiting), type="NodeNotYet", category=benign) from None
            except Exception as error:
                await self._tell_what_it_waits_for([(request, error)])
                raise

    @activity.defn(name="create_nodes")
    async def create_nodes(self, request: NodesRequest) -> NodesCreated:
        """Makes many nodes exist, as far as that succeeds at once: what does not is requested again, one by one.

        Raises:
            ApplicationError: `NodeRefused`, not retried, if this worker does not serve the backend.
        """
        backend = self._backend(request.spec.backend)
        requests = request.each
        async with _beating():
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
            await self._tell_what_it_waits_for(waiting)
        return NodesCreated(created=created, refused=refused)

    @activity.defn(name="delete_nodes")
    async def delete_nodes(self, request: NodesRef) -> None:
        """Ends nodes; returns when nothing of them runs."""
        async with _beating():
            await self._backend(request.nodes[0].backend).delete(*request.nodes)

    @activity.defn(name="clear_group")
    async def clear_group(self, group: GroupRef) -> None:
        """Ends whatever is left of a group, and what the job's nodes share where no other group has any; returns when
        nothing is."""
        backend = self._backend(group.backend)
        if isinstance(backend, SharingBackend):
            async with _beating():
                await backend.clear(group)

    @activity.defn(name="describe_node")
    async def describe_node(self, node: NodeRef) -> NodeEvent | None:
        """The node's state now; None where it does not exist."""
        return await self._backend(node.backend).describe(node)

    @activity.defn(name="watch_nodes")
    async def watch_nodes(self, request: WatchRequest) -> None:
        """Signals the group whatever its backend sees, and that its job has closed; ends with the group."""
        backend = self._backend(request.backend)
        telling = _Telling(self._client, request.group_id)
        async with _beating():
            tasks = [
                asyncio.create_task(task)
                for task in (
                    telling.run(),
                    self._follow(backend, request, telling),
                    self._ask_after_job(request, telling),
                )
            ]
            try:
                # The first to end is the telling, when the group has closed, or one that failed.
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            except asyncio.CancelledError:
                # The group's run is over, or another attempt watches: no workflow waits for an answer.
                details = activity.cancellation_details()
                if details is None or not (details.not_found or details.timed_out):
                    raise
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _tell_what_it_waits_for(self, waiting: Sequence[tuple[NodeRequest, Exception]]) -> None:
        """Signals the group why nodes are not there yet, where that is news to it: an activity that is retried tells
        its workflow nothing. The next try tells it again if this one does not get through."""
        events: list[NodeEvent] = []
        for request, error in waiting:
            node, reason = request.node, _why_waiting(error)
            logger.info("%s waits: %s", request.name, reason)
            if self._waits_for.get(request.name) != reason:
                events.append(
                    NodeEvent(
                        kind=NodeEventKind.PENDING,
                        rank=node.rank,
                        incarnation=node.incarnation,
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
            logger.info("%s was not told: %s", group.id, error)
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
        """Cancels the job as a user would, with the reason; tries until it is done, or nothing is left to cancel."""
        logger.warning("%s is cancelled: %s", job_id, reason)
        job = self._client.get_workflow_handle(job_id, first_execution_run_id=first_run_id)
        pause = _FIRST_PAUSE
        while True:
            try:
                await job.cancel(reason=reason, rpc_timeout=_CALL_TIMEOUT)
            except RPCError as error:
                if error.status is RPCStatusCode.NOT_FOUND:
                    return
                logger.info("%s was not cancelled, trying again in %.1f s: %s", job_id, pause, error)
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
            else:
                return

    async def _ask_after_job(self, request: WatchRequest, telling: _Telling) -> None:
        told = False
        while True:
            try:
                liveness = await query_job_liveness(
                    self._client,
                    job_id=request.job_id,
                    first_run_id=request.job_first_run_id,
                    rpc_timeout=_CALL_TIMEOUT,
                )
            except Exception as error:
                logger.info("no answer about %s, so nothing follows: %s", request.job_id, error)
            else:
                if liveness is JobLiveness.CLOSED and not told:
                    told = True
                    telling.owner_closed()
            await asyncio.sleep(request.owner_check.total_seconds())

    def _backend(self, name: str) -> NodeBackend:
        backend = self._backends.get(name)
        if backend is None:
            served = ", ".join(sorted(self._backends)) or "none"
            raise ApplicationError(
                f"backend is {str(name)!r}, which this worker does not serve (it serves {served}); "
                "choose another backend, or start a worker with this one",
                type="NodeRefused",
                non_retryable=True,
            )
        return backend


def _why_waiting(error: Exception) -> str:
    """For people: why a node was not created that may be later."""
    if isinstance(error, NodeNotYet):
        return str(error)[:_LONGEST_REASON]
    return f"it could not be created yet: {str(error) or type(error).__name__}"[:_LONGEST_REASON]


class _Telling:
    """Signals to one group: in order, some together, and again until they have arrived."""

    def __init__(self, client: Client, group_id: str) -> None:
        self._group = client.get_workflow_handle(group_id)
        self._waiting: list[NodeEvent] = []
        self._owner_closed = False
        self._changed = asyncio.Event()
        self._urgent = asyncio.Event()

    def events(self, batch: Iterable[NodeEvent]) -> None:
        events = tuple(batch)
        self._waiting.extend(events)
        self._changed.set()
        if any(event.kind is NodeEventKind.GONE for event in events):
            self._urgent.set()

    def owner_closed(self) -> None:
        self._owner_closed = True
        self._changed.set()

    async def run(self) -> None:
        """Returns when the group has closed."""
        pause = _FIRST_PAUSE
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
                logger.info("%s was not told, trying again in %.1f s: %s", self._group.id, pause, error)
                self._changed.set()
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
            else:
                pause = _FIRST_PAUSE
                del self._waiting[: len(message.events)]
                if message.owner_closed:
                    self._owner_closed = False
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._urgent.wait(), _GATHER)


@contextlib.asynccontextmanager
async def _beating() -> AsyncGenerator[None]:
    """Heartbeats for as long as the body takes, so that a worker's death is noticed and a cancellation heard."""
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
