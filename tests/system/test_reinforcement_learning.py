"""Tests of examples/09-reinforcement-learning: a job of three roles that learns while each of them is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.demo.learning import REWARD, ROLLOUT, TRAINER, Learning
from examples.demo.trajectories import read_trained
from perdure.contract import JobPhase
from tests.system.site import Site


def test_trajectories_are_counted_that_are_in_no_step_or_in_two(tmp_path: Path) -> None:
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories" / "position.json").write_text('{"consumer": "role trainer", "next": {"0": 4, "1": 2}}')
    (tmp_path / "trained-0.csv").write_text("1.0,1,1,0-0 0-1\n2.0,1,2,0-2\n4.0,2,2,0-2\n5.0,2,3,0-1\n6.0,2,4,0-")
    (tmp_path / "trained-1.csv").write_text("1.0,1,1,1-0\n2.0,1,2,1-1\n4.0,2,2,0-3\n")
    trained = read_trained(tmp_path)
    assert {step: set(names) for step, names in trained.of_steps.items()} == {
        1: {"0-0", "0-1", "1-0"},
        2: {"0-2", "0-3"},
        3: {"0-1"},
    }
    assert (trained.lost, trained.doubled) == (1, 1)


@pytest.mark.long("roles")
async def test_each_role_is_killed_and_no_trajectory_is_lost_or_learned_twice(site: Site) -> None:
    learning = Learning(site.client, site.folder / "learning", steps=400)
    await learning.start()
    for role, whole_node in [(ROLLOUT, True), (REWARD, False), (TRAINER, True), (REWARD, True), (TRAINER, False)]:
        fault = await learning.kill(role, 0, whole_node=whole_node)
        assert (fault.other_restarts, fault.lost, fault.doubled) == (0, 0, 0), fault
    result = await learning.wait()
    assert result.phase is JobPhase.SUCCEEDED, result
    trained = read_trained(learning.out)
    assert len(trained.of_steps) == 400
    assert (trained.lost, trained.doubled) == (0, 0)
    assert learning.score > 0.5, "an undisturbed run reaches 0.75"
