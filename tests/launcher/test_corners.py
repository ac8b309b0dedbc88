"""Tests of torchrun jobs with faults at the worst moments, of ranks that are hard to end, and of nested torchruns."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from perdure_launcher.state import StateFile
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
from tests.launcher.test_env_mode import ENV_READY
from tests.launcher.test_torchrun_worlds import HELLO, finish, pair
from tests.support.waiting import eventually

pytestmark = [pytest.mark.usefixtures("ranks"), pytest.mark.timeout(300), pytest.mark.long("launchers")]

SIGKILLED = {"exit_code": None, "signal": 9}
SHARED = Path("/dev/shm")


def shared_by(pid: str) -> list[Path]:
    """Returns the batches that a worker of a loader has passed on by files."""
    return list(SHARED.glob(f"torch_{pid}_*"))


def kill_node(*nodes: Node) -> None:
    """Nothing of a node survives its launcher."""
    for node in nodes:
        assert node.launcher
        node.launcher.kill()


def torchruns(node: Node) -> list[int]:
    return node.processes(lambda environment: "PERDURE_TORCHRUN" in environment)


def ranks_of(node: Node, generation: int) -> list[int]:
    """Returns the ranks of a generation that torchrun has started, and all their descendants."""
    return node.processes(lambda environment: environment.get("PERDURE_GENERATION", "").strip() == str(generation))


async def kill_at_start(node: Node, generation: int) -> None:
    """Kills the node's only rank of a generation before it has run a line of its script."""
    [rank, *_] = await eventually(lambda: ranks_of(node, generation))
    os.kill(rank, signal.SIGKILL)


def gone(*pids: int) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


async def test_torchrun_and_a_rank_may_die_before_there_ever_was_a_step() -> None:
    node = Node([*TORCHRUN, "train.py"])
    async with running(node):
        for pid in await eventually(lambda: torchruns(node)):
            os.kill(pid, signal.SIGKILL)
        exited = await node.agent.heard(EXITED)
        assert (exited.body["attempt"], exited.body["generation"], exited.body["superseded"]) == (1, 0, False)
        assert {name: exited.body[name] for name in SIGKILLED} == SIGKILLED
        assert StateFile(node.run_directory).read().handler_pid == 0, "torchrun was still importing"
        await node.agent.want(attempt=2)
        [ready] = await all_ready(node)
        await form_world([node], 1, port=ready.body["store_ports"][0])
        await kill_at_start(node, 1)
        again = await node.agent.heard(READY, lambda body: body["after_generation"] == 1)
        assert [rank["signal"] for rank in again.body["ranks"]] == [9]
        await form_world([node], 2, port=again.body["store_ports"][0])
        await all_step([node], 2)


async def test_a_rank_that_still_imports_does_not_outlive_a_killed_launcher() -> None:
    node = Node([*TORCHRUN, "train.py"], warm_starts=False)
    async with running(node):
        [ready] = await all_ready(node)
        await form_world([node], 1, port=ready.body["store_ports"][0])
        await eventually(lambda: node.processes(lambda environment: "LOCAL_RANK" in environment))
        kill_node(node)
        await eventually(lambda: node.processes() == [])


async def test_nodes_may_be_lost_while_a_world_is_handed_out_two_at_once_and_while_ranks_restart() -> None:
    host, survivor, third, newcomer = (Node([*TORCHRUN, "train.py"], nodes="1:3", run_id="four") for _ in range(4))
    async with running(host, survivor, third):
        ready = await all_ready(host, survivor, third)
        ports = [post.body["store_ports"] for post in ready]
        # The third one's torchrun dies before it receives the world that the others wait in.
        worlds = world_of([host, survivor, third], 1, port=ports[0][0])
        [torchrun] = torchruns(third)
        os.kill(torchrun, signal.SIGKILL)
        await host.agent.apply(worlds[0])
        await survivor.agent.apply(worlds[1])
        await third.agent.heard(EXITED)
        for node in (host, survivor):
            await eventually(lambda node=node: ranks_of(node, 1))
        await third.agent.want(attempt=2)
        await all_ready(third)
        await form_world([host, survivor, third], 2, port=ports[0][1])
        await all_step([host, survivor, third], 2)
        assert [*ranks_of(host, 1), *ranks_of(survivor, 1)] == []

        # Two at once, and one of them serves the store and is rank 0.
        kill_node(host, third)
        async with running(newcomer):
            await form_world([survivor], 3, port=ports[1][0])
            await all_step([survivor], 3)
            assert survivor.ranks(3).keys() == {0}

            # And again at the very start of its ranks, while the new node enters already.
            [joining] = await all_ready(newcomer)
            await form_world([survivor, newcomer], 4, port=ports[1][1])
            await kill_at_start(survivor, 4)
            report = await survivor.agent.heard(READY, lambda body: body["after_generation"] == 4)
            assert [rank["signal"] for rank in report.body["ranks"]] == [9]
            # Now the newcomer serves the store.
            await form_world([newcomer, survivor], 5, port=joining.body["store_ports"][0])
            await all_step([newcomer, survivor], 5)


async def test_a_node_may_die_in_the_exit_barrier_and_an_agent_be_away_when_it_ends() -> None:
    nodes = done, late = pair("--linger", "1")
    async with running(*nodes):
        await first_world(nodes)
        finish(done, late)
        await done.agent.heard(FINISHED)
        kill_node(done)
        # The rank that takes its time to save is not disturbed by what became of rank 0's node.
        [saving] = late.ranks(1).values()
        await eventually(lambda: done.processes() == [])
        assert not gone(saving)
        (late.run_directory / "stop").unlink()
        ports = late.agent.said(ENTERED)[-1]["store_ports"]
        await form_world([late], 2, port=ports[0])
        await all_step([late], 2)
        assert gone(saving)
        finish(late)
        await late.agent.heard(FINISHED, lambda body: body["generation"] == 2)
        await late.agent.stop()
        await late.agent.complete_generation(2)
        late.agent.posts.clear()
        await late.agent.start()
        exited = await late.agent.heard(EXITED)
        assert (exited.body["exit_code"], exited.body["generation"]) == (0, 2)


def daemons(node: Node, generation: int) -> list[int]:
    """Returns the daemons that ranks of `clings.py` have left behind."""
    return [int(line) for line in (node.run_directory / f"daemons-{generation}").read_text().split()]


async def test_ranks_stuck_in_a_collective_and_their_daemons_do_not_outlive_their_generation() -> None:
    nodes = stuck, frozen = [Node([*TORCHRUN, "clings.py"], nodes="2", stop_grace_s=0.5) for _ in range(2)]
    async with running(*nodes):
        ready = await first_world(nodes)
        old = [*stuck.ranks(1).values(), *frozen.ranks(1).values()]
        left = [*daemons(stuck, 1), *daemons(frozen, 1)]
        assert (len(left), gone(left[0])) == (4, False)
        # A peer that answers no more, without its connections closing: the collective never ends.
        os.kill(frozen.ranks(1)[1], signal.SIGSTOP)
        await form_world(nodes, 2, port=ready[0].body["store_ports"][1])
        await all_step(nodes, 2)
        assert gone(*old)
        await eventually(lambda: gone(*left))
        assert not gone(*daemons(stuck, 2), *daemons(frozen, 2))

        # torchrun dies while it waits for a rank to end.
        rank, handler = stuck.ranks(2)[0], (await stuck.agent.heard(HELLO)).body["pid"]
        left = daemons(stuck, 2)
        told = stuck.output.count("told to end")
        await form_world(nodes, 3, port=ready[0].body["store_ports"][2])
        await eventually(lambda: stuck.output.count("told to end") > told)
        os.kill(handler, signal.SIGKILL)
        exited = await stuck.agent.heard(EXITED)
        assert (exited.body["signal"], exited.body["generation"]) == (9, 2)
        assert gone(rank, *left)


async def test_without_torchrun_too_on_nodes_of_different_sizes() -> None:
    sizes = (2, 1)
    command = [sys.executable, "-u", "clings.py"]
    nodes = [Node(command, nodes="2", processes=processes, stop_grace_s=0.3) for processes in sizes]
    async with running(*nodes):
        ready = await first_world(nodes, processes=sizes, path=ENV_READY)
        left = [*daemons(nodes[0], 1), *daemons(nodes[1], 1)]
        assert len(left) == 6
        await form_world(nodes, 2, port=ready[0].body["store_ports"][1], processes=sizes)
        await all_step(nodes, 2, processes=sizes)
        assert gone(*left)


@pytest.mark.parametrize("launcher", [TORCHRUN, [sys.executable]], ids=["torchrun", "env"])
async def test_what_a_killed_rank_has_left_is_gone_before_the_next_rank_starts(launcher: list[str]) -> None:
    node = Node([*launcher, "leaves_a_port.py"], stop_grace_s=600)
    path = READY if launcher is TORCHRUN else ENV_READY
    async with running(node):
        ready = await first_world([node], path=path)
        helper = int((node.run_directory / "helper-1").read_text())
        await eventually(lambda: "helps" in node.output)
        assert not gone(helper)
        os.kill(node.ranks(1)[0], signal.SIGKILL)
        await node.agent.heard(path, lambda body: bool(body["ranks"]))
        await form_world([node], 2, port=ready[0].body["store_ports"][1])
        await all_step([node], 2)
        assert gone(helper)
        assert "Address already in use" not in node.output
        os.kill(int((node.run_directory / "helper-2").read_text()), signal.SIGKILL)


@pytest.mark.parametrize("launcher", [TORCHRUN, [sys.executable]], ids=["torchrun", "env"])
async def test_a_killed_rank_leaves_no_shared_memory_behind(launcher: list[str]) -> None:
    node = Node([*launcher, "shares_memory.py"])
    path = READY if launcher is TORCHRUN else ENV_READY
    async with running(node):
        ready = await first_world([node], path=path)
        worker = (node.run_directory / "worker-1").read_text()
        assert await eventually(lambda: shared_by(worker))
        os.kill(node.ranks(1)[0], signal.SIGKILL)
        await node.agent.heard(path, lambda body: bool(body["ranks"]))
        await form_world([node], 2, port=ready[0].body["store_ports"][1])
        await all_step([node], 2)
        assert "FileExistsError" not in node.output
        await eventually(lambda: not shared_by(worker))
        worker = (node.run_directory / "worker-2").read_text()
        await node.agent.want(exit=True)
        await node.left()
        await eventually(lambda: not shared_by(worker) and not (SHARED / node.run_directory.name).exists())


@pytest.mark.parametrize(
    "script",
    [
        ["starts_torchrun.py"],
        ["spawns.py"],
        ["launches_a_function.py", "spawn"],
        # As notebooks do, whose functions no other process could import.
        ["launches_a_function.py", "fork"],
    ],
    ids=" ".join,
)
async def test_ranks_of_a_launcher_that_a_program_starts_are_those_of_the_job(script: list[str]) -> None:
    node = Node([sys.executable, "-u", *script])
    async with running(node):
        ready = await first_world([node], path=ENV_READY)
        second = int((node.run_directory / "second-1").read_text())
        os.kill(second, signal.SIGKILL)
        report = await node.agent.heard(ENV_READY, lambda body: body["after_generation"] == 1)
        [failed] = report.body["ranks"]
        assert (failed["global_rank"], failed["signal"]) == (0, signal.SIGKILL)
        assert str(second) in failed["error"]
        await form_world([node], 2, port=ready[0].body["store_ports"][1])
        await all_step([node], 2)
        (node.run_directory / "fail").touch()
        report = await node.agent.heard(ENV_READY, lambda body: body["after_generation"] == 2)
        [failed] = report.body["ranks"]
        assert (failed["exit_code"], failed["error"]) == (1, "ValueError: of the script")
        assert "in train" in failed["traceback"]


@pytest.mark.parametrize("launcher", [TORCHRUN, [sys.executable, "-u"]], ids=["torchrun", "env"])
async def test_a_rank_that_has_ended_alone_is_named_where_another_one_loses_it(launcher: list[str]) -> None:
    node = Node([*launcher, "ends_alone.py"], processes=2)
    path = READY if launcher is TORCHRUN else ENV_READY
    async with running(node):
        [ready] = await all_ready(node, path=path)
        await form_world([node], 1, port=ready.body["store_ports"][0], processes=2)
        report = await node.agent.heard(path, lambda body: bool(body["ranks"]))
        [failed] = report.body["ranks"]
        assert (failed["global_rank"], failed["exit_code"]) == (1, 1)
        assert failed["error"].endswith(" (rank 0 had ended with exit code 0 before)")


async def test_a_torchrun_that_each_of_several_processes_starts_is_refused() -> None:
    node = Node([sys.executable, "-u", "starts_torchrun.py"], processes=2)
    async with running(node):
        [ready] = await all_ready(node, path=ENV_READY)
        await form_world([node], 1, port=ready.body["store_ports"][0], processes=2)
        refused = await node.agent.heard("/v1/launcher/unmanaged")
        assert "each of this node's processes starts torchrun by itself" in refused.body["detail"]


async def test_a_torchrun_within_a_rank_is_a_world_of_its_own() -> None:
    node = Node([*TORCHRUN, "nests.py"], nodes="1:2")
    async with running(node):
        ready = await first_world([node])
        nested = re.search(r"nested: (\d+) of (\d+) ranks met at port (\d+)", node.output)
        assert nested
        assert nested.group(1, 2) == ("2", "2")
        assert int(nested[3]) not in ready[0].body["store_ports"]
        assert node.ranks(1).keys() == {0}, "the nested ranks' steps are not the job's"
        assert len(node.agent.said(HELLO)) == 1


async def test_a_command_without_restarts_and_nodes_of_different_sizes() -> None:
    sizes = (1, 2)
    nodes = [
        Node([*TORCHRUN, "--max-restarts=0", "train.py"], nodes="2", run_id="pair", processes=processes)
        for processes in sizes
    ]
    async with running(*nodes):
        ready = await first_world(nodes, processes=sizes)
        assert [post.body["processes"] for post in ready] == [1, 2]
        assert "rank 2 of 3 steps" in nodes[1].output
        os.kill(nodes[1].ranks(1)[2], signal.SIGKILL)
        culprit, victim = await asyncio.gather(*(node.agent.heard(EXITED) for node in reversed(nodes)))
        assert (culprit.body["exit_code"], victim.body["exit_code"]) == (1, 1)
        assert [rank["global_rank"] for rank in culprit.body["ranks"] if rank["signal"] == 9] == [2]
        for node in nodes:
            await node.agent.want(attempt=2)
        again = await all_ready(*nodes)
        # The larger one comes first now.
        await form_world(nodes[::-1], 2, port=again[1].body["store_ports"][0], processes=sizes[::-1])
        await all_step(nodes[::-1], 2, processes=sizes[::-1])
