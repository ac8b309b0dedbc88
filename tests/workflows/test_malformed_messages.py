"""Tests that a message that cannot be decided on does not stop a job."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from temporalio.api.common.v1 import Payload
from temporalio.client import Client, WorkflowFailureError, WorkflowUpdateFailedError
from temporalio.common import RawValue
from temporalio.exceptions import ApplicationError

from perdure.base.encryption.codec import UNREADABLE_JSON, PayloadEncryption
from perdure.contract import (
    Accepted,
    Failure,
    FailureKind,
    GroupTransitions,
    JobPhase,
    RestartRequest,
    ScaleRequest,
)
from perdure.contract.transitions import NodeLost
from perdure.workflows import training_job
from perdure.workflows.policy.facts.events import AddressedEvent, RestartRequested, ScalingChanged, plain
from perdure.workflows.policy.state.job import JobState
from tests.workflows.fleet import job_spec, running_fleet, submit
from tests.workflows.jobs import node, running, until


async def test_a_time_without_a_zone_is_utc_and_edges_of_a_sender_that_knows_only_the_uid_are_not_taken(
    temporal_client: Client,
):
    async with running_fleet(temporal_client) as fleet:
        job = await submit(fleet, job_spec("2"))
        known = await running(job, nodes=2)
        transition = NodeLost(rank=1, incarnation=1, time=datetime.now(UTC), detail="a lie")
        await job.signal(
            "transitions", GroupTransitions(uid=known.uid, group=0, sequence=10**9, transitions=(transition,))
        )
        sender = (await node(fleet, job, 1)).request.node.model_dump()
        time = datetime.now(UTC).replace(tzinfo=None).isoformat()
        message = {"sender": sender, "sequence": 99, "time": time, "generation": 1, "kind": "RANKS", "message": "gone"}
        await job.signal("failure", message)
        assert (await running(job, nodes=2, generation=2)).restarts == 1
        assert {incarnation for _, _, incarnation in fleet.nodes} == {1}


LAST, FIRST, LARGE = "9999-12-31T23:59:59.999999Z", "0001-01-01T00:00:00Z", 10**30
CHECKPOINT = {"step": 1, "run": "run", "generation": 1}
OF_A_NODE: dict[str, list[dict[str, Any]]] = {
    "failure": [
        {"generation": LARGE, "kind": "RANKS", "exit_code": LARGE, "store_ports": [LARGE, -1]},
        {"generation": 1, "kind": "COMMAND", "time": LAST, "exit_code": LARGE, "ranks": [{"local_rank": 0}] * 3000},
        {"generation": 1, "kind": "RANKS", "time": FIRST, "progress": {"step": LARGE, "last_step_at": LAST}},
    ],
    "joined": [{"agent_started_at": LAST, "address": "x", "time": LAST, "generation": 1}],
    "ready": [
        {"after_generation": 1, "processes": LARGE, "time": LAST},
        {"after_generation": 1, "processes": 4096, "stage": -5, "store_ports": list(range(50_000))},
    ],
    "stepping": [{"generation": 1, "time": FIRST, "entered_at": LAST, "starts": {"warm": LARGE, "cold": -LARGE}}],
    "stall": [{"generation": 1, "since": LAST, "usual_step": "999999d"}, {"generation": 1, "since": FIRST}],
    "stall_evidence": [
        {
            "look": {
                "generation": 1,
                "since": FIRST,
                "taken_at": LAST,
                "usual_steps": LARGE,
                "ranks": [{"rank": LARGE, "state": "TTTT", "steady": True, "stack": -LARGE}] * 3000,
                "stacks": [[{"function": "x" * 500, "file": "x" * 500, "line": LARGE}] * 100] * 10,
            }
        }
    ],
    "lease_taken": [{"agent_started_at": LAST, "epoch": LARGE}],
    "ports_changed": [{"store_ports": [LARGE, *range(60_000)], "time": LAST}],
    "checked": [{"run": 1, "checks": [{"name": "x" * 500, "value": 1e308}] * 3000}, {"run": LARGE}],
    "checkpoint_stored": [
        {"stored": {"checkpoint": CHECKPOINT, "size": LARGE, "took": "9999d", "answers": LARGE}},
        {"stored": {"checkpoint": CHECKPOINT | {"place": "../.."}}},
        {"stored": {"checkpoint": CHECKPOINT | {"step": LARGE}}},
    ],
    "checkpoint_committed": [{"checkpoint": CHECKPOINT, "problem": "x" * 50_000}],
    "checkpoint_restored": [
        {"generation": 1, "restored": {"step": -LARGE, "source": "STORAGE", "distrusted": [LARGE] * 50_000}},
        {"generation": 1, "restored": {"step": 1, "source": "STORAGE", "unusable": ["x"] * 50_000, "stops": True}},
    ],
}
"""Messages by which a node that was taken over could stop the decisions of its job."""


async def test_no_number_and_no_time_that_a_node_claims_stops_its_job(temporal_client: Client):
    async with running_fleet(temporal_client) as fleet:
        job = await submit(fleet, job_spec("2"))
        await running(job, nodes=2)
        hostile = await node(fleet, job, 1)
        for signal, messages in OF_A_NODE.items():
            for fields in messages:
                await (hostile.to_job if signal == "failure" else hostile.to_group)(signal, dict, **fields)
        before = (await running(job, nodes=2)).generation
        await (await node(fleet, job, 0)).rank_dies()
        await until(job, lambda now: now.phase is JobPhase.RUNNING and now.generation > before)


async def test_a_request_that_cannot_be_decided_on_is_refused_and_stops_no_job(
    temporal_client: Client, monkeypatch: pytest.MonkeyPatch
):
    decide = training_job.decide

    def with_a_defect(state: JobState, event: AddressedEvent, *arguments: Any, **named: Any) -> JobState:
        if isinstance(plain(event), RestartRequested | ScalingChanged):
            raise ZeroDivisionError("a defect")
        return decide(state, event, *arguments, **named)

    monkeypatch.setattr(training_job, "decide", with_a_defect)
    async with running_fleet(temporal_client) as fleet:
        job = await submit(fleet, job_spec("1:2"))
        await running(job, nodes=2)
        scaling = {"policy": "efficient"}
        for name, request in (("restart", RestartRequest()), ("scale", ScaleRequest(scaling=scaling))):
            with pytest.raises(WorkflowUpdateFailedError) as refused:
                await job.execute_update(name, request, rpc_timeout=timedelta(seconds=10))
            assert "this release cannot decide on the request: ZeroDivisionError" in str(refused.value.cause)
        monkeypatch.setattr(training_job, "decide", decide)
        told = await job.execute_update("scale", ScaleRequest(scaling=scaling), result_type=Accepted)
        assert "has policy efficient instead of max" in told.message, "the specification was as before"
        await (await node(fleet, job, 0)).rank_dies()
        await running(job, nodes=2, generation=2)


def test_a_failure_without_a_zone_is_utc():
    time = datetime(2026, 1, 1)  # noqa: DTZ001
    sender = {"uid": "0", "role": "worker", "rank": 0, "incarnation": 1, "token": "t"}
    failure = Failure.model_validate(
        {"sender": sender, "sequence": 1, "time": time, "generation": 1, "kind": FailureKind.RANKS}
    )
    assert failure.time == time.replace(tzinfo=UTC)


DEEP = RawValue(Payload(metadata={"encoding": b"json/plain"}, data=b'{"a":' * 400 + b"1" + b"}" * 400))
"""What no reader of JSON follows, as a user's own program can send it."""


async def as_users_connect(client: Client) -> Client:
    """A connection with the converter that workers and commands use."""
    converter = PayloadEncryption.of(None).data_converter
    return await Client.connect(
        client.service_client.config.target_host, namespace=client.namespace, data_converter=converter
    )


@pytest.mark.parametrize("workflow", ["TrainingJob", "ScheduledJob"])
async def test_a_job_that_is_started_with_what_cannot_be_read_ends(temporal_client: Client, workflow: str):
    async with running_fleet(await as_users_connect(temporal_client)) as fleet:
        job = await fleet.client.start_workflow(
            workflow, DEEP, id=f"job/default/{uuid4()}", task_queue=fleet.task_queue
        )
        with pytest.raises(WorkflowFailureError) as failed:
            await job.result()
        assert isinstance(failed.value.cause, ApplicationError)
        assert failed.value.cause.type == UNREADABLE_JSON


async def test_a_message_that_cannot_be_read_stops_no_job(temporal_client: Client):
    async with running_fleet(await as_users_connect(temporal_client)) as fleet:
        job = await submit(fleet, job_spec("2"))
        await running(job, nodes=2)
        for name in ("failure", "transitions", "shards_set_aside"):
            await job.signal(name, DEEP)
        for name in ("scale", "join"):
            with pytest.raises(WorkflowUpdateFailedError):
                await job.execute_update(name, DEEP)
        assert await job.execute_update("restart", RestartRequest(reason="once more"), result_type=Accepted)
        await running(job, nodes=2, generation=2)
