"""Jobs on a GPU one of whose ranks is killed: they continue from memory with every bit, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perdure.contract import FailureClass, JobPhase, RestoreSource
from tests.gpu.nvidia import used_mib
from tests.gpu.train import BALLAST
from tests.gpu.trainings import SCRIPT, at_step, lines, train
from tests.support.waiting import eventually
from tests.system.site import PATIENCE, Site

STEPS = 120
_BALLAST_MIB = BALLAST >> 20


async def undisturbed(out: Path, *, ranks: int, backend: str) -> list[str]:
    """The digests with which the ranks end without Perdure."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*launcher, str(SCRIPT), str(out), "--backend", backend, "--steps", str(STEPS), "--pause", "0"]
    await asyncio.to_thread(subprocess.run, command, check=True, timeout=PATIENCE, capture_output=True)
    return [(out / f"ended-{rank}").read_text() for rank in range(ranks)]


@pytest.mark.parametrize(("ranks", "backend"), [(1, "nccl"), (2, "gloo")])
async def test_a_killed_rank_costs_at_most_one_step_and_no_bit(
    site: Site, tmp_path: Path, figures: dict[str, Any], ranks: int, backend: str
) -> None:
    before = used_mib()
    job = await train(site, ranks=ranks, backend=backend, steps=STEPS)
    killed = await at_step(job, 30, rank=ranks - 1)
    held = used_mib() - before
    assert held >= ranks * _BALLAST_MIB
    os.kill(killed.pid, signal.SIGKILL)
    await at_step(job, killed.step + 10, rank=ranks - 1, generation=2)
    # The memory of both incarnations together would be twice as much.
    assert used_mib() - before < held + _BALLAST_MIB // 2
    result = await job.client.wait(job.name)
    assert result.phase is JobPhase.SUCCEEDED

    [incident] = await job.incidents()
    assert incident.failure is FailureClass.KILLED
    status = await job.status()
    assert status.checkpoint.restored_from is RestoreSource.MEMORY
    for rank in range(ranks):
        told = lines(job.out, rank)
        [restored] = [line for line in told if line.kind == "restored"]
        assert restored.digest in {line.digest for line in told if line.kind == "made" and line.step == restored.step}
        made = [line.step for line in told if line.kind == "made"]
        assert sorted(set(made)) == list(range(1, STEPS + 1))
        assert len(made) - len(set(made)) <= 2
    ended = [(job.out / f"ended-{rank}").read_text() for rank in range(ranks)]
    assert ended == await undisturbed(tmp_path / "undisturbed", ranks=ranks, backend=backend)
    await job.ended()
    await eventually(lambda: used_mib() <= before + 64, what=lambda: f"{used_mib()} MiB in use, {before} before")

    first = next(line for line in lines(job.out, ranks - 1) if line.generation > 1 and line.kind == "made")
    last = max(line.time for line in lines(job.out, ranks - 1) if line.pid == killed.pid)
    figures[f"{backend}, {ranks} rank(s), from a kill to the next step"] = f"{first.time - last:.2f} s"


async def test_the_nodes_gpu_is_shown_while_the_job_runs(site: Site, gpu: str) -> None:
    job = await train(site, ranks=1, backend="nccl", steps=100_000)
    await at_step(job, 5)

    async def shown() -> bool:
        [node] = await job.client.nodes(job.name)
        devices = node.metrics.devices if node.metrics is not None else ()
        return any(device.name == gpu and (device.memory_used_bytes or 0) >= BALLAST for device in devices)

    await eventually(shown, within=PATIENCE)
