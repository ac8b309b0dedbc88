"""Jobs whose parts are killed at random: no sample is lost or consumed twice, and no parameter differs.

`PERDURE_EXACTNESS_SEEDS=0:50` runs fifty jobs, each with the faults of its seed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos.faults import Kind, find, inject
from perdure.contract import JobPhase
from tests.support.allocation import REPOSITORY
from tests.system.site import PATIENCE, Job, Site

SCRIPT = Path(__file__).with_name("exact_training.py")
SEEDS = range(*map(int, os.environ.get("PERDURE_EXACTNESS_SEEDS", "0:4").split(":")))
KINDS = (Kind.RANK, Kind.AGENT, Kind.NODE, Kind.WORKER, Kind.SERVER)
MOST_FAULTS = 3
LAST_STEP = 45
"""Faults come before it: a job has at least fifty steps."""
PAUSE = 0.03
"""Seconds of a step."""
LONGEST_AWAY = 3.0
"""Seconds for which a worker or a server is away."""


class When(StrEnum):
    """When the next fault follows."""

    AT_STEP = "at a step"
    NEXT_WORLD = "as soon as the next world is decided"
    AT_ONCE = "at once"


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the parameters without Perdure and without faults."""
    folder = tmp_path_factory.mktemp("undisturbed")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT)]
    subprocess.run([*command, str(folder), "0"], cwd=REPOSITORY, check=True, timeout=PATIENCE, capture_output=True)
    result = json.loads((folder / "result.json").read_text())
    assert set(result["tally"]) == {1}
    return result["digest"]


async def kill(site: Site, job: Job, kind: Kind, chance: random.Random) -> bool:
    """Kills one part, and restarts it if it is one of the control plane; returns whether that ends the world."""
    if kind not in (Kind.WORKER, Kind.SERVER):
        _, killed = inject(kind, find(kind, uid=job.uid, nodes=(chance.randrange(2),)))
        return bool(killed) and kind in (Kind.RANK, Kind.NODE)
    plane = site.control_plane
    plane.kill_worker() if kind is Kind.WORKER else plane.kill_server()
    await asyncio.sleep(chance.uniform(0, LONGEST_AWAY))
    await plane.ensure()
    return False


async def disturb(site: Site, job: Job, chance: random.Random) -> None:
    """Kills parts of a job, and of what it needs, a few times."""
    when, world_ends, before = When.AT_STEP, False, 0
    for step in sorted(chance.randint(2, LAST_STEP) for _ in range(chance.randint(1, MOST_FAULTS))):
        if when is When.NEXT_WORLD and world_ends:
            await job.until(lambda known, before=before: known.generation > before)
        elif when is not When.AT_ONCE:
            await job.reaching(step)
        kind = chance.choice(KINDS)
        before = job.steps()[-1].generation
        print(f"{when} (from step {step} on), generation {before}: {kind}")
        world_ends = await kill(site, job, kind, chance)
        when = chance.choice(list(When))


@pytest.mark.long("exactness")
@pytest.mark.parametrize("seed", SEEDS)
async def test_random_kills_lose_no_sample_and_change_no_parameter(own_site: Site, undisturbed: str, seed: int):
    chance = random.Random(seed)
    nodes = chance.choice(("2", "2", "2", "1:2"))
    storage = {"storage": f"file://{own_site.folder / 'storage'}"}
    spec: dict[str, Any] = {"checkpoint": storage} if chance.random() < 0.5 else {}
    out = own_site.folder / "out"
    out.mkdir()
    command = ["torchrun", str(SCRIPT), str(out), str(PAUSE)]
    job = await own_site.submit(command=command, nodes=nodes, **spec)
    job.out = out
    await disturb(own_site, job, chance)
    result = await own_site.client.wait(job.name)
    assert result.phase is JobPhase.SUCCEEDED, result.reason
    made = json.loads((job.out / "result.json").read_text())
    wrong = {index: count for index, count in enumerate(made["tally"]) if count != 1}
    assert not wrong, f"samples that were lost (0) or consumed repeatedly: {wrong}"
    if made["worlds"] == [2]:
        assert made["digest"] == undisturbed
