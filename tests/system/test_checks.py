"""Tests of checks of real machines: those of a job that trains, with a disk that is full."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.cli.explain import explanation
from perdure.client.connection import payload_encryption
from perdure.contract import FailureClass, IncidentView, JobPhase
from tests.support.command_line import PERDURE, CommandLine
from tests.support.small_disks import small_disk
from tests.support.waiting import eventually
from tests.system.joined import machines
from tests.system.site import WALK, Site


@pytest.mark.long("silent-faults")
async def test_the_machines_of_a_running_job_are_checked_and_it_trains_on(site: Site):
    job = await site.submit(script=WALK)
    await job.running(nodes=2)
    perdure = CommandLine.local(site.folder, site.state.path)
    shown = await asyncio.to_thread(perdure.run, "check", job.name)
    assert shown.code == 0, shown.out + shown.err
    rows = [line.split() for line in shown.out.splitlines()[1:]]
    assert {row[1] for row in rows} >= {"processor", "memory", "disk", "room", "names", "clock", "reach"}
    assert {row[0] for row in rows} == {"0", "1"}
    answer = await asyncio.to_thread(perdure.run, "check", job.name, "--nodes", "1", "-o", "json")
    (node,) = answer.json
    assert node["node"] == 1
    assert not any(check["problem"] for check in node["checks"])
    assert (await job.status()).generation == 1


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path leaves room for that of an agent's socket, which is limited."""
    with tempfile.TemporaryDirectory(prefix="p-") as name:
        yield Path(name)


@pytest.mark.long("silent-faults")
async def test_devices_and_the_link_between_two_nodes_are_measured(site: Site):
    job = await site.submit(script=WALK)
    await job.running(nodes=2)
    found = await site.client.check(job.name, full=True)
    for node, other in zip(found, ("node 1", "node 0"), strict=True):
        checks = {check.key: check for check in node.checks}
        assert (checks["matmul", "cpu"].value or 0.0) > 0.1, node
        assert (checks["link", other].value or 0.0) > 0.1, node
        assert not node.failed


@pytest.mark.long("silent-faults")
async def test_a_folder_without_room_is_named_and_the_command_fails(site: Site, tmp_path: Path):
    with small_disk(tmp_path / "small", "1m") as folder:
        job = await site.submit(script=WALK, env={"TMPDIR": str(folder)})
        await job.running(nodes=2)
        perdure = CommandLine.local(site.folder, site.state.path)
        shown = await asyncio.to_thread(perdure.run, "check", job.name)
    assert shown.code == 3, shown.out + shown.err
    assert "No space left on device" in shown.out
    assert "is less than 64 MB: the log of a node takes so many MB" in shown.out


@pytest.mark.long("silent-faults")
async def test_a_machine_whose_disk_is_full_is_not_taken_in_and_another_one_is(
    site: Site, tmp_path: Path, short_folder: Path
):
    endpoint = site.client.endpoint
    environment = {"TEMPORAL_ADDRESS": endpoint.address, **payload_encryption(endpoint).environment}
    with small_disk(short_folder / "small", "1m") as folder:
        async with machines(tmp_path, environment) as here:
            job = await site.submit(script=WALK, backend="joined", preflight="quick")
            here.join(job.name, "good")
            full = here.start(*PERDURE, "join", job.name, "--node-id", "full", environment={"TMPDIR": str(folder)})
            incidents: list[IncidentView] = []

            async def refused() -> bool:
                incidents[:] = await job.incidents()
                return bool(incidents)

            await eventually(refused, what="a machine is refused")
            await full.leave()
            here.join(job.name, "spare")
            await job.running(nodes=2)
            (incident,) = await job.incidents()
            assert "was not taken in" in incident.title
            full_disk = f"disk of temporary folder: {folder}: No space left on device"
            assert any(sign.text.endswith(full_disk) for sign in incident.evidence)
            assert incident.observation is not None
            assert incident.observation.refused
            assert (await job.status()).generation == 1
            job.finish()
            assert (await site.client.wait(job.name)).phase is JobPhase.SUCCEEDED


@pytest.mark.long("silent-faults")
async def test_a_machine_is_checked_after_a_crash_and_status_warns_of_what_it_fails(site: Site, short_folder: Path):
    found = "failed a check after a failure that may be its own: room of temporary folder"
    with small_disk(short_folder / "small", "1m") as folder:
        job = await site.submit(env={"TMPDIR": str(folder), "OMP_NUM_THREADS": "1"})
        await job.running(nodes=2)
        await job.stepping(generation=1, ranks=2)
        os.kill(job.steps()[-1].pid, signal.SIGSEGV)
        status = await job.until(lambda known: any(found in warning for warning in known.warnings))
    crash, entry = await job.incidents()
    assert crash.failure is FailureClass.CRASH
    assert entry.observation is not None
    assert entry.observation.suspected
    assert status.generation == 2
    print(explanation(entry, job=job.name, flag="").plain)


@pytest.mark.long("silent-faults")
async def test_a_job_whose_nodes_are_checked_trains_and_nothing_is_said(site: Site):
    job = await site.submit(script=WALK, preflight="full")
    status = await job.running(nodes=2)
    assert status.generation == 1
    assert not await job.incidents()
