"""Tests of how a node follows what its group desires of it, whatever it has missed and in whatever order it arrives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from perdure.agent.checkpoint.keeper import CheckpointService
from perdure.agent.checkpoint.records import FileRecord, NodeFiles
from perdure.contract import (
    ApplyDesired,
    CheckpointCommitted,
    CheckpointRef,
    Commit,
    CopyTarget,
    NodeDesired,
    RoleAddresses,
    StopRequest,
)
from perdure.contract.worlds import pack_roles
from perdure.spec.checkpoint import Checkpoint
from perdure_training.node_api.layout import ROLES
from tests.agent.bench import IDENTITY, Bench
from tests.support.desired import desired_world
from tests.support.waiting import eventually

STOP = StopRequest(reason="scaled down", grace=timedelta(seconds=5))
WITHIN = 60.0


def commit_of(step: int, *, answers: int = 0) -> Commit:
    checkpoint = CheckpointRef(step=step, run="run", generation=1)
    return Commit(checkpoint=checkpoint, rank=IDENTITY.rank, answers=answers)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_node_that_missed_three_desired_states_lacks_nothing_with_the_fourth(bench: Bench) -> None:
    bench.apply(1)
    bench.enter(1)
    bench.exit(generation=1, code=0)
    bench.desires.next(complete_generation=1, stages_complete=1)
    bench.desires.next(command_restarts=1)
    bench.desires.next(world=desired_world(IDENTITY, 2, stage=1))
    reached = bench.desire(world=desired_world(IDENTITY, 3, stage=1), inquiry=1)
    state = bench.node.state
    assert (reached.accepted, reached.version, reached.generation) == (True, 5, 3)
    assert (state.complete, state.stages_complete, state.command_restarts) == (1, 1, 1)
    assert (state.run, state.attempt) == (True, 2), "its command is started again, once"
    assert state.desired.stop_generation == 2


def test_a_node_tells_its_processes_the_addresses_that_it_is_sent_in_compressed_form(bench: Bench) -> None:
    servers = RoleAddresses(serves=tuple(f"server-{rank}.perdure-job-0123abcd.nlp.svc:8000" for rank in range(500)))
    packed = pack_roles({"server": servers})
    assert packed
    bench.desire(packed_roles=packed)
    written = json.loads((bench.node.config.run_dir / ROLES).read_text())
    assert written == {"server": servers.model_dump(mode="json")}


def test_a_desired_state_that_arrives_twice_changes_nothing_the_second_time(bench: Bench) -> None:
    bench.apply(1)
    bench.exit(generation=1, code=1)
    command = bench.desires.next(world=desired_world(IDENTITY, 2), command_restarts=1, stop=STOP)
    reached = bench.node.apply_desired(command)
    state, messages = bench.node.state, list(bench.job.messages)
    assert state.attempt == 2
    assert bench.node.apply_desired(command).model_copy(update={"accepted": True, "detail": ""}) == (
        reached.model_copy(update={"accepted": True, "detail": ""})
    )
    assert (bench.node.state, bench.job.messages) == (state, messages)


def test_an_older_desired_state_is_ignored_and_the_answer_names_the_newest(bench: Bench) -> None:
    older = bench.desires.next(world=desired_world(IDENTITY, 1), command_restarts=3, stop=STOP)
    bench.desire(world=desired_world(IDENTITY, 2), command_restarts=0, stop=None)
    state = bench.node.state
    reached = bench.node.apply_desired(older)
    assert (reached.accepted, reached.version, reached.generation) == (False, 2, 2)
    assert bench.node.state == state


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"incarnation": 1}, id="another incarnation"),
        pytest.param({"token": "guessed"}, id="another token"),
        pytest.param({"rank": 9}, id="another node"),
    ],
)
def test_a_desired_state_of_another_incarnation_is_refused_and_tells_nothing(
    bench: Bench, other: dict[str, object]
) -> None:
    bench.apply(1)
    state = bench.node.state
    node = IDENTITY.model_copy(update=other)
    desired = NodeDesired(
        world=desired_world(node, 2), complete_generation=1, checkpoint_request=4, commit=commit_of(5), stop=STOP
    )
    reached = bench.node.apply_desired(ApplyDesired(node=node, version=99, desired=desired))
    assert (reached.accepted, reached.version, reached.generation) == (False, 0, 0)
    assert bench.node.state == state


def test_an_agent_that_starts_again_ignores_what_it_had_passed_before(bench: Bench) -> None:
    older = bench.desires.next(stop=STOP)
    bench.desire(world=desired_world(IDENTITY, 1), stop=None)
    bench.start()
    assert bench.node.apply_desired(older).version == 2
    assert bench.node.state.leaving is None


def test_only_a_shorter_grace_period_changes_a_stop(bench: Bench) -> None:
    bench.desire(stop=STOP)
    bench.desire(stop=STOP.model_copy(update={"grace": timedelta(seconds=60)}))
    assert bench.node.state.leaving_grace == 5
    bench.desire(stop=STOP.model_copy(update={"grace": timedelta(seconds=1)}))
    assert (bench.node.state.leaving, bench.node.state.leaving_grace) == ("scaled down", 1)


class Saving(Bench):
    """A node with what keeps its checkpoints, in a folder that stands for the job's storage."""

    def __init__(self, tmp_path: Path) -> None:
        self.storage = tmp_path / "storage"
        super().__init__(tmp_path, checkpoint=Checkpoint(storage=str(self.storage)))

    def complete(self, *steps: int) -> None:
        """All parts of these checkpoints become durable."""
        for step in steps:
            folder = self.storage / f"step-{step}-run-1"
            folder.mkdir(parents=True)
            (folder / "metadata.uncommitted").write_bytes(b"pickle")
            (folder / "__0_0.distcp").write_bytes(b"part")
            files = {name: FileRecord(size=size, checksum=0) for name, size in ((".metadata", 6), ("__0_0.distcp", 4))}
            (folder / "perdure-0.json").write_text(NodeFiles(ranks=1, files=files).model_dump_json())

    @property
    def committed(self) -> list[str]:
        return sorted(path.parent.name for path in self.storage.glob("*/.metadata"))

    @property
    def desired(self) -> dict[str, float]:
        """What rank 0 and the launcher can read."""
        path = self.config.run_dir / "checkpoint-desired.json"
        return json.loads(path.read_bytes()) if path.is_file() else {}

    @property
    def reports(self) -> list[tuple[int, str]]:
        return [(report.checkpoint.step, report.problem) for report in self.group.of(CheckpointCommitted)]

    async def until_committed(self, step: int) -> None:
        def is_committed() -> bool:
            commit = self.node.state.committed
            return commit is not None and commit.checkpoint.step == step

        assert await self.node.changed.wait_for(is_committed, within=WITHIN)

    @asynccontextmanager
    async def followed(self) -> AsyncIterator[None]:
        """An agent that follows what is desired of checkpoints, until it ends."""
        checkpoints = CheckpointService(self.config, self.node, to_group=self.group.put)
        running = asyncio.create_task(checkpoints.run())
        try:
            yield
        finally:
            running.cancel()
            await asyncio.wait([running])


@pytest.fixture
def saving(tmp_path: Path) -> Saving:
    return Saving(tmp_path)


async def test_a_node_that_missed_desired_states_does_what_the_newest_says_of_checkpoints(saving: Saving) -> None:
    saving.complete(5, 7)
    saving.desires.next(checkpoint_request=1, commit=commit_of(5))
    saving.desires.next(checkpoint_request=2)
    saving.desires.next(commit=commit_of(7, answers=1))
    async with saving.followed():
        assert saving.desire(command_restarts=1).accepted
        await saving.until_committed(7)
        assert await eventually(lambda: saving.desired == {"request": 2, "answered": 1})
    assert (saving.committed, saving.reports) == (["step-7-run-1"], [(7, "")])


async def test_a_commit_that_arrives_twice_or_with_later_desired_states_is_carried_out_once(saving: Saving) -> None:
    saving.complete(5)
    command = saving.desires.next(commit=commit_of(5))
    async with saving.followed():
        assert saving.node.apply_desired(command).committed is None
        await saving.until_committed(5)
        assert saving.node.apply_desired(command).committed == commit_of(5).checkpoint
        assert saving.desire(command_restarts=1).committed == commit_of(5).checkpoint, (
            "its group may have lost the report"
        )
        saving.complete(7)
        saving.desire(commit=commit_of(7))
        await saving.until_committed(7)
    assert saving.reports == [(5, ""), (7, "")]


async def test_an_older_commit_is_ignored(saving: Saving) -> None:
    saving.complete(5, 7)
    older = saving.desires.next(checkpoint_request=4, commit=commit_of(5))
    async with saving.followed():
        saving.desire(checkpoint_request=5, commit=commit_of(7))
        assert not saving.node.apply_desired(older).accepted
        await saving.until_committed(7)
        assert await eventually(lambda: saving.desired == {"request": 5})
    assert saving.committed == ["step-7-run-1"]


async def test_a_commit_that_its_storage_does_not_take_is_tried_again_also_by_the_next_agent(saving: Saving) -> None:
    async with saving.followed():
        saving.desire(commit=commit_of(5))
        assert await eventually(lambda: saving.reports, within=WITHIN)
    [(step, problem)] = saving.reports
    assert (step, "No such file or directory" in problem) == (5, True)
    saving.start()
    async with saving.followed():
        assert await eventually(lambda: len(saving.reports) == 2, within=WITHIN)
        saving.complete(5)
        await saving.until_committed(5)
    assert [problem == "" for _, problem in saving.reports] == [False, False, True], "each agent reports it once"
    assert saving.committed == ["step-5-run-1"]


async def test_a_commit_that_is_withdrawn_is_not_tried_again(saving: Saving) -> None:
    async with saving.followed():
        saving.desire(commit=commit_of(5))
        assert await eventually(lambda: saving.reports, within=WITHIN)
        saving.desire(commit=None)
        saving.complete(5, 7)
        saving.desire(commit=commit_of(7))
        await saving.until_committed(7)
    assert saving.committed == ["step-7-run-1"]


async def test_requests_that_cannot_be_written_are_written_later(
    saving: Saving, caplog: pytest.LogCaptureFixture
) -> None:
    file = saving.config.run_dir / "checkpoint-desired.json"
    file.mkdir()
    async with saving.followed():
        saving.desire(checkpoint_request=3)
        assert await eventually(lambda: "cannot be told what is desired" in caplog.text, within=WITHIN)
        file.rmdir()
        assert await eventually(lambda: saving.desired == {"request": 3}, within=WITHIN)


async def test_the_holder_of_copies_that_an_agent_knows_survives_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    holder = CopyTarget(rank=1, incarnation=1, address="10.0.0.1", port=7, folder="new", token="token")
    bench.desire(copies=holder)
    assert bench.start().state.copies == holder
    bench.desire(copies=None)
    assert bench.node.state.copies == holder, "the group knows no other"
