"""The open jobs of one backend, as their workflows answer. No job knows that it is looked at."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from temporalio.client import Client, WorkflowQueryFailedError
from temporalio.service import RPCError, RPCStatusCode

from perdure.activities.recorded_spec import recorded_spec
from perdure.base.executions import OPEN, Execution, QueryRejected, list_executions, query
from perdure.contract import ClusterJob, JobPhase, JobStatus, NodePhase, NodesQuery, NodeView
from perdure.contract.names import TRAINING_JOB
from perdure.spec.job import JobSpec

logger = logging.getLogger(__name__)

_CALL: Final = timedelta(seconds=10)
_AT_ONCE: Final = 8
"""Jobs that are asked at a time: each of those that do not answer takes as long as a call may."""
_SHARING_AGAIN: Final = timedelta(seconds=15)
"""The time after which a job that shares is asked again: what it has measured is in no list."""
_LOOK_AGAIN: Final = timedelta(minutes=2)
"""The same for other jobs, where lists show no change."""


@dataclass
class _Known:
    spec: JobSpec | None
    """None where it cannot be read."""
    shown: Any = None
    asked_at: datetime | None = None
    roles: tuple[ClusterJob, ...] = ()
    nodes: tuple[tuple[ClusterJob, NodeView], ...] = ()


class OpenJobs:
    """What is known of the jobs of one backend and task queue."""

    def __init__(self, client: Client, *, task_queue: str, backend: str, with_nodes: bool) -> None:
        """Knows nothing yet.

        Args:
            client: A client of the namespace of the jobs.
            task_queue: Their queue: several sites may share a namespace.
            backend: The source of their nodes.
            with_nodes: Whether they are asked for their nodes, because the backend cannot see its machines.
        """
        self._client = client
        self._task_queue = task_queue
        self._backend = backend
        self._with_nodes = with_nodes
        self._known: dict[str, _Known] = {}
        self.problem = ""

    @property
    def roles(self) -> tuple[ClusterJob, ...]:
        """The roles of all jobs, in the order of their names."""
        found = (role for known in self._known.values() for role in known.roles)
        return tuple(sorted(found, key=lambda role: (role.namespace, role.job, role.role)))

    @property
    def nodes(self) -> Iterator[tuple[ClusterJob, NodeView]]:
        """The nodes of all jobs, where they are asked for."""
        for known in self._known.values():
            yield from known.nodes

    async def look(self) -> None:
        """Asks the jobs that may have changed.

        Raises:
            RPCError: if the server does not answer.
        """
        now, known = datetime.now(UTC), self._known
        listed = [one async for one in self._listed()]
        self._known = {one.run_id: known[one.run_id] for one in listed if one.run_id in known}
        self.problem = ""
        slots = asyncio.Semaphore(_AT_ONCE)

        async def look_at(execution: Execution) -> None:
            async with slots:
                await self._look_at(execution, now)

        await asyncio.gather(*map(look_at, listed))

    def _listed(self) -> AsyncGenerator[Execution]:
        jobs = f"WorkflowType = '{TRAINING_JOB}' AND TaskQueue = '{self._task_queue}' AND {OPEN}"
        return list_executions(self._client, jobs, rpc_timeout=_CALL)

    async def _look_at(self, execution: Execution, now: datetime) -> None:
        try:
            known = self._known.get(execution.run_id)
            if known is None:
                known = self._known[execution.run_id] = _Known(await self._spec(execution))
            if known.spec is None or known.spec.backend != self._backend or not _is_due(known, execution, now):
                return
            known.roles = tuple([await self._ask(execution, known.spec, role) for role in known.spec.roles])
            known.nodes = await self._nodes(execution, known.roles) if self._with_nodes else ()
            known.shown, known.asked_at = _shown(execution), now
        except (WorkflowQueryFailedError, QueryRejected, ValueError) as error:
            logger.info("%s does not answer: %s", execution.id, error)
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                self._known.pop(execution.run_id, None)
                return
            # What one job does not say keeps no other from being seen.
            self.problem = f"{execution.id} does not answer: {error.message}"

    async def _spec(self, execution: Execution) -> JobSpec | None:
        try:
            return await recorded_spec(self._client, execution, rpc_timeout=_CALL)
        except ValueError as error:
            logger.info("%s has a specification that cannot be read: %s", execution.id, error)
            return None

    async def _ask(self, execution: Execution, spec: JobSpec, role: str) -> ClusterJob:
        handle = self._client.get_workflow_handle(execution.id, run_id=execution.run_id)
        status = await query(handle, "status", result_type=JobStatus, args=[role], rpc_timeout=_CALL)
        return _cluster_job(spec, role, status)

    async def _nodes(
        self, execution: Execution, roles: Iterable[ClusterJob]
    ) -> tuple[tuple[ClusterJob, NodeView], ...]:
        handle = self._client.get_workflow_handle(execution.id, run_id=execution.run_id)
        found: list[tuple[ClusterJob, NodeView]] = []
        for role in roles:
            request = NodesQuery(role=role.role)
            nodes = await query(handle, "nodes", result_type=list[NodeView], args=[request], rpc_timeout=_CALL)
            found += [(role, node) for node in nodes if node.phase is not NodePhase.LOST]
        return tuple(found)


def _cluster_job(spec: JobSpec, role: str, status: JobStatus) -> ClusterJob:
    """Returns what a job says of itself, without what its machines show."""
    view = status.scaling
    return ClusterJob(
        namespace=status.namespace,
        job=status.name,
        uid=status.uid,
        role=role,
        phase=status.phase,
        fewest=status.nodes_min,
        most=status.nodes_allowed,
        unit=spec.roles[role].nodes.unit if view is None else view.unit,
        requested=0 if status.phase is JobPhase.SUSPENDED else status.nodes_max,
        started_at=status.started_at,
        shares=view is not None and view.shares and status.phase is not JobPhase.SUSPENDED,
        priority=1.0 if view is None else view.priority,
        paces=() if view is None else view.paces,
        global_batch=view is not None and view.global_batch,
        advised=None if view is None else view.advised,
        smaller={one.resource: one.enough for one in status.smaller if one.relaxes},
    )


def _is_due(known: _Known, execution: Execution, now: datetime) -> bool:
    again = _SHARING_AGAIN if any(role.shares or role.smaller for role in known.roles) else _LOOK_AGAIN
    return known.asked_at is None or now - known.asked_at >= again or known.shown != _shown(execution)


def _shown(execution: Execution) -> bytes:
    return execution.info.search_attributes.SerializeToString(deterministic=True)
