"""Tests of checks of real machines: those of a job that trains, with a disk that is full."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.support.command_line import CommandLine
from tests.support.small_disks import small_disk
from tests.system.site import WALK, Site


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


async def test_devices_and_the_link_between_two_nodes_are_measured(site: Site):
    job = await site.submit(script=WALK)
    await job.running(nodes=2)
    found = await site.client.check(job.name, full=True)
    for node, other in zip(found, ("node 1", "node 0"), strict=True):
        checks = {check.key: check for check in node.checks}
        assert (checks["matmul", "cpu"].value or 0.0) > 0.1, node
        assert (checks["link", other].value or 0.0) > 0.1, node
        assert not node.failed


async def test_a_folder_without_room_is_named_and_the_command_fails(site: Site, tmp_path: Path):
    with small_disk(tmp_path / "small", "1m") as folder:
        job = await site.submit(script=WALK, env={"TMPDIR": str(folder)})
        await job.running(nodes=2)
        perdure = CommandLine.local(site.folder, site.state.path)
        shown = await asyncio.to_thread(perdure.run, "check", job.name)
    assert shown.code == 3, shown.out + shown.err
    assert "No space left on device" in shown.out
    assert "is less than 64 MB: the log of a node takes so many MB" in shown.out
