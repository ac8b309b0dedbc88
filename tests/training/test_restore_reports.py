"""What the control plane learns of a restore: the step, where it was, what is made again, what is distrusted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perdure.contract import CheckpointRestored, RestoreSource
from perdure_training.snapshots.agreement import TRUSTED_RESTORES
from tests.support.waiting import wait_for
from tests.training.checkpoint_agent import checkpoint_agent
from tests.training.one_rank import World


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
        assert agent.of(CheckpointRestored) == []
        for step in range(1, 8):
            checkpointer.save(step, {"weight": step})
        checkpointer.flush()
        for _ in range(TRUSTED_RESTORES + 1):
            begin()
        reports = wait_for(lambda: (found := agent.of(CheckpointRestored))[TRUSTED_RESTORES:] and found)
        assert {report.source for report in reports} == {RestoreSource.MEMORY}
        assert [report.step for report in reports] == [6] * TRUSTED_RESTORES + [4]
        # Step 7 was made and not saved. Nothing was made between the failures after it.
        assert [report.again for report in reports] == [1] + [0] * (TRUSTED_RESTORES - 1) + [2]
        assert [report.distrusted for report in reports] == [()] * TRUSTED_RESTORES + [(6,)]
