"""A user changes `scaling` of a running job: the update `scale` on a real server, with played nodes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from temporalio.client import WorkflowHandle, WorkflowQueryFailedError, WorkflowUpdateFailedError

from perdure.contract import Accepted, JobStatus, PaceReport, Progress, ScaleRequest
from perdure.workflows import options
from tests.support.temporal_server import dev_server
from tests.workflows.fleet import Fleet, job_spec, running_fleet, submit
from tests.workflows.jobs import continue_as_new, incidents, node, reset, running, status, until

Job = WorkflowHandle[Any, Any]


async def scale(job: Job, **request: Any) -> str:
    return (await job.execute_update("scale", ScaleRequest(**request), result_type=Accepted)).message


async def preview(job: Job, **request: Any) -> JobStatus:
    return await job.query("preview_scale", ScaleRequest(**request), result_type=JobStatus)


async def measured(fleet: Fleet, job: Job, *, step: float, nodes: int) -> None:
    """The first node of the world tells how fast it is."""
    known = await running(job, nodes=nodes)
    progress = Progress(step=100, total_steps=10_000, last_step_at=datetime.now(UTC))
    first = await node(fleet, job, 0)
    await first.to_group("pace", PaceReport, generation=known.generation, step=step, spread=0.0, progress=progress)


@pytest.mark.long("workflows")
async def test_another_policy_is_followed_and_explained(fleet: Fleet):
    job = await submit(fleet, job_spec("1:4"))
    await measured(fleet, job, step=1.0, nodes=4)
    assert (await status(job)).goal == {}

    # Nothing but a user's change makes the job of `policy: max` choose.
    seen = await preview(job, scaling={"policy": "efficient", "batch": "global"})
    assert seen.scaling is not None
    assert seen.goal == {"policy": "efficient", "batch": "global"}
    assert (await status(job)).scaling is None
    told = await scale(job, scaling=seen.goal, reason="try it")
    assert "has policy efficient instead of max, batch global instead of per-rank; " in told
    await measured(fleet, job, step=1.0, nodes=2)
    await until(job, lambda known: known.nodes == 1)
    [goal] = [one for one in await incidents(job) if one.observation is not None and one.observation.new_goal]
    assert goal.title.startswith("a user has changed scaling: try it: policy efficient instead of max")

    finish_by = (datetime.now(UTC) + timedelta(days=2)).replace(microsecond=0)
    goal_by_time = {"policy": "deadline", "batch": "global", "finish_by": finish_by.isoformat()}
    assert "has policy deadline instead of efficient" in await scale(job, scaling=goal_by_time)
    assert "has that scaling already" in await scale(job, scaling=goal_by_time)
    assert "changes to 1:3 nodes; has policy max instead of deadline" in await scale(job, nodes="1:3", scaling={})
    known = await running(job, nodes=3)
    assert (known.goal, known.scaling) == ({}, None)


@pytest.mark.long("workflows")
async def test_a_later_run_and_one_that_was_reset_have_the_goal_of_the_user(monkeypatch: pytest.MonkeyPatch):
    goal = {"policy": "efficient", "batch": "global"}
    monkeypatch.setattr(options, "HISTORY_LIMIT", 200)
    async with dev_server() as server, running_fleet(await server.client()) as fleet:
        job = await submit(fleet, job_spec("1:2"))
        job = fleet.client.get_workflow_handle(job.id)
        await running(job, nodes=2)
        await scale(job, scaling=goal)
        await continue_as_new(job)
        assert (await status(job)).goal == goal
        await reset(job)
        await until(job, lambda known: known.goal == goal)
        await measured(fleet, job, step=1.0, nodes=2)
        await until(job, lambda known: known.nodes == 1)
        await job.cancel()


async def test_a_scaling_that_cannot_be_is_refused_by_field_and_value(fleet: Fleet):
    job = await submit(fleet, job_spec("2"))
    await running(job, nodes=2)
    refusals: tuple[tuple[dict[str, Any], str], ...] = (
        ({"scaling": {"policy": "fastest"}}, 'roles.worker.scaling.policy: got "fastest"; expected max, efficient'),
        ({"scaling": {"policy": "deadline", "nodes": "1:4"}}, "roles.worker.scaling.nodes"),
        ({"scaling": {"policy": "deadline"}, "nodes": "1:4"}, "finish_by is not given; set it"),
        ({"scaling": {"policy": "deadline", "finish_by": "soon"}}, "expected a time with its zone"),
        ({"scaling": {"policy": "budget", "max_cost": -1, "price": 1}}, "roles.worker.scaling.max_cost"),
        ({"scaling": {"policy": "efficient"}}, "nodes is 2, which leaves no choice; give a range such as 2:8"),
        ({"scaling": {"policy": "efficient", "share": True}, "nodes": "1:4"}, "share is true, and policy is efficient"),
        ({}, 'nodes: got ""'),
    )
    for request, says in refusals:
        with pytest.raises(WorkflowUpdateFailedError) as refused:
            await job.execute_update("scale", ScaleRequest(**request))
        assert says in str(refused.value.cause)
        with pytest.raises(WorkflowQueryFailedError) as unseen:
            await preview(job, **request)
        assert says in str(unseen.value)
    assert (await status(job)).goal == {}
    assert "changes to 1:4 nodes; has policy efficient instead of max" in await scale(
        job, nodes="1:4", scaling={"policy": "efficient"}
    )
