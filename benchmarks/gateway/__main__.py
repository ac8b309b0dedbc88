"""`make bench-gateway`: a thousand agents through one gateway process; ends with one line of JSON.

Server, workflows, leases, signals, gateway and its connections are real. Nodes are simulated: each is an agent's worker
with a connection and a grant of its own, without processes. Reviews of tokens by an API server are left out.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.gateway.agents import GatewayFleet, GatewayProcess
from benchmarks.gateway.probe import probers
from perdure.contract import JobPhase
from tests.support.temporal_server import dev_server
from tests.support.waiting import eventually
from tests.workflows.fleet import job_spec, running_fleet, submit
from tests.workflows.jobs import status


@dataclass
class Measured:
    """The results."""

    formed_seconds: float = 0.0
    direct_ms: tuple[float, ...] = ()
    gateway_ms: tuple[float, ...] = ()
    cpu_percent: float = 0.0
    rss_mb: float = 0.0
    heartbeats_per_second: float = 0.0
    lost_by_kill: int = 0
    lost_by_outage: int = 0
    restarts: int = 0

    @property
    def added_ms(self) -> float:
        return median(self.gateway_ms) - median(self.direct_ms)


async def measure(nodes: int, probes: int, seconds: float, outage: float, console: Console) -> Measured:
    """Runs a job of so many nodes, and disturbs its gateway."""

    def say(text: str) -> None:
        console.print(f"bench: {text}", highlight=False)

    found = Measured()
    async with dev_server() as server:
        gateway = GatewayProcess(server)
        await gateway.start()
        try:
            async with running_fleet(await server.client(), fleet_type=GatewayFleet) as fleet:
                fleet.gateway = gateway
                began = time.monotonic()
                handle = await submit(fleet, job_spec(str(nodes)))

                async def formed() -> bool:
                    now = await status(handle)
                    return now.phase is JobPhase.RUNNING and now.nodes == nodes

                await eventually(formed, within=600)
                await eventually(lambda: sum(bool(node.lease_epochs) for node in fleet.nodes.values()) == nodes)
                found.formed_seconds = time.monotonic() - began
                say(f"{nodes} agents hold their leases after {found.formed_seconds:.0f} s")

                async with probers(fleet.client, gateway) as (direct, through):
                    pairs = [(await direct.milliseconds(), await through.milliseconds()) for _ in range(probes)]
                    # The first calls connect.
                    found.direct_ms, found.gateway_ms = zip(*pairs[1:], strict=True)
                say(
                    f"signal to command: {median(found.direct_ms):.1f} ms directly, {found.added_ms:+.1f} ms by gateway"
                )

                before, renewals, began = gateway.usage()[0], fleet.renewals(), time.monotonic()
                await asyncio.sleep(seconds)
                elapsed = time.monotonic() - began
                used, found.rss_mb = gateway.usage()
                found.cpu_percent = 100 * (used - before) / elapsed
                found.heartbeats_per_second = (fleet.renewals() - renewals) / elapsed
                say(f"at rest: {found.cpu_percent:.0f}% of a core, {found.rss_mb:.0f} MB")

                taken = fleet.leases_granted()
                await gateway.kill()
                await gateway.start()
                await _settled(fleet, seconds)
                found.lost_by_kill = fleet.leases_granted() - taken
                say(f"killed and replaced: {found.lost_by_kill} leases lost")

                taken = fleet.leases_granted()
                await gateway.kill()
                await asyncio.sleep(outage)
                await gateway.start()
                await _settled(fleet, seconds)
                found.lost_by_outage = fleet.leases_granted() - taken
                now = await status(handle)
                assert (now.phase, now.nodes) == (JobPhase.RUNNING, nodes), now
                found.restarts = now.restarts_total
                say(f"none for {outage:g} s: {found.lost_by_outage} leases lost and taken again, no node replaced")
        finally:
            await gateway.kill()
    return found


async def _settled(fleet: GatewayFleet, seconds: float) -> None:
    """Returns when agents have had the time to miss heartbeats, and all of them have renewed their lease since."""
    await asyncio.sleep(seconds)
    marks = {id(node): node.renewals for node in fleet.nodes.values()}
    await eventually(lambda: all(node.renewals > marks[id(node)] for node in fleet.nodes.values()), within=120)


def report(found: Measured, nodes: int, outage: float, console: Console) -> None:
    """Prints the table and the line of JSON."""
    table = Table("measured", "directly", "by the gateway", title=f"{nodes} agents, one gateway process")
    for name, at in (("median", 0), ("p95", 1)):
        values = [
            f"{(median(times) if not at else quantiles(times, n=20)[-1]):.1f} ms"
            for times in (found.direct_ms, found.gateway_ms)
        ]
        table.add_row(f"signal to command, {name}", *values)
    table.add_row("processor at rest", "", f"{found.cpu_percent:.0f}% of a core")
    table.add_row("lease renewals", "", f"{found.heartbeats_per_second:.0f} per second")
    table.add_row("memory", "", f"{found.rss_mb:.0f} MB")
    table.add_row("leases lost, killed and replaced", "", str(found.lost_by_kill))
    table.add_row(f"leases lost, none for {outage:g} s", "", str(found.lost_by_outage))
    table.add_row("restarts", "", str(found.restarts))
    console.print(table)
    keys = {
        "gateway_added_ms_p50": round(found.added_ms, 1),
        "gateway_rss_mb": round(found.rss_mb),
        "gateway_cpu_pct": round(found.cpu_percent, 1),
        "gateway_leases_lost": found.lost_by_kill,
        "gateway_leases_lost_in_outage": found.lost_by_outage,
        "gateway_renewals_per_s": round(found.heartbeats_per_second),
        "restarts": found.restarts,
    }
    print(json.dumps(keys))


def main(
    nodes: Annotated[int, typer.Option(help="Agents of one job.", min=1)] = 1000,
    probes: Annotated[int, typer.Option(help="Reports that are timed, each way in turn.", min=3)] = 200,
    seconds: Annotated[float, typer.Option(help="Seconds for which the idle cost is measured.")] = 30,
    outage: Annotated[float, typer.Option(help="Seconds without any gateway.")] = 30,
    quick: Annotated[bool, typer.Option("--quick", help="A job of 50 nodes.")] = False,
) -> None:
    """Measures what the gateway adds to the latency of a repair, what it costs, and what its absence costs."""
    # Activities that are cancelled with their leases are what is measured.
    logging.getLogger("temporalio").setLevel(logging.CRITICAL)
    console = Console(highlight=False)
    nodes, probes, seconds = (50, 30, 10.0) if quick else (nodes, probes, seconds)
    report(asyncio.run(measure(nodes, probes, seconds, outage, console)), nodes, outage, console)


if __name__ == "__main__":
    typer.run(main)
