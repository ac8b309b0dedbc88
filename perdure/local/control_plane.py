"""Starts, finds and stops the embedded default's two processes: a Temporal dev server and a worker.

Both are detached: no command owns them, and a job outlives each of them. A command that needs one makes sure that it
runs.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.client import Client as TemporalClient
from temporalio.service import RPCError

from perdure.activities.nodes.ray.settings import ADDRESS_VARIABLE
from perdure.base.encryption.keys import create_keys
from perdure.base.errors import ControlPlaneUnreachable, NoWorker, StateFolderError
from perdure.base.files import read_record
from perdure.base.state_folder import StateFolder, users_own_path
from perdure.client.connection import (
    CONNECT_TIMEOUT,
    UI_BACKEND_VARIABLE,
    UI_VARIABLE,
    Endpoint,
    LocalServer,
    connect,
    local_endpoint,
    payload_encryption,
)
from perdure.client.search_attributes import SEARCH_ATTRIBUTES
from perdure.client.workers import pollers, worker_identity
from perdure.contract.names import WORKER_TASK_QUEUE, watch_task_queue
from perdure.local import temporal_binary
from perdure.local.code_version import code_version, is_of_newer_release
from perdure.local.ports import choose_ports, choose_ui_backend, is_free, listens
from perdure.local.processes import DaemonRecord, spawn, tail
from perdure.spec.job import Backend

START_TIMEOUT = timedelta(seconds=60)
"""The longest start: a server or worker that does not answer by then will not; both usually take a second or two."""

JOB_EVENTS = "events.jsonl"
"""The file with the events of all jobs, in the worker's folder."""

SERVER_OPTIONS = (
    # One frontend's limit of open long polls per namespace; 1,200 by default, and every agent needs some.
    ("--dynamic-config-value", "frontend.namespaceCount=20000"),
    # Updates that one workflow may have at a time; 10 by default. Each one above the limit also aborts those that the
    # server has taken, so 200 machines that joined at once had places after minutes, or never.
    ("--dynamic-config-value", "history.maxInFlightUpdates=500"),
    ("--dynamic-config-value", "system.enableActivityEagerExecution=true"),
    # By default, reads of each task queue are limited to 20 a second. On the dev server's single shard that delays
    # every step of a recovery by up to 50 ms (an activity's round trip 101 ms, without the limit 18 ms).
    ("--dynamic-config-value", "history.transferProcessorMaxPollRPS=1000"),
    ("--dynamic-config-value", "history.timerProcessorMaxPollRPS=1000"),
    # Every node has a task queue of its own with one poller. With four partitions of each, the default, the server of a
    # thousand nodes took 3 GB, with one 1.1 GB.
    ("--dynamic-config-value", "matching.numTaskqueueReadPartitions=1"),
    ("--dynamic-config-value", "matching.numTaskqueueWritePartitions=1"),
    # Metrics of each node's queue took a twentieth of that server's time, and nothing reads them here.
    ("--dynamic-config-value", "metrics.breakdownByTaskQueue=false"),
    # `temporal workflow pause` is an experiment of the server's, which it does not allow by default.
    ("--dynamic-config-value", "frontend.WorkflowPauseEnabled=true"),
    # The server has no authorization, and its HTTP API takes a POST that any web page may send without a preflight
    # request. Nothing here uses that API, so no host name is allowed.
    ("--dynamic-config-value", 'frontend.httpAllowedHosts=["nobody.invalid"]'),
    # A write-ahead log survives a kill of the server as the default journal does, and halves that again.
    ("--sqlite-pragma", "journal_mode=WAL"),
    ("--sqlite-pragma", "synchronous=NORMAL"),
    # Lines of a failing server would otherwise repeat without end; an error that prevents its start is printed anyway.
    ("--log-level", "never"),
)

Report = Callable[[str], None]


class ServerRecord(LocalServer, DaemonRecord, frozen=True):
    """The local default's server, as stored in `temporal/server.json`."""

    binary: str
    ui_backend: str = ""
    """The address at which the UI itself listens; the worker serves it at `ui`. Empty in records of older releases,
    whose servers listen there themselves."""


class WorkerRecord(DaemonRecord, frozen=True):
    """The local default's worker, as stored in `worker/worker.json`."""

    code: str
    """The version of the code that it runs."""
    address: str
    """The address of the server that it polls."""
    python: str


@dataclass(frozen=True, kw_only=True)
class LocalStatus:
    """The processes that run from a state folder now."""

    server: ServerRecord | None
    worker: WorkerRecord | None

    @property
    def worker_is_current(self) -> bool:
        return self.worker is not None and self.worker.code == code_version()


@dataclass(frozen=True, kw_only=True)
class PodSite:
    """A cluster beside this machine, whose pods are the nodes."""

    kubeconfig: Path
    agent_image: str
    """An image that contains Perdure."""
    site_policy: Path
    """The site's policy as YAML: what jobs may request from the cluster."""
    ip: str
    """This machine's address for pods. The server then listens on all addresses: the dev server's own parts connect on
    loopback, and it has one option for them and for its clients."""


class LocalControlPlane:
    """The server and the worker of one state folder.

    Invariants:
        - One process at a time starts or stops them (the folder's lock).
        - A server that comes back takes its old port and database: agents and clients find it where it was.
        - Stopping either ends no node.
    """

    def __init__(
        self, state: StateFolder | None = None, *, report: Report = lambda _: None, pods: PodSite | None = None
    ) -> None:
        """Opens the state folder.

        Args:
            state: The folder; by default the user's own.
            report: Is called with lines about processes that are started.
            pods: A cluster whose pods the worker creates, instead of processes.
        """
        self.state = (state or StateFolder()).open()
        self._report = report
        self._pods = pods

    def status(self) -> LocalStatus:
        server = read_record(self.state.server_record, ServerRecord)
        worker = read_record(self.state.worker_record, WorkerRecord)
        return LocalStatus(
            server=server if server and server.alive else None, worker=worker if worker and worker.alive else None
        )

    async def ensure(self) -> Endpoint:
        """Makes sure that both run."""
        endpoint = await self.ensure_server()
        await self.ensure_worker()
        return endpoint

    async def ensure_server(self) -> Endpoint:
        """Makes sure that the server runs, and returns when it answers.

        Raises:
            ControlPlaneUnreachable: if it does not come up; with the end of its log.
            StateFolderError: if the state folder's disk is full.
            TemporalBinaryMissing: if there is no binary and none could be made.
        """
        async with self.state.lock(self._report):
            if self._pods is None:
                # Without keys, this command and the worker would read whatever other users of this machine send. Agents
                # in pods have no file of this machine.
                create_keys(self.state.payload_keys)
            record = read_record(self.state.server_record, ServerRecord)
            if record is None or not record.alive:
                with self._held(record) as lock:
                    record = await self._start_server(record, lock)
            endpoint = local_endpoint(record, self.state)
            await self._until_server_answers(record)
            return endpoint

    async def ensure_worker(self) -> WorkerRecord:
        """Makes sure that a worker of this code, or of a newer release, runs, and returns when it polls its queues.

        Raises:
            NoWorker: if it does not start; with the end of its log.
        """
        async with self.state.lock(self._report):
            server = read_record(self.state.server_record, ServerRecord)
            if server is None:
                raise ControlPlaneUnreachable("the local Temporal server was never started", remedy="Start it first.")
            record = read_record(self.state.worker_record, WorkerRecord)
            if record and record.alive:
                if record.address == server.address:
                    if record.code == code_version():
                        return record
                    if is_of_newer_release(record.code):
                        self._report(f"The worker is of a newer release ({record.code}) and stays: jobs may need it.")
                        return record
                self._report("Restarting the worker: its code is not this command's. Jobs continue meanwhile.")
                await record.stop()
            record = self._spawn_worker(server)
            await self._until_worker_polls(server, record)
            return record

    async def stop_worker(self) -> bool:
        """Stops the worker, gracefully; False where none ran."""
        async with self.state.lock(self._report):
            worker = self.status().worker
            if worker:
                await worker.stop()
            return worker is not None

    async def stop_server(self) -> bool:
        """Stops the server, gracefully; False where none ran."""
        async with self.state.lock(self._report):
            server = self.status().server
            if server:
                await server.stop()
            return server is not None

    def kill_worker(self) -> None:
        """Kills the worker as a crash would."""
        if worker := self.status().worker:
            worker.kill()

    def kill_server(self) -> None:
        """Kills the server as a crash would."""
        if server := self.status().server:
            server.kill()

    @contextmanager
    def _held(self, previous: ServerRecord | None) -> Generator[int]:
        """Yields the descriptor of a lock that a server holds for as long as it runs, by inheriting it.

        Process IDs say nothing of another machine with the same home folder. A second server would change the same
        database, and its worker would replace the nodes of the first machine, whose processes it does not see.

        Raises:
            ControlPlaneUnreachable: if a server that this machine does not see holds it.
        """
        with self.state.map_errors():
            # NFS locks only what is open for writing.
            lock = (self.state.temporal / "running").open("a")
        with lock:
            try:
                with self.state.map_errors():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except StateFolderError as error:
                if not isinstance(error.__cause__, BlockingIOError):
                    raise
                host = previous.host if previous and previous.host else "another machine"
                raise ControlPlaneUnreachable(
                    f"the Temporal server of the state folder {self.state.path} runs on {host}: two machines, or a "
                    "container and its machine, share this folder",
                    remedy=f"Use its jobs on {host}. For jobs of this machine set PERDURE_STATE to another folder.",
                ) from None
            yield lock.fileno()

    async def _start_server(self, previous: ServerRecord | None, lock: int) -> ServerRecord:
        binary = await temporal_binary.ensure(self._report)
        started = time.monotonic()
        if previous:
            if not is_free(previous.port):
                raise ControlPlaneUnreachable(
                    f"port {previous.port}, where this state folder's jobs look for their Temporal server, is taken by "
                    "another process",
                    remedy=f"Free the port; or, where no job of this folder runs, remove {self.state.server_record} "
                    "to let the server choose another.",
                )
            record = self._spawn_server(binary, previous.port, previous.ui_port, previous.ui_backend, lock=lock)
            self._report(f"Starting the Temporal server on {record.address}, its UI on {record.ui} ...")
            await self._until_server_answers(record)
        else:
            record = await self._start_first_server(binary, lock)
        self._report(f"  up in {time.monotonic() - started:.1f} s")
        return record

    async def _start_first_server(self, binary: Path, lock: int) -> ServerRecord:
        """Starts the server on free ports; tries others if another process takes them first."""
        while True:
            port, ui_port = choose_ports(first=self.state.path == users_own_path())
            record = self._spawn_server(binary, port, ui_port, lock=lock)
            self._report(f"Starting the Temporal server on {record.address}, its UI on {record.ui} ...")
            try:
                await self._until_server_answers(record)
                return record
            except ControlPlaneUnreachable:
                self.state.server_record.unlink(missing_ok=True)
                # The log does not matter: a server that loses its port during its start crashes without a reason.
                if record.alive or (is_free(port) and is_free(ui_port)):
                    raise

    def _spawn_server(self, binary: Path, port: int, ui_port: int, ui_backend: str = "", *, lock: int) -> ServerRecord:
        self.state.check_space()
        # The worker that runs knows where the UI was.
        backend = urlsplit(ui_backend or choose_ui_backend())
        command = [
            str(binary),
            *("server", "start-dev", "--ip", "0.0.0.0" if self._pods else "127.0.0.1", "--port", str(port)),
            *("--ui-ip", str(backend.hostname), "--ui-port", str(backend.port)),
            *("--db-filename", str(self.state.temporal / "temporal.db")),
            *(word for option in SERVER_OPTIONS for word in option),
            *(word for name, kind in SEARCH_ATTRIBUTES.items() for word in ("--search-attribute", f"{name}={kind}")),
        ]
        with self.state.map_errors():
            log = self._server_log
            log.unlink(missing_ok=True)
            pid, created = spawn(
                command,
                output=log,
                folder=self.state.temporal,
                environment=_own_environment(),
                umask=0o077,
                inherited=(lock,),
            )
        ip = self._pods.ip if self._pods else "127.0.0.1"
        record = ServerRecord(
            pid=pid,
            created=created,
            ip=ip,
            port=port,
            ui_port=ui_port,
            binary=str(binary),
            ui_backend=backend.geturl(),
            host=socket.gethostname(),
        )
        self.state.write(self.state.server_record, record.model_dump_json())
        return record

    def _spawn_worker(self, server: ServerRecord) -> WorkerRecord:
        self.state.check_space()
        environment = {
            **_own_environment(),
            "TEMPORAL_ADDRESS": server.address,
            "TEMPORAL_NAMESPACE": "default",
            # The user's own profile may hold credentials of another control plane.
            "TEMPORAL_CONFIG_FILE": os.devnull,
            "PERDURE_STATE": str(self.state.path),
            UI_VARIABLE: server.ui,
            UI_BACKEND_VARIABLE: server.ui_backend,
            "PERDURE_TASK_QUEUE": WORKER_TASK_QUEUE,
            **payload_encryption(local_endpoint(server, self.state)).environment,
        }
        options: list[str] = []
        if self._pods:
            options = ["--backend", Backend.KUBERNETES]
            environment |= {
                "KUBECONFIG": str(self._pods.kubeconfig),
                "PERDURE_KUBERNETES_AGENT_IMAGE": self._pods.agent_image,
                "PERDURE_KUBERNETES_POLICY_FILE": str(self._pods.site_policy),
            }
        elif os.environ.get(ADDRESS_VARIABLE):
            options = ["--backend", Backend.LOCAL, "--backend", Backend.RAY]
        with self.state.map_errors():
            output = self.state.worker / "worker.out"
            output.unlink(missing_ok=True)
            pid, created = spawn(
                [
                    *(sys.executable, "-P", "-m", "perdure.cli.main", "worker"),
                    *("--log-file", str(self._worker_log), "--events", str(self.state.worker / JOB_EVENTS), *options),
                ],
                output=output,
                folder=self.state.worker,
                environment=environment,
            )
        record = WorkerRecord(
            pid=pid, created=created, code=code_version(), address=server.address, python=sys.executable
        )
        self.state.write(self.state.worker_record, record.model_dump_json())
        return record

    async def _until_server_answers(self, record: ServerRecord) -> TemporalClient:
        """Waits for the server to serve its namespace."""
        endpoint = local_endpoint(record, self.state)
        deadline = time.monotonic() + START_TIMEOUT.total_seconds()
        while True:
            try:
                client = await connect(endpoint)
                request = DescribeNamespaceRequest(namespace=endpoint.namespace)
                await client.workflow_service.describe_namespace(request, timeout=CONNECT_TIMEOUT)
                # If two start at once on the same free port, one of them reaches the other's server.
                if record.process is not None and listens(record.process, record.port):
                    return client
                reason = "another server answers there"
            except (ControlPlaneUnreachable, RPCError) as error:
                reason = str(error)
            log = tail(self._server_log)
            if not record.alive:
                self.state.check_space()
                raise ControlPlaneUnreachable(
                    f"the Temporal server ended while starting: {log or 'it printed nothing'}",
                    remedy="`perdure doctor` checks what it needs.",
                )
            if time.monotonic() > deadline:
                raise ControlPlaneUnreachable(
                    f"the Temporal server (process {record.pid}) does not answer on {record.address}: {reason} {log}",
                    remedy="`perdure doctor` checks what it needs; `perdure worker --stop` ends it, jobs continue.",
                )
            await asyncio.sleep(0.1)

    async def _until_worker_polls(self, server: ServerRecord, record: WorkerRecord) -> None:
        client = await connect(local_endpoint(server, self.state))
        deadline = time.monotonic() + START_TIMEOUT.total_seconds()
        while not await _polls_both_queues(client, record.pid):
            if not record.alive or time.monotonic() > deadline:
                what = "does not poll its task queues" if record.alive else "ended while starting"
                log = tail(self.state.worker / "worker.out") or tail(self._worker_log)
                raise NoWorker(
                    f"the worker (process {record.pid}) {what}: {log or 'it logged nothing'}",
                    remedy=f"Its log is {self._worker_log}. `perdure worker` runs one in the foreground.",
                )
            await asyncio.sleep(0.05)

    @property
    def _server_log(self) -> Path:
        return self.state.temporal / "server.log"

    @property
    def _worker_log(self) -> Path:
        return self.state.worker / "worker.log"


async def _polls_both_queues(client: TemporalClient, pid: int) -> bool:
    identity = worker_identity(pid)
    with suppress(RPCError):
        return identity in await pollers(
            client, WORKER_TASK_QUEUE, TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW
        ) and identity in await pollers(
            client, watch_task_queue(WORKER_TASK_QUEUE), TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY
        )
    return False


def _own_environment() -> dict[str, str]:
    """This process's environment without what configures other control planes."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("TEMPORAL_", "PERDURE_PAYLOAD_"))}
