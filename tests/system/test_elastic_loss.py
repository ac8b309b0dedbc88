"""A real job whose number of nodes changes: with a fixed global batch it ends as one that never changed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perdure.contract import JobPhase
from tests.support.allocation import REPOSITORY
from tests.system.site import PATIENCE, Site

SCRIPT = Path(__file__).with_name("elastic_loss.py")
SIZES = (1, 3, 2, 1, 2)


def undisturbed(folder: Path, *, steps: int) -> dict[str, Any]:
    """The result of so many steps without Perdure, on two ranks."""
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT)]
    subprocess.run(
        [*command, str(folder), str(steps)], cwd=REPOSITORY, check=True, timeout=2 * PATIENCE, capture_output=True
    )
    return json.loads((folder / "result.json").read_text())


@pytest.mark.long("exactness")
@pytest.mark.timeout(900)
async def test_a_job_that_changed_size_five_times_ends_with_the_loss_of_one_that_never_did(site: Site) -> None:
    out = site.folder / "out"
    job = await site.submit(nodes="1:3", command=["torchrun", str(SCRIPT), str(out)], out=out)
    generation = (await job.running(nodes=3)).generation
    await job.stepping(generation=generation, ranks=3)
    for size in SIZES:
        await job.client.scale(job.name, str(size))
        generation = (await job.running(nodes=size, after=generation)).generation
        await job.stepping(generation=generation, ranks=size)
    job.finish()
    result = await job.client.wait(job.name)
    assert result.phase is JobPhase.SUCCEEDED, result.reason
    ended = json.loads((out / "result.json").read_text())
    assert ended["worlds"] == [3, *SIZES]
    expected = undisturbed(site.folder / "undisturbed", steps=ended["step"])
    assert ended["loss"] == pytest.approx(expected["loss"], rel=1e-9)
    assert ended["parameters"] == pytest.approx(expected["parameters"], rel=1e-9, abs=1e-12)
