"""Warm starts beside a GPU: a fork of an interpreter that has initialized CUDA could not use it."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from perdure.contract import IncidentView, RankStarts
from perdure_launcher.warm_start.names import STANDBYS
from perdure_launcher.warm_start.starts import lacks_standbys
from perdure_training.node_api import layout
from tests.gpu.nvidia import used_mib
from tests.gpu.trainings import SCRIPT, Line, at_step, lines, train
from tests.launcher.warmth import interpreter_with
from tests.support.waiting import eventually
from tests.system.site import PATIENCE, Job, Site

PACKAGES = {
    "initializes_cuda": "import torch\nkept = torch.ones(1 << 28, device='cuda')\n",
    "asks_for_cuda": "import torch\navailable = torch.cuda.is_available()\n",
}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return interpreter_with(PACKAGES, tmp_path_factory.mktemp("environment"))


async def killed(job: Job, *, generation: int) -> tuple[float, Line]:
    """Kills the rank of a generation; returns when, and its first step in the next one."""
    rank = [line for line in lines(job.out, 0) if line.generation == generation][-1]
    when = time.time()
    os.kill(rank.pid, signal.SIGKILL)
    await at_step(job, 1, generation=generation + 1)
    return when, next(line for line in lines(job.out, 0) if line.generation == generation + 1 and line.kind == "made")


async def standby(job: Job) -> int:
    """Waits for the standby of the only rank; returns its process."""
    [launcher] = job.processes(0, kind="launcher")
    folder = Path(launcher.environ()["PERDURE_RUN_DIR"]) / layout.WARM
    await eventually(
        lambda: (folder / STANDBYS).exists() and not lacks_standbys(folder, processes=1),
        within=PATIENCE,
        what=lambda: f"no standby: {(folder / 'log').read_text()}",
    )
    return json.loads((folder / STANDBYS).read_text())["ready"]["0"]


async def starts(job: Job, generation: int) -> RankStarts:
    """How the ranks of a generation were started."""

    seen: list[IncidentView] = []

    async def known() -> RankStarts | None:
        seen[:] = await job.incidents()
        found = [one for one in seen if one.generation_after == generation]
        return found[0].starts if found and found[0].stepping_at is not None else None

    return await eventually(known, within=30, what=lambda: f"no starts in {seen}")


def described(when: float, line: Line) -> str:
    return f"its script begins after {line.started - when:.2f} s, and steps after {line.time - when:.2f} s"


async def test_a_killed_rank_is_forked_while_no_standby_waits_and_becomes_one_later(
    site: Site, figures: dict[str, Any]
) -> None:
    job = await train(site, ranks=1, backend="nccl", steps=100_000)
    await at_step(job, 1)
    figures["a killed rank, forked with torch alone"] = described(*await killed(job, generation=1))
    forked = await starts(job, 2)
    assert (forked.warm, forked.standbys) == (1, 0), forked
    waiting = await standby(job)
    when, line = await killed(job, generation=2)
    figures["a killed rank, from a standby"] = described(when, line)
    started = await starts(job, 3)
    assert (started.warm, started.standbys) == (1, 1), started
    assert started.standby_reason == "the node has GPUs, whose driver no fork survives"
    assert line.pid == waiting


async def test_cold_starts_are_measured_beside_warm_ones(site: Site, figures: dict[str, Any]) -> None:
    job = await train(site, ranks=1, backend="nccl", steps=100_000, recovery={"warm_starts": False})
    await at_step(job, 5)
    figures["a killed rank, started cold"] = described(*await killed(job, generation=1))


@pytest.mark.parametrize("package", PACKAGES)
async def test_an_import_that_touches_the_driver_breaks_no_warm_rank(
    site: Site, python: str, figures: dict[str, Any], package: str
) -> None:
    script = site.folder / "imports.py"
    script.write_text(f"import {package}\nimport runpy\nrunpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n")
    out = site.folder / "trained"
    command = [python, "-m", "torch.distributed.run", str(script), str(out), "--steps", "100000"]
    before = used_mib()
    job = await site.submit(nodes="1", command=command)
    job.out = out
    await at_step(job, 5)
    alone = used_mib() - before
    await standby(job)
    figures[f"memory of the GPU that a standby with {package} holds"] = f"{used_mib() - before - alone} MiB"
    await killed(job, generation=1)
    assert (await starts(job, 2)).warm == 1
    await at_step(job, 20, generation=2)
