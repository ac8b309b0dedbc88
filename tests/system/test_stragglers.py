"""A training of real ranks over gloo, of which one computes longer in each step: it is named while all train."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.contract import FailureClass, IncidentView, Observation, RankStepTimes, SlowCause, kind_of
from tests.support.waiting import eventually
from tests.system.site import PATIENCE, Job, Site

SCRIPT = Path(__file__).with_name("slow_rank.py")
SLOW = 2
COMPUTES = 0.11
"""Seconds of a step of a rank that is not slow."""


@pytest.mark.long("silent-faults")
@pytest.mark.timeout(280)
async def test_the_rank_for_which_the_others_wait_is_named_while_they_train(site: Site):
    job = await site.submit(
        command=["torchrun", str(SCRIPT), "--slow", str(SLOW)], nodes="3", recovery={"warm_starts": False}
    )

    async def found() -> Observation | None:
        return next((one.observation for one in await job.incidents() if one.observation), None)

    entry = await eventually(found, within=PATIENCE)
    assert [(one.node, one.rank) for one in entry.stragglers] == [(SLOW, SLOW)]
    [slow] = entry.stragglers
    assert slow.compute > 1.2 * slow.usual
    times = {one.rank: one for node in await site.client.nodes(job.name) for one in node.step_times}
    assert min(times.values(), key=lambda one: one.wait).rank == SLOW
    assert {node.incarnation for node in await site.client.nodes(job.name)} == {1}


async def measured(job: Job, ranks: int) -> dict[int, RankStepTimes]:
    """How the steps of all ranks split, once each has measured it."""

    async def known() -> dict[int, RankStepTimes] | None:
        times = {one.rank: one for node in await job.client.nodes(job.name) for one in node.step_times}
        return times if len(times) == ranks else None

    return await eventually(known, within=PATIENCE)


@pytest.mark.long("silent-faults")
@pytest.mark.timeout(280)
async def test_a_slow_rank_is_named_where_ranks_have_two_process_groups(site: Site):
    command = ["torchrun", str(SCRIPT), "--slow", str(SLOW), "--program", "groups"]
    job = await site.submit(command=command, nodes="4")

    async def found() -> Observation | None:
        return next((one.observation for one in await job.incidents() if one.observation), None)

    entry = await eventually(found, within=PATIENCE)
    assert [one.rank for one in entry.stragglers] == [SLOW]
    assert entry.stragglers[0].compute > 1.2 * entry.stragglers[0].usual


@pytest.mark.long("silent-faults")
@pytest.mark.timeout(280)
async def test_all_ranks_of_a_slow_node_are_named(site: Site):
    command = ["torchrun", "--nproc-per-node=2", str(SCRIPT), "--slow-node", "worker-1/1"]
    job = await site.submit(command=command, nodes="2")

    async def found() -> set[tuple[int, int]]:
        seen = [one.observation for one in await job.incidents() if one.observation]
        return {(slow.node, slow.rank) for one in seen for slow in one.stragglers}

    assert await eventually(found, within=PATIENCE) == {(1, 2), (1, 3)}


@pytest.mark.long("silent-faults")
@pytest.mark.timeout(280)
async def test_only_the_first_layer_is_compared_where_each_has_collectives_of_its_own(site: Site):
    """It is a fourth of what a rank computes: too little for a rank to be named (docs/stragglers.md)."""
    command = ["torchrun", str(SCRIPT), "--slow", str(SLOW), "--program", "fsdp"]
    job = await site.submit(command=command, nodes="3")
    times = await measured(job, ranks=3)
    steps = [one.compute + one.wait + one.rest for one in times.values()]
    assert max(steps) < 1.2 * min(steps)
    assert min(steps) > 1.4 * COMPUTES
    usual = max(one.compute for rank, one in times.items() if rank != SLOW)
    assert usual < COMPUTES / 2
    assert times[SLOW].compute > 1.2 * usual
    assert not await job.incidents()


SOON = {"stragglers": {"restart_cost": "2s"}}


async def acted_on(job: Job, action: str) -> list[IncidentView]:
    """The incidents of the job, once one about a slow rank has this action and its world steps."""

    async def found() -> list[IncidentView] | None:
        known = await job.incidents()
        kinds = {kind_of(type(done)) for one in known if one.stepping_at and one.slowness for done in one.actions}
        return known if action in kinds else None

    return await eventually(found, within=2 * PATIENCE)


@pytest.mark.long("silent-faults")
@pytest.mark.timeout(400)
async def test_the_node_of_a_slow_rank_is_replaced(site: Site):
    job = await site.submit(
        command=["torchrun", str(SCRIPT), "--slow-node", f"worker-{SLOW}/1"],
        nodes="3",
        recovery={"on_straggler": "replace"},
        timing=SOON,
    )
    [*_, replaced] = await acted_on(job, "REPLACE_NODES")
    assert (replaced.failure, replaced.culprit) == (FailureClass.STRAGGLER, SLOW)
    nodes = {node.rank: node.incarnation for node in await site.client.nodes(job.name)}
    assert nodes == {0: 1, 1: 1, SLOW: 2}


@pytest.mark.long("silent-faults")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("slow", "cause"), [(("--slow", "2"), SlowCause.PLACE), (("--slow-node", "worker-2/1"), SlowCause.MACHINE)]
)
async def test_an_experiment_tells_a_slow_machine_from_a_rank_with_more_work(
    site: Site, slow: tuple[str, str], cause: SlowCause
):
    job = await site.submit(
        command=["torchrun", str(SCRIPT), *slow], nodes="3", recovery={"on_straggler": "experiment"}, timing=SOON
    )

    async def verdict() -> SlowCause | None:
        return next((one.slowness.cause for one in await job.incidents() if one.slowness and one.slowness.cause), None)

    await acted_on(job, "EXCHANGE_PLACES")
    assert await eventually(verdict, within=3 * PATIENCE) is cause
    if cause is SlowCause.MACHINE:
        await acted_on(job, "REPLACE_NODES")
    nodes = {node.rank: node.incarnation for node in await site.client.nodes(job.name)}
    assert nodes == {0: 1, 1: 1, SLOW: 2 if cause is SlowCause.MACHINE else 1}
