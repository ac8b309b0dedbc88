"""What the control plane learns of a restore: the step, where it was, what is made again, what is distrusted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perdure.contract import MemoryFinding, MemoryOrigin, MemoryProblem, RestoreSource
from perdure_training.snapshots.agreement import TRUSTED_RESTORES
from perdure_training.snapshots.arena import PAGE
from tests.support.waiting import wait_for
from tests.training.checkpoint_agent import checkpoint_agent
from tests.training.one_rank import World
from tests.training.ranks_in_threads import rank_threads


def test_a_restore_reports_the_steps_that_are_made_again_and_those_that_are_distrusted(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with checkpoint_agent(tmp_path / "storage") as agent:
        for name, value in agent.environment.items():
            monkeypatch.setenv(name, value)

        def begin(**arguments: Any) -> Any:
            agent.begin(agent.generation + 1)
            return world.begin({"weight": 0}, **arguments)[0]

        checkpointer = begin(every=2)
        assert agent.restores == []
        for step in range(1, 8):
            checkpointer.save(step, {"weight": step})
        checkpointer.flush()
        for _ in range(TRUSTED_RESTORES + 1):
            begin()
        reports = wait_for(lambda: (found := agent.restores)[TRUSTED_RESTORES:] and found)
        assert {report.source for report in reports} == {RestoreSource.MEMORY}
        assert [report.step for report in reports] == [6] * TRUSTED_RESTORES + [4]
        # Step 7 was made and not saved. Nothing was made between the failures after it.
        assert [report.again for report in reports] == [1] + [0] * (TRUSTED_RESTORES - 1) + [2]
        assert [report.distrusted for report in reports] == [()] * TRUSTED_RESTORES + [(6,)]


def damage(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(PAGE)
        byte = file.read(1)[0]
        file.seek(PAGE)
        file.write(bytes([byte ^ 255]))


def test_a_restore_from_storage_reports_what_is_damaged_in_memory_and_where_nothing_was_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PERDURE_NODE", "0a1b2c3d/worker-7/2")
    monkeypatch.setenv("PERDURE_MEMORY_ORIGIN", "adopted")
    with rank_threads(tmp_path) as ranks:
        states = [{"part": rank} for rank in range(2)]
        ranks.begin(states)
        assert all(ranks.save(4, states, durable=True))
        assert all(ranks.wait_until_durable(60))
        for checkpointer in ranks.checkpointers:
            checkpointer.flush()
        for path in ranks.memory.rglob("rank-1-of-*.[0-9]"):
            damage(path)
        assert ranks.begin(states) == [4, 4]
        report = wait_for(lambda: ranks.agent.restores)[-1]
        assert report.source is RestoreSource.STORAGE
        assert report.memory == (MemoryFinding(rank=1, node=7, problem=MemoryProblem.DAMAGED, steps=(4,)),)
        monkeypatch.setenv("PERDURE_MEMORY_ORIGIN", "new")
        assert ranks.begin(states, lose_memory=True) == [4, 4]
        report = wait_for(lambda: ranks.agent.restores[1:])[-1]
        assert report.memory == tuple(
            MemoryFinding(rank=rank, node=7, problem=MemoryProblem.MISSING, origin=MemoryOrigin.NEW)
            for rank in range(2)
        )


def test_a_damaged_snapshot_is_reported_also_where_an_older_one_is_loaded(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with checkpoint_agent(tmp_path / "storage") as agent:
        for name, value in agent.environment.items():
            monkeypatch.setenv(name, value)
        agent.begin(1)
        checkpointer = world.begin({"weight": 0})[0]
        for step in (1, 2):
            checkpointer.save(step, {"weight": step})
            checkpointer.flush()
        damage(world.files()[1])
        agent.begin(2)
        assert world.begin({"weight": 0})[1] == 1
        report = wait_for(lambda: agent.restores)[-1]
        assert (report.step, report.source) == (1, RestoreSource.MEMORY)
        assert report.memory == (MemoryFinding(rank=0, node=None, problem=MemoryProblem.DAMAGED, steps=(2,)),)
