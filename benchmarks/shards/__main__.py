"""`make bench-shards`: shards through one dataset, the wait of a rank, the size of its state; ends with one line of
JSON.

Server, workflow and updates are real; the wait is measured by a real client through a real agent.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import tempfile
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from temporalio.client import WorkflowHandle
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from benchmarks.history.__main__ import quieten
from perdure.contract import (
    DatasetAnswer,
    DatasetParameters,
    DatasetRequest,
    DatasetView,
    NodeCredentials,
    ShardRequest,
    Term,
)
from perdure.contract.datasets import Spans
from perdure.contract.names import dataset_workflow_id
from perdure.workflows.companion import JobOwner
from perdure.workflows.dataset import Dataset, DatasetInput
from perdure.workflows.policy.services.dataset_views import view
from perdure.workflows.policy.services.datasets import MOST_FRAGMENTS, DatasetState, exchange
from perdure.workflows.policy.services.spans import difference, union
from perdure_training.node_api.agent_client import Agent
from perdure_training.shards import ShardingClient
from perdure_training.shards.link import AgentLink
from tests.agent.harness import Workflows, recording, running_agent
from tests.support.temporal_server import dev_server

logger = logging.getLogger(__name__)

UID = "0a1b2c3d"
BILLION = 10**9
READERS = 8
"""Updates in progress: a server takes ten at a time for one workflow."""
SHARDS_AT_ONCE = 2_000
"""The number that a rank requests which processes several hundred shards a second."""
BATCH_SECONDS = 0.002
"""What the measured rank does with a shard."""
WARM_UP_SECONDS = 2.0
"""The client finds out in this time how many shards its rank needs ahead."""


async def _dataset(
    workflows: Workflows, uid: str, parameters: DatasetParameters, queue: str
) -> WorkflowHandle[Any, Any]:
    job = workflows.job
    owner = JobOwner(job_id=job.id, job_first_run_id=job.first_execution_run_id or "", check=timedelta(minutes=1))
    return await workflows.client.start_workflow(
        Dataset.run,
        DatasetInput(owner=owner, uid=uid, name="train", state=DatasetState(parameters=parameters)),
        id=dataset_workflow_id(job.id, uid, "train"),
        task_queue=queue,
    )


async def shards_per_second(shard_size: int, *, seconds: float) -> float:
    """Measures how many shards one dataset leases and counts as done."""
    async with dev_server() as server, recording(server) as workflows:
        queue = f"shards-{secrets.token_hex(4)}"
        async with Worker(
            workflows.client, task_queue=queue, workflows=[Dataset], workflow_runner=UnsandboxedWorkflowRunner()
        ):
            parameters = DatasetParameters(size=BILLION, shard_size=shard_size, epochs=0, shuffle=True)
            dataset = await _dataset(workflows, UID, parameters, queue)
            began = time.monotonic()
            deadline = began + seconds
            await asyncio.gather(*(_read(workflows, dataset.id, parameters, rank, deadline) for rank in range(READERS)))
            took = time.monotonic() - began
            known = await workflows.client.get_workflow_handle(dataset.id).query("progress", result_type=DatasetView)
            await workflows.client.get_workflow_handle(dataset.id).terminate()
            return known.done / shard_size / took


async def _read(workflows: Workflows, dataset: str, parameters: DatasetParameters, rank: int, deadline: float) -> None:
    holds: Spans = ()
    sender = NodeCredentials(uid=UID, role="worker", rank=rank, incarnation=1, token="t")
    handle = workflows.client.get_workflow_handle(dataset)
    while time.monotonic() < deadline:
        one = ShardRequest(rank=rank, world_size=READERS, done=holds, shards=SHARDS_AT_ONCE)
        request = DatasetRequest(sender=sender, parameters=parameters, term=Term(generation=1), ranks=(one,))
        try:
            answer = await handle.execute_update("exchange", request, result_type=DatasetAnswer)
        except Exception as error:
            # A run that continues as new, or too many updates: the agent sends the request again, too.
            logger.info("repeated: %s", error)
            await asyncio.sleep(0.02)
            continue
        holds = answer.ranks[0].granted


@dataclass(frozen=True)
class Waits:
    """The times that `fetch` took, in milliseconds."""

    median: float
    p99: float
    longest: float


async def waits(*, seconds: float) -> Waits:
    """Measures how long a rank waits for a shard that it needs every few milliseconds."""
    with tempfile.TemporaryDirectory(prefix="shards") as folder:
        async with (
            dev_server(Path(folder) / "temporal.db") as server,
            recording(server) as workflows,
            running_agent(server, workflows, Path(folder)) as agent,
        ):
            await agent.desire(world=agent.world(1))
            queue = f"shards-{secrets.token_hex(4)}"
            async with Worker(workflows.client, task_queue=queue, workflows=[Dataset]):
                parameters = DatasetParameters(size=BILLION, shard_size=64, shuffle=True)
                dataset = await _dataset(workflows, agent.node.uid, parameters, queue)
                os.environ["PERDURE_GENERATION"] = "1"
                client = ShardingClient(
                    "train", **parameters.model_dump(), link=AgentLink(Agent(agent.run_dir / "agent.sock"))
                )
                times = await asyncio.to_thread(_fetch_times, client, seconds)
                await workflows.client.get_workflow_handle(dataset.id).terminate()
    ordered = sorted(1000 * one for one in times)
    return Waits(ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)], ordered[-1])


def _fetch_times(client: ShardingClient, seconds: float) -> list[float]:
    times: list[float] = []
    began = time.monotonic()
    pause = threading.Event()
    while (now := time.monotonic()) < began + WARM_UP_SECONDS + seconds:
        before = time.perf_counter()
        shard = client.fetch()
        took = time.perf_counter() - before
        assert shard
        if now >= began + WARM_UP_SECONDS:
            times.append(took)
        pause.wait(BATCH_SECONDS)
        client.report(shard)
    client.flush(10)
    return times


def state_bytes(ranks: int) -> int:
    """Returns the largest state of a dataset of a billion samples whose shards are done in any order.

    A third of the ranks is behind: each turn it finishes the first of its spans only, so that leases go to pieces.
    """
    state = DatasetState(parameters=DatasetParameters(size=BILLION, shard_size=64, shuffle=True))
    term, held, largest = Term(generation=1), list[Spans]([()] * ranks), 0
    turns, at_once = 0, BILLION // 64 // ranks // 50
    while state.next < BILLION:
        turns += 1
        for rank, spans in enumerate(held):
            done = spans[:1] if (turns + rank) % 3 == 0 else spans
            request = ShardRequest(
                rank=rank,
                world_size=ranks,
                holds=difference(spans, done),
                done=done,
                shards=at_once,
            )
            state, answer = exchange(state, state.parameters, term, request)
            held[rank] = union(request.holds, answer.granted)
        largest = max(largest, view(state).state_bytes)
    return largest


def worst_state_bytes(ranks: int) -> int:
    """Returns the size of the state when each rank has finished every other one of the shards that it holds."""
    state = DatasetState(parameters=DatasetParameters(size=BILLION, shard_size=64, shuffle=True))
    term, middle = Term(generation=1), BILLION // 64 // 2 * 64
    state = state.model_copy(update={"next": middle})
    for rank in range(ranks):
        one = ShardRequest(rank=rank, world_size=ranks, shards=2 * MOST_FRAGMENTS)
        state, answer = exchange(state, state.parameters, term, one)
        first = answer.granted[0][0]
        done = tuple((first + 128 * n, first + 128 * n + 64) for n in range(MOST_FRAGMENTS))
        one = ShardRequest(rank=rank, world_size=ranks, holds=difference(answer.granted, done), done=done)
        state, _ = exchange(state, state.parameters, term, one)
    return view(state).state_bytes


async def _measure(seconds: float) -> None:
    console = Console(stderr=True)
    small, large = [await shards_per_second(size, seconds=seconds) for size in (64, 4096)]
    waited = await waits(seconds=seconds)
    sizes = {ranks: state_bytes(ranks) for ranks in (64, 512)}
    table = Table("what", "measured", "goal")
    table.add_row(f"shards a second through one dataset, {READERS} updates at a time", f"{small:,.0f}", ">= 20,000")
    table.add_row("samples a second at 64 samples a shard", f"{64 * small:,.0f}", "")
    table.add_row("samples a second at 4,096 samples a shard", f"{4096 * large:,.0f}", "")
    table.add_row("wait for a shard: median", f"{waited.median:.3f} ms", "")
    table.add_row("wait for a shard: p99", f"{waited.p99:.3f} ms", "< 1 ms")
    table.add_row("wait for a shard: longest", f"{waited.longest:.1f} ms", "")
    worst = worst_state_bytes(64)
    table.add_row("state at 10^9 samples, 64 ranks, in as many pieces as possible", f"{worst / 1024:.1f} KB", "< 64 KB")
    for ranks, size in sizes.items():
        table.add_row(f"largest state at 10^9 samples, {ranks} ranks", f"{size / 1024:.1f} KB", "< 64 KB")
    console.print(table)
    result = {
        "shards_per_s": round(small),
        "wait_p99_ms": round(waited.p99, 3),
        "state_bytes_1e9": max(worst, sizes[64]),
    }
    print(json.dumps(result), flush=True)


def main(seconds: Annotated[float, typer.Option(help="Seconds of each measurement.")] = 15.0) -> None:
    """Measures the shards of datasets."""
    quieten()
    asyncio.run(_measure(seconds))


if __name__ == "__main__":
    typer.run(main)
