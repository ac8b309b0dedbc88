"""Tests that a message that cannot be decided on does not stop a job."""

from __future__ import annotations

from datetime import UTC, datetime

from temporalio.client import Client

from tests.workflows.fleet import job_spec, running_fleet, submit
from tests.workflows.jobs import node, running
from workflows.messages import Failure, FailureKind, GroupTransitions, NodeTransition
from workflows.messages.groups import TransitionKind


async def test_times_without_a_zone_are_taken_as_utc(temporal_client: Client):
    async with running_fleet(temporal_client) as fleet:
        job = await submit(fleet, job_spec("2"))
        await running(job, nodes=2)
        played = await node(fleet, job, 1)
        sender = played.request.node.model_dump()
        time = datetime.now(UTC).replace(tzinfo=None).isoformat()
        message = {"sender": sender, "sequence": 99, "time": time, "generation": 1, "kind": "RANKS", "message": "gone"}
        await job.signal("failure", message)
        await running(job, nodes=2, generation=2)


async def test_edges_of_a_sender_that_knows_only_the_uid_are_not_taken(temporal_client: Client):
    async with running_fleet(temporal_client) as fleet:
        job = await submit(fleet, job_spec("2"))
        known = await running(job, nodes=2)
        transition = NodeTransition(
            kind=TransitionKind.LOST, rank=1, incarnation=1, time=datetime.now(UTC), detail="a lie"
        )
        await job.signal("edges", GroupTransitions(uid=known.uid, group=0, sequence=10**9, transitions=(transition,)))
        await (await node(fleet, job, 0)).rank_dies()
        assert (await running(job, nodes=2, generation=2)).restarts == 1
        assert {incarnation for _, _, incarnation in fleet.nodes} == {1}


def test_a_failure_without_a_zone_is_utc():
    time = datetime(2026, 1, 1)  # noqa: DTZ001
    sender = {"uid": "0", "role": "worker", "rank": 0, "incarnation": 1, "token": "t"}
    failure = Failure.model_validate(
        {"sender": sender, "sequence": 1, "time": time, "generation": 1, "kind": FailureKind.RANKS}
    )
    assert failure.time == time.replace(tzinfo=UTC)
