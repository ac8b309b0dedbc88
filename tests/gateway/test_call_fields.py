"""Tests of what the gateway makes of the fields of an agent's call."""

from __future__ import annotations

import json

import temporalio.api.workflowservice.v1 as service
from temporalio.api.common.v1 import Payload, WorkflowExecution

from perdure.base.credentials.grants import Grant
from perdure.gateway.calls import SignalWorkflowExecution

GRANT = Grant(
    temporal_namespace="default",
    job_id="job/nlp/llama",
    group_id="job/nlp/llama/0123abcd/worker/0",
    task_queue="node/0123abcd/worker-0/1",
    uid="0123abcd",
    role="worker",
    rank=0,
    incarnation=1,
    machine="digest",
)

LONGEST_COLUMN = 255
"""Characters that a server with an SQL database writes of a request's ID. It tries a longer one again and again."""


def signal(request_id: str) -> service.SignalWorkflowExecutionRequest:
    """The signal that passes for an agent's."""
    sender = {"uid": GRANT.uid, "role": GRANT.role, "rank": GRANT.rank, "incarnation": GRANT.incarnation}
    request = service.SignalWorkflowExecutionRequest(
        namespace="default",
        workflow_execution=WorkflowExecution(workflow_id=GRANT.job_id),
        signal_name="finished",
        request_id=request_id,
    )
    data = json.dumps({"sender": sender}).encode()
    request.input.payloads.append(Payload(metadata={"encoding": b"json/plain"}, data=data))
    return SignalWorkflowExecution(GRANT, ()).check(request)


def test_the_id_of_a_request_passes():
    assert signal("0f8fad5b-d9cb-469f-a165-70867728950e").request_id == "0f8fad5b-d9cb-469f-a165-70867728950e"


def test_an_id_that_no_database_takes_is_shortened():
    assert len(signal("x" * 1_000).request_id) <= LONGEST_COLUMN
