"""Tests of scripts around torchrun on real nodes: several torchruns, and commands between and after them."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from perdure.contract import FailureClass, JobPhase
from tests.system.site import SCRIPT, Job, Site

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ["torchrun", str(SCRIPT)]


def staged(*lines: str) -> list[str]:
    return ["bash", "-c", "\n".join(("set -e", *lines))]


def folder(site: Site, name: str) -> Path:
    made = site.folder / name
    made.mkdir()
    return made


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.long("frameworks")
async def test_a_rank_and_a_node_killed_in_the_second_stage_train_the_first_one_once(site: Site):
    pretrain, finetune = folder(site, "pretrain"), folder(site, "finetune")
    job = await site.submit(
        command=staged(
            shlex.join([*TORCHRUN, str(pretrain), "--steps", "20"]),
            "echo between",
            "until [ -e go ]; do sleep 0.2; done",
            shlex.join([*TORCHRUN, str(finetune)]),
            'echo "$PERDURE_NODE" >> exported',
        )
    )
    known = await job.until(lambda s: s.reason.endswith("commands: 2 at work"))
    assert (known.phase, known.reason) == (JobPhase.RUNNING, "torchrun 1 has finished; commands: 2 at work")
    (site.folder / "go").touch()
    second = Job(site.client, job.name, job.uid, finetune)
    await second.stepping(generation=2, ranks=2)
    job.signal(1, "rank")
    await second.stepping(generation=3, ranks=2)
    known = await job.running(nodes=2, after=2)
    job.signal(0, None)
    await second.stepping(generation=known.generation + 1, ranks=2)
    assert not (site.folder / "exported").exists()
    second.finish()
    result = await site.client.wait(job.name)
    assert (result.phase, result.exit_code) == (JobPhase.SUCCEEDED, 0)
    assert result.reason == "the command ended with 0 on every node; 2 torchruns finished"
    assert sorted(lines_of(site.folder / "exported")) == [f"{job.uid}/worker-0/2", f"{job.uid}/worker-1/1"]
    first = Job(site.client, job.name, job.uid, pretrain).steps()
    assert {step.generation for step in first} == {1}
    assert sorted(step.number for step in first) == sorted([*range(1, 21)] * 2)
    assert [incident.failure for incident in await job.incidents()] == [FailureClass.KILLED, FailureClass.NODE_LOST]


@pytest.mark.long("frameworks")
async def test_a_line_that_fails_after_torchrun_every_time_fails_the_job(site: Site):
    trained = folder(site, "trained")
    job = await site.submit(
        command=staged(shlex.join([*TORCHRUN, str(trained), "--steps", "5"]), 'echo "$PERDURE_NODE" >> tried', "exit 7")
    )
    result = await site.client.wait(job.name)
    assert (result.phase, result.exit_code) == (JobPhase.FAILED, 1)
    assert "exited with 7" in result.reason
    incidents = await job.incidents()
    assert {incident.generation_after for incident in incidents} == {None}
    assert len(lines_of(site.folder / "tried")) <= 2 * (result.restarts + 1)
    assert len(Job(site.client, job.name, job.uid, trained).steps()) == 10


@pytest.mark.long("frameworks")
async def test_work_before_the_first_torchrun_may_take_longer_than_a_node_has_to_join(site: Site):
    out = folder(site, "out")
    job = await site.submit(
        command=staged("until [ -e installed ]; do sleep 0.2; done", shlex.join([*TORCHRUN, str(out), "--steps", "5"])),
        timing={"rendezvous": {"join_timeout": "40s"}},
    )
    known = await job.until(lambda s: "its command runs and has not started its torchrun yet" in s.reason)
    assert known.phase is JobPhase.STARTING
    started = known.started_at
    await job.until(lambda s: datetime.now(UTC) - started > timedelta(seconds=45))
    (site.folder / "installed").touch()
    result = await site.client.wait(job.name)
    assert (result.phase, result.restarts) == (JobPhase.SUCCEEDED, 0)


@pytest.mark.parametrize(
    ("name", "torchruns", "made"),
    [
        ("two-stages", 2, ("out/narrow/checkpoint.pt", "out/wide/checkpoint.pt")),
        ("upload", 1, ("uploaded/checkpoint.pt",)),
        ("seeds", 3, ("out/seed-0/checkpoint.pt", "out/seed-1/checkpoint.pt", "out/seed-2/checkpoint.pt")),
    ],
)
@pytest.mark.long("frameworks")
async def test_an_example_runs_as_it_says(site: Site, name: str, torchruns: int, made: tuple[str, ...]):
    (site.folder / "examples").symlink_to(EXAMPLES)
    text = (EXAMPLES / "03-scripts" / f"{name}.sh").read_text()
    command = f"bash examples/03-scripts/{name}.sh"
    assert f"perdure run --nodes 2 -- {command}" in text
    environment = {"OMP_NUM_THREADS": "1", "STEPS": "3"}
    job = await site.submit(command=command.split(), env=environment)
    result = await site.client.wait(job.name)
    assert (result.phase, result.generations, result.restarts) == (JobPhase.SUCCEEDED, torchruns, 0)
    assert all((site.folder / path).stat().st_size for path in made)
    assert not list((site.folder / "uploaded").glob(".checkpoint.*"))
