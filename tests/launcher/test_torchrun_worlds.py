"""Tests of unmodified torchrun jobs on real nodes, through everything that can happen to a world."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest

from perdure_launcher.rank_exits import SUPERSEDED_EXIT_CODE
from tests.launcher.nodes import (
    ENTERED,
    EXITED,
    FINISHED,
    READY,
    TORCHRUN,
    Node,
    all_ready,
    all_step,
    first_world,
    form_world,
    running,
    world_of,
)
from tests.launcher.warmth import STUB_TORCH
from tests.support.waiting import eventually

pytestmark = [pytest.mark.usefixtures("ranks"), pytest.mark.timeout(400)]

HELLO = "/v1/rendezvous/hello"


def pair(*arguments: str, **config: object) -> list[Node]:
    return [Node([*TORCHRUN, "train.py", *arguments], nodes="2", run_id="pair", **config) for _ in range(2)]


def finish(*nodes: Node) -> None:
    for node in nodes:
        (node.run_directory / "stop").touch()


async def test_a_rank_finds_its_node_as_on_other_systems_and_does_not_outlive_its_killed_launcher(
    tmp_path: Path,
) -> None:
    """The first of the two nodes is only played: no node waits for another one. A stub stands for torch in the rank."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import torch, time; open('trains', 'w'); time.sleep(3600)"
    script = 'echo "$RANK $NODE_RANK $GROUP_RANK ${MASTER_PORT:+port}" > names; exec "$PYTHON" -c "$CODE" "$STUB"'
    node = Node(
        [*TORCHRUN, "--no-python", "sh", "-c", script],
        nodes="2",
        workdir=str(tmp_path),
        env={"PYTHON": sys.executable, "CODE": code, "STUB": str(STUB_TORCH)},
        warm_starts=False,
    )
    async with running(node):
        [ready] = await all_ready(node)
        _, world = world_of([node, node], 1, port=ready.body["store_ports"][0])
        await node.agent.apply(world | {"stage": 0})
        # A rank that has imported torch ends with its torchrun.
        await eventually((tmp_path / "trains").exists, what=lambda: node.output)
        assert (tmp_path / "names").read_text() == "1 1 1 port\n"
        assert node.launcher
        node.launcher.kill()
        await eventually(lambda: node.processes() == [])


@pytest.mark.long("launchers")
async def test_a_killed_rank_is_reported_with_its_signal_and_both_nodes_step_in_the_next_world() -> None:
    nodes = pair()
    async with running(*nodes):
        ready = await first_world(nodes)
        entered = await nodes[0].agent.heard(ENTERED)
        assert ready[0].body["store_ports"][0] not in entered.body["store_ports"]
        assert len(entered.body["store_ports"]) == len(ready[0].body["store_ports"])
        victim = nodes[1].ranks()[1]
        os.kill(victim, signal.SIGKILL)
        report = await nodes[1].agent.heard(READY)
        assert report.body["after_generation"] == 1
        [culprit] = report.body["ranks"]
        assert (culprit["signal"], culprit["exit_code"], culprit["global_rank"], culprit["pid"]) == (9, None, 1, victim)
        await form_world(nodes, 2, port=ready[0].body["store_ports"][1])
        await all_step(nodes, 2)
        assert nodes[1].ranks()[1] != victim
        finish(*nodes)
        for node in nodes:
            await node.agent.heard(FINISHED, lambda body: body["generation"] == 2)
            await node.agent.complete_generation(2)
        for node in nodes:
            exited = await node.agent.heard(EXITED)
            assert (exited.body["exit_code"], exited.body["superseded"], exited.body["generation"]) == (0, False, 2)
            assert exited.body["ranks"] == []


@pytest.mark.long("launchers")
@pytest.mark.parametrize("launcher", [TORCHRUN, [sys.executable]], ids=["torchrun", "env"])
async def test_an_error_with_undecodable_bytes_is_reported_like_any_other(launcher: list[str]) -> None:
    node = Node([*launcher, "names_bytes.py"])
    async with running(node):
        ready = READY if launcher is TORCHRUN else "/v1/launcher/ready"
        asked = await node.agent.heard(ready)
        await form_world([node], 1, port=asked.body["store_ports"][0])
        report = await node.agent.heard(ready, lambda body: body["after_generation"] == 1)
        [failed] = report.body["ranks"]
        assert failed["exit_code"] == 1
        assert failed["error"] == r"ValueError: caf\udce9.jpg is no image"
        assert r"caf\udce9.jpg" in failed["traceback"]


@pytest.mark.long("launchers")
async def test_a_killed_torchrun_takes_its_ranks_along_and_its_successor_enters_only_a_newer_world() -> None:
    nodes = pair()
    async with running(*nodes):
        ready = await first_world(nodes)
        rank = nodes[0].ranks()[0]
        torchrun = (await nodes[0].agent.heard(HELLO)).body["pid"]
        os.kill(torchrun, signal.SIGKILL)
        exited = await nodes[0].agent.heard(EXITED)
        assert (exited.body["attempt"], exited.body["signal"], exited.body["generation"]) == (1, 9, 1)
        assert not Path(f"/proc/{rank}").exists()
        await nodes[0].agent.want(attempt=2)
        again = await nodes[0].agent.heard(READY)
        assert again.body["after_generation"] == 1
        assert not set(again.body["store_ports"]) & {ready[0].body["store_ports"][0]}
        await form_world(nodes, 2, port=again.body["store_ports"][0])
        await all_step(nodes, 2)


@pytest.mark.long("launchers")
async def test_a_node_in_the_exit_barrier_starts_again_when_a_peer_dies_before_it_has_finished() -> None:
    nodes = pair("--linger", "1")
    async with running(*nodes):
        await first_world(nodes)
        finish(*nodes)
        await nodes[0].agent.heard(FINISHED)
        os.kill(nodes[1].ranks()[1], signal.SIGKILL)
        await nodes[1].agent.heard(READY, lambda body: bool(body["ranks"]))
        ports = nodes[0].agent.said(ENTERED)[-1]["store_ports"]
        await form_world(nodes, 2, port=ports[0])
        exited = await nodes[0].agent.heard(EXITED)
        assert exited.body["exit_code"] == SUPERSEDED_EXIT_CODE
        assert exited.body["superseded"] is True
        for node in nodes:
            (node.run_directory / "stop").unlink()
        await nodes[0].agent.want(attempt=2)
        await all_step(nodes, 2)


@pytest.mark.long("launchers")
async def test_a_failing_script_is_reported_with_its_exception_although_it_does_not_record_it() -> None:
    node = Node([*TORCHRUN, "fails.py"])
    begun = time.time()
    async with running(node):
        [ready] = await all_ready(node)
        await form_world([node], 1, port=ready.body["store_ports"][0])
        for generation in (1, 2):
            report = await node.agent.heard(READY, lambda body: bool(body["ranks"]))
            [failed] = report.body["ranks"]
            assert failed["exit_code"] == 1
            assert failed["error"] == "ValueError: unknown optimizer 'adamm'; known: ['learning_rate']"
            assert "fails.py" in failed["traceback"]
            assert begun <= failed["time"] <= time.time()
            await form_world([node], generation + 1, port=report.body["store_ports"][0])


@pytest.mark.long("launchers")
async def test_a_torchrun_that_was_told_not_to_restart_reports_its_ranks_through_the_launcher() -> None:
    node = Node([*TORCHRUN, "--max-restarts=0", "fails.py"])
    async with running(node):
        [ready] = await all_ready(node)
        await form_world([node], 1, port=ready.body["store_ports"][0])
        exited = await node.agent.heard(EXITED)
        assert (exited.body["exit_code"], exited.body["generation"]) == (1, 1)
        [failed] = exited.body["ranks"]
        assert failed["error"].startswith("ValueError: unknown optimizer")
        assert "ValueError: unknown optimizer" in exited.body["log_tail"]


@pytest.mark.long("launchers")
async def test_training_goes_on_while_the_agent_is_away_and_it_hears_on_return_what_happened() -> None:
    nodes = pair()
    async with running(*nodes):
        ready = await first_world(nodes)
        for node in nodes:
            await node.agent.stop()
        pids = nodes[0].ranks()
        step = (await nodes[0].stepped(0, 1)).step
        await nodes[0].stepped(0, 1, steps=step + 20)
        os.kill(nodes[1].ranks()[1], signal.SIGKILL)
        await eventually(lambda: nodes[1].ranks()[1] not in nodes[1].processes())
        for node in nodes:
            node.agent.posts.clear()
            await node.agent.start()
        await nodes[1].agent.heard(HELLO)
        await nodes[1].agent.heard("/v1/launcher/hello")
        report = await nodes[1].agent.heard(READY, lambda body: bool(body["ranks"]))
        assert report.body["ranks"][0]["signal"] == 9
        # A restart of an agent that waits changes nothing but that the node says again that it waits.
        await nodes[1].agent.stop()
        nodes[1].agent.posts.clear()
        await nodes[1].agent.start()
        waiting = await nodes[1].agent.heard(READY)
        assert (waiting.body["after_generation"], waiting.body["ranks"]) == (1, [])
        await form_world(nodes, 2, port=ready[0].body["store_ports"][1])
        await all_step(nodes, 2)
        assert nodes[0].ranks() != pids


@pytest.mark.long("launchers")
async def test_a_rank_that_ignores_sigterm_delays_the_report_of_its_neighbour_by_the_stop_grace_only() -> None:
    node = Node([*TORCHRUN, "stubborn.py"], processes=2, stop_grace_s=0.5)
    async with running(node):
        ready = await first_world([node], processes=2)
        assert ready[0].body["processes"] == 2
        killed_at = time.time()
        os.kill(node.ranks()[1], signal.SIGKILL)
        report = await node.agent.heard(READY)
        assert report.heard_at - killed_at < 30, "torchrun alone waits 30 s"
        assert [(rank["local_rank"], rank["signal"]) for rank in report.body["ranks"]] == [(1, 9)]
        await form_world([node], 2, port=report.body["store_ports"][0], processes=2)
        await all_step([node], 2, processes=2)
        # A world that is superseded while it runs ends without a failure.
        await form_world([node], 3, port=report.body["store_ports"][1], processes=2)
        await all_step([node], 3, processes=2)
        assert node.agent.said(READY) == []


@pytest.mark.long("launchers")
async def test_flags_of_the_command_itself_win_over_what_the_job_asks_for_but_for_the_rendezvous() -> None:
    flags = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:29400", "--rdzv-id=mine", "--nproc-per-node=2"]
    node = Node([*TORCHRUN, *flags, "train.py"], nodes="2:4")
    async with running(node):
        hello = await node.agent.heard(HELLO)
        assert (hello.body["min_nodes"], hello.body["max_nodes"]) == (2, 4)
        assert hello.body["processes"] == 2
        ready = await node.agent.heard(READY)
        await form_world([node], 1, port=ready.body["store_ports"][0], processes=2)
        await all_step([node], 1, processes=2)


@pytest.mark.long("launchers")
async def test_ranks_that_bypass_the_rendezvous_on_several_nodes_are_stopped_and_explained() -> None:
    bypass = ["env", "-u", "PYTHONPATH", "PET_RDZV_BACKEND=c10d", "PET_RDZV_ENDPOINT=localhost:0", "PET_NNODES=1"]
    node = Node([*bypass, *TORCHRUN, "alone.py"], nodes="2", rendezvous="torchrun")
    async with running(node):
        report = await node.agent.heard("/v1/launcher/unmanaged")
        assert report.body["ranks"]
        assert "PYTHONPATH" in report.body["detail"]
        exited = await node.agent.heard(EXITED)
        assert "without Perdure's rendezvous" in exited.body["log_tail"]
        assert node.processes(lambda environment: "LOCAL_RANK" in environment) == []


@pytest.mark.long("launchers")
async def test_a_lost_plugin_is_explained() -> None:
    node = Node(["sh", "-c", f"PYTHONPATH=/nowhere {shlex.join(TORCHRUN)} train.py"])
    async with running(node):
        exited = await node.agent.heard(EXITED)
        assert exited.body["exit_code"] == 1
        assert "PYTHONPATH was overwritten" in exited.body["message"]
        assert "PYTHONPATH was overwritten" in exited.body["log_tail"]


@pytest.mark.long("launchers")
async def test_leaving_while_waiting_for_a_world_is_prompt() -> None:
    node = Node([*TORCHRUN, "train.py"], nodes="2", termination_grace_s=60)
    async with running(node):
        ready = await node.agent.heard(READY)
        await form_world([node], 1, port=ready.body["store_ports"][0])
        await all_step([node], 1)
        # Now torchrun has its signal handlers, which only raise in its main thread.
        os.kill(node.ranks()[0], signal.SIGKILL)
        await node.agent.heard(READY)
        asked_at = time.monotonic()
        await node.agent.want(exit=True, reason="the job was cancelled")
        assert await node.left() == 0
        assert time.monotonic() - asked_at < 60, "the grace was waited for"
        assert node.processes() == []
        assert "perdure: SIGTERM ended torchrun\n" in node.output
        assert "SignalException" not in node.output, "a traceback would hide the ranks' own errors"


@pytest.mark.long("launchers")
async def test_ranks_have_the_termination_grace_to_save_when_the_job_ends() -> None:
    node = Node([*TORCHRUN, "saves.py"], stop_grace_s=0.2, termination_grace_s=30)
    async with running(node):
        await first_world([node])
        await node.agent.want(exit=True)
        assert await node.left() == 0
        assert "saved" in node.output


@pytest.mark.long("launchers")
async def test_a_node_that_joins_restarts_the_others_without_a_failure() -> None:
    nodes = pair()
    async with running(nodes[0]):
        ready = await first_world(nodes[:1])
        async with running(nodes[1]):
            await nodes[1].agent.heard(READY)
            await form_world(nodes, 2, port=ready[0].body["store_ports"][1])
            await all_step(nodes, 2)
            assert nodes[0].agent.said(READY) == []
            # Handed out and superseded at once: no node is stuck in the world that never was.
            await form_world(nodes, 3, port=ready[0].body["store_ports"][2])
            await nodes[0].agent.heard(ENTERED, lambda body: body["generation"] == 3)
            await form_world(nodes, 4, port=ready[0].body["store_ports"][3])
            await all_step(nodes, 4)
