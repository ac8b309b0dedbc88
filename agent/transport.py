"""How an agent reaches the control plane. The seam is small so that a gateway can take Temporal's place.

Nothing here gives up: a server that is away at the start, for an hour, or that comes back restored is tried again
indefinitely, and nothing on this side draws a conclusion from its silence.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import StrEnum
from typing import Any, Protocol

from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.envconfig import ClientConfig
from temporalio.runtime import LogForwardingConfig, LoggingConfig, Runtime, TelemetryConfig, TelemetryFilter
from temporalio.service import RPCError, RPCStatusCode
from temporalio.worker import PollerBehaviorSimpleMaximum, Worker

from agent.config import AgentConfig
from agent.job_liveness import JobLiveness, query_job_liveness
from agent.outbox import ControlPlaneBusy, DestinationNotFound
from workflows.messages import AgentMessage

logger = logging.getLogger(__name__)

_CALL_TIMEOUT = timedelta(seconds=5)
"""For one signal or question; the outbox repeats what did not get through."""
_LONGEST_CALL = timedelta(seconds=20)
"""For a signal that can wait, where the server answers late: what it is still working on should not be sent again."""
_URGENT = frozenset({"failure", "finished"})
_BUSY = frozenset({RPCStatusCode.DEADLINE_EXCEEDED, RPCStatusCode.RESOURCE_EXHAUSTED, RPCStatusCode.CANCELLED})
"""CANCELLED is how the SDK reports that a call took longer than its timeout."""
_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 5.0


class Destination(StrEnum):
    """Who is told."""

    JOB = "JOB"
    GROUP = "GROUP"


class ControlPlane(Protocol):
    """What an agent needs of whatever stands between it and the workflows."""

    async def signal(self, destination: Destination, name: str, message: AgentMessage) -> None:
        """Delivers one message.

        Raises:
            DestinationNotFound: if the workflow does not exist or has closed.
            ControlPlaneBusy: if there was no answer in time, or no capacity for the call.
        """
        ...

    async def job_liveness(self) -> JobLiveness:
        """Asks for the job; raises whatever keeps it from getting an answer."""
        ...

    async def serve(self, commands: Sequence[Callable[..., Any]]) -> None:
        """Carries out commands from the node's queue until cancelled."""
        ...


class TemporalControlPlane:
    """Temporal directly: signals to workflows, and an activity worker on the node's own queue."""

    def __init__(self, config: AgentConfig, *, client: Client | None = None) -> None:
        """Connects when it is first needed.

        Args:
            config: What the agent was started with.
            client: A connection to use instead of one of its own.
        """
        self._config = config
        self._client = client
        self._connecting = asyncio.Lock()
        self._patience = _CALL_TIMEOUT
        """Longer after a signal that the server did not answer in time."""

    async def signal(self, destination: Destination, name: str, message: AgentMessage) -> None:
        client = await self._connected()
        workflow = self._config.job_id if destination is Destination.JOB else self._config.group_id
        timeout = _CALL_TIMEOUT if name in _URGENT else self._patience
        try:
            await client.get_workflow_handle(workflow).signal(name, message, rpc_timeout=timeout)
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                raise DestinationNotFound(f"{workflow} does not exist or has closed") from error
            if error.status in _BUSY:
                self._patience = min(2 * self._patience, _LONGEST_CALL)
                raise ControlPlaneBusy(error.message) from error
            raise
        self._patience = max(self._patience / 2, _CALL_TIMEOUT)

    async def job_liveness(self) -> JobLiveness:
        client = await self._connected()
        return await query_job_liveness(
            client, job_id=self._config.job_id, first_run_id=self._config.job_first_run_id, rpc_timeout=_CALL_TIMEOUT
        )

    async def serve(self, commands: Sequence[Callable[..., Any]]) -> None:
        heartbeat = self._config.timing.lease.heartbeat
        pause = _FIRST_PAUSE
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                worker = Worker(
                    await self._connected(),
                    task_queue=self._config.task_queue,
                    activities=commands,
                    # One poll per agent: frontends limit the polls of a namespace.
                    activity_task_poller_behavior=PollerBehaviorSimpleMaximum(1),
                    # Two leases may overlap, and commands must never wait for them.
                    max_concurrent_activities=8,
                    max_heartbeat_throttle_interval=heartbeat,
                    default_heartbeat_throttle_interval=heartbeat,
                )
                await worker.run()
            except Exception as error:
                if loop.time() - began > _LONGEST_PAUSE:
                    pause = _FIRST_PAUSE
                logger.warning("commands cannot be taken, trying again in %.1f s: %s", pause, error)
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)

    async def _connected(self) -> Client:
        async with self._connecting:
            if self._client is None:
                # Read anew each time: keys and certificates are renewed under running agents.
                connection = ClientConfig.load_client_connect_config()
                node = self._config.node
                connection.setdefault("target_host", "localhost:7233")
                self._client = await Client.connect(
                    **connection,
                    data_converter=pydantic_data_converter,
                    identity=f"{node.role}-{node.rank}/{node.incarnation}@{self._config.host}",
                    runtime=shared_runtime(),
                    connect_timeout=_CALL_TIMEOUT,
                )
            return self._client


_shared_runtime: Runtime | None = None


def shared_runtime() -> Runtime:
    """One per process: each has its own threads."""
    global _shared_runtime
    if _shared_runtime is None:
        # Its warnings would fill a disk during an outage: kilobytes a minute, to standard output.
        errors = LoggingConfig(
            filter=TelemetryFilter(core_level="ERROR", other_level="ERROR"),
            forwarding=LogForwardingConfig(logger=logging.getLogger("temporalio.core")),
        )
        _shared_runtime = Runtime(
            telemetry=TelemetryConfig(logging=errors, metrics=None), worker_heartbeat_interval=None
        )
    return _shared_runtime
