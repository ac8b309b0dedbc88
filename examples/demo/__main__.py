"""`make demo`: an ordinary torchrun script trains on three nodes while everything around it is killed.

It ends with a table of the faults: when each was detected, what Perdure did and why, and what it cost. It also compares
the final loss with that of the same training without faults. With BACKEND=kubernetes the nodes are pods.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from examples.demo.faults import kill_rank
from examples.demo.places import NAME, OUT, ROLE, SCRIPT, Place, processes
from examples.demo.stage import play, stage
from examples.demo.steps import Samples, longest_gap, made_between, read_samples, read_steps, stepping, steps_again
from perdure.base.errors import JobNotFound, PerdureError
from perdure.cli.text import describe_restore
from perdure.client.client import Client
from perdure.contract import IncidentView, JobPhase
from perdure.spec.job import Backend

OUTAGE_SECONDS = 15.0
REACTION_SECONDS = 180.0
"""A new pod starts and imports torch before the job reacts to it: a minute and more on a machine that is busy."""


@dataclass(frozen=True)
class Fault:
    """One fault that was injected, and its effect on the training."""

    what: str
    at: float
    stepping_at: float
    lost: float
    """Seconds without a step."""
    again: int
    """Steps whose work was lost, so that they were made a second time."""
    steps: tuple[int, int]
    """The first and the last step that were made after it, before the next fault."""
    incidents: tuple[IncidentView, ...]


class Demo:
    """Injects the faults one after another and records their effects."""

    def __init__(self, place: Place, *, say: Callable[[str], None], out: Path, steps: int) -> None:
        self.place = place
        self.say = say
        self.out = out
        self.steps = steps
        self.faults: list[Fault] = []

    async def run(self) -> JobPhase:
        endpoint = await self.place.control_plane.ensure()
        self.say(f"Temporal UI: {endpoint.ui or 'not served'}")
        async with Client(endpoint=endpoint) as client:
            job = self.place.job(["--steps", str(self.steps), "--out", str(self.out)])
            job |= {"name": NAME, "env": {"OMP_NUM_THREADS": "1"}}
            job["roles"][ROLE]["nodes"] = {"min": 2, "max": 3}
            began = time.time()
            try:
                submission = await client.submit(job)
                page = f"; its page: {submission.page}" if submission.page else ""
                self.say(f"job submitted: torchrun {SCRIPT.name} on 3 nodes{page}")
                first = await stepping(self.out, since=began, world_size=3)
                self.say(f"[bold]3 ranks step[/], {first - began:.1f} s after submit")
                uid = (await client.status(NAME)).uid
                await self._play(client, uid)
                self.say("no more faults: training continues to the end")
                result = await client.wait(NAME)
            except BaseException as error:
                if isinstance(error, TimeoutError):
                    await self._tell_why(client, error)
                await self._end_job(client)
                raise
            self.say(f"[bold]{result.phase}[/]: {result.reason}")
            return result.phase

    async def _end_job(self, client: Client) -> None:
        """Ends the job and its nodes. The worker shuts them down, so it must not be stopped before they are gone."""
        # The demo may end while it has the server and the worker killed.
        await self.place.control_plane.ensure()
        with suppress(JobNotFound):
            await client.cancel(NAME)
            await client.wait(NAME)

    async def _play(self, client: Client, uid: str) -> None:
        await self._fault(client, "kill -9 of one rank", lambda: asyncio.to_thread(kill_rank, uid, ROLE, 1))
        await self._fault(client, self.place.node_fault, lambda: self.place.lose_node(uid, 2))
        await self._outage(client)
        await self._fault(client, "perdure scale demo 2", lambda: client.scale(NAME, "2"), world_size=2)
        await self._fault(client, "perdure scale demo 3", lambda: client.scale(NAME, "2:3"))

    async def _fault(
        self, client: Client, what: str, do: Callable[[], Awaitable[object]], *, world_size: int = 3
    ) -> None:
        before = {incident.number for incident in await client.incidents(NAME)}
        self.say(f"[red]{what}[/]")
        at = time.time()
        await do()
        # The interrupted world may have the same size, so its last steps must not be counted as new ones.
        seen = await self._incident_after(client, before)
        stepped = await stepping(
            self.out, since=(seen.decided_at or seen.noticed_at).timestamp(), world_size=world_size
        )
        await self._settled(client)
        new = tuple(
            incident
            for incident in await client.incidents(NAME)
            if incident.number not in before and incident.observation is None
        )
        steps, until = read_steps(self.out), max(stepped, time.time() - 0.5)
        lost, again = longest_gap(steps, at, until), steps_again(steps, at, until)
        self.faults.append(
            Fault(
                what=what,
                at=at,
                stepping_at=stepped,
                lost=lost,
                again=again,
                steps=made_between(steps, at, until),
                incidents=new,
            )
        )
        self.say(f"  {world_size} ranks step again, {stepped - at:.1f} s after it: {new[-1].title}")

    async def _incident_after(self, client: Client, before: set[int]) -> IncidentView:
        deadline = time.monotonic() + REACTION_SECONDS
        while time.monotonic() < deadline:
            for incident in await client.incidents(NAME):
                if incident.number not in before and incident.decided_at is not None:
                    return incident
            await asyncio.sleep(0.1)
        raise TimeoutError(f"the job did not react within {REACTION_SECONDS:.0f} s")

    async def _tell_why(self, client: Client, error: TimeoutError) -> None:
        """Prints what the demo waited for, the job's state, and a remedy."""
        self.say(f"[bold red]The demo stops:[/] {error}")
        with suppress(PerdureError):
            status = await client.status(NAME)
            self.say(f"  the job is {status.phase}: {status.reason}; next: {status.next_action}")
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
        if load > 2 * cores:
            self.say(f"  this machine is busy: a load of {load:.0f} on {cores} cores; try again when the load is lower")
        self.say("  run the demo with --keep, and read its nodes' output in the folder that it prints")

    async def _settled(self, client: Client) -> None:
        """Waits until the job reports that it runs at full size and that no repair is in progress."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            status = await client.status(NAME)
            incident = status.last_incident
            settled = incident is None or incident.over_at is not None
            if status.phase is JobPhase.RUNNING and status.nodes == status.nodes_max and settled:
                return
            await asyncio.sleep(0.2)
        raise TimeoutError("the job did not settle within 120 s")

    async def _outage(self, client: Client) -> None:
        what = f"kill -9 of the worker and the Temporal server, back after {OUTAGE_SECONDS:.0f} s"
        before = {incident.number for incident in await client.incidents(NAME)}
        self.say(f"[red]{what}[/]")
        at = time.time()
        self.place.control_plane.kill_worker()
        self.place.control_plane.kill_server()
        await asyncio.sleep(OUTAGE_SECONDS)
        made = [step for step in read_steps(self.out) if step.time > at]
        self.say(f"  {len(made)} steps were made meanwhile; starting both again")
        await self.place.control_plane.ensure()
        await client.status(NAME)
        # By then every lease has lapsed and every poll has returned.
        await stepping(self.out, since=time.time() + 10, world_size=3)
        await self._settled(client)
        after = await client.incidents(NAME)
        steps, until = read_steps(self.out), time.time() - 0.5
        self.faults.append(
            Fault(
                what=what,
                at=at,
                stepping_at=at,
                lost=longest_gap(steps, at, until),
                again=steps_again(steps, at, until),
                steps=made_between(steps, at, until),
                incidents=tuple(one for one in after if one.number not in before and one.observation is None),
            )
        )

    def table(self, samples: Samples) -> Table:
        table = Table(title="Injected faults and what they cost", title_justify="left", show_lines=True)
        costs = ("longest pause", "steps lost", "samples repeated")
        for column in ("fault", "noticed after", "done", "because", *costs):
            table.add_column(column, overflow="fold")
        for fault in self.faults:
            cost = (f"{fault.lost:.1f} s", str(fault.again), str(samples.repeated(*fault.steps)))
            if not fault.incidents:
                table.add_row(
                    *(fault.what, "-", "nothing: training needs neither", "unknown is not failed"),
                    *cost,
                )
                continue
            first = fault.incidents[0]
            table.add_row(
                fault.what,
                f"{max(first.noticed_at.timestamp() - fault.at, 0):.2f} s",
                "\n".join(map(done, fault.incidents)),
                "\n".join(f"{incident.rule}" for incident in fault.incidents),
                *cost,
            )
        return table


def done(incident: IncidentView) -> str:
    """Returns what the job did, and from where the training continued."""
    if incident.restored_step is None:
        return incident.action
    restored = describe_restore(incident.restored_step, incident.restored_from, incident.steps_again)
    return f"{incident.action}; {restored}"


async def train_alone(out: Path, steps: int) -> float:
    """Runs the same training with plain torchrun and without faults; returns its final loss."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(str(SCRIPT), "--steps", str(steps), "--out", str(out)),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        if await process.wait() != 0:
            raise RuntimeError("the uninterrupted training failed")
    except asyncio.CancelledError:
        process.terminate()
        await process.wait()
        raise
    return final_loss(out)


def final_loss(out: Path) -> float:
    return float((out / "final_loss").read_text())


async def main() -> int:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--backend", choices=[Backend.LOCAL, Backend.KUBERNETES], default=Backend.LOCAL)
    parser.add_argument("--steps", type=int, default=1000, help="length of the training")
    parser.add_argument("--keep", action="store_true", help="keep the folder with state, logs and checkpoints")
    options = parser.parse_args()
    place = processes
    if options.backend == Backend.KUBERNETES:
        # Imported here because it needs packages that local nodes do not.
        from examples.demo.pods import pods as place
    with stage(keep=options.keep, width=140) as on:
        async with place(on.folder, on.say) as chosen:
            demo = Demo(chosen, say=on.say, out=on.folder / OUT, steps=options.steps)
            phase = await demo.run()
            on.say("the same training once more, without faults")
            alone = await train_alone(on.folder / "alone", options.steps)
            interrupted = final_loss(demo.out)
            samples, expected = read_samples(demo.out), read_samples(on.folder / "alone").distinct
            on.console.print(demo.table(samples))
            on.console.print(f"Final loss: {interrupted:.4f} with faults, {alone:.4f} without.")
            on.console.print(
                f"Samples: {len(samples.distinct & expected):,} of {len(expected):,} that it should read, "
                f"{samples.repeated(0, options.steps):,} of them twice."
            )
            on.console.print("Now on your own script: perdure run --nodes 2:3 -- torchrun train.py", style="bold")
            return 0 if phase is JobPhase.SUCCEEDED else 1


if __name__ == "__main__":
    play(main)
