"""The way of a report to the command that answers it: signal, decision of a workflow, activity."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

from temporalio import activity, workflow
from temporalio.client import Client, WorkflowHandle
from temporalio.worker import PollerBehaviorSimpleMaximum, Worker

from benchmarks.gateway.agents import GatewayProcess


@workflow.defn(name="Probe", sandboxed=False)
class Probe:
    """Answers each report with a command."""

    def __init__(self) -> None:
        self._reports = 0

    @workflow.run
    async def run(self, queue: str) -> None:
        answered = 0
        while True:
            await workflow.wait_condition(lambda seen=answered: self._reports > seen)
            answered += 1
            await workflow.execute_activity(
                "check_connection", task_queue=queue, start_to_close_timeout=timedelta(seconds=10)
            )

    @workflow.signal
    def ports_changed(self, _: dict[str, object]) -> None:
        self._reports += 1


class Prober:
    """One agent that reports and waits for the command."""

    def __init__(self, client: Client, uid: str) -> None:
        self._client = client
        self._commanded = asyncio.Event()
        self.handle: WorkflowHandle[object, object] | None = None
        self._sender = {"uid": uid, "role": "worker", "rank": 0, "incarnation": 1}

    @activity.defn(name="check_connection")
    async def command(self) -> None:
        self._commanded.set()

    async def milliseconds(self) -> float:
        """From the report to the command."""
        assert self.handle
        self._commanded.clear()
        began = time.perf_counter()
        await self.handle.signal("ports_changed", {"sender": self._sender})
        await self._commanded.wait()
        return (time.perf_counter() - began) * 1000


@asynccontextmanager
async def probers(direct: Client, gateway: GatewayProcess) -> AsyncIterator[tuple[Prober, Prober]]:
    """Yields a prober that connects to Temporal, and one that connects to the gateway."""
    queue = f"probe-{secrets.token_hex(4)}"
    async with (
        Worker(direct, task_queue=queue, workflows=[Probe]),
        _prober(direct, direct, queue) as one,
        _prober(direct, gateway, queue) as other,
    ):
        yield one, other


@asynccontextmanager
async def _prober(direct: Client, through: Client | GatewayProcess, queue: str) -> AsyncIterator[Prober]:
    uid = secrets.token_hex(4)
    own_queue = f"node/{uid}/worker-0/1"
    started = await direct.start_workflow(Probe.run, own_queue, id=f"probe/{uid}", task_queue=queue)
    if isinstance(through, GatewayProcess):
        client = await through.client(
            through.grant(job_id=f"job/{uid}", group_id=started.id, task_queue=own_queue, uid=uid)
        )
    else:
        client = through
    prober = Prober(client, uid)
    prober.handle = client.get_workflow_handle(started.id)
    poller = PollerBehaviorSimpleMaximum(1)
    async with Worker(client, task_queue=own_queue, activities=[prober.command], activity_task_poller_behavior=poller):
        yield prober
    await started.terminate()
