"""A training of real ranks of which one computes a wrong gradient, once and without an error."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.cli.explain import explanation
from perdure.contract import FailureClass, JobPhase
from tests.support.allocation import REPOSITORY
from tests.system.made_steps import steps
from tests.system.site import PATIENCE, Site

SCRIPT = Path(__file__).with_name("wrong_results.py")
STEPS = 60


@pytest.mark.long("silent-faults")
@pytest.mark.timeout(400)
async def test_the_node_is_replaced_and_the_result_is_that_of_a_sound_training(site: Site, tmp_path: Path):
    undisturbed = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT)]
    run = [*undisturbed, str(tmp_path), "--pause", "0"]
    await asyncio.to_thread(subprocess.run, run, cwd=REPOSITORY, check=True, timeout=PATIENCE, capture_output=True)
    out = site.folder / "wrong-results"
    out.mkdir()
    job = await site.submit(command=["torchrun", str(SCRIPT), str(out), "--flip-at", "20"], nodes="2")
    job.out = out
    result = await job.client.wait(job.name)
    assert result.phase is JobPhase.SUCCEEDED, result
    [incident] = await job.incidents()
    assert incident.failure is FailureClass.CORRUPTION
    assert "computed wrong gradients at step 20, and right when it computed them again" in incident.title
    assert incident.title.startswith(f"node {incident.culprit}: rank 1 ")
    assert incident.restored_step == 19
    incarnations = {node.rank: node.incarnation for node in await site.client.nodes(job.name)}
    assert incarnations == {rank: 2 if rank == incident.culprit else 1 for rank in range(2)}
    assert sorted(set(steps(job, 0))) == list(range(1, STEPS + 1))
    assert (out / "digest").read_text() == (tmp_path / "digest").read_text()
    told = explanation(incident, job=job.name, flag="").plain
    print(told)
    assert 'corruption/1 "a device computes wrongly: replace its node"' in told
    assert "those of rank 1 are " in told
