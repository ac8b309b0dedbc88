"""Tests of jobs handled with Temporal's own command line only, with real nodes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from temporalio.api.enums.v1 import EventType

from perdure.base.errors import JobAlreadyRunning, Refused
from perdure.contract import JobPhase
from perdure.contract.names import TRAINING_JOB, WORKER_TASK_QUEUE, job_workflow_id
from perdure.spec.errors import SpecError
from perdure.spec.validate import validate_spec
from tests.support.waiting import eventually
from tests.system.site import SCRIPT, WALK, Job, Site

SOON: dict[str, Any] = {"rendezvous": {"last_call": "2s"}, "owner_check": "2s"}
"""Groups ask often whether their job still runs."""


async def terminate(site: Site, job: Job) -> None:
    await site.temporal("workflow", "terminate", "--workflow-id", job.workflow_id, "--reason", "the budget is spent")


async def reset(site: Site, job: Job, *how: str) -> None:
    await site.temporal("workflow", "reset", "--workflow-id", job.workflow_id, "--reason", "a test", *how)


async def start(site: Site, spec: dict[str, Any]) -> None:
    """As the README has it: plain JSON from a file."""
    path = site.folder / "job.json"
    path.write_text(json.dumps(spec))
    await site.temporal(
        *("workflow", "start", "--type", TRAINING_JOB, "--task-queue", WORKER_TASK_QUEUE),
        *("--workflow-id", job_workflow_id("default", spec["name"]), "--input-file", str(path)),
    )


@pytest.mark.long("commands")
async def test_a_terminated_job_leaves_nothing_and_its_name_is_free(site: Site):
    job = await site.submit(script=WALK, timing=SOON)
    await job.running(nodes=2)
    await terminate(site, job)
    result = await site.client.wait(job.name)
    assert result.phase is JobPhase.CANCELLED
    assert "the budget is spent" in result.reason
    await job.wound_down()
    again = await site.submit(script=WALK, name=job.name)
    assert again.uid != job.uid
    again.finish()
    assert (await site.client.wait(job.name)).phase is JobPhase.SUCCEEDED


@pytest.mark.long("survival")
async def test_a_name_used_again_while_the_old_nodes_wind_down_never_mixes(site: Site):
    old = await site.submit("--stubborn", nodes="3", limits={"termination_grace_period": "10m"}, timing=SOON)
    await old.running(nodes=3)
    await site.client.cancel(old.name)
    with pytest.raises(JobAlreadyRunning):
        await site.submit(name=old.name)
    await terminate(site, old)
    new = await site.submit(name=old.name, nodes="2", timing=SOON)
    await new.running(nodes=2)
    await new.stepping(generation=1, ranks=2)
    assert old.processes(kind="rank"), "the old job's ranks ended too early to meet the new one's"
    for process in old.processes(kind="rank"):
        process.kill()
    await old.wound_down()
    await new.undisturbed(ranks=2, seconds=3)
    assert ({step.world_size for step in old.steps()}, {step.world_size for step in new.steps()}) == ({3}, {2})
    assert {step.pid for step in old.steps()}.isdisjoint({step.pid for step in new.steps()})
    assert (await new.status()).generation == 1
    assert [node.incarnation for node in await site.client.nodes(new.name)] == [1, 1]
    assert not await new.incidents()


@pytest.mark.long("survival")
@pytest.mark.parametrize(
    ("how", "generation", "script"),
    [
        (("--type", "FirstWorkflowTask"), 2, SCRIPT),
        (("--type", "FirstWorkflowTask", "--reapply-exclude", "All"), 2, WALK),
        (("--type", "LastWorkflowTask"), 1, WALK),
    ],
    ids=["to-the-first-task", "forgetting-signals", "to-the-last-task"],
)
async def test_a_reset_job_adopts_its_nodes_and_trains_on(
    site: Site, how: tuple[str, ...], generation: int, script: Path
):
    job = await site.submit(script=script)
    await job.running(nodes=2)
    await job.stepping(generation=1, ranks=2, count=30)
    supervisors = {kind: {p.pid for p in job.processes(kind=kind)} for kind in ("agent", "launcher")}
    step = job.steps()[-1].number
    await reset(site, job, *how)
    await job.running(nodes=2, after=generation - 1)
    await job.stepping(generation=generation, ranks=2, since=time.time(), count=50)
    known = await job.status()
    assert (known.phase, known.nodes, known.generation) == (JobPhase.RUNNING, 2, generation)
    assert {kind: {p.pid for p in job.processes(kind=kind)} for kind in supervisors} == supervisors
    job.finish()
    result = await site.client.wait(job.name)
    assert (result.phase, result.exit_code) == (JobPhase.SUCCEEDED, 0)
    resumed = min(made.number for made in job.steps() if made.generation == generation)
    assert generation == 1 or resumed > step - 25, "no further back than the last checkpoint"
    assert (await job.status()).uid == job.uid
    await job.wound_down()
    nodes = [path.name for path in site.state.nodes.iterdir() if job.uid in path.name]
    assert len(nodes) == 2, "no node was created again"


@pytest.mark.long("commands")
async def test_jobs_are_listed_by_their_phase_and_each_of_them_is_suspended(site: Site):
    label = f"team-{uuid4().hex[:8]}"
    jobs = [await site.submit(script=WALK, nodes="1", name=f"{label}-{number}") for number in range(2)]
    for job in jobs:
        await job.running(nodes=1)
    query = f"JobPhase = 'RUNNING' AND WorkflowId STARTS_WITH 'job/default/{label}'"
    wanted = {job.workflow_id for job in jobs}

    async def listed() -> bool:
        found = await site.temporal("workflow", "list", "--query", query)
        return all(workflow_id in found for workflow_id in wanted)

    await eventually(listed, within=60)
    for workflow_id in wanted:
        await site.temporal(
            *("workflow", "update", "execute", "--name", "suspend", "--input", '{"reason": "maintenance"}'),
            *("--workflow-id", workflow_id),
        )
    for job in jobs:
        assert (await job.status()).phase is JobPhase.SUSPENDED
    await eventually(lambda: none_is_listed(site, query), within=60)


async def none_is_listed(site: Site, query: str) -> bool:
    return "job/default" not in await site.temporal("workflow", "list", "--query", query)


async def test_plain_json_is_enough(site: Site):
    name = f"plain-{uuid4().hex[:8]}"
    await start(site, {"name": name, "roles": {"worker": {"nodes": 1, "command": ["true"]}}})
    result = await site.client.wait(name)
    assert (result.phase, result.exit_code) == (JobPhase.SUCCEEDED, 0)


async def test_a_wrong_field_fails_once_with_the_text(site: Site):
    name = f"wrong-{uuid4().hex[:8]}"
    spec: dict[str, Any] = {"name": name, "roles": {"worker": {"nods": 1, "command": ["true"]}}}
    with pytest.raises(SpecError) as of_validate:
        validate_spec(spec)
    await start(site, spec)
    with pytest.raises(Refused) as of_workflow:
        await site.client.wait(name)
    assert 'did you mean "nodes"' in str(of_validate.value)
    assert str(of_validate.value) in str(of_workflow.value)
    handle = (await site.client.connect()).get_workflow_handle(job_workflow_id("default", name))
    kinds = [EventType.Name(event.event_type) async for event in handle.fetch_history_events()]
    assert kinds.count("EVENT_TYPE_WORKFLOW_TASK_COMPLETED") == 1, "the first task fails the job"
    assert kinds[-1] == "EVENT_TYPE_WORKFLOW_EXECUTION_FAILED"


@pytest.mark.long("commands")
@pytest.mark.parametrize("how", [(), ("--reapply-exclude", "All")], ids=["handed-its-signals", "forgetting-signals"])
async def test_a_job_that_failed_is_reset_once_its_script_is_mended(site: Site, how: tuple[str, ...]):
    script = site.folder / "job.sh"
    script.write_text("exit 7")
    job = await site.submit(command=["sh", str(script)], retry={"max_restarts": 0})
    assert (await site.client.wait(job.name)).phase is JobPhase.FAILED
    script.write_text("exit 0")
    await reset(site, job, "--type", "FirstWorkflowTask", *how)
    assert (await site.client.wait(job.name)).phase is JobPhase.SUCCEEDED
    assert not await job.incidents()
