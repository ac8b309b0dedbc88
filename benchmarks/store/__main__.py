"""`make bench-store`: calls through one store, and how long a rank's calls take; ends with one line of JSON.

Server, workflow, updates, agent and client are real; there is one agent, and the calls of others are sent as agents do.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import tempfile
import threading
import time
from itertools import count
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from temporalio.client import WorkflowHandle
from temporalio.service import RPCError

from benchmarks.history.__main__ import quieten
from perdure.contract import NodeCredentials, StoreAction, StoreAnswers, StoreCall, StoreRequest
from perdure_training.node_api.agent_client import Agent
from perdure_training.store import JobStore
from tests.agent.harness import recording, running_agent
from tests.agent.test_agent_store import store_of
from tests.support.temporal_server import dev_server

SENDERS = 8
"""Updates in progress: a server takes ten at a time for one workflow."""
TOGETHER = 64
"""Calls of one update: those of a node with many ranks."""
PAIRS = 100
"""Below the pace at which an agent serves ranks that call in a loop."""


async def calls_per_second(together: int, *, seconds: float) -> float:
    """Measures how many additions one store carries out."""
    async with dev_server() as server, recording(server) as workflows:
        uid = secrets.token_hex(4)
        async with store_of(workflows, uid) as store:
            began = time.monotonic()
            done = await asyncio.gather(
                *(_add(store, uid, number, together, began + seconds) for number in range(SENDERS))
            )
            return sum(done) / (time.monotonic() - began)


async def _add(store: WorkflowHandle[object, object], uid: str, rank: int, together: int, deadline: float) -> int:
    sender = NodeCredentials(uid=uid, role="worker", rank=rank, incarnation=1, token="t")
    numbers = count(1)
    done = 0
    while time.monotonic() < deadline:
        number = next(numbers)
        calls = tuple(
            StoreCall(client=f"{rank}/{one}", sequence=number, action=StoreAction.ADD, keys=("n",), amount=1)
            for one in range(together)
        )
        request = StoreRequest(sender=sender, generation=1, calls=calls)
        while True:
            try:
                await store.execute_update("call", request, result_type=StoreAnswers)
                break
            except RPCError:
                # A run that continues as new, or too many updates: the agent sends the request again, too.
                await asyncio.sleep(0.02)
        done += together
    return done


async def latencies() -> tuple[float, float]:
    """Measures a rank's `set` and `get` together, and the time from a `set` to the end of another rank's wait.

    Returns:
        The medians in milliseconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        async with (
            dev_server() as server,
            recording(server) as workflows,
            running_agent(server, workflows, Path(folder)) as agent,
            store_of(workflows, agent.node.uid),
        ):
            await agent.desire(world=agent.world(1))
            return await asyncio.to_thread(_measure, Agent(agent.run_dir / "agent.sock"))


def _measure(agent: Agent) -> tuple[float, float]:
    store = JobStore(agent=agent)
    pairs: list[float] = []
    waits: list[float] = []
    ended = [0.0]

    def wait(key: str) -> None:
        store.wait([key])
        ended[0] = time.monotonic()

    for number in range(PAIRS):
        began = time.monotonic()
        store.set(f"k{number}", "value")
        store.get(f"k{number}")
        pairs.append(time.monotonic() - began)
    for number in range(PAIRS // 4):
        waiting = threading.Thread(target=wait, args=(f"w{number}",))
        waiting.start()
        # The wait has reached the store.
        time.sleep(0.2)
        began = time.monotonic()
        store.set(f"w{number}", "value")
        waiting.join()
        waits.append(ended[0] - began)
    return median(pairs) * 1000, median(waits) * 1000


def main(seconds: Annotated[float, typer.Option(help="Of each measurement of calls a second.")] = 10.0) -> None:
    """Measures a store."""
    quieten()
    os.environ["PERDURE_GENERATION"] = "1"
    console = Console()
    alone = asyncio.run(calls_per_second(1, seconds=seconds))
    together = asyncio.run(calls_per_second(TOGETHER, seconds=seconds))
    pair, wake = asyncio.run(latencies())
    console.print(f"{alone:,.0f} calls a second, one in each update; {together:,.0f}, {TOGETHER} in each")
    console.print(f"set and get: {pair:.0f} ms; from a set to the end of another rank's wait: {wake:.0f} ms")
    print(
        json.dumps(
            {
                "calls_per_s": round(alone),
                "calls_together_per_s": round(together),
                "set_get_p50_ms": round(pair, 1),
                "wait_p50_ms": round(wake, 1),
            }
        )
    )


if __name__ == "__main__":
    typer.run(main)
