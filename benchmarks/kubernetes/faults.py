"""Faults of a cluster, injected into a job of two nodes on two real kubelets."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

from benchmarks.recovery.perdure_job import node_processes
from benchmarks.recovery.processes import TrialFailed, kill
from benchmarks.recovery.processes import eventually as eventually_seen
from benchmarks.recovery.steps import Step, StepLog, find_world
from perdure.base.kubernetes import Object
from perdure.contract import IncidentView
from perdure.contract.names import uid_of
from scripts.cluster.host_programs import with_host_programs
from scripts.cluster.images import BARE_IMAGE

from .records import FaultName, FaultTrial
from .site import Site, eventually

TRAIN = Path(__file__).with_name("train.py")
ROLE = "worker"
VICTIM = 1
NODES = 2
MEMORY = "2Gi"

START_SECONDS = 180.0
SETTLE_SECONDS = 2.0
API_SERVER_AWAY = 3.0
WORKER_AWAY = 10.0
AFTERWARDS = 10.0
"""Seconds for which training is observed after a fault that need not interrupt it."""
LONGEST_PAUSE = 2.0
"""Longest acceptable pause between two steps of about 50 ms; two ranks share two cores with everything else."""


@dataclass
class Victim:
    """A stepping job, with the access to it that faults need."""

    site: Site
    name: str
    uid: str
    folder: Path

    async def pod(self) -> Object:
        """Returns the pod of the node that the fault hits."""
        labels = f"perdure.dev/uid={self.uid},perdure.dev/rank={VICTIM}"
        pods = await self.site.api.list(self.site.pods_path, labels=labels)
        return max(pods, key=lambda pod: pod["metadata"]["creationTimestamp"])

    async def delete_pod(self) -> None:
        await self.site.api.delete(f"{self.site.pods_path}/{(await self.pod())['metadata']['name']}")

    async def incident(self, after: int) -> IncidentView | None:
        """Returns the first decided incident with a higher number."""
        for incident in await self.site.client.incidents(self.name):
            if incident.number > after and incident.decided_at is not None:
                return incident
        return None


@asynccontextmanager
async def pod_deleted(victim: Victim) -> AsyncGenerator[None]:
    await victim.delete_pod()
    yield


@asynccontextmanager
async def container_killed(victim: Victim) -> AsyncGenerator[None]:
    """Kills the container's first process, the launcher; all others of the container end with it."""
    processes = node_processes(f"{victim.uid}/{ROLE}-{VICTIM}/")
    (first,) = (process for process in processes if _is_first_of_its_container(process))
    kill([first])
    yield


@asynccontextmanager
async def out_of_memory(victim: Victim) -> AsyncGenerator[None]:
    (victim.folder / f"allocate-{VICTIM}").touch()
    yield


@asynccontextmanager
async def kubelet_stopped(victim: Victim) -> AsyncGenerator[None]:
    """Stops the kubelet until the control plane has marked the machine NotReady, and during the trial."""
    machine = (await victim.pod())["spec"]["nodeName"]
    (node,) = (node for node in victim.site.cluster.nodes() if node.name == machine)
    await asyncio.to_thread(node.kill_kubelet)
    try:
        await eventually(
            lambda: _readiness(victim.site, machine, "Unknown"),
            seconds=120,
            otherwise=f"{machine} was not marked NotReady",
        )
        yield
    finally:
        await asyncio.to_thread(node.start_kubelet)
        await eventually(
            lambda: _readiness(victim.site, machine, "True"), seconds=120, otherwise=f"{machine} did not come back"
        )


@asynccontextmanager
async def machine_drained(victim: Victim) -> AsyncGenerator[None]:
    """Drains the machine like `kubectl drain`: cordons it, and evicts pods."""
    api, pod = victim.site.api, await victim.pod()
    machine, name = f"/api/v1/nodes/{pod['spec']['nodeName']}", pod["metadata"]["name"]
    await api.set_spec(machine, unschedulable=True)
    try:
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
        await api.create(f"{victim.site.pods_path}/{name}/eviction", eviction)
        yield
    finally:
        await api.set_spec(machine, unschedulable=False)


@asynccontextmanager
async def worker_killed(victim: Victim) -> AsyncGenerator[None]:
    """Kills the worker and restarts it after a while; a Deployment would do so sooner."""
    control_plane = victim.site.control_plane
    await asyncio.to_thread(control_plane.kill_worker)
    await asyncio.sleep(WORKER_AWAY)
    await control_plane.ensure_worker()
    yield


@asynccontextmanager
async def api_server_restarted(victim: Victim) -> AsyncGenerator[None]:
    """Restarts the API server as soon as the job has decided how to repair a deleted pod."""
    before = await last_incident(victim)
    await victim.delete_pod()
    await eventually(lambda: victim.incident(before), seconds=60, otherwise="the job did not notice")
    await asyncio.to_thread(victim.site.cluster.kill_api_server)
    await asyncio.sleep(API_SERVER_AWAY)
    await asyncio.to_thread(victim.site.cluster.start_api_server)
    yield


FAULTS: dict[FaultName, Callable[[Victim], AbstractAsyncContextManager[None]]] = {
    FaultName.POD_DELETED: pod_deleted,
    FaultName.POD_DELETED_GATEWAY: pod_deleted,
    FaultName.CONTAINER_KILLED: container_killed,
    FaultName.OUT_OF_MEMORY: out_of_memory,
    FaultName.KUBELET_STOPPED: kubelet_stopped,
    FaultName.MACHINE_DRAINED: machine_drained,
    FaultName.WORKER_KILLED: worker_killed,
    FaultName.API_SERVER_RESTARTED: api_server_restarted,
}
"""The faults as contexts: entering one injects the fault, leaving it restores the cluster."""


async def run_fault(site: Site, fault: FaultName, *, number: int, folder: Path, timeout_seconds: float) -> FaultTrial:
    """Runs one trial; a failure to recover is a result, not an exception."""
    trial = FaultTrial(fault=fault, number=number, ok=False)
    name = f"fault-{secrets.token_hex(3)}"
    log = StepLog(folder)
    try:
        await site.gateway.turn(on=fault.through_gateway)
        victim = await _stepping_job(site, name, folder, log)
        before = await last_incident(victim)
        struck = time.time()
        async with FAULTS[fault](victim):
            if fault.interrupts:
                return await _recovery(trial, victim, log, before, struck, timeout_seconds)
            await asyncio.sleep(AFTERWARDS)
        return await _undisturbed(trial, victim, log, before, struck)
    except TrialFailed as failed:
        return trial.model_copy(update={"error": str(failed)})
    finally:
        await site.end(name)


async def _stepping_job(site: Site, name: str, folder: Path, log: StepLog) -> Victim:
    began = time.time()
    submission = await site.client.submit(
        {
            "name": name,
            "namespace": site.namespace,
            "backend": "kubernetes",
            "env": {"OMP_NUM_THREADS": "1", "BENCH_FOLDER": str(folder)},
            "limits": {"termination_grace_period": "5s"},
            "roles": {
                ROLE: {
                    "nodes": NODES,
                    "nproc_per_node": 1,
                    "image": BARE_IMAGE,
                    "resources": {"memory": MEMORY},
                    "command": ["torchrun", str(TRAIN)],
                    "pod_template": with_host_programs(folder),
                }
            },
        }
    )
    await eventually_seen(
        lambda: find_world(log.refresh(), world_size=NODES, after=began, count=10),
        seconds=START_SECONDS,
        otherwise="the job did not start stepping",
    )
    await asyncio.sleep(SETTLE_SECONDS)
    return Victim(site, name, uid_of(submission.run_id), folder)


async def _recovery(
    trial: FaultTrial, victim: Victim, log: StepLog, before: int, struck: float, timeout_seconds: float
) -> FaultTrial:
    incident = await eventually(
        lambda: victim.incident(before), seconds=timeout_seconds, otherwise="the job did not notice"
    )
    assert incident.decided_at is not None
    noticed, decided = incident.noticed_at.timestamp(), incident.decided_at.timestamp()
    trial = trial.model_copy(
        update={
            "noticed": noticed - struck,
            "decided": decided - struck,
            "title": incident.title,
            "action": incident.action,
        }
    )
    # Ranks are distinguished by the time of their steps: their PIDs are those in their containers, and are used again.
    try:
        world = await eventually_seen(
            lambda: find_world(log.refresh(), world_size=NODES, after=decided),
            seconds=timeout_seconds,
            otherwise="not stepping again",
        )
    except TrialFailed as failed:
        return trial.model_copy(update={"error": str(failed)})
    return trial.model_copy(update={"ok": True, "stepping": world.time - struck})


async def _undisturbed(trial: FaultTrial, victim: Victim, log: StepLog, before: int, struck: float) -> FaultTrial:
    pause = longest_pause(log.refresh(), since=struck, until=time.time())
    incident = await victim.incident(before)
    return trial.model_copy(
        update={
            "ok": incident is None and pause <= LONGEST_PAUSE,
            "stepping": pause,
            "title": incident.title if incident else "",
            "action": incident.action if incident else "nothing: training continued",
        }
    )


def longest_pause(steps: list[Step], *, since: float, until: float) -> float:
    """Returns the longest pause of any rank, in seconds."""
    longest = 0.0
    for rank in range(NODES):
        times = [step.time for step in steps if step.rank == rank and since <= step.time <= until]
        longest = max(longest, *(later - earlier for earlier, later in pairwise([since, *times, until])))
    return longest


async def last_incident(victim: Victim) -> int:
    """Returns the number of the newest incident; 0 if there is none."""
    return max((incident.number for incident in await victim.site.client.incidents(victim.name)), default=0)


async def _readiness(site: Site, machine: str, wanted: str) -> bool:
    node = await site.api.get(f"/api/v1/nodes/{machine}")
    conditions = node["status"].get("conditions", []) if node else []
    return any(one["type"] == "Ready" and one["status"] == wanted for one in conditions)


def _is_first_of_its_container(process: psutil.Process) -> bool:
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
    (numbers,) = (line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:"))
    return numbers[-1] == "1"
