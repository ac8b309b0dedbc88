"""`make bench-history`: an idle job, a flood of signals, and renewed leases; ends with one line of JSON.

Server, workflows, task queues, leases and signals are real. Nodes are simulated: each is an agent's worker on the
node's own queue, without processes, so that 128 of them fit on one machine.
"""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass
from itertools import cycle
from random import Random
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from temporalio.client import WorkflowHandle
from temporalio.runtime import LoggingConfig, Runtime, TelemetryConfig, TelemetryFilter

from tests.support.temporal_server import dev_server
from tests.support.waiting import eventually
from tests.workflows.adverse_site import adverse_site
from tests.workflows.fleet import Fleet, PlayedNode, job_spec, running_fleet, submit
from tests.workflows.flood import Flooded, flood
from tests.workflows.jobs import node, running

NODES_AT_REST = 3
NODES_IN_FLOOD = 40
SETTLED_SECONDS = 5.0
"""A job is at rest once no history has grown for this time."""


@dataclass(frozen=True)
class AtRest:
    """What an undisturbed job of real agents adds to histories."""

    job_per_minute: float
    """Events in the job's own history."""
    node_per_hour: float
    """Events in all of its histories, by node."""
    messages: int
    """Signals that agents have sent."""


async def at_rest(seconds: float) -> AtRest:
    """Measures the growth of histories while nothing happens but that leases are renewed."""
    async with (
        dev_server() as server,
        adverse_site(await server.client(), Random(0), max_cached_workflows=1000) as site,
    ):
        handle = await submit(site, job_spec(str(NODES_AT_REST)))
        known = await running(handle, nodes=NODES_AT_REST)
        await site.until(lambda: site.trains(NODES_AT_REST))
        groups = [site.client.get_workflow_handle(group) for group in known.groups]
        before = await _settled(handle, *groups)
        said = len(site.sent)
        await asyncio.sleep(seconds)
        after, messages = await _lengths(handle, *groups), len(site.sent) - said
        for one in site.training_nodes:
            one.finish()
        await handle.result()
    return AtRest(
        job_per_minute=(after[0] - before[0]) * 60 / seconds,
        node_per_hour=(sum(after) - sum(before)) / NODES_AT_REST * 3600 / seconds,
        messages=messages,
    )


async def _settled(*workflows: WorkflowHandle[Any, Any]) -> list[int]:
    lengths = await _lengths(*workflows)
    while True:
        await asyncio.sleep(SETTLED_SECONDS)
        before, lengths = lengths, await _lengths(*workflows)
        if lengths == before:
            return lengths


async def _lengths(*workflows: WorkflowHandle[Any, Any]) -> list[int]:
    return [(await workflow.describe()).history_length for workflow in workflows]


async def signals_through_the_boundary(signals: int) -> Flooded:
    """Sends signals to one group, across as many runs as the server's own limits require."""
    async with dev_server() as server:
        return await flood(await server.client(), nodes=NODES_IN_FLOOD, signals_per_node=signals // NODES_IN_FLOOD)


async def leases_reheld_seconds(leases: int, *, times: int) -> list[float]:
    """Measures, several times, the time from the start of a group's next run until every agent holds a lease of it."""
    async with dev_server() as server, running_fleet(await server.client()) as fleet:
        _, nodes = await _running_job(fleet, leases)
        return [await _next_run_seconds(fleet, nodes) for _ in range(times)]


async def _next_run_seconds(fleet: Fleet, nodes: list[PlayedNode]) -> float:
    group = fleet.client.get_workflow_handle(nodes[0].request.group_id)
    run_id = (await group.describe()).run_id
    before = {played.rank: played.lease_epochs[-1] for played in nodes}
    # One at a time: a burst of signals would distort the measurement.
    for played in cycle(nodes):
        await played.report()
        if (await group.describe()).run_id != run_id:
            break
    await eventually(lambda: all(played.lease_epochs[-1] > before[played.rank] for played in nodes), within=120)
    began = (await group.describe()).start_time
    return max((played.lease_taken_at - began).total_seconds() for played in nodes if played.lease_taken_at)


async def _running_job(fleet: Fleet, nodes: int) -> tuple[WorkflowHandle[Any, Any], list[PlayedNode]]:
    """Starts a job; returns when all its nodes step and all its agents hold their leases."""
    handle = await submit(fleet, job_spec(str(nodes)))
    await running(handle, nodes=nodes, within=300)
    played = [await node(fleet, handle, rank) for rank in range(nodes)]
    await eventually(lambda: all(node.lease_epochs for node in played), within=120)
    return handle, played


def quieten() -> None:
    """Silences warnings about leases that end with their run; the SDK prints its own to stdout."""
    logging.getLogger("temporalio").setLevel(logging.ERROR)
    errors_only = TelemetryFilter(core_level="ERROR", other_level="ERROR")
    Runtime.set_default(Runtime(telemetry=TelemetryConfig(logging=LoggingConfig(filter=errors_only))))


def main(
    seconds: Annotated[float, typer.Option(help="Seconds for which the idle job is observed.")] = 60,
    signals: Annotated[int, typer.Option(help="Signals sent to one group.")] = 20_000,
    leases: Annotated[int, typer.Option(help="Nodes whose leases are renewed.")] = 128,
    times: Annotated[int, typer.Option(help="Number of times that their group continues as new.")] = 5,
) -> None:
    """Measures the history events of jobs, and the cost of continuing as new."""
    quieten()
    console = Console(highlight=False)
    console.print(f"bench: an idle job of {NODES_AT_REST} nodes, {seconds:.0f} s")
    rest = asyncio.run(at_rest(seconds))
    console.print(f"bench: {signals} signals to one group, a few minutes")
    flooded = asyncio.run(signals_through_the_boundary(signals))
    console.print(f"bench: {leases} leases, until their group has continued as new {times} times")
    reheld = asyncio.run(leases_reheld_seconds(leases, times=times))

    table = Table("what", "measured", "goal", title="History")
    table.add_row(f"events a minute, job of {NODES_AT_REST} nodes at rest", f"{rest.job_per_minute:.1f}", "0")
    table.add_row("events per node and hour, in all histories", f"{rest.node_per_hour:.1f}", "0")
    table.add_row(f"signals of its agents in {seconds:.0f} s", str(rest.messages), "0")
    sent, rate = flooded.signals_sent, flooded.signals_sent / flooded.seconds
    table.add_row(f"signals lost of {sent}, at {rate:.0f}/s", str(flooded.signals_lost), "0")
    table.add_row("runs of the group that took them", str(flooded.runs), "> 1")
    all_times = f"{median(reheld):.2f} ({min(reheld):.2f} to {max(reheld):.2f})"
    table.add_row(f"seconds until {leases} leases are held again, median of {times}", all_times, "<= 2")
    console.print(table)
    result = {
        "job_events_per_minute": round(rest.job_per_minute, 2),
        "events_per_node_hour": round(rest.node_per_hour, 2),
        "signals_lost": flooded.signals_lost,
        "signals_sent": sent,
        "leases_reheld_s": round(median(reheld), 2),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    typer.run(main)
