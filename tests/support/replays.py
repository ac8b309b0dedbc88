"""Replays histories with this release's workflows."""

from __future__ import annotations

from collections.abc import Sequence

from temporalio.client import WorkflowHistory
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.worker import Interceptor, Replayer

from perdure.workflows.node_group import NodeGroup
from perdure.workflows.training_job import TrainingJob


async def replay(history: WorkflowHistory, *, interceptors: Sequence[Interceptor] = ()) -> None:
    """Replays a job's history, or a group's.

    Raises:
        Exception: if this release decides something else than was recorded.
    """
    replayer = Replayer(
        workflows=[TrainingJob, NodeGroup],
        data_converter=pydantic_data_converter,
        interceptors=interceptors,
        # On a busy machine a decision may take seconds: the SDK would take it for a deadlock after two.
        debug_mode=True,
    )
    await replayer.replay_workflow(history)
