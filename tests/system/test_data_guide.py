"""Tests that the script of docs/data.md runs as it is printed, also when a rank is killed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.docs.pages import ROOT
from tests.support.waiting import eventually
from tests.system.site import PATIENCE, Site
from workflows.messages import JobPhase


def printed_script() -> str:
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    return page.partition("```python\n")[2].partition("```")[0]


@pytest.mark.long("survival")
async def test_the_script_of_the_guide_continues_where_it_was_when_a_rank_is_killed(site: Site, tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(printed_script())
    job = await site.submit(script=script)
    await eventually((job.out / "checkpoint.pt").exists, within=PATIENCE)
    job.signal(1, "rank")
    result = await job.client.wait(job.name)
    assert result.phase is JobPhase.SUCCEEDED
    assert result.restarts >= 1
    saved = torch.load(job.out / "checkpoint.pt")
    assert abs(saved["model"]["module.weight"].item() - 3) < 0.1
    assert saved["data"]["next"] >= 4 * 8192 - 10 * 2 * 16, "all but what came after the last checkpoint"
