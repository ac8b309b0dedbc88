"""Runs one agent, from its first report to its shutdown report: creates its parts and keeps them running."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncGenerator, Callable, Coroutine
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from perdure.agent.checkpoint.keeper import CheckpointService
from perdure.agent.checks import Checker
from perdure.agent.commands import Commands
from perdure.agent.config import AgentConfig
from perdure.agent.datasets import Datasets
from perdure.agent.event_files import EventShipper
from perdure.agent.lease import Lease
from perdure.agent.logs import LogShipper
from perdure.agent.node import Node
from perdure.agent.node_events import NodeEventEmitter
from perdure.agent.notifier import Notifier
from perdure.agent.outbox import Outbox, envelope, spread_of
from perdure.agent.parts import Shipper
from perdure.agent.polls import report_refused_polls
from perdure.agent.progress import ProgressReader
from perdure.agent.readiness import ReadinessProbe
from perdure.agent.server import NodeServer
from perdure.agent.stacks import StackReader
from perdure.agent.stall_watch import StallWatch
from perdure.agent.state import StateFile
from perdure.agent.store import StoreRelay
from perdure.agent.telemetry import Telemetry
from perdure.agent.transport import ControlPlane
from perdure.base.memory import settle
from perdure.base.tracing import tracing_of
from perdure.contract.agents import GroupMissing, Joined
from perdure.contract.names import job_of
from perdure.contract.routes import Destination
from perdure.events import AsyncExporter, FileExporter, to_collector
from perdure_launcher.system.processes import environment_of
from perdure_launcher.system.user_signals import survive_user_signals
from perdure_training.node_api import layout
from perdure_training.node_api.bodies import LauncherHello

if TYPE_CHECKING:
    from perdure.agent.metrics import NodeMetrics

logger = logging.getLogger(__name__)

_SHUTDOWN_REPORT_TIMEOUT = 3.0
"""Seconds to deliver remaining messages when the agent ends."""
_JOIN_AGAIN = 60.0
"""Seconds without a lease after which the agent joins again: a group that continues as new needs less."""
_MISSING_AGAIN = 60.0
"""Seconds before the agent reports a missing group again: its other nodes do the same."""
_METRICS_INTERVAL = timedelta(minutes=1)
"""The time between two events with the machine's figures: a few megabytes a week."""
_METRICS_MAX = 2 * 1024 * 1024
_BEYOND_GRACE = 15.0
"""Seconds after the command's grace period within which its launcher must have ended."""


class _Followed(NamedTuple):
    """A launcher whose end the agent learns of."""

    pid: int
    descriptor: int


class Agent:
    """The agent of one incarnation of a node."""

    def __init__(self, config: AgentConfig, control: ControlPlane) -> None:
        self._config = config
        self._control = control
        self._started_at = datetime.now(UTC)
        self._stop = asyncio.Event()
        self._changed = Notifier()
        self._launcher_gone: bool | None = None
        """Whether the launcher has ended; None if its process is not visible from here."""
        self._followed: _Followed | None = None
        self._group_missing = False
        self._joined_at = 0.0
        self._missing_reported: float | None = None
        self._to_job = self._outbox(Destination.JOB)
        self._to_group = self._outbox(Destination.GROUP)
        self._events = _event_exporters(config)
        ranks = ProgressReader(config.run_dir)
        self.node = Node(
            config,
            StateFile(config.private_dir),
            to_job=self._to_job,
            to_group=self._to_group,
            progress=lambda: ranks.newest,
            events=NodeEventEmitter(*self._events),
        )
        self._stacks = StackReader(self.node)
        self._readiness = ReadinessProbe(self.node, config.ready) if config.ready is not None else None
        self._telemetry = Telemetry(
            self.node,
            ranks,
            to_group=self._to_group,
            readiness=self._readiness,
            watch=StallWatch(self.node, self._stacks, progress=lambda: ranks.newest, to_group=self._to_group),
            on_preparing=partial(self._join, preparing=True),
        )
        self._lease = Lease(
            self.node,
            self._telemetry,
            control,
            started_at=self._started_at,
            to_group=self._to_group,
            without_lease=self._join_again,
        )
        datasets = Datasets(
            config.node, send=control.exchange, state=lambda: self.node.state, to_group=self._to_group.put
        )
        self._store = StoreRelay(
            config.node,
            send=control.call_store,
            state=lambda: self.node.state,
            changed=self.node.changed,
            to_group=self._to_group.put,
        )
        self._checkpoints = CheckpointService(config, self.node, to_group=self._to_group.put)
        self._checks = Checker(self.node)
        self._metrics: NodeMetrics | None = None
        self._make_metrics = partial(
            _node_metrics,
            config,
            node=self.node,
            telemetry=self._telemetry,
            lease=self._lease,
            outboxes={"job": self._to_job, "group": self._to_group},
            checkpoints=self._checkpoints,
            datasets=datasets,
            events=self._events,
            progress=lambda: ranks.newest,
            stall=lambda: ranks.save_stall,
            step_times=lambda: ranks.step_times,
        )
        self._machine = AsyncExporter(
            FileExporter(config.private_dir / layout.EVENTS / layout.AGENT_METRICS, max_bytes=_METRICS_MAX, kept=1)
        )
        self._server = NodeServer(
            self.node,
            self._telemetry,
            config.run_dir,
            datasets=datasets,
            store=self._store,
            stacks=self._stacks,
            checks=self._checks,
            metrics=self._read_metrics,
            on_hello=self._follow_launcher,
            on_waits=self._join,
        )
        self._log_shipper = _log_shipper(config)
        self._event_shipper = _event_shipper(config)

    def _outbox(self, destination: Destination) -> Outbox:
        return Outbox(
            layout.outbox(self._config.private_dir, destination.lower()),
            send=self._control.signal,
            not_found=partial(self._not_found, destination),
            spread=spread_of(self._config.most_nodes),
        )

    def _not_found(self, destination: Destination) -> None:
        self._group_missing = self._group_missing or destination is Destination.GROUP
        self._lease.ask_soon()

    def _join_again(self) -> None:
        """Joins again while the job runs and the agent holds no lease: a restarted group does not know the node yet.

        If there is no group, this reports it: the job may not have noticed, and starts the group again.
        """
        now, missing = asyncio.get_running_loop().time(), self._group_missing
        self._group_missing = False
        lost = self._lease.was_taken_since(self._joined_at)
        if self.node.state.leaving is not None:
            return
        if (missing or lost or now - self._joined_at >= _JOIN_AGAIN) and not self._to_group.holds(Joined):
            self._join()
        if missing and (self._missing_reported is None or now - self._missing_reported >= _MISSING_AGAIN):
            self._missing_reported = now
            self._to_job.put(GroupMissing(**envelope(self._config.node)))

    def _join(self, *, preparing: bool = False) -> None:
        self._joined_at = asyncio.get_running_loop().time()
        self._to_group.put(
            Joined(
                **envelope(self._config.node),
                agent_started_at=self._started_at,
                address=self._config.address,
                host=self._config.host,
                generation=self.node.state.generation,
                log_path=self._config.log_path,
                preparing=preparing,
                waits=self.node.state.waits,
                copies=self._checkpoints.receiver,
                unpacks_roles=True,
            ),
            first=True,
        )

    def stop(self) -> None:
        """Makes `run` return soon; training continues."""
        self._stop.set()

    async def run(self) -> None:
        """Serves until `stop` is called, or until the node has left the job."""
        await self._server.start()
        node = self._config.node
        self.node.events.start(job=self._config.job_id, node=node.path, host=self._config.host)
        self._checkpoints.start()
        self._join()
        logger.info("serving %s", self._config.task_queue)
        async with (
            self._serving_metrics(),
            _together(
                self._to_job.run(),
                self._to_group.run(),
                self._control.serve(
                    Commands(self.node, self._lease, self._store, self._stacks, self._checks).activities
                ),
                report_refused_polls(
                    self._control, self._config.node, nodes=self._config.most_nodes, to_group=self._to_group
                ),
                self._telemetry.run(),
                self._checkpoints.run(),
                self._lease.watch_owner(),
                self._report_machine(),
                self._checks.make_checks(),
                *([self._readiness.run()] if self._readiness is not None else []),
                *(shipper.run() for shipper in (self._log_shipper, self._event_shipper) if shipper is not None),
            ),
        ):
            await self._until_leave_is_requested()
            self.node.events.exit(reason=self.node.state.leaving)
            await self._report_shutdown()
            await asyncio.gather(*(asyncio.to_thread(exporter.close) for exporter in self._events))
            await asyncio.to_thread(self._machine.close)
            if self.node.state.leaving is not None or self.node.state.ended_by or self._launcher_gone:
                await asyncio.to_thread(self._checkpoints.close)
            await _ship_last(self._event_shipper)

    async def _read_metrics(self) -> bytes:
        self._metrics = self._metrics or self._make_metrics()
        return await self._metrics.text()

    @contextlib.asynccontextmanager
    async def _serving_metrics(self) -> AsyncGenerator[None]:
        if self._config.metrics_port is None:
            yield
            return
        from perdure.base.metrics.endpoint import serving_metrics

        async with serving_metrics(self._read_metrics, self._config.metrics_port, required=False):
            yield

    async def _report_machine(self) -> None:
        await asyncio.sleep(_METRICS_INTERVAL.total_seconds())
        from perdure.agent.machine_reports import machine_reports

        reports = machine_reports(self._config, self._machine, interval=_METRICS_INTERVAL)
        settle()
        await reports.run()

    async def _until_leave_is_requested(self) -> None:
        stopped = asyncio.create_task(self._stop.wait())
        left = asyncio.create_task(self._until_left())
        try:
            await asyncio.wait((stopped, left), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            left.cancel()

    async def _until_left(self) -> None:
        """Returns when the node has left the job. An agent that ended earlier would only be restarted."""
        node = self.node
        await node.changed.wait_for(lambda: node.state.leaving is not None)
        patience = node.state.leaving_grace + _BEYOND_GRACE
        if self._launcher_gone is None:
            await node.changed.wait_for(lambda: node.state.exited_attempt >= node.state.attempt, within=patience)
        else:
            await self._changed.wait_for(lambda: self._launcher_gone is True, within=patience)
        logger.info("the node has left the job: %s", node.state.leaving)

    async def _report_shutdown(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._to_job.flush(within=_SHUTDOWN_REPORT_TIMEOUT))
            tasks.create_task(self._to_group.flush(within=_SHUTDOWN_REPORT_TIMEOUT))
            tasks.create_task(_ship_last(self._log_shipper))

    def _follow_launcher(self, hello: LauncherHello) -> None:
        if self._followed and self._followed.pid == hello.pid:
            return
        try:
            descriptor = os.pidfd_open(hello.pid)
        except (OSError, OverflowError):
            return
        # In another container the PID belongs to another process, or to none.
        if not _belongs_here(hello.pid):
            os.close(descriptor)
            return
        self._unfollow()
        self._followed = _Followed(hello.pid, descriptor)
        self._launcher_gone = False
        asyncio.get_running_loop().add_reader(descriptor, self._on_launcher_gone)

    def _on_launcher_gone(self) -> None:
        self._unfollow()
        logger.info("the launcher has ended")
        self._launcher_gone = True
        self._changed.fire()

    def _unfollow(self) -> None:
        if self._followed:
            asyncio.get_running_loop().remove_reader(self._followed.descriptor)
            os.close(self._followed.descriptor)
            self._followed = None


def _event_exporters(config: AgentConfig) -> tuple[AsyncExporter, ...]:
    """The destinations of the agent's events: its file, and the collector that OpenTelemetry's variables name."""
    to_file = AsyncExporter(FileExporter(config.private_dir / layout.EVENTS / layout.AGENT_EVENTS))
    collector = to_collector(resource={"perdure.job": config.job_id, "perdure.node": config.node.path})
    return tuple(one for one in (to_file, collector, _to_traces(config)) if one is not None)


def _log_shipper(config: AgentConfig) -> LogShipper | None:
    if config.outputs_logs is None:
        return None
    return LogShipper(
        config.run_dir,
        config.outputs_logs,
        config.node,
        private_dir=config.private_dir,
        file_max=config.timing.processes.log_max_bytes,
        keep_all=config.keep_all_logs,
    )


def _event_shipper(config: AgentConfig) -> EventShipper | None:
    if config.archived_events is None:
        return None
    return EventShipper(config.run_dir, config.archived_events, config.node, private_dir=config.private_dir)


async def _ship_last(shipper: Shipper | None) -> None:
    if shipper is not None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SHUTDOWN_REPORT_TIMEOUT):
                await shipper.finish()


def _to_traces(config: AgentConfig) -> AsyncExporter | None:
    tracing = tracing_of("agent")
    if tracing is None:
        return None
    from perdure.agent.node_spans import NodeSpans

    node = config.node
    return AsyncExporter(NodeSpans(tracing, job=config.job_id, node=f"{node.role}-{node.rank}/{node.incarnation}"))


def _node_metrics(config: AgentConfig, **sources: Any) -> NodeMetrics:
    # What it imports takes megabytes and a moment, which only agents need that are scraped.
    from perdure.agent.metrics import NodeMetrics

    return NodeMetrics(config, **sources)


def _belongs_here(pid: int) -> bool:
    name = os.environ.get("PERDURE_NODE")
    return bool(name) and environment_of(pid).get("PERDURE_NODE") == name


@contextlib.asynccontextmanager
async def _together(*tasks: Coroutine[None, None, None]) -> AsyncGenerator[None]:
    """Runs all tasks beside the body. Each handles its own errors; a task that ends with an error ends the agent."""
    body = asyncio.current_task()
    failed: list[BaseException] = []

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            failed.append(error)
            if body:
                body.cancel()

    running = [asyncio.create_task(task) for task in tasks]
    for task in running:
        task.add_done_callback(ended)
    try:
        yield
    except asyncio.CancelledError:
        if failed:
            raise failed[0] from None
        raise
    finally:
        # The worker is not awaited: it ends with the process, and its leases lapse or are taken over.
        for task in running:
            task.cancel()


class LogPlaces:
    """The job, node and generation of the agent's log lines."""

    def __init__(self, config: AgentConfig) -> None:
        node = config.node
        self._fixed = {"job": "/".join(job_of(config.job_id)), "node": f"{node.role}-{node.rank}/{node.incarnation}"}
        self.generation: Callable[[], int] | None = None

    def __call__(self) -> dict[str, Any]:
        return self._fixed | ({"generation": self.generation()} if self.generation else {})


async def serve(config: AgentConfig, control: ControlPlane, places: LogPlaces | None = None) -> None:
    """Runs an agent until SIGTERM or SIGINT, or until its node has left the job."""
    agent = Agent(config, control)
    if places is not None:
        places.generation = lambda: agent.node.state.generation
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, agent.stop)
    survive_user_signals()
    await agent.run()
