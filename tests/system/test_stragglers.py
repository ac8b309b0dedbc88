"""A training of real ranks over gloo, of which one computes longer in each step: it is named while all train."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.contract import Observation
from tests.support.waiting import eventually
from tests.system.site import PATIENCE, Site

SCRIPT = Path(__file__).with_name("slow_rank.py")
SLOW = 2


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
