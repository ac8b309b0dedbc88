"""Tests that run the recipes of docs/operations.md for Temporal's command line, as the page prints them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from perdure.contract import JobPhase
from perdure.contract.names import job_workflow_id
from tests.docs.pages import ROOT
from tests.support.command_line import PERDURE
from tests.support.temporal_server import temporal_binary
from tests.support.waiting import eventually
from tests.system.site import PATIENCE, WALK, Job, Site

pytestmark = pytest.mark.long("commands")


def recipes() -> dict[str, list[str]]:
    """The commands of each recipe, by its heading."""
    page = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    section = page.split("\n### Recipes for Temporal's command line\n")[1].split("\n## ")[0]
    parts = (part.partition("\n") for part in section.split("\n#### ")[1:])
    return {heading: re.findall(r"^\$ (.+)$", text, re.MULTILINE) for heading, _, text in parts}


class Shell:
    """A shell as `perdure codec-server -- bash` opens it, in a folder of its own."""

    def __init__(self, site: Site, folder: Path) -> None:
        self._site = site
        self.folder = folder
        (folder / "bin").mkdir()
        (folder / "bin" / "temporal").symlink_to(temporal_binary())

    async def run(self, command: str, names: Mapping[str, str]) -> tuple[int, str]:
        """Runs a command of the page, with names of the test's own; returns its exit code and its output."""
        for printed, name in names.items():
            assert printed in command, f"{command} does not name {printed}"
            command = command.replace(printed, name)
        programs = f"{self.folder / 'bin'}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        process = await asyncio.create_subprocess_exec(
            *(*PERDURE, "codec-server", "--", "bash", "-euo", "pipefail", "-c", command),
            cwd=self.folder,
            env={**os.environ, "PERDURE_STATE": str(self._site.state.path), "TEMPORAL_ADDRESS": "", "PATH": programs},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        printed, _ = await process.communicate()
        return process.returncode or 0, printed.decode()

    async def succeed(self, command: str, names: Mapping[str, str]) -> str:
        code, printed = await self.run(command, names)
        assert code == 0, f"{command}: {printed}"
        return printed


@pytest.fixture
def shell(site: Site, tmp_path: Path) -> Shell:
    folder = tmp_path / "reader"
    folder.mkdir()
    return Shell(site, folder)


def specification(shell: Shell, *command: str) -> str:
    """Writes `job.json`; returns the job's name."""
    name = f"r-{uuid4().hex[:8]}"
    worker: dict[str, Any] = {"nodes": 1, "command": list(command)}
    spec = {"name": name, "roles": {"worker": worker}, "retry": {"max_restarts": 0}}
    (shell.folder / "job.json").write_text(json.dumps(spec))
    return name


async def trains(site: Site) -> Job:
    job = await site.submit(script=WALK)
    await job.running(nodes=2)
    return job


def test_every_recipe_is_run_here() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    assert recipes()
    assert [heading for heading in recipes() if f'recipes()["{heading}"]' not in source] == []


@pytest.mark.parametrize("code", [0, 7])
async def test_ci_starts_a_job_and_fails_with_it(shell: Shell, code: int) -> None:
    start, result = recipes()["Start a job from CI and wait for its end"]
    names = {"job/default/llama": job_workflow_id("default", specification(shell, "sh", "-c", f"exit {code}"))}
    await shell.succeed(start, names)
    ended, printed = await shell.run(result, names)
    assert (ended != 0) == (code != 0), printed


async def test_jobs_that_do_not_train_are_listed(site: Site, shell: Shell) -> None:
    [listing] = recipes()["List the jobs that do not train"]
    running, waiting = await trains(site), f"r-{uuid4().hex[:8]}"
    worker: dict[str, Any] = {"nodes": 1, "command": ["true"]}
    await site.client.submit({"name": waiting, "backend": "joined", "roles": {"worker": worker}})
    workflow_id = job_workflow_id("default", waiting)

    async def listed() -> str:
        printed = await shell.succeed(listing, {})
        return printed if workflow_id in printed else ""

    assert running.workflow_id not in await eventually(listed, what="the job that waits for a machine is listed")
    await site.client.cancel(waiting)


async def test_all_jobs_of_a_user_are_suspended_and_resumed(
    site: Site, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    suspend, resume = recipes()["Suspend all jobs of a user, and resume them"]
    other = await trains(site)
    user = f"ana-{uuid4().hex[:8]}"
    monkeypatch.setenv("LOGNAME", user)
    jobs = [await trains(site) for _ in range(2)]
    temporal = await site.client.connect()

    async def are_found(phase: str) -> bool:
        return (await temporal.count_workflows(f"JobPhase = '{phase}' AND JobOwner = '{user}'")).count == len(jobs)

    await eventually(lambda: are_found("RUNNING"))
    await shell.succeed(suspend, {"ana": user})
    assert [(await job.status()).phase for job in jobs] == [JobPhase.SUSPENDED] * 2
    assert (await other.status()).phase is JobPhase.RUNNING
    await eventually(lambda: are_found("SUSPENDED"))
    await shell.succeed(resume, {"ana": user})
    for job in jobs:
        await job.running(nodes=2, after=1)


async def test_a_schedule_starts_a_job_and_skips_the_night_in_which_it_still_trains(site: Site, shell: Shell) -> None:
    create, trigger = recipes()["Train each night"]
    out = shell.folder / "out"
    out.mkdir()
    name = specification(shell, sys.executable, str(WALK), str(out))
    schedule = f"nightly-{uuid4().hex[:8]}"
    await shell.succeed(create, {"nightly": schedule})
    handle = (await site.client.connect()).get_schedule_handle(schedule)
    try:
        await shell.succeed(trigger, {"nightly": schedule})

        async def runs() -> bool:
            summaries = {job.name: job.phase for job in await site.client.list()}
            return summaries.get(name) is JobPhase.RUNNING

        await eventually(runs, what=f"{name} runs")
        job = Job(site.client, name, (await site.client.status(name)).uid, out)
        site.jobs.append(job)
        await shell.succeed(trigger, {"nightly": schedule})

        async def is_skipped() -> bool:
            return (await handle.describe()).info.num_actions_skipped_overlap == 1

        await eventually(is_skipped, what="the second start is skipped")
        assert (await job.status()).uid == job.uid
        job.finish()
        assert (await site.client.wait(name)).phase is JobPhase.SUCCEEDED
    finally:
        await handle.delete()


async def test_a_job_that_is_reset_after_a_bad_deploy_trains_on(site: Site, shell: Shell) -> None:
    [reset] = recipes()["Undo what a bad deploy has decided"]
    job = await trains(site)
    await shell.succeed(reset, {"job/default/llama": job.workflow_id})
    await job.undisturbed(ranks=2, seconds=5)
    assert (await job.running(nodes=2)).generation == 1
    assert not await job.incidents()


async def test_training_does_not_notice_that_its_job_is_paused_and_the_status_says_it(site: Site, shell: Shell) -> None:
    pause, status, unpause = recipes()["Look at a job while it decides nothing"]
    job = await trains(site)
    names = {"job/default/llama": job.workflow_id}
    await shell.succeed(pause, names)
    try:
        await job.undisturbed(ranks=2, seconds=5)
        code, shown = await shell.run(status, {"llama": job.name})
        assert code == 6, shown
        assert "is paused in Temporal" in shown
        assert "looking" in shown
    finally:
        await shell.succeed(unpause, names)
    await job.undisturbed(ranks=2, seconds=2)
    assert (await job.running(nodes=2)).generation == 1


async def test_training_does_not_notice_that_the_lease_of_a_node_is_paused(site: Site, shell: Shell) -> None:
    groups, activities, pause, status, unpause = recipes()["Pause an activity, such as the lease of a node"]
    job = await trains(site)
    found = await shell.succeed(groups, {"llama": job.name})
    [group] = re.findall(rf"{job.workflow_id}/\w+/worker/0", found)
    names = {"job/default/llama/0a1b2c3d/worker/0": group}

    async def held() -> str | None:
        shown = await shell.succeed(activities, names)
        leases = re.findall(r"ActivityId +(lease/1/1/\d+)", shown)
        return leases[0] if leases else None

    lease = await eventually(held, within=PATIENCE, what="the lease of node 1 is held")
    await shell.succeed(pause, {**names, "lease/1/1/1": lease})
    try:

        async def told() -> bool:
            return "the lease of node 1.1 is paused in Temporal" in await shell.succeed(status, {"llama": job.name})

        await eventually(told, within=PATIENCE, what="the status names the pause")
        assert "looking" in await shell.succeed(status, {"llama": job.name})
        await job.undisturbed(ranks=2, seconds=5)
    finally:
        await shell.succeed(unpause, {**names, "lease/1/1/1": lease})
    await job.undisturbed(ranks=2, seconds=2)
    assert (await job.running(nodes=2)).generation == 1
    assert not await job.incidents()
