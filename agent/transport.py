"""The agent's connection to the control plane: to Temporal itself, or to the gateway, which speaks the same protocol.

Nothing here gives up: a server that is away at the start or for an hour, or that comes back restored, is retried
indefinitely, and the agent draws no conclusion from its silence.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import PollActivityTaskQueueRequest
from temporalio.client import (
    Client,
    WorkflowHandle,
    WorkflowUpdateFailedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
from temporalio.common import WorkerDeploymentVersion
from temporalio.envconfig import ClientConfig, ClientConnectConfig
from temporalio.runtime import (
    LogForwardingConfig,
    LoggingConfig,
    MetricBuffer,
    Runtime,
    TelemetryConfig,
    TelemetryFilter,
)
from temporalio.service import RPCError, RPCStatusCode, TLSConfig
from temporalio.worker import PollerBehaviorSimpleMaximum, Worker, WorkerDeploymentConfig

from perdure.agent.config import AgentConfig, GatewayConnection
from perdure.agent.job_liveness import JobLiveness, query_job_liveness
from perdure.agent.outbox import ControlPlaneBusy, DestinationNotFound, MessageRefused
from perdure.agent.poll_meter import PollMeter
from perdure.agent.server_clock import ClockReader, ServerClock
from perdure.base.backoff import Backoff
from perdure.base.credentials.names import GRANT_HEADER
from perdure.base.encryption.codec import PayloadEncryption
from perdure.base.executions import update
from perdure.base.shortages import is_passing
from perdure.base.text_variables import text_variables
from perdure.base.tracing import interceptors
from perdure.contract.agents import AgentMessage
from perdure.contract.base import Message
from perdure.contract.datasets import DatasetAnswer, DatasetRequest
from perdure.contract.names import dataset_workflow_id, probe_task_queue, store_workflow_id
from perdure.contract.routes import Destination, RoutedMessage
from perdure.contract.store import StoreAnswers, StoreRequest
from perdure_launcher import __version__

logger = logging.getLogger(__name__)

_CALL_TIMEOUT = timedelta(seconds=5)
"""Timeout of one signal or query; the outbox retries failed signals."""
_LONGEST_CALL = timedelta(seconds=20)
"""Longest timeout of a signal that is not urgent, used if the server answers late: a retry would only repeat a signal
that it still processes."""
_BUSY = frozenset({RPCStatusCode.DEADLINE_EXCEEDED, RPCStatusCode.RESOURCE_EXHAUSTED, RPCStatusCode.CANCELLED})
"""Statuses of an overloaded server. The SDK reports CANCELLED if a call took longer than its timeout."""
_REFUSED = frozenset({RPCStatusCode.PERMISSION_DENIED, RPCStatusCode.INVALID_ARGUMENT})
"""Statuses of a message that is not one of those that the gateway lets pass, or the server takes."""
_TOKEN_INTERVAL = 10.0
"""Seconds between two checks for a new token. Kubernetes writes it when a fifth of the old one's lifetime remains."""
_PROBE = timedelta(seconds=1)
"""Timeout of a poll that shows whether the server refuses polls: it answers those at once."""
_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 5.0


_DEPLOYMENT = WorkerDeploymentConfig(
    version=WorkerDeploymentVersion(deployment_name="perdure-agent", build_id=__version__), use_worker_versioning=False
)
"""What the Temporal UI shows of an agent's release; commands go to every release."""

_Answer = TypeVar("_Answer", bound=Message)


class UpdateRefused(Exception):
    """A workflow refuses a request, however often it is sent."""


class ControlPlane(Protocol):
    """The interface between an agent and the workflows."""

    async def signal(self, message: AgentMessage) -> None:
        """Delivers one message to the workflow of its route.

        Raises:
            DestinationNotFound: if the workflow does not exist or has closed.
            ControlPlaneBusy: if there was no answer in time, or no capacity for the call.
            MessageRefused: if this message is not one that is taken.
        """
        ...

    async def job_liveness(self) -> JobLiveness:
        """Queries the job's liveness. Raises the error of the connection if there is no answer."""
        ...

    async def exchange(self, dataset: str, request: DatasetRequest) -> DatasetAnswer:
        """Sends a dataset of the job what ranks have done, and returns what they are granted.

        Raises:
            DestinationNotFound: if the dataset's workflow does not exist.
            ControlPlaneBusy: if there was no answer in time, or no capacity for the call.
            UpdateRefused: if the dataset refuses the request.
        """
        ...

    async def call_store(self, request: StoreRequest) -> StoreAnswers:
        """Sends the job's store calls of ranks, and returns its answers.

        Raises:
            DestinationNotFound: if the store's workflow does not exist.
            ControlPlaneBusy: if there was no answer in time, or no capacity for the call.
            UpdateRefused: if the store refuses the request.
        """
        ...

    async def why_refused(self) -> str:
        """Why the server, for lack of capacity, has refused to hand this agent commands or to take its messages since
        the last call; empty where it has not."""
        ...

    async def serve(self, commands: Sequence[Callable[..., Any]]) -> None:
        """Executes commands from the node's queue until cancelled."""
        ...


class TemporalControlPlane:
    """Connects directly to Temporal: signals to workflows, and an activity worker on the node's own queue."""

    def __init__(self, config: AgentConfig, *, client: Client | None = None) -> None:
        """Creates the object; it connects at the first call.

        Args:
            config: The agent's configuration.
            client: A client to use instead of an own connection.
        """
        self._config = config
        self._client = client
        self._connecting = asyncio.Lock()
        self._patience = _CALL_TIMEOUT
        """The timeout of signals that are not urgent; longer after a signal that the server did not answer in time."""
        self._runtime: Runtime | None = None
        self._polls: PollMeter | None = None
        """None with a client that was given, whose runtime others use as well."""
        self.clock = ServerClock()
        """Moves the times of all that is reported to the server's clock."""
        self._refusal = ""
        """Why the server has refused a message, for lack of capacity."""

    async def signal(self, message: AgentMessage) -> None:
        client = await self._connect()
        route = message.route
        workflow = self._config.job_id if route.to is Destination.JOB else self._config.group_id
        timeout = _CALL_TIMEOUT if route.urgent else self._patience
        try:
            handle = client.get_workflow_handle(workflow)
            await handle.signal(route.name, self.clock.moved(message), rpc_timeout=timeout)
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                raise DestinationNotFound(f"{workflow} does not exist or has closed") from error
            if error.status in _BUSY:
                self._patience = min(2 * self._patience, _LONGEST_CALL)
                self._refusal = _shortage(error) or self._refusal
                raise ControlPlaneBusy(error.message) from error
            if error.status in _REFUSED:
                raise MessageRefused(error.message) from error
            raise
        self._patience = max(self._patience / 2, _CALL_TIMEOUT)

    async def job_liveness(self) -> JobLiveness:
        client = await self._connect()
        return await query_job_liveness(
            client, job_id=self._config.job_id, first_run_id=self._config.job_first_run_id, rpc_timeout=_CALL_TIMEOUT
        )

    async def exchange(self, dataset: str, request: DatasetRequest) -> DatasetAnswer:
        workflow = dataset_workflow_id(self._config.job_id, self._config.node.uid, dataset)
        return await self._update(workflow, request, DatasetAnswer)

    async def call_store(self, request: StoreRequest) -> StoreAnswers:
        workflow = store_workflow_id(self._config.job_id, self._config.node.uid)
        return await self._update(workflow, request, StoreAnswers)

    async def _update(self, workflow: str, request: RoutedMessage, answer: type[_Answer]) -> _Answer:
        client = await self._connect()
        try:
            # While no worker handles it, the server answers again and again that it has not begun.
            async with asyncio.timeout(_LONGEST_CALL.total_seconds()):
                handle: WorkflowHandle[Any, Any] = client.get_workflow_handle(workflow)
                return await update(
                    handle, request.route.name, args=[request], result_type=answer, rpc_timeout=_LONGEST_CALL
                )
        except (TimeoutError, WorkflowUpdateRPCTimeoutOrCancelledError) as error:
            raise ControlPlaneBusy(f"{workflow} did not answer in time") from error
        except WorkflowUpdateFailedError as error:
            raise UpdateRefused(str(error.cause)) from error
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                raise DestinationNotFound(f"{workflow} does not exist or has closed") from error
            if error.status in _BUSY:
                raise ControlPlaneBusy(error.message) from error
            raise

    async def why_refused(self) -> str:
        refusal, self._refusal = self._refusal, ""
        if refusal or self._polls is None or not self._polls.are_refused():
            return refusal
        client = await self._connect()
        # The node's own queue would hand this poll a command.
        queue = TaskQueue(name=probe_task_queue(self._config.task_queue))
        poll = PollActivityTaskQueueRequest(namespace=client.namespace, task_queue=queue, identity=client.identity)
        try:
            await client.workflow_service.poll_activity_task_queue(poll, timeout=_PROBE)
        except RPCError as error:
            return _shortage(error)
        return ""

    async def serve(self, commands: Sequence[Callable[..., Any]]) -> None:
        async with asyncio.TaskGroup() as tasks:
            if self._config.gateway:
                tasks.create_task(self._renew_token(self._config.gateway))
            await self._serve(commands)

    async def _serve(self, commands: Sequence[Callable[..., Any]]) -> None:
        heartbeat = self._config.timing.lease.heartbeat
        backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                worker = Worker(
                    await self._connect(),
                    task_queue=self._config.task_queue,
                    activities=commands,
                    interceptors=[ClockReader(self.clock)],
                    # One poller per agent: frontends limit the pollers of a namespace.
                    activity_task_poller_behavior=PollerBehaviorSimpleMaximum(1),
                    # Two leases may overlap, and commands must never wait for them.
                    max_concurrent_activities=8,
                    max_heartbeat_throttle_interval=heartbeat,
                    default_heartbeat_throttle_interval=heartbeat,
                    # Otherwise the SDK reads all modules again to compute one, for a tenth of a second.
                    deployment_config=_DEPLOYMENT,
                )
                await worker.run()
            except Exception as error:
                logger.warning("commands cannot be received, retrying: %s", error)
            await asyncio.sleep(backoff.next_pause(ran=loop.time() - began))

    async def _connect(self) -> Client:
        async with self._connecting:
            if self._client is None:
                node = self._config.node
                encryption = PayloadEncryption.from_environment()
                self._client = await Client.connect(
                    **self._connection(),
                    data_converter=encryption.data_converter,
                    identity=f"{node.role}-{node.rank}/{node.incarnation}@{self._config.host}",
                    runtime=self._own_runtime(),
                    connect_timeout=_CALL_TIMEOUT,
                    interceptors=interceptors("agent"),
                )
                encryption.use(self._client)
            return self._client

    def _own_runtime(self) -> Runtime:
        """Returns an SDK runtime whose metrics show how polls end; the same one for each try to connect."""
        if self._runtime is None:
            polls = PollMeter()
            self._runtime = quiet_runtime(metrics=polls.buffer)
            self._polls = polls
        return self._runtime

    def _connection(self) -> ClientConnectConfig:
        """Returns the settings of the connection. Files are read again each time: keys and certificates are renewed
        while agents run."""
        gateway = self._config.gateway
        if gateway is None:
            connection = ClientConfig.load_client_connect_config(override_env_vars=text_variables())
            connection.setdefault("target_host", "localhost:7233")
            return connection
        trust = TLSConfig(server_root_ca_cert=gateway.authority.encode(), domain=gateway.server_name)
        return ClientConnectConfig(
            target_host=gateway.address,
            namespace=gateway.namespace,
            api_key=gateway.token_path.read_text(encoding="ascii").strip(),
            rpc_metadata={GRANT_HEADER: gateway.grant},
            tls=trust,
        )

    async def _renew_token(self, gateway: GatewayConnection) -> None:
        """Shows the gateway the newest token: Kubernetes replaces the file before the old token expires."""
        while True:
            await asyncio.sleep(_TOKEN_INTERVAL)
            try:
                token = gateway.token_path.read_text(encoding="ascii").strip()
            except OSError as error:
                logger.warning("the service account token cannot be read: %s", error)
                continue
            if self._client and token != self._client.api_key:
                self._client.api_key = token


def _shortage(error: RPCError) -> str:
    """What a server lacks that refuses a call; empty where it refuses it for another reason."""
    lacks = error.status is RPCStatusCode.RESOURCE_EXHAUSTED and not is_passing(error.message)
    return error.message if lacks else ""


_shared_runtime: Runtime | None = None


def shared_runtime() -> Runtime:
    """Returns the process's shared SDK runtime; each runtime has its own threads."""
    global _shared_runtime
    if _shared_runtime is None:
        _shared_runtime = quiet_runtime()
    return _shared_runtime


def quiet_runtime(*, metrics: MetricBuffer | None = None) -> Runtime:
    """Creates an SDK runtime that logs errors only: its warnings would fill a disk during an outage, with kilobytes a
    minute to standard output.

    Args:
        metrics: Receives its metrics, and must be emptied regularly.
    """
    errors = LoggingConfig(
        filter=TelemetryFilter(core_level="ERROR", other_level="ERROR"),
        forwarding=LogForwardingConfig(logger=logging.getLogger("temporalio.core")),
    )
    return Runtime(telemetry=TelemetryConfig(logging=errors, metrics=metrics), worker_heartbeat_interval=None)
