"""Tests of commands that start torchrun more than once, or work before and after it."""

from __future__ import annotations

import os
import shlex
import signal

import pytest

from perdure_launcher.rank_exits import SUPERSEDED_EXIT_CODE
from tests.launcher.nodes import (
    EXITED,
    FINISHED,
    READY,
    TORCHRUN,
    Node,
    all_step,
    form_world,
    running,
)
from tests.support.waiting import eventually

pytestmark = [pytest.mark.usefixtures("ranks"), pytest.mark.timeout(400)]

HELLO = "/v1/rendezvous/hello"
SUPERSEDED = "/v1/rendezvous/superseded"
TRAIN = f"{shlex.join(TORCHRUN)} train.py"


def script(*lines: str, **config: object) -> Node:
    return Node(["bash", "-c", "\n".join(lines)], **config)


async def train(node: Node, generation: int, *, stage: int) -> None:
    """Brings a node that asks for a world through one."""
    ready = await node.agent.heard(READY, lambda body: body["stage"] == stage)
    await form_world([node], generation, port=ready.body["store_ports"][0], stage=stage)
    await all_step([node], generation)
    (node.run_directory / "stop").touch()
    await node.agent.heard(FINISHED, lambda body: body["generation"] == generation)
    (node.run_directory / "stop").unlink()
    await node.agent.complete_generation(generation, stages=stage + 1)


@pytest.mark.long("launchers")
async def test_what_follows_torchrun_runs_and_its_exit_code_is_the_commands() -> None:
    node = script(f"{TRAIN}; echo EXPORTED; sleep 1; exit 7")
    async with running(node):
        await train(node, 1, stage=0)
        exited = await node.agent.heard(EXITED)
        assert (exited.body["exit_code"], exited.body["generation"]) == (7, 1)
        await eventually(lambda: "EXPORTED" in node.output)
        assert "SignalException" not in node.output


@pytest.mark.long("launchers")
async def test_each_torchrun_of_a_command_has_a_world_of_its_own() -> None:
    node = script("set -e", TRAIN, "echo BETWEEN", TRAIN, "echo EXPORTED")
    async with running(node):
        await train(node, 1, stage=0)
        await train(node, 2, stage=1)
        exited = await node.agent.heard(EXITED)
        assert (exited.body["exit_code"], exited.body["generation"]) == (0, 2)
        # The log is written by a thread of its own.
        await eventually(lambda: "EXPORTED" in node.output)
        assert node.output.index("BETWEEN") < node.output.index("EXPORTED")


@pytest.mark.long("launchers")
async def test_a_command_that_begins_anew_passes_over_what_the_job_has_finished() -> None:
    """A loop over seeds whose last run is killed: the first ones do not train again."""
    node = script("set -e", f"for seed in 0 1 2; do echo SEED $seed; {TRAIN} $seed; done", "echo EXPORTED")
    async with running(node):
        await train(node, 1, stage=0)
        await train(node, 2, stage=1)
        ready = await node.agent.heard(READY, lambda body: body["stage"] == 2)
        await form_world([node], 3, port=ready.body["store_ports"][0], stage=2)
        await all_step([node], 3)
        torchrun = node.agent.said(HELLO)[-1]["pid"]
        os.kill(torchrun, signal.SIGKILL)
        exited = await node.agent.heard(EXITED)
        assert exited.body["exit_code"] == 137
        node.agent.posts.clear()
        await node.agent.want(attempt=2)
        await train(node, 4, stage=2)
        exited = await node.agent.heard(EXITED)
        assert exited.body["exit_code"] == 0
        assert [body["stage"] for body in node.agent.said(READY)] == [0, 1]
        await eventually(lambda: node.output.count("EXPORTED") == 1)
        assert node.output.count("steps") == 4
        assert node.output.count("has finished in this job") == 2
        assert "SignalException" not in node.output


@pytest.mark.long("launchers")
async def test_a_wrapper_that_retries_a_failing_torchrun_stays_in_its_stage() -> None:
    node = script(f"until {TRAIN}; do echo RETRIED; done")
    async with running(node):
        ready = await node.agent.heard(READY)
        await form_world([node], 1, port=ready.body["store_ports"][0])
        await all_step([node], 1)
        os.kill(node.agent.said(HELLO)[-1]["pid"], signal.SIGKILL)
        await train(node, 2, stage=0)
        assert (await node.agent.heard(EXITED)).body["exit_code"] == 0
        await eventually(lambda: "RETRIED" in node.output)


@pytest.mark.long("launchers")
async def test_a_script_that_ignores_a_killed_torchrun_does_not_begin_the_next_one_in_its_place() -> None:
    node = script(TRAIN, f"{TRAIN} second", "echo EXPORTED")
    async with running(node):
        ready = await node.agent.heard(READY)
        await form_world([node], 1, port=ready.body["store_ports"][0])
        await all_step([node], 1)
        os.kill(node.agent.said(HELLO)[-1]["pid"], signal.SIGKILL)
        exited = await node.agent.heard(EXITED)
        assert (exited.body["exit_code"], exited.body["generation"]) == (0, 1)
        await eventually(lambda: "the torchrun before this one did not finish its ranks" in node.output)
        assert node.agent.said(READY) == []


@pytest.mark.long("launchers")
async def test_several_torchruns_at_once_are_stopped() -> None:
    """As in a sweep that gives each of them some of the machine's devices."""
    node = script(f"{TRAIN} &", f"{TRAIN} second &", "wait")
    async with running(node):
        refused = await node.agent.heard("/v1/launcher/unmanaged")
        assert "several torchruns at once" in refused.body["detail"]
        await eventually(lambda: "several torchruns at once" in node.output)
        assert len(node.agent.said(READY)) == 1


@pytest.mark.long("launchers")
async def test_a_script_is_ended_with_the_torchrun_whose_generation_is_over() -> None:
    node = script(TRAIN, "echo CONTINUED")
    async with running(node):
        ready = await node.agent.heard(READY)
        await form_world([node], 1, port=ready.body["store_ports"][0])
        await all_step([node], 1)
        (node.run_directory / "stop").touch()
        await node.agent.heard(FINISHED)
        await form_world([node], 2, port=ready.body["store_ports"][1])
        superseded = await node.agent.heard(SUPERSEDED)
        assert superseded.body == {"generation": 1}
        (node.run_directory / "stop").unlink()
        await node.agent.want(attempt=2)
        exited = await node.agent.heard(EXITED)
        assert (exited.body["attempt"], exited.body["signal"]) == (1, signal.SIGTERM)
        await all_step([node], 2)
        assert "CONTINUED" not in node.output
        assert "SignalException" not in node.output
        assert SUPERSEDED_EXIT_CODE not in [body["exit_code"] for body in node.agent.said(EXITED)]


@pytest.mark.long("launchers")
async def test_a_node_that_is_left_out_of_the_last_world_goes_on_to_the_next_stage() -> None:
    node = script("set -e", TRAIN, TRAIN, nodes="1:2")
    async with running(node):
        ready = await node.agent.heard(READY)
        await form_world([node], 1, port=ready.body["store_ports"][0])
        await all_step([node], 1)
        # Others have finished the stage meanwhile, in a world that this node was no part of.
        await node.agent.complete_generation(5, stages=1)
        await node.agent.heard(READY, lambda body: body["stage"] == 1)
        await eventually(lambda: "has finished in this job" in node.output)
