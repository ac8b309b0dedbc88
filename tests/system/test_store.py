"""Tests of the store that real ranks use: as docs/store.md prints it, and when a rank is killed while others wait."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from perdure.contract import JobPhase, StoreView
from perdure.contract.names import store_workflow_id
from tests.docs.pages import ROOT
from tests.support.waiting import eventually
from tests.system.site import PATIENCE, Site

SCRIPT = Path(__file__).with_name("use_store.py")


def printed_script() -> str:
    page = (ROOT / "docs" / "store.md").read_text(encoding="utf-8")
    return page.partition("```python\n")[2].partition("```")[0]


@pytest.mark.long("survival")
async def test_the_script_of_the_guide_runs_as_it_is_printed(site: Site, tmp_path: Path):
    script = tmp_path / "prepare.py"
    script.write_text(printed_script())
    job = await site.submit(script=script)
    result = await job.client.wait(job.name)
    assert (result.phase, result.restarts) == (JobPhase.SUCCEEDED, 0)
    assert (job.out / "data.txt").read_text() == "prepared once\n"


@pytest.mark.long("survival")
async def test_a_killed_rank_ends_the_waits_of_its_generation_and_lasting_keys_remain(site: Site):
    job = await site.submit(script=SCRIPT, timing={"owner_check": "1s"})
    await eventually(lambda: all((job.out / f"waits-{rank}").exists() for rank in range(2)), within=PATIENCE)
    job.signal(1, "agent")
    job.signal(0, "rank")
    result = await job.client.wait(job.name)
    assert (result.phase, result.restarts) == (JobPhase.SUCCEEDED, 1)
    results = [json.loads((job.out / f"result-{rank}.json").read_text()) for rank in range(2)]
    assert results == [{"lives": 2, "keys": 0, "sum": "3"}] * 2
    temporal = await job.client.connect()
    async with asyncio.timeout(PATIENCE):
        ended = await temporal.get_workflow_handle(store_workflow_id(job.workflow_id, job.uid)).result()
    assert StoreView.model_validate(ended).lasting_keys == 2
