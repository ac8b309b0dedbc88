"""What ranks may tell their agent of themselves, and what it makes of claims about others' ranks and other worlds."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from perdure.agent.progress import ProgressReader
from perdure.agent.server import NodeServer
from perdure.agent.telemetry import Telemetry
from perdure.contract import CheckpointRestored, Failure, Finished, Ready
from perdure.contract.agents import LARGEST_NUMBER, UNKNOWN_RANK
from perdure_training.node_api.bodies import EnteredReport, FinishedReport, HandlerHello, RankExit, ReadyReport
from perdure_training.node_api.storage_link import StorageLink, StorageProblem
from tests.agent.test_agent_node import Bench
from tests.support.desired import desired_world
from tests.support.waiting import DEADLINE, wait_for
from tests.training.checkpoint_agent import checkpoint_agent

MADE_UP = [3, 10_000, LARGEST_NUMBER]
"""Generations that the job has not reached."""


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A node with ranks 4 and 5, in generation 2."""
    bench = Bench(tmp_path)
    bench.node.on_handler_hello(HandlerHello(pid=1, min_nodes=2, max_nodes=4, processes=2))
    for generation in (1, 2):
        give(bench, generation, base_rank=4)
    bench.enter(2)
    return bench


def give(bench: Bench, generation: int, *, base_rank: int) -> None:
    world = desired_world(
        bench.config.node,
        generation,
        nodes=4,
        processes=8,
        group_rank=1,
        base_rank=base_rank,
        store_address="",
        store_port=1,
        store_host=False,
    )
    assert bench.desire(world=world).accepted


def report(bench: Bench, *exits: RankExit, generation: int = 2) -> Failure:
    """The failure that the job learns of."""
    bench.node.on_ready(ReadyReport(after_generation=generation, ranks=exits, processes=2))
    [failure] = bench.job.of(Failure)
    return failure


@pytest.mark.parametrize(
    ("claimed", "told", "message"),
    [
        ((1, 5), (1, 5), "rank 5 exited with 1"),
        ((1, 0), (1, None), "rank 1 exited with 1"),
        ((7, 11), (UNKNOWN_RANK, None), "an unknown rank exited with 1"),
        ((-1, 3), (UNKNOWN_RANK, None), "an unknown rank exited with 1"),
    ],
)
def test_a_rank_of_another_node_is_unknown(
    bench: Bench, claimed: tuple[int, int], told: tuple[int, int | None], message: str
) -> None:
    failure = report(bench, RankExit(local_rank=claimed[0], global_rank=claimed[1], exit_code=1))
    [ended] = failure.ranks
    assert (ended.local_rank, ended.global_rank, ended.exit_code) == (*told, 1)
    assert failure.message == message
    assert failure.wrong_claims == bench.node.wrong_claims == (claimed != told)


def test_no_more_ranks_end_than_the_node_has(bench: Bench) -> None:
    failure = report(bench, *(RankExit(local_rank=rank, global_rank=4 + rank, signal=9) for rank in range(200)))
    assert [rank.global_rank for rank in failure.ranks] == [4, 5]
    assert failure.wrong_claims == 198


def test_ranks_of_the_world_that_was_entered_are_own_ones_also_when_the_next_is_there(bench: Bench) -> None:
    give(bench, 3, base_rank=0)
    failure = report(bench, RankExit(local_rank=1, global_rank=5, signal=9))
    assert ([rank.global_rank for rank in failure.ranks], failure.wrong_claims) == ([5], 0)


@pytest.mark.parametrize("generation", MADE_UP)
def test_a_world_that_the_node_has_not_received_is_the_newest_that_it_has(bench: Bench, generation: int) -> None:
    bench.node.on_ready(ReadyReport(after_generation=generation, processes=2))
    bench.node.on_entered(EnteredReport(generation=generation))
    bench.node.on_finished(FinishedReport(generation=generation))
    bench.exit(generation=generation, code=1)
    assert {ready.after_generation for ready in bench.group.of(Ready)} == {2}
    assert {finished.generation for finished in bench.job.of(Finished)} == {2}
    assert {failure.generation for failure in bench.job.of(Failure)} <= {2}
    assert bench.node.state.entered == 2
    assert bench.node.wrong_claims == 4


@pytest.mark.parametrize("generation", [*MADE_UP, 10**30])
def test_what_is_said_of_checkpoints_in_a_world_to_come_is_refused(tmp_path: Path, generation: int) -> None:
    """The job would believe its node to be in that world, and end the one that trains."""
    restored = {"request": "restored", "step": 5, "source": "memory"}
    with checkpoint_agent(tmp_path / "storage") as agent:
        agent.begin(2)
        link = StorageLink(agent.run_dir)
        for asked in (restored, {"request": "hello", "saves": True}):
            with pytest.raises(StorageProblem, match=r"no world of this node|too large"):
                link.ask(asked | {"generation": generation}, within=DEADLINE)
        assert link.ask(restored | {"generation": 2}, within=DEADLINE) == {}
        [told] = wait_for(lambda: agent.of(CheckpointRestored))
        assert told.generation == 2
        assert agent.saving == []


async def test_a_wait_that_is_no_number_is_refused(bench: Bench) -> None:
    """The event loop's timers are in order of their times, and nothing is before or after such a time."""
    run_dir = bench.config.run_dir
    telemetry = Telemetry(bench.node, ProgressReader(run_dir), to_group=bench.group)
    server = NodeServer(
        bench.node, telemetry, run_dir, **bench.of_ranks, on_hello=lambda _: None, on_waits=lambda: None
    )
    await server.start()
    connector = aiohttp.UnixConnector(str(run_dir / "agent.sock"))
    async with aiohttp.ClientSession(connector=connector) as session:
        for target in ("launcher/desired?version=0", "rendezvous/world?after=9"):
            async with session.get(f"http://agent/v1/{target}&wait=nan") as answer:
                assert (answer.status, "expected a number" in await answer.text()) == (400, True)
    server.close()


def test_a_wait_for_a_checkpoint_that_is_no_number_is_refused(tmp_path: Path) -> None:
    """The thread that waits would never sleep, nor end."""
    with checkpoint_agent(tmp_path / "storage") as agent:
        wanted = {"request": "await", "folder": "step-1-run-1", "within": float("nan")}
        with pytest.raises(StorageProblem, match="expected a number"):
            StorageLink(agent.run_dir).ask(wanted, within=DEADLINE)


@pytest.mark.parametrize("field", ["step", "again", "distrusted"])
def test_numbers_that_no_message_carries_are_refused(tmp_path: Path, field: str) -> None:
    restored = {"request": "restored", "generation": 1, "step": 5, "source": "memory"}
    with checkpoint_agent(tmp_path / "storage") as agent:
        agent.begin(1)
        link = StorageLink(agent.run_dir)
        with pytest.raises(StorageProblem, match="too large"):
            link.ask(restored | {field: [10**30] if field == "distrusted" else 10**30}, within=DEADLINE)
