"""Tests of which server errors are final, and which only mean that the server cannot answer now."""

from __future__ import annotations

import re

import pytest
from temporalio.client import Client as TemporalClient
from temporalio.client import WorkflowQueryFailedError
from temporalio.service import RPCError, RPCStatusCode

from perdure.base.errors import (
    ControlPlaneOverloaded,
    ControlPlaneUnreachable,
    NotPermitted,
    NoWorker,
    PerdureError,
    Refused,
    WorkflowTaskFails,
)
from perdure.client import error_mapping
from perdure.client.client import Client
from perdure.client.connection import find_endpoint
from perdure.client.error_mapping import map_errors, why_late
from tests.workflows.fleet import job_spec, running_fleet, submit
from tests.workflows.jobs import running


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (RPCStatusCode.RESOURCE_EXHAUSTED, ControlPlaneOverloaded),
        (RPCStatusCode.UNAVAILABLE, ControlPlaneUnreachable),
        (RPCStatusCode.PERMISSION_DENIED, NotPermitted),
    ],
)
async def test_a_server_without_capacity_has_not_refused(status: RPCStatusCode, expected: type[PerdureError]) -> None:
    client = Client(endpoint=find_endpoint("127.0.0.1:9"))
    with pytest.raises(expected):
        async with map_errors(client, "job"):
            raise RPCError("no", status, b"")


@pytest.mark.parametrize(
    ("cause", "remedy"),
    [
        ("namespace concurrent poller limit exceeded", "raise frontend.namespaceCount"),
        ("namespace rate limit exceeded", "raise frontend.namespaceRPS"),
        ("limit on number of concurrent in-flight updates has been reached (10)", "raise history.maxInFlightUpdates"),
        ("Workflow is busy.", "Try again."),
        ("words of a later release", "more capacity"),
    ],
)
async def test_a_server_without_capacity_is_given_the_setting_that_it_lacks(cause: str, remedy: str) -> None:
    with pytest.raises(ControlPlaneOverloaded, match=re.escape(cause)) as raised:
        async with map_errors(Client(endpoint=find_endpoint("127.0.0.1:9")), "job"):
            raise RPCError(cause, RPCStatusCode.RESOURCE_EXHAUSTED, b"")
    assert remedy in raised.value.remedy


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        ("[TMPRL1101] Potential deadlock detected: workflow didn't yield within 2 second(s).", NoWorker),
        ("no such query", Refused),
    ],
)
async def test_a_worker_on_an_overloaded_machine_has_not_refused(failure: str, expected: type[PerdureError]) -> None:
    with pytest.raises(expected, match=re.escape(failure)):
        async with map_errors(Client(endpoint=find_endpoint("127.0.0.1:9"))):
            raise WorkflowQueryFailedError(failure)


FULL = (
    "consistent query buffer is full, this may be caused by too many queries and workflow not able to process query "
    "fast enough"
)


async def test_a_server_where_too_many_questions_wait_for_a_worker_has_none(temporal_client: TemporalClient) -> None:
    with pytest.raises(NoWorker, match=r"no worker answers for job .*none has polled") as raised:
        async with map_errors(Client(temporal=temporal_client), "job"):
            raise RPCError(FULL, RPCStatusCode.RESOURCE_EXHAUSTED, b"")
    assert "perdure worker" in raised.value.remedy


async def test_a_worker_that_polls_and_does_not_answer_in_time_is_busy(temporal_client: TemporalClient) -> None:
    async with running_fleet(temporal_client) as fleet:
        job = await submit(fleet, job_spec("1"))
        await running(job, nodes=1)
        with pytest.raises(NoWorker, match=r"polled \d+ s ago: it is busy") as raised:
            async with map_errors(Client(temporal=temporal_client), job.id.rpartition("/")[2]):
                raise RPCError(FULL, RPCStatusCode.RESOURCE_EXHAUSTED, b"")
        assert raised.value.remedy.startswith("Try again.")


LATE = RPCError("Timeout expired", RPCStatusCode.CANCELLED, b"")


@pytest.mark.parametrize(
    ("silent", "polled", "expected"),
    [
        (None, "worker polled 3 s ago", ControlPlaneOverloaded),
        (None, LATE, ControlPlaneOverloaded),
        (None, "", NoWorker),
        (WorkflowTaskFails("its workflow task fails: KeyError"), "", WorkflowTaskFails),
    ],
)
async def test_a_request_that_a_busy_worker_does_not_answer_in_time_may_be_sent_again(
    monkeypatch: pytest.MonkeyPatch, silent: NoWorker | None, polled: str | RPCError, expected: type[PerdureError]
) -> None:
    async def why_silent(*_: object) -> NoWorker | None:
        return silent

    async def polled_lately(*_: object) -> str:
        if isinstance(polled, RPCError):
            raise polled
        return polled

    monkeypatch.setattr(error_mapping, "why_silent", why_silent)
    monkeypatch.setattr(error_mapping, "_polled_lately", polled_lately)
    error = await why_late(Client(endpoint=find_endpoint("127.0.0.1:9")), "job", "default")
    assert isinstance(error, expected)
    assert isinstance(error, ControlPlaneOverloaded) == (expected is ControlPlaneOverloaded)
