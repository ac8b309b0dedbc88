"""Tests that the scripts of docs/data.md run as they are printed, also when a rank is killed."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from temporalio.service import RPCError

from perdure.contract import DatasetView, JobPhase
from perdure.contract.names import dataset_workflow_id
from tests.docs.pages import ROOT
from tests.support.waiting import eventually
from tests.system.site import PATIENCE, Site


def printed_script(heading: str) -> str:
    """The first script below a heading."""
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    return page.partition(f"{heading}\n")[2].partition("```python\n")[2].partition("```")[0]


@pytest.mark.long("survival")
async def test_the_script_of_the_guide_continues_where_it_was_when_a_rank_is_killed(site: Site, tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(printed_script("## A script"))
    job = await site.submit(script=script)
    await eventually((job.out / "checkpoint.pt").exists, within=PATIENCE)
    job.signal(1, "rank")
    result = await job.client.wait(job.name)
    assert result.phase is JobPhase.SUCCEEDED
    assert result.restarts >= 1
    saved = torch.load(job.out / "checkpoint.pt")
    assert abs(saved["model"]["module.weight"].item() - 3) < 0.1
    assert saved["data"]["next"] >= 4 * 8192 - 10 * 2 * 16, "all but what came after the last checkpoint"


def append(folder: Path, records: int, rows: Iterator[float]) -> None:
    for name in ("a", "b", "c"):
        with (folder / name).open("ab") as file:
            file.write(b"".join(struct.pack("<ff", x, 3 * x + 1) for x in itertools.islice(rows, records)))


@pytest.mark.long("survival")
async def test_the_script_that_follows_a_stream_has_trained_with_all_of_it_when_a_rank_is_killed(
    site: Site, tmp_path: Path
):
    script = tmp_path / "train.py"
    script.write_text(printed_script("## Streams"))
    rows = itertools.cycle(number / 50 - 1 for number in range(100))
    folder = tmp_path / "rows"
    folder.mkdir()
    append(folder, 500, rows)
    printed = tmp_path / "printed"
    job = await site.submit(command=["sh", "-c", f"torchrun {script} {folder} >> {printed}"])
    dataset = (await job.client.connect()).get_workflow_handle(
        dataset_workflow_id(job.workflow_id, job.uid, "rows"), result_type=DatasetView
    )

    async def done(samples: int) -> bool:
        try:
            return (await dataset.query("progress", result_type=DatasetView)).done >= samples
        except RPCError:
            return False

    await eventually(lambda: done(400), within=PATIENCE)
    append(folder, 1000, rows)
    job.signal(1, "rank")
    await job.running(nodes=2, after=1)
    append(folder, 500, rows)
    (folder / "closed").touch()
    result = await job.client.wait(job.name)
    assert result.phase is JobPhase.SUCCEEDED
    position = {name: {"next": 2000, "holes": []} for name in ("a", "b", "c")}
    assert f"the position is {position} the slope 3.0" in printed.read_text()
