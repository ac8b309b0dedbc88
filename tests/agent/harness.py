"""A real agent process together with everything that it communicates with."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from temporalio.client import Client, WorkflowHandle
from temporalio.worker import Worker

from perdure.agent.config import AgentConfig
from perdure.contract import LeaseRequest, NodeCredentials, World
from perdure.spec.timing import LeaseTiming, Timing
from tests.agent.recorder import RECORDED, Call, LeaseCall, Recorder, Seen
from tests.support.desired import Desires, desired_world
from tests.support.temporal_server import DevServer
from tests.support.waiting import DEADLINE, eventually
from tests.support.warm_process import WarmProcess, warm_interpreter

QUICK = Timing(
    lease=LeaseTiming(heartbeat=timedelta(seconds=0.5), timeout=timedelta(seconds=20)),
    owner_check=timedelta(seconds=1),
)
"""Frequent reports. A lease is lost only by a test that wants that: a busy machine delays heartbeats by seconds."""


class Workflows:
    """A recording job and group, with the worker that runs them."""

    def __init__(self, client: Client, job: WorkflowHandle[Any, Any], group: WorkflowHandle[Any, Any]) -> None:
        self.client = client
        self.job = job
        self.group = group

    async def seen(self, handle: WorkflowHandle[Any, Any], signal: str = "") -> list[Seen]:
        """Signals that the workflow has had, of one name or all."""
        seen = await handle.query(Recorder.seen)
        return [one for one in seen if signal in ("", one.signal)]

    async def expect(
        self,
        handle: WorkflowHandle[Any, Any],
        signal: str,
        *,
        count: int = 1,
        within: float = DEADLINE,
        where: Callable[[dict[str, Any]], bool] = lambda body: True,
    ) -> list[dict[str, Any]]:
        """Waits for so many signals of one name, which a worker of this process records."""
        known = -1

        async def enough() -> list[dict[str, Any]] | None:
            nonlocal known
            if known == (recorded := RECORDED[handle.id]):
                return None
            try:
                bodies = [one.body for one in await self.seen(handle, signal) if where(one.body)]
            except Exception:
                return None
            known = recorded
            return bodies if len(bodies) >= count else None

        return await eventually(enough, within=within)

    async def beats(self, count: int) -> None:
        """Waits for so many more heartbeats of the lease: what the agent does in that time, it has done."""
        for _ in range(count):
            before = await self.report()
            await eventually(partial(self._newer_report, before))

    async def report(self) -> dict[str, Any] | None:
        """Returns the newest report in the lease of the agent."""
        description = await self.group.describe()
        for pending in description.raw_description.pending_activities:
            if pending.activity_type.name == "hold_lease":
                details = await description.data_converter.decode(pending.heartbeat_details.payloads)
                if details:
                    return details[0]
        return None

    async def _newer_report(self, before: dict[str, Any] | None) -> bool:
        report = await self.report()
        return report is not None and (before is None or report["time"] > before["time"])


@asynccontextmanager
async def recording(server: DevServer, *, client: Client | None = None, job: str = "") -> AsyncIterator[Workflows]:
    """Starts a job and a group that record.

    Args:
        server: where they run.
        client: of their worker; by default one without encryption.
        job: the job's ID; by default one of its own.
    """
    client = client or await server.client()
    queue = f"recorder-{secrets.token_hex(4)}"
    job_id = job or f"job/tests/{secrets.token_hex(4)}"
    job_handle = await client.start_workflow(Recorder.run, id=job_id, task_queue=queue)
    group = await client.start_workflow(Recorder.run, id=f"{job_id}/group", task_queue=queue)
    async with Worker(client, task_queue=queue, workflows=[Recorder]):
        yield Workflows(client, job_handle, group)


class RunningAgent:
    """One agent process after another, for the same incarnation of a node."""

    def __init__(self, server: DevServer, workflows: Workflows, folder: Path, **config: Any) -> None:
        self.node = NodeCredentials(
            uid=secrets.token_hex(4), role="worker", rank=0, incarnation=1, token=secrets.token_hex(8)
        )
        self._desires = Desires(self.node)
        self.run_dir = folder
        self._server = server
        self.workflows = workflows
        self.config = AgentConfig(
            **dict[str, Any](
                {
                    "node": self.node,
                    "job_id": workflows.job.id,
                    "job_first_run_id": workflows.job.first_execution_run_id,
                    "group_id": workflows.group.id,
                    "task_queue": f"node/{self.node.uid}/worker-0/1",
                    "address": "127.0.0.1",
                    "host": "here",
                    "nodes": "1:2",
                    "run_dir": folder,
                    "timing": QUICK,
                    "termination_grace": 1.0,
                },
                **config,
            )
        )
        self.process: WarmProcess | None = None
        self._http: aiohttp.ClientSession | None = None

    @property
    def environment(self) -> dict[str, str]:
        """As the backend gives it to all of the node's processes."""
        return {
            "PERDURE_RUN_DIR": str(self.run_dir),
            "PERDURE_NODE": f"{self.node.uid}/worker-0/1",
        }

    @property
    def process_environment(self) -> dict[str, str]:
        """All variables of the agent's process."""
        config = {"PERDURE_AGENT_CONFIG": str(self.run_dir / "agent.json")}
        return {**os.environ, **self._server.environment, **self.environment, **config}

    async def start(self) -> None:
        (self.run_dir / "agent.json").write_text(self.config.model_dump_json())
        self.process = await start_agent(self.process_environment)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    async def kill(self) -> None:
        """SIGKILL, whatever its state."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
            await self.process.wait()

    async def close(self) -> None:
        await self.kill()
        if self._http is not None:
            await self._http.close()

    def log(self) -> str:
        path = self.run_dir / "logs" / "agent.log"
        return path.read_text() if path.exists() else ""

    # As its launcher and its handler

    async def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """One request, asked again while the agent is away, as its clients do."""
        if self._http is None:
            connector = aiohttp.UnixConnector(path=str(self.run_dir / "agent.sock"))
            self._http = aiohttp.ClientSession(connector=connector, base_url="http://agent")
        http = self._http

        async def answer() -> tuple[int, dict[str, Any]] | None:
            try:
                async with http.request(method, path, json=body) as response:
                    return response.status, json.loads(await response.read())
            except (aiohttp.ClientError, OSError):
                return None

        return await eventually(answer, what=f"an answer to {method} {path}")

    async def post(self, path: str, **body: Any) -> None:
        status, answer = await self.request("POST", path, body)
        assert status == 200, answer

    async def get(self, path: str) -> dict[str, Any]:
        status, answer = await self.request("GET", path)
        assert status == 200, answer
        return answer

    async def enter(self, generation: int) -> None:
        await self.post("/v1/rendezvous/entered", generation=generation, time=time.time(), store_ports=[29502])

    async def launcher_hello(self, *, pid: int | None = None, mode: str = "torchrun") -> None:
        await self.post(
            "/v1/launcher/hello",
            pid=pid or os.getpid(),
            attempt=1,
            mode=mode,
            processes=1,
            protocol=1,
        )

    async def handler_hello(self, *, pid: int = 4711) -> None:
        await self.post(
            "/v1/rendezvous/hello",
            pid=pid,
            torch="2.15.0",
            min_nodes=1,
            max_nodes=2,
            processes=1,
            run_id=self.node.uid,
            store_ports=[29501, 29502],
        )

    async def ready(self, after: int, ranks: list[dict[str, Any]] | None = None) -> None:
        await self.post(
            "/v1/rendezvous/ready",
            after_generation=after,
            ranks=ranks or [],
            store_ports=[29501, 29502],
            processes=1,
        )

    # As the control plane

    def world(self, generation: int, **changes: Any) -> World:
        return desired_world(self.node, generation, **changes)

    async def desire(self, **desired: Any) -> dict[str, Any]:
        """Has the group desire this, and all else as before; returns the agent's answer."""
        return await self.command("apply_desired", self._desires.next(**desired))

    async def command(self, activity: str, argument: Any) -> dict[str, Any]:
        """Runs an activity on the agent through the group."""
        call = Call(queue=self.config.task_queue, activity=activity, argument=argument.model_dump(mode="json"))
        return await self.workflows.group.execute_update(Recorder.call, call)  # pyrefly: ignore[no-matching-overload]

    async def start_lease(self, epoch: int) -> asyncio.Task[str]:
        """Schedules a lease; the task's result says how it ended."""
        call = LeaseCall(
            queue=self.config.task_queue,
            request=LeaseRequest(
                node=self.node,
                epoch=epoch,
                heartbeat=self.config.timing.lease.heartbeat,
            ),
            timeout=self.config.timing.lease.timeout,
        )
        return asyncio.create_task(self.workflows.group.execute_update(Recorder.lease, call))  # pyrefly: ignore[no-matching-overload]


async def start_agent(environment: Mapping[str, str]) -> WarmProcess:
    """Starts `python -m perdure.agent` with these variables only."""
    interpreter = warm_interpreter("perdure.agent.process", "perdure.agent.transport")
    return await asyncio.to_thread(interpreter.start, "perdure.agent", environment=environment)


@asynccontextmanager
async def running_agent(
    server: DevServer, workflows: Workflows, folder: Path, **config: Any
) -> AsyncIterator[RunningAgent]:
    """A started agent, ended when the test is over."""
    agent = RunningAgent(server, workflows, folder, **config)
    try:
        await agent.start()
        yield agent
    finally:
        await agent.close()


def rank_exit(**fields: Any) -> dict[str, Any]:
    """A failed rank, as a handler reports it."""
    return {"local_rank": 0, "global_rank": 0, "pid": 4712, "signal": 9, "time": time.time(), **fields}


def utc(text: str) -> datetime:
    """A time from a recorded signal."""
    return datetime.fromisoformat(text).astimezone(UTC)
