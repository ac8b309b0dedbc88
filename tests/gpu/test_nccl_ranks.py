"""Several ranks over NCCL on one GPU: who hangs, who is slow, and what the checks of devices and links measure.

NCCL takes ranks of one machine for those of different machines if they have different `NCCL_HOSTID`s, and has them
exchange over sockets.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from perdure.cli.explain import explanation
from perdure.contract import FailureClass, HangKind, IncidentView, JobPhase, Observation, RankStepTimes
from tests.support.waiting import eventually
from tests.system.site import PATIENCE, WALK, Job, Site

SLOW_RANK = Path(__file__).parents[1] / "system" / "slow_rank.py"
SLOW = 2
TIMED = {"TORCH_NCCL_ENABLE_TIMING": "1"}
QUICK = {
    "rendezvous": {"last_call": "2s"},
    "stall": {"after": "6s", "first_look": "2s", "steps": 5, "elsewhere": 2},
}


async def submit(site: Site, *arguments: str) -> Job:
    return await site.submit("--backend", "nccl", *arguments, nodes="3", timing=QUICK)


async def repaired(job: Job, figures: dict[str, Any]) -> IncidentView:
    """The only incident of a job whose ranks hung once, and all step again."""
    await job.until(lambda status: status.phase is JobPhase.RUNNING and status.generation >= 2)
    await job.stepping(generation=2, ranks=3)
    [incident] = [one for one in await job.incidents() if one.observation is None]
    assert (incident.failure, incident.culprit) == (FailureClass.RANK_HANG, 1)
    assert incident.hang is not None
    assert incident.hang.ranks == (1,)
    told = explanation(incident, job=job.name, flag="").plain
    print(told)
    assert "2 independent signs agree" in told or "3 independent signs agree" in told
    stalled = max(step.time for step in job.steps() if step.generation == 1)
    figures[f"{incident.hang.kind}, from the last step to the first after the repair"] = (
        f"{min(step.time for step in job.steps() if step.generation == 2) - stalled:.1f} s"
    )
    return incident


async def test_a_stopped_rank_is_found(site: Site, figures: dict[str, Any]) -> None:
    job = await submit(site)
    await job.stepping(generation=1, ranks=3)
    os.kill(next(step.pid for step in job.steps() if step.rank == 1), signal.SIGSTOP)
    incident = await repaired(job, figures)
    assert incident.hang is not None
    assert incident.hang.kind is HangKind.STOPPED


@pytest.mark.parametrize(("fault", "kind"), [("loop", HangKind.LOOP), ("lock", HangKind.ASLEEP)])
async def test_a_rank_that_does_not_come_is_named_with_the_collective_in_which_the_others_wait(
    site: Site, figures: dict[str, Any], fault: str, kind: HangKind
) -> None:
    incident = await repaired(await submit(site, "--fault", fault), figures)
    assert incident.hang is not None
    assert incident.hang.kind is kind
    assert "fail_to_come" in incident.hang.at
    assert incident.hang.waiting == (0, 2)
    assert incident.hang.collective is not None
    assert (incident.hang.collective.name, incident.hang.collective.elements) == ("nccl:all_reduce", 1)


async def test_a_collective_of_another_size_is_named(site: Site, figures: dict[str, Any]) -> None:
    incident = await repaired(await submit(site, "--fault", "size"), figures)
    assert incident.hang is not None
    assert incident.hang.kind is HangKind.MISMATCH
    told = explanation(incident, job="", flag="").plain
    assert "all_reduce of 8, number" in told


async def test_a_skipped_collective_is_named(site: Site, figures: dict[str, Any]) -> None:
    incident = await repaired(await submit(site, "--fault", "skip"), figures)
    assert incident.hang is not None
    assert incident.hang.kind is HangKind.MISMATCH
    assert incident.hang.collective is not None
    assert incident.hang.collective.elements == 1
    told = explanation(incident, job="", flag="").plain
    assert "of process group 0 (default_pg)" in told


async def times_of(job: Job) -> dict[int, RankStepTimes]:
    return {one.rank: one for node in await job.client.nodes(job.name) for one in node.step_times}


async def test_a_slow_rank_is_named_where_torch_times_the_collectives(site: Site, figures: dict[str, Any]) -> None:
    command = ["torchrun", str(SLOW_RANK), "--backend", "nccl", "--slow", str(SLOW)]
    job = await site.submit(command=command, nodes="3", env={"OMP_NUM_THREADS": "1", **TIMED})

    async def found() -> Observation | None:
        return next((one.observation for one in await job.incidents() if one.observation), None)

    entry = await eventually(found, within=PATIENCE)
    times = await times_of(job)
    for rank, split in sorted(times.items()):
        figures[f"rank {rank} of 3, of which rank {SLOW} computes 165 ms and the others 110 ms"] = (
            f"computes {1000 * split.compute:.0f} ms, waits {1000 * split.wait:.0f} ms"
        )
    assert [(one.node, one.rank) for one in entry.stragglers] == [(SLOW, SLOW)]
    assert min(times.values(), key=lambda one: one.wait).rank == SLOW
    assert 0.15 < times[SLOW].compute < 0.2
    assert all(0.1 < times[rank].compute < 0.15 for rank in times if rank != SLOW)
    assert all(0.15 < split.compute + split.wait < 0.25 for split in times.values())


async def test_a_rank_says_why_its_steps_are_not_split(site: Site) -> None:
    command = ["torchrun", str(SLOW_RANK), "--backend", "nccl", "--slow", str(SLOW)]
    job = await site.submit(command=command, nodes="2")

    async def said() -> bool:
        logs = [node.log_path for node in await job.client.nodes(job.name)]
        known = [Path(path).read_text() for path in logs if path and Path(path).exists()]
        return len(known) == 2 and all("TORCH_NCCL_ENABLE_TIMING" in log for log in known)

    await eventually(said, within=PATIENCE)
    nodes = await job.client.nodes(job.name)
    assert [(node.unsplit_steps, node.step_times) for node in nodes] == [(True, ()), (True, ())]


@pytest.fixture
def start(tmp_path: Path) -> Path:
    """A program that starts Python, for a node that NCCL takes for a machine of its own."""
    for name in ("start", "python"):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\nNCCL_HOSTID="$PERDURE_NODE" exec {shlex.quote(sys.executable)} "$@"\n')
        program.chmod(0o755)
    return tmp_path / "start"


async def test_the_device_and_the_link_between_two_nodes_are_measured(
    site: Site, start: Path, gpu: str, figures: dict[str, Any]
) -> None:
    out = site.folder / "walked"
    job = await site.submit(command=[str(start), str(WALK), str(out)], out=out, preflight="full")
    await job.running(nodes=2)
    assert not await job.incidents()
    found = await asyncio.wait_for(site.client.check(job.name, full=True), PATIENCE)
    for node, other in zip(found, ("node 1", "node 0"), strict=True):
        checks = {check.key: check for check in node.checks}
        assert not node.failed, node
        assert ("matmul", "cpu") not in checks
        figures[f"node {node.node}"] = ", ".join(
            f"{name} of {subject or 'the machine'} {checks[name, subject].value:,.0f}"
            for name, subject in (("matmul", "cuda:0"), ("link", other))
        )
        # Of a GPU, and not of a processor; over sockets.
        assert (checks["matmul", "cuda:0"].value or 0.0) > 5_000
        assert (checks["link", other].value or 0.0) > 10
