"""Tests of a dataset that real ranks read, of which one is killed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from perdure.contract import JobPhase
from perdure.contract.names import dataset_workflow_id
from tests.support.waiting import eventually
from tests.system.site import PATIENCE, Site

SCRIPT = Path(__file__).with_name("read_shards.py")
SIZE = 120
DIES_AT = 7


@pytest.mark.long("survival")
@pytest.mark.parametrize("checkpoints", [(), ("--in-memory",)], ids=["file", "memory"])
async def test_the_samples_of_committed_steps_are_exactly_the_dataset_when_a_rank_and_an_agent_are_killed(
    site: Site, checkpoints: tuple[str, ...]
):
    job = await site.submit(str(SIZE), str(DIES_AT), *checkpoints, script=SCRIPT, timing={"owner_check": "1s"})
    await job.reaching(DIES_AT - 1)
    job.signal(0, "agent")
    await eventually((job.out / "die").exists, within=PATIENCE)
    await asyncio.to_thread((job.out / "die").write_bytes, b"now")
    result = await job.client.wait(job.name)
    assert result.phase is JobPhase.SUCCEEDED
    assert result.restarts >= 1
    saved = json.loads((job.out / "checkpoint.json").read_text())
    assert sorted(map(tuple, saved["consumed"])) == [(epoch, index) for epoch in range(2) for index in range(SIZE)]
    temporal = await job.client.connect()
    dataset = temporal.get_workflow_handle(dataset_workflow_id(job.workflow_id, job.uid, "train"))
    async with asyncio.timeout(PATIENCE):
        ended = await dataset.result()
    assert ended["set_aside_samples"] == 0
    assert ended["done"] == 2 * SIZE
    await eventually(lambda: not job.processes(), within=PATIENCE)


@pytest.mark.long("survival")
async def test_the_samples_of_committed_steps_are_exactly_the_stream_when_a_rank_is_killed(site: Site):
    job = await site.submit("0", str(DIES_AT), "--stream", "--in-memory", script=SCRIPT, timing={"owner_check": "1s"})

    def grow(may_grow: bool, **ends: int) -> None:
        draft = job.out / "ends.draft"
        draft.write_text(json.dumps([ends, may_grow]))
        draft.replace(job.out / "ends.json")

    grow(True, a=50, b=5)
    await job.reaching(3)
    grow(True, a=62, b=33)
    await eventually((job.out / "die").exists, within=PATIENCE)
    await asyncio.to_thread((job.out / "die").write_bytes, b"now")
    await job.running(nodes=2, after=1)
    grow(False, a=93, b=71)
    result = await job.client.wait(job.name)
    assert result.phase is JobPhase.SUCCEEDED
    assert result.restarts == 1
    saved = json.loads((job.out / "checkpoint.json").read_text())
    whole = [*(("a", offset) for offset in range(2, 93)), *(("b", offset) for offset in range(71))]
    assert sorted(map(tuple, saved["consumed"])) == whole
    assert saved["data"]["partitions"] == {"a": {"next": 93, "holes": []}, "b": {"next": 71, "holes": []}}
    temporal = await job.client.connect()
    dataset = temporal.get_workflow_handle(dataset_workflow_id(job.workflow_id, job.uid, "train"))
    async with asyncio.timeout(PATIENCE):
        ended = await dataset.result()
    assert (ended["done"], ended["total"]) == (91 + 71, 91 + 71)
