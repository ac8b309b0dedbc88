"""Tests of `perdure check --replay`: a user has ranks of a real job replay their next step."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.command_line import CommandLine
from tests.system.site import WALK, Site

EXAMPLE = Path(__file__).parents[2] / "examples/08-checked-steps/train.py"


@pytest.mark.long("silent-faults")
async def test_a_script_that_replays_nothing_is_told_apart(site: Site):
    job = await site.submit(script=WALK)
    await job.running(nodes=2)
    perdure = CommandLine.local(site.folder, site.state.path)
    shown = await asyncio.to_thread(perdure.run, "check", job.name, "--replay")
    assert shown.code == 3, shown.out + shown.err
    assert shown.out.count("the script replays no steps: docs/corruption.md says how it can") == 2
    refused = await asyncio.to_thread(perdure.run, "check", job.name, "--replay", "--full")
    assert "all ranks replay a step, and nothing else is checked" in refused.err


@pytest.mark.long("silent-faults")
async def test_all_ranks_of_the_example_replay_their_next_step_and_agree(site: Site):
    job = await site.submit(command=["torchrun", str(EXAMPLE), "--steps", "100000", "--pause", "0.02"])
    await job.running(nodes=2)
    perdure = CommandLine.local(site.folder, site.state.path)
    shown = await asyncio.to_thread(perdure.run, "check", job.name, "--replay", "-o", "json")
    assert shown.code == 0, shown.out + shown.err
    checks = [check for node in shown.json for check in node["checks"]]
    assert {check["subject"].partition(",")[0] for check in checks} == {"rank 0", "rank 1"}
    assert len({check["subject"].partition("gradients of step ")[2] for check in checks}) == 1, "all replay one step"
    assert all(len(check["checksum"]) == 16 and not check["problem"] for check in checks)
    again = await asyncio.to_thread(perdure.run, "check", job.name, "--replay")
    assert again.code == 0, again.out + again.err
    assert again.out.count("ok") == 2
    assert (await job.status()).generation == 1
    assert not await job.incidents()
