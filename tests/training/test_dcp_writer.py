"""Scripts that call `torch.distributed.checkpoint` themselves, and save into memory with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from perdure_training.checkpoint import MemoryWriter, dcp_writer
from tests.training.one_rank import World
from tests.training.ranks import run_ranks


def state(value: float) -> dict[str, Any]:
    return {
        "model": {"weight": torch.full((4, 3), value), "scale": torch.tensor(value)},
        "optimizer": {"state": [{"moment": torch.full((2,), -value)}], "lr": value / 10},
        "step": int(value),
    }


def save_step(memory: MemoryWriter, step: int, **arguments: Any) -> None:
    save(state(step), storage_writer=memory, checkpoint_id=f"run-8/step-{step}", no_dist=True, **arguments)


def test_what_was_saved_last_is_loaded_in_the_next_generation(world: World):
    world.next_generation()
    memory = dcp_writer()
    assert memory.step is None
    with pytest.raises(RuntimeError, match="no step is in memory"):
        memory.reader()
    planner = DefaultSavePlanner(enable_plan_caching=True)
    for step in (3, 4):
        save_step(memory, step, planner=planner)
    memory.flush()

    world.next_generation()
    memory = dcp_writer()
    assert memory.step == 4
    found = state(0)
    load(found, storage_reader=memory.reader(), no_dist=True)
    torch.testing.assert_close(found, state(4), rtol=0, atol=0)
    # An ID without a number: the next step.
    save(state(9), storage_writer=memory, checkpoint_id="last", no_dist=True)
    memory.flush()
    world.next_generation()
    assert dcp_writer().step == 5


def test_a_state_with_other_names_is_refused(world: World):
    world.next_generation()
    memory = dcp_writer()
    save_step(memory, 1)
    memory.flush()
    world.next_generation()
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: other"):
        load({"other": torch.zeros(1)}, storage_reader=dcp_writer().reader(), no_dist=True)


def test_outside_of_perdure_nothing_is_kept():
    memory = dcp_writer()
    save_step(memory, 1)
    assert memory.step is None


@pytest.mark.long("survival")
@pytest.mark.usefixtures("ranks")
def test_ranks_load_their_parts_of_a_model_that_fsdp_splits(tmp_path: Path):
    run = run_ranks("restores_parts_with_dcp.py", tmp_path)
    assert sorted(run.stdout.split()) == ["rank-0:True", "rank-1:True"]
