"""Perdure's trials: a control plane of the benchmark's own, and one job per trial, through the public client."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from perdure.base.errors import PerdureError
from perdure.base.state_folder import StateFolder
from perdure.client.client import Client
from perdure.client.views import Submission
from perdure.contract import IncidentView, JobResult
from perdure.contract.names import uid_of
from perdure.local.control_plane import LocalControlPlane
from perdure.local.processes import DaemonRecord, spawn

from .processes import QUIET_NETWORK, TrialFailed, eventually, kill
from .records import Composition, Scenario

TRAIN = Path(__file__).with_name("train.py")
TORCHRUN = Path(sys.executable).with_name("torchrun")
ROLE = "worker"

CAPACITY_FILE = "capacity"
"""The file in the state folder that limits the number of nodes on this machine."""

INCIDENT_SECONDS = 15.0
"""Seconds to wait for the job's incident: the job learns of the first step shortly after the step."""


@dataclass(frozen=True)
class ControlPlane:
    """A server and a worker, and a client to them."""

    client: Client
    state: Path
    server: DaemonRecord
    worker: DaemonRecord


DEAF_WORKER = "benchmarks.recovery.deaf_worker"
"""A worker that withholds the loss of nodes."""


@asynccontextmanager
async def control_plane(*, worker_module: str = "") -> AsyncGenerator[ControlPlane]:
    """Runs a control plane in a folder of its own while the context is open.

    Args:
        worker_module: The program that runs instead of the product's worker.
    """
    # The folder contains sockets, whose paths are limited to 108 bytes.
    with tempfile.TemporaryDirectory(prefix="pb-") as folder:
        path = Path(folder)
        local = LocalControlPlane(StateFolder(path))
        own: DaemonRecord | None = None
        try:
            endpoint = await local.ensure_server()
            if worker_module:
                worker = own = await _start_worker(worker_module, path, endpoint.address)
            else:
                worker = await local.ensure_worker()
            server = local.status().server
            assert server is not None
            async with Client(endpoint=endpoint) as client:
                yield ControlPlane(client, path, server, worker)
        finally:
            if own is not None:
                await own.stop()
            await local.stop_worker()
            await local.stop_server()


async def _start_worker(module: str, state: Path, address: str) -> DaemonRecord:
    """Starts a worker of the benchmarks. It polls its queues within a second or two; the first job waits for that."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("TEMPORAL_")},
        "TEMPORAL_ADDRESS": address,
        "TEMPORAL_CONFIG_FILE": os.devnull,
        "PERDURE_STATE": str(state),
    }
    command = [sys.executable, "-m", module]
    root = Path(__file__).resolve().parents[2]
    pid, created = spawn(command, output=state / "own-worker.log", folder=root, environment=environment)
    return DaemonRecord(pid=pid, created=created)


def node_processes(prefix: str) -> list[psutil.Process]:
    """Returns every process of local nodes whose `PERDURE_NODE` has this prefix: agents, launchers, commands and ranks.

    The prefix begins with a job's uid, so that other jobs of this machine are not touched.
    """
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            node = process.environ().get("PERDURE_NODE")
            if node is not None and node.startswith(prefix) and process.pid != os.getpid():
                found.append(process)
    return found


@dataclass
class PerdureJob:
    """A trial's job of Perdure, on the local backend."""

    scenario: Scenario
    folder: Path
    plane: ControlPlane
    size: int = 2
    warm_starts: bool = True
    name: str = field(default_factory=lambda: f"bench-{secrets.token_hex(3)}")
    _submission: Submission | None = None
    _ended: asyncio.Task[JobResult] | None = None

    @property
    def uid(self) -> str:
        if self._submission is None:
            raise TrialFailed("the job was not submitted")
        return uid_of(self._submission.run_id)

    async def start(self) -> None:
        spec = {
            "name": self.name,
            "recovery": {"warm_starts": self.warm_starts},
            "env": {
                **QUIET_NETWORK,
                "BENCH_FOLDER": str(self.folder),
                "BENCH_MEMORY": "1",
                **self.scenario.environment,
            },
            "roles": {
                ROLE: {
                    "nodes": self.scenario.nodes(self.size),
                    "nproc_per_node": 1,
                    "command": [str(TORCHRUN), str(TRAIN)],
                }
            },
        }
        try:
            self._submission = await self.plane.client.submit(spec)
        except PerdureError as error:
            raise TrialFailed(f"not submitted: {error}") from error
        self._ended = asyncio.create_task(self.plane.client.wait(self.name))

    def alive(self) -> bool:
        return self._ended is not None and not self._ended.done()

    def processes(self, node: int) -> list[psutil.Process]:
        return node_processes(f"{self.uid}/{ROLE}-{node}/")

    async def forbid_replacement(self) -> None:
        (self.plane.state / CAPACITY_FILE).write_text(f"{self.size - 1}\n", encoding="utf-8")

    async def replace(self, node: int) -> None:
        """Does nothing: the job replaces nodes itself."""

    async def compose(self, killed_at: float) -> Composition:
        deadline = asyncio.get_running_loop().time() + INCIDENT_SECONDS
        while True:
            with suppress(PerdureError):
                incidents = await self.plane.client.incidents(self.name)
                interruptions = [one for one in incidents if one.observation is None]
                ours = next((one for one in interruptions if one.noticed_at.timestamp() > killed_at), None)
                if ours and (composition := compose_incident(ours, killed_at)).entered is not None:
                    texts = [incident.model_dump_json(indent=1) for incident in incidents]
                    (self.folder / "incidents.json").write_text(f"[{','.join(texts)}]\n", encoding="utf-8")
                    return composition
            if asyncio.get_running_loop().time() > deadline:
                raise TrialFailed("the world steps again, but the job knows of no incident")
            await asyncio.sleep(0.1)

    async def stop(self) -> None:
        (self.plane.state / CAPACITY_FILE).unlink(missing_ok=True)
        if self._submission is None:
            return
        with suppress(PerdureError):
            await self.plane.client.cancel(self.name)
        if self._ended is not None:
            with suppress(PerdureError, TimeoutError):
                await asyncio.wait_for(self._ended, 60)
        uid = self.uid
        with suppress(TrialFailed):
            await eventually(lambda: None if node_processes(f"{uid}/") else True, seconds=20, otherwise="nodes stayed")
        kill(node_processes(f"{uid}/"))


def compose_incident(incident: IncidentView, killed_at: float) -> Composition:
    """Returns the incident's times, in seconds since the kill."""

    def since_kill(name: str) -> float | None:
        time = getattr(incident, name)
        return None if time is None else time.timestamp() - killed_at

    return Composition(
        happened=since_kill("started_at"),
        noticed=since_kill("noticed_at"),
        decided=since_kill("decided_at"),
        commanded=since_kill("commanded_at"),
        entered=since_kill("entered_at"),
    )
