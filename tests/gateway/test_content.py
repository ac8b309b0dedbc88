"""What the gateway lets an agent write as results, errors and heartbeats."""

from __future__ import annotations

import pytest
import temporalio.api.workflowservice.v1 as service
from pydantic import SecretBytes
from temporalio.api.common.v1 import Payload, Payloads
from temporalio.api.failure.v1 import Failure

from perdure.gateway.calls import Denied, RespondActivityTaskCompleted, RespondActivityTaskFailed
from perdure.gateway.content import why_unreadable
from tests.gateway.test_call_fields import GRANT

KEYS = (SecretBytes(b"k" * 32),)


def payload(content: bytes, encoding: bytes = b"json/plain") -> Payload:
    return Payload(metadata={"encoding": encoding}, data=content)


READABLE = [payload(b'{"accepted": true}'), payload(b"", b"binary/null")]
UNREADABLE = [
    pytest.param(payload(b"x", b"x/y"), "encoding 'x/y'", id="another encoding"),
    pytest.param(payload(b"x", b"binary/encrypted"), "encoding 'binary/encrypted'", id="encrypted elsewhere"),
    pytest.param(payload(b"{"), "no JSON", id="no JSON"),
    pytest.param(payload(b"[" * 300 + b"]" * 300), "no JSON", id="nested too deep"),
    pytest.param(Payload(data=b"x"), "encoding ''", id="no encoding"),
]


def places(given: Payload) -> list[Payloads | Failure]:
    """Everything that may hold a payload, the given one in it."""
    found: list[Payloads | Failure] = [Payloads(payloads=[READABLE[0], given])]
    for fill in (
        lambda failure: failure.application_failure_info.details.payloads.append(given),
        lambda failure: failure.canceled_failure_info.details.payloads.append(given),
        lambda failure: failure.timeout_failure_info.last_heartbeat_details.payloads.append(given),
        lambda failure: failure.reset_workflow_failure_info.last_heartbeat_details.payloads.append(given),
        lambda failure: failure.encoded_attributes.CopyFrom(given),
        lambda failure: failure.cause.cause.application_failure_info.details.payloads.append(given),
    ):
        failure = Failure(message="no")
        fill(failure)
        found.append(failure)
    return found


@pytest.mark.parametrize(("given", "why"), UNREADABLE)
def test_what_no_workflow_could_read_goes_no_further(given: Payload, why: str):
    for content in places(given):
        assert why in why_unreadable(content)


@pytest.mark.parametrize("given", READABLE)
def test_what_agents_write_passes(given: Payload):
    for content in places(given):
        assert why_unreadable(content) == ""


def test_a_result_and_an_error_are_checked():
    token = GRANT.sign_task(b"task", GRANT.group_id, KEYS)
    about = {"namespace": "default", "task_token": token}
    wrong = payload(b"x", b"x/y")
    result = service.RespondActivityTaskCompletedRequest(result=Payloads(payloads=[wrong]), **about)
    with pytest.raises(Denied, match="result: a payload of the encoding 'x/y'"):
        RespondActivityTaskCompleted(GRANT, KEYS).check(result)
    failed = service.RespondActivityTaskFailedRequest(failure=Failure(message="no"), **about)
    assert RespondActivityTaskFailed(GRANT, KEYS).check(failed).failure.message == "no"
    failed.last_heartbeat_details.payloads.append(wrong)
    with pytest.raises(Denied, match="last_heartbeat_details"):
        RespondActivityTaskFailed(GRANT, KEYS).check(failed)
