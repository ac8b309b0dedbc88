"""Tests of workflows and activities that an operator has paused in Temporal: every view names them and the remedy."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from temporalio.api.enums.v1 import WorkflowExecutionStatus as WireStatus
from temporalio.api.workflow.v1 import WorkflowExecutionInfo
from temporalio.client import Client as TemporalClient
from temporalio.client import WorkflowFailureError, WorkflowHandle

from perdure.base.errors import JobPaused
from perdure.base.executions import ExecutionStatus, describe, status_of
from perdure.cli.checks import Verdict, check_pauses
from perdure.client.client import Client
from perdure.client.views import JobSummary
from perdure.contract import JobPhase, NodePhase
from tests.support.command_line import CommandLine, Finished
from tests.support.temporal_operator import NAME, Operator
from tests.support.temporal_server import DevServer
from tests.support.waiting import eventually
from tests.workflows.fleet import Fleet, job_spec, running_fleet, submit
from tests.workflows.jobs import node, running
from tests.workflows.played_node import PlayedNode

Handle = WorkflowHandle[Any, Any]


def name_of(job: Handle) -> str:
    return job.id.rpartition("/")[2]


async def ended(job: Handle) -> None:
    with pytest.raises(WorkflowFailureError):
        await job.result()


async def listed(client: Client, name: str, *, running: bool = False) -> JobSummary | None:
    return next((one for one in await client.list(limit=500, running=running) if one.name == name), None)


@pytest.mark.parametrize("number", range(20))
def test_only_an_end_that_is_known_is_an_end(number: int):
    ends = {
        WireStatus.WORKFLOW_EXECUTION_STATUS_COMPLETED,
        WireStatus.WORKFLOW_EXECUTION_STATUS_FAILED,
        WireStatus.WORKFLOW_EXECUTION_STATUS_CANCELED,
        WireStatus.WORKFLOW_EXECUTION_STATUS_TERMINATED,
        WireStatus.WORKFLOW_EXECUTION_STATUS_TIMED_OUT,
    }
    status = status_of(WorkflowExecutionInfo(status=number))  # pyrefly: ignore[bad-argument-type]
    assert status.is_open is (number not in ends)
    assert (status is ExecutionStatus.UNKNOWN) is (number == 0 or number not in WireStatus.values())


async def test_a_paused_job_is_named_by_all_commands_and_hides_no_other(
    temporal_client: TemporalClient, temporal_server: DevServer, tmp_path: Path
):
    commands = CommandLine(tmp_path, {**temporal_server.environment, "PERDURE_STATE": str(tmp_path), "COLUMNS": "100"})

    async def perdure(*arguments: str) -> Finished:
        return await asyncio.to_thread(commands.run, *arguments)

    client, operator = Client(temporal=temporal_client), Operator(temporal_client)
    async with running_fleet(temporal_client) as fleet:
        job, other = [await submit(fleet, job_spec("1")) for _ in range(2)]
        for started in (job, other):
            await running(started, nodes=1)
        await operator.pause(job.id, reason="the budget is checked")
        unpause = f"perdure temporal workflow unpause --workflow-id {job.id}"

        async def seen() -> bool:
            summary = await listed(client, name_of(job), running=True)
            return summary is not None and summary.pause is not None

        await eventually(seen, what="visibility shows that the job is paused")
        lists = await perdure("list")
        assert lists.code == 0, lists.err
        assert name_of(other) in lists.out
        assert "(paused)" in next(line for line in lists.out.splitlines() if line.startswith(name_of(job)))
        assert f"by {NAME}: the budget is checked" in lists.out
        assert unpause in lists.out
        refused = await asyncio.gather(
            *(perdure(command, name_of(job)) for command in ("status", "explain", "restart"))
        )
        for answer in refused:
            assert answer.code == 6, (answer.out, answer.err)
            assert "is paused in Temporal" in answer.err
            assert unpause in answer.err
        assert (await perdure("status", name_of(other))).code == 0
        cancelled = await perdure("cancel", name_of(job))
        assert cancelled.code == 0, cancelled.err
        assert unpause in cancelled.out
        assert (await describe(temporal_client, job.id)).is_open
        await operator.unpause(job.id)
        await ended(job)
        await other.cancel()
        await ended(other)


async def test_a_paused_job_keeps_its_nodes_and_continues_once_it_is_unpaused(temporal_client: TemporalClient):
    client, operator = Client(temporal=temporal_client), Operator(temporal_client)
    async with running_fleet(temporal_client) as fleet:
        job = await submit(fleet, job_spec("2"))
        await running(job, nodes=2)
        await operator.pause(job.id)
        await (await node(fleet, job, 1)).rank_dies()
        snapshots = client.watch(name_of(job))
        snapshot = await anext(snapshots)
        assert "is paused in Temporal" in snapshot.problem
        await snapshots.aclose()
        with pytest.raises(JobPaused, match=NAME):
            await client.scale(name_of(job), 3)
        assert not fleet.deleted
        await operator.unpause(job.id)
        known = await running(job, nodes=2, generation=2)
        assert known.last_incident is not None
        assert known.last_incident.culprit == 1
        await job.cancel()
        await ended(job)


async def test_a_paused_group_keeps_its_nodes_and_is_named(temporal_client: TemporalClient):
    client, operator = Client(temporal=temporal_client), Operator(temporal_client)
    async with running_fleet(temporal_client) as fleet:
        job = await submit(fleet, job_spec("2"))
        [group] = (await running(job, nodes=2)).groups
        await operator.pause(group, reason="a mistake")

        async def seen() -> bool:
            return [(pause.workflow_id, pause.reason) for pause in await client.pauses(name_of(job))] == [
                (group, "a mistake")
            ]

        await eventually(seen, what="the paused group is named")
        assert [one.rank for one in await client.nodes(name_of(job))] == [0, 1]
        await fleet.lose(await node(fleet, job, 1))
        assert (await client.status(name_of(job))).phase is JobPhase.RUNNING
        await operator.unpause(group)
        assert (await running(job, nodes=2, generation=2)).last_incident is not None
        assert await client.pauses(name_of(job)) == ()
        await job.cancel()
        await ended(job)


async def test_a_paused_lease_is_named_with_its_node_and_held_again_once_it_is_unpaused(
    temporal_client: TemporalClient, temporal_server: DevServer, tmp_path: Path
):
    commands = CommandLine(tmp_path, {**temporal_server.environment, "PERDURE_STATE": str(tmp_path), "COLUMNS": "100"})
    client, operator = Client(temporal=temporal_client), Operator(temporal_client)
    async with running_fleet(temporal_client) as fleet:
        job = await submit(fleet, job_spec("2"))
        [group] = (await running(job, nodes=2)).groups
        played = await node(fleet, job, 1)
        await lease_is_held(fleet, job)
        taken = len(played.lease_epochs)
        await operator.pause_activity(group, f"lease/1/1/{played.lease_epochs[-1]}", reason="what is that?")
        await eventually(lambda: played.leases_left == taken, what="the agent has heard of the pause")
        status = await asyncio.to_thread(commands.run, "status", name_of(job))
        assert status.code == 0, status.err
        remedy = f"perdure temporal activity unpause --workflow-id {group} --activity-id lease/1/1/"
        [warning] = [line for line in status.out.splitlines() if line.startswith("WARNING")]
        [next_action] = [line for line in status.out.splitlines() if line.startswith("NEXT")]
        assert "the lease of node 1.1 is paused in Temporal for" in warning
        assert f"by {NAME}: what is that?" in warning
        assert remedy in warning
        assert remedy in next_action
        assert "leases 1/2" in status.out
        zero, one = await client.nodes(name_of(job))
        assert (zero.reachable, one.reachable, one.phase) == (True, False, NodePhase.READY)
        assert "paused in Temporal" in one.reason
        assert not fleet.deleted, "a paused lease is no sign of a lost node"
        warnings = [check async for check in check_pauses(temporal_client) if check.verdict is Verdict.WARNING]
        assert any(remedy in check.remedy for check in warnings)
        await operator.unpause_activity(group, f"lease/1/1/{played.lease_epochs[-1]}")
        await eventually(lambda: len(played.lease_epochs) > taken, what="the lease is held again")
        assert await client.pauses(name_of(job)) == ()
        assert all(view.reachable for view in await client.nodes(name_of(job)))
        await a_lease_whose_agent_heard_nothing_of_its_pause_stays_held(client, operator, job, group, played)
        await job.cancel()
        await ended(job)


async def a_lease_whose_agent_heard_nothing_of_its_pause_stays_held(
    client: Client, operator: Operator, job: Handle, group: str, played: PlayedNode
) -> None:
    lease = f"lease/1/1/{played.lease_epochs[-1]}"
    await operator.pause_activity(group, lease)
    await operator.unpause_activity(group, lease)
    renewed = played.renewals
    await eventually(lambda: played.renewals > renewed + 2, what="the lease is renewed")
    assert await client.pauses(name_of(job)) == ()
    assert all(view.reachable for view in await client.nodes(name_of(job)))


async def lease_is_held(fleet: Fleet, job: Handle) -> None:
    for rank in range(2):
        played = await node(fleet, job, rank)
        await eventually(lambda played=played: bool(played.lease_epochs), what=f"the lease of node {rank} is held")
