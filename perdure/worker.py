"""The worker process: runs the workflows' decisions, and the activities that carry them out.

It keeps no state: it can end or be replaced at any time, and jobs continue where they were. It serves two task queues,
each with a Worker of its own: watches last for as long as their groups, and would starve short activities of slots.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

from perdure.base import sdk as _temporal  # noqa: F401

# isort: split

from temporalio.client import Client as TemporalClient
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from perdure.activities.archive import ArchiveActivities, ArchivePlaces, Render
from perdure.activities.cluster.activities import watching_clusters
from perdure.activities.cluster.settings import ClusterSettings, cluster_settings
from perdure.activities.datasets import DatasetActivities
from perdure.activities.history.settings import HistorySettings
from perdure.activities.job_metrics import JobMetrics
from perdure.activities.nodes.activities import NodeActivities
from perdure.activities.nodes.backend import NodeBackend, TidyingBackend
from perdure.activities.nodes.joined.backend import JoinedBackend
from perdure.activities.nodes.local.backend import LocalBackend
from perdure.activities.nodes.local.claim import claimed
from perdure.activities.nodes.ray.backend import RayBackend
from perdure.activities.nodes.ray.settings import RaySettings
from perdure.activities.notifications import NotificationActivities
from perdure.activities.runtime import RuntimeActivities
from perdure.activities.scheduled_jobs import ScheduledJobActivities
from perdure.activities.signals import SignalActivities
from perdure.activities.site import SiteActivities, gateway_facts, webhook_networks
from perdure.activities.workdir import WorkdirActivities
from perdure.base.encryption.codec import PayloadEncryption
from perdure.base.encryption.keys import KEYS_FILE_VARIABLE
from perdure.base.errors import Refused
from perdure.base.memory import settle
from perdure.base.metrics.endpoint import serving_metrics
from perdure.base.metrics.sdk import SdkRuntime, worker_runtime
from perdure.base.metrics.series import merge
from perdure.base.services import health_endpoint
from perdure.base.state_folder import StateFolder
from perdure.base.tracing import tracing_of
from perdure.client.connection import (
    UI_BACKEND_VARIABLE,
    UI_VARIABLE,
    configured_task_queue,
    connect,
    find_endpoint,
)
from perdure.client.search_attributes import follow_search_attributes, register_search_attributes
from perdure.client.workers import worker_identity
from perdure.contract import GatewayFacts, SiteFacts
from perdure.contract.names import watch_task_queue
from perdure.events import AsyncExporter, ConsoleExporter, EventType, FileExporter, JobEvents, json_line, to_collector
from perdure.spec.job import Backend
from perdure.workflows.archiver import Archiver
from perdure.workflows.ask_node import AskNode
from perdure.workflows.cluster import Cluster
from perdure.workflows.dataset import Dataset
from perdure.workflows.event_sink import Sink, set_dataset_sink, set_sinks
from perdure.workflows.history import HistoryRecorder, ReadHistory
from perdure.workflows.node_group import NodeGroup
from perdure.workflows.notifier import Notifier
from perdure.workflows.policy.record.job_events import JobEvent
from perdure.workflows.policy.state.job import JobState
from perdure.workflows.read_site import ReadSite
from perdure.workflows.scheduled_job import ScheduledJob
from perdure.workflows.store import KeyValueStore
from perdure.workflows.training_job import TrainingJob
from perdure.workflows.workdir_upload import WorkdirUpload
from perdure_launcher.system.user_signals import survive_user_signals

WATCH_SLOTS = 2000
"""Groups that one worker can watch at a time; a waiting watch costs almost nothing."""

SHORT_SLOTS = 1000
"""Short activities at a time: those that wait for nodes to end must not delay the signals of another job's repair."""

SHUTDOWN_GRACE = timedelta(seconds=5)
"""The time for short activities to end when the worker is stopped; the next worker retries those that are cut off."""

STICKY_TIMEOUT = timedelta(seconds=5)
"""The time for which a decision waits for a worker that may have died; half of the SDK's default, because training
waits too."""

HEARTBEAT_INTERVAL = timedelta(seconds=3)
"""The longest interval of heartbeats of short activities, by which they also learn that they are cancelled."""

logger = logging.getLogger("perdure.worker")


@asynccontextmanager
async def running_worker(
    client: TemporalClient,
    *,
    backends: Iterable[NodeBackend] | None = None,
    task_queue: str | None = None,
    gateway: GatewayFacts | None = None,
    render: Render | None = None,
) -> AsyncGenerator[SiteFacts]:
    """Serves both task queues while the context is open; leaving it stops gracefully.

    Args:
        client: A client of the namespace to serve.
        backends: Sources of nodes; by default this machine, and nodes that join by themselves.
        task_queue: The task queue of workflows and short activities; by default the one that the environment names.
        gateway: How machines reach the site's gateway, for those who make tickets.
        render: Makes the reports in archives; by default they have none.

    Yields:
        The facts that the worker found out about the client's namespace.
    """
    problem = await register_search_attributes(client)
    if problem:
        logger.warning("jobs run without search attributes, so they cannot be searched for: %s", problem)
    served = tuple(backends) if backends is not None else (_local_backend(client), JoinedBackend())
    nodes = NodeActivities(client, served)
    workdirs = WorkdirActivities(client, served)
    notifications = NotificationActivities(
        client,
        own_machine=any(backend.name == Backend.LOCAL for backend in served),
        networks=webhook_networks(served),
    )
    task_queue = task_queue or configured_task_queue()
    facts = SiteFacts(search_attributes=not problem, backends=tuple(backend.name for backend in served))
    site = SiteActivities(facts, served, gateway)
    async with (
        _following_attributes(client, site, facts),
        Worker(
            client,
            task_queue=task_queue,
            workflows=[
                TrainingJob,
                ScheduledJob,
                NodeGroup,
                Dataset,
                KeyValueStore,
                AskNode,
                ReadSite,
                HistoryRecorder,
                ReadHistory,
                Cluster,
                WorkdirUpload,
                Notifier,
                Archiver,
            ],
            # The sandbox is entered anew for each payload, which takes most of a worker's time when a thousand nodes
            # report at once. Problems that it prevents are found before a release: the tests' own workers run in it.
            workflow_runner=UnsandboxedWorkflowRunner(),
            activities=[
                *nodes.short,
                *workdirs.all,
                *RuntimeActivities(served).all,
                *SignalActivities(client).all,
                *ScheduledJobActivities(client).all,
                *site.all,
                *notifications.all,
                *ArchiveActivities(client, ArchivePlaces.of_site(served), render).all,
            ],
            max_concurrent_activities=SHORT_SLOTS,
            graceful_shutdown_timeout=SHUTDOWN_GRACE,
            max_heartbeat_throttle_interval=HEARTBEAT_INTERVAL,
            sticky_queue_schedule_to_start_timeout=STICKY_TIMEOUT,
        ),
        Worker(
            client,
            task_queue=watch_task_queue(task_queue),
            activities=[*nodes.watches, *DatasetActivities(client).watches],
            max_concurrent_activities=WATCH_SLOTS,
        ),
    ):
        yield facts


@asynccontextmanager
async def _following_attributes(client: TemporalClient, site: SiteActivities, facts: SiteFacts) -> AsyncGenerator[None]:
    """Has jobs that begin later set search attributes only while they are there, and adds those that are removed."""

    async def learn() -> None:
        async for there in follow_search_attributes(client, there=facts.search_attributes):
            site.learn(facts.replace(search_attributes=there))
            if there:
                logger.info("the search attributes are there now: jobs that start from now on can be searched for")
            else:
                logger.error(
                    "search attributes were removed, and this worker may not add them: open jobs decide nothing until "
                    "an administrator has; `perdure doctor` names them"
                )

    learning = asyncio.create_task(learn())
    try:
        yield
    finally:
        learning.cancel()
        await asyncio.gather(learning, return_exceptions=True)


def _connection_of(client: TemporalClient) -> dict[str, str]:
    """The variables with which agents connect to the worker's server with its payload keys."""
    address = client.service_client.config.target_host
    connection = {"TEMPORAL_ADDRESS": address, "TEMPORAL_NAMESPACE": client.namespace}
    codec = client.data_converter.payload_codec
    if isinstance(codec, PayloadEncryption):
        connection |= codec.environment
    return connection


def _local_backend(client: TemporalClient) -> LocalBackend:
    """The backend for nodes on this machine."""
    return LocalBackend(connection=_connection_of(client))


def _ray_backend(client: TemporalClient) -> RayBackend:
    """The backend for actors of a Ray cluster.

    Raises:
        Refused: if the environment names none.
    """
    try:
        return RayBackend(RaySettings.from_environment(connection=_connection_of(client)))
    except ValueError as error:
        raise Refused(f"the backend ray is not configured: {error}", remedy="See docs/ray.md.") from error


def _kubernetes_backend(client: TemporalClient) -> NodeBackend:
    """The backend for pods, whose agents find the server as the environment configures it.

    Raises:
        Refused: if the environment does not configure enough.
    """
    try:
        from perdure.activities.nodes.kubernetes import KubernetesBackend, KubernetesSettings
    except ModuleNotFoundError as missing:
        raise Refused(
            f"the backend kubernetes needs {missing.name}", remedy="Run `pip install 'perdure[kubernetes]'`."
        ) from missing
    found = {"TEMPORAL_ADDRESS": client.service_client.config.target_host, "TEMPORAL_NAMESPACE": client.namespace}
    try:
        settings = KubernetesSettings.from_environment({**found, **os.environ})
    except ValueError as error:
        raise Refused(f"the backend kubernetes is not configured: {error}", remedy="See docs/kubernetes.md.") from error
    codec = client.data_converter.payload_codec
    if settings.gateway is None and isinstance(codec, PayloadEncryption) and codec.keys:
        raise Refused(
            "payloads are encrypted, and agents in pods that connect to Temporal itself are given no keys",
            remedy=f"Configure a gateway, or unset {KEYS_FILE_VARIABLE}.",
        )
    return KubernetesBackend(settings)


@asynccontextmanager
async def exporting_events(
    path: Path | None, metrics: JobMetrics | None = None
) -> AsyncGenerator[Sequence[AsyncExporter]]:
    """Exports the events of the jobs that this process decides while the context is open.

    Args:
        path: The file; `-` for standard output, None for nowhere.
        metrics: What counts the events, if anything does.

    Yields:
        The exporters: to the file, and to the collector that OpenTelemetry's variables name.
    """
    exporters = [exporter for exporter in (_to_file(path), to_collector()) if exporter is not None]
    to_exporters = _to_exporters(exporters) if exporters else None
    set_sinks(
        *(sink for sink in (to_exporters, metrics.on_event if metrics else None, _to_traces()) if sink is not None)
    )
    set_dataset_sink(metrics.on_dataset if metrics else None)
    try:
        yield exporters
    finally:
        set_sinks()
        set_dataset_sink(None)
        await asyncio.gather(*(asyncio.to_thread(exporter.close) for exporter in exporters))


def _to_file(path: Path | None) -> AsyncExporter | None:
    if path is None:
        return None
    to_stdout = str(path) == "-"
    return AsyncExporter(ConsoleExporter(descriptor=1, format=json_line) if to_stdout else FileExporter(path))


def _to_traces() -> Sink | None:
    tracing = tracing_of("worker")
    if tracing is None:
        return None
    from perdure.activities.job_spans import JobSpans

    return JobSpans(tracing).on_event


def _to_exporters(exporters: Sequence[AsyncExporter]) -> Sink:
    emitter = JobEvents(*exporters)

    def export(job: JobState, event: JobEvent) -> None:
        emitter.emit(
            event.span,
            event.name,
            EventType(event.type),
            event.time.timestamp() if event.time else None,
            None,
            job.roles[event.role].generation or None,
            {"job": f"{job.namespace}/{job.name}", "uid": job.uid, "role": event.role, **event.attributes},
        )

    return export


def _keeping_history(
    client: TemporalClient, settings: HistorySettings | None, task_queue: str
) -> AbstractAsyncContextManager[object]:
    if settings is None:
        return nullcontext()
    # Its packages are an extra, and are imported once jobs are served.
    from perdure.activities.history.activities import keeping_history

    return keeping_history(client, settings, task_queue=task_queue)


def _serving_ui(address: str, backend: str) -> AbstractAsyncContextManager[object]:
    if not (address and backend):
        return nullcontext()
    from perdure.base.ui_proxy import ui_proxy

    return ui_proxy(address, backend)


def _watching_clusters(
    client: TemporalClient, served: Sequence[NodeBackend], settings: ClusterSettings, task_queue: str
) -> AbstractAsyncContextManager[object]:
    if not settings.watched:
        return nullcontext()
    return watching_clusters(client, served, task_queue=task_queue, sharing=settings.sharing)


class _WorkerMetrics:
    """All that a worker exports at its port: its jobs, the SDK, and the nodes of this machine."""

    def __init__(self, jobs: JobMetrics, sdk: SdkRuntime, backends: Sequence[NodeBackend]) -> None:
        self._jobs = jobs
        self._sdk = sdk
        self._local = [backend for backend in backends if isinstance(backend, LocalBackend)]
        self.events: Sequence[AsyncExporter] = ()

    async def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        series = self._jobs.series
        if self.events:
            dropped, refused = sum(one.dropped for one in self.events), sum(one.refused for one in self.events)
            series.set("perdure_events_lost_total", dropped, reason="dropped")
            series.set("perdure_events_lost_total", refused, reason="refused")
        sdk, nodes = await asyncio.gather(
            self._sdk.text(), asyncio.gather(*(backend.metrics() for backend in self._local))
        )
        for _, failures in nodes:
            series.count("perdure_node_scrape_failures_total", failures)
        of_nodes = (text for texts, _ in nodes for text in texts)
        return merge((await self._jobs.text(), sdk, *of_nodes))


async def serve(
    *,
    address: str | None = None,
    metrics_port: int | None = None,
    health_port: int | None = None,
    backends: Sequence[Backend] = (Backend.LOCAL,),
    events: Path | None = None,
    render: Render | None = None,
) -> None:
    """Runs a worker until SIGTERM or SIGINT.

    Args:
        address: The Temporal server; by default as the environment configures it.
        metrics_port: The port that serves Prometheus metrics of jobs, of Temporal's SDK, and of this machine's nodes.
        health_port: The port that answers `GET /healthz` for as long as both task queues are served.
        backends: Sources of nodes, in addition to nodes that join by themselves.
        events: The file for the events of jobs; `-` for standard output.
        render: Makes the reports in archives of jobs; by default they have none.

    Raises:
        ControlPlaneUnreachable: if the server does not answer at the start.
        StateFolderError: if the state folder cannot be used, or has the nodes of a worker on another machine.
        Refused: if a backend cannot be served.
    """
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    survive_user_signals()
    try:
        gateway = gateway_facts(os.environ)
    except ValueError as error:
        raise Refused(str(error), remedy="See docs/gateway.md.") from error
    state = StateFolder()
    if Backend.LOCAL in backends:
        state.open()
    try:
        history = HistorySettings.from_environment(os.environ, state)
    except ValueError as error:
        raise Refused(str(error), remedy="See docs/history.md.") from error
    try:
        watching = cluster_settings(os.environ)
    except ValueError as error:
        raise Refused(str(error), remedy="See docs/operations.md.") from error
    endpoint = find_endpoint(address)
    sdk = worker_runtime(with_metrics=metrics_port is not None)
    client = await connect(
        endpoint, identity=worker_identity(os.getpid()), runtime=sdk.runtime, patient=True, part="worker"
    )
    make = {Backend.LOCAL: _local_backend, Backend.KUBERNETES: _kubernetes_backend, Backend.RAY: _ray_backend}
    # Places for nodes that join by themselves cost nothing.
    served = [*(make[backend](client) for backend in dict.fromkeys(backends)), JoinedBackend()]
    jobs = JobMetrics(client) if metrics_port else None
    metrics = _WorkerMetrics(jobs, sdk, served) if jobs is not None else None
    async with (
        claimed(state.path, lost=stopped.set) if Backend.LOCAL in backends else nullcontext(),
        exporting_events(events, jobs) as exporters,
        serving_metrics(metrics.text, metrics_port) if metrics is not None else nullcontext(),
        running_worker(
            client, backends=served, task_queue=endpoint.task_queue, gateway=gateway, render=render
        ) as facts,
        health_endpoint(health_port),
        _serving_ui(os.environ.get(UI_VARIABLE, ""), os.environ.get(UI_BACKEND_VARIABLE, "")),
        asyncio.TaskGroup() as beside,
    ):
        if metrics is not None:
            metrics.events = exporters
        tidying = [beside.create_task(one.keep_tidy(client)) for one in served if isinstance(one, TidyingBackend)]
        logger.info(
            "serving %s and %s at %s, namespace %s; backends: %s",
            endpoint.task_queue,
            watch_task_queue(endpoint.task_queue),
            endpoint.address,
            endpoint.namespace,
            ", ".join(facts.backends),
        )
        async with (
            _keeping_history(client, history, endpoint.task_queue),
            _watching_clusters(client, served, watching, endpoint.task_queue),
        ):
            settle()
            await stopped.wait()
            logger.info("stopping")
        for task in tidying:
            task.cancel()


if __name__ == "__main__":
    raise SystemExit("The worker's command is `perdure worker`.")
