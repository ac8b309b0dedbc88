"""Workflows of this release go on with what any release began: recorded histories replay without a difference."""

from __future__ import annotations

from pathlib import Path

import pytest
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.worker import Replayer

from tests.histories.recorded import RECORDED, read, recorded_files
from workflows.node_group import NodeGroup
from workflows.training_job import TrainingJob


@pytest.mark.parametrize("path", recorded_files(), ids=lambda path: str(path.relative_to(RECORDED)))
async def test_a_recorded_history_replays(path: Path):
    replayer = Replayer(workflows=[TrainingJob, NodeGroup], data_converter=pydantic_data_converter)
    await replayer.replay_workflow(read(path))


def test_both_workflows_and_their_continuations_are_recorded():
    names = {path.name.split(".")[1] for path in recorded_files()}
    assert {"job-1", "job-2", "group-1", "group-2"} <= names


def test_recorded_histories_stay_small():
    assert sum(path.stat().st_size for path in recorded_files()) < 1_000_000
