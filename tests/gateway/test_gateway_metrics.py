"""Tests of the gateway's metrics: each call is counted, and no caller can make new time series."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from typing import Any

import grpc
import pytest
import temporalio.api.workflowservice.v1 as service
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.service import RPCError

from perdure.base.credentials.names import MACHINES_SERVICE
from perdure.gateway.calls import CALLS, SERVICE
from perdure.gateway.machines import METHODS
from perdure.gateway.metrics import OTHER_METHOD, GatewayMetrics, Reason, serving_metrics
from tests.agent.harness import Workflows
from tests.docs.pages import ROOT
from tests.gateway.site import GatewaySite
from tests.support.temporal_server import free_port
from tests.support.waiting import DEADLINE, eventually

PREFIX = "perdure_gateway_"


def value(metrics: GatewayMetrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(PREFIX + name, labels) or 0.0


async def test_calls_refusals_and_agents_are_counted(site: GatewaySite, workflows: Workflows) -> None:
    metrics = site.metrics
    grant = site.grant(workflows)
    headers = site.headers(grant)
    assert (await site.describe(workflows.job.id, *headers))[0] is grpc.StatusCode.OK
    assert (await site.describe(workflows.job.id))[0] is grpc.StatusCode.UNAUTHENTICATED
    assert (await site.describe("job/other/job", *headers))[0] is grpc.StatusCode.PERMISSION_DENIED
    describe = {"method": "DescribeWorkflowExecution"}
    for outcome in ("OK", "UNAUTHENTICATED", "PERMISSION_DENIED"):
        assert value(metrics, "calls_total", outcome=outcome, **describe) == 1
    assert value(metrics, "call_seconds_count", **describe) == 3
    assert value(metrics, "refused_total", reason="not_proven") == 1
    assert value(metrics, "refused_total", reason="not_allowed") == 1

    client = await site.client(grant, site.token(grant))
    poll = asyncio.create_task(
        client.workflow_service.poll_activity_task_queue(
            service.PollActivityTaskQueueRequest(
                namespace=site.server.namespace, task_queue=TaskQueue(name=grant.task_queue)
            )
        )
    )
    await eventually(lambda: value(metrics, "calls_in_progress", method="PollActivityTaskQueue") == 1)
    await eventually(lambda: value(metrics, "agents") == 1)
    poll.cancel()
    await asyncio.gather(poll, return_exceptions=True)
    await eventually(lambda: value(metrics, "calls_total", method="PollActivityTaskQueue", outcome="CANCELLED") == 1)
    await eventually(lambda: value(metrics, "agents") == 0)
    assert value(metrics, "calls_in_progress", method="PollActivityTaskQueue") == 0
    assert value(metrics, "call_seconds_count", method="PollActivityTaskQueue") == 0


async def test_a_caller_that_hangs_up_before_its_request_has_sent_no_wrong_one(
    site: GatewaySite, workflows: Workflows
) -> None:
    headers = site.headers(site.grant(workflows))
    async with site.channel() as channel:
        call: Any = channel.stream_unary(f"/{SERVICE}/PollActivityTaskQueue")(metadata=headers, timeout=DEADLINE)
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.CANCELLED
    assert value(site.metrics, "calls_total", method="PollActivityTaskQueue", outcome="CANCELLED") == 1
    assert not any(value(site.metrics, "refused_total", reason=reason) for reason in Reason)


async def test_a_caller_makes_no_time_series(site: GatewaySite, workflows: Workflows) -> None:
    """Whatever methods, headers and workflows it names."""
    async with site.channel() as channel:
        for method in ("ListNamespaces", "x" * 200, "Perdure"):
            for of in (SERVICE, MACHINES_SERVICE, "no.such.Service"):
                call: Any = channel.unary_unary(f"/{of}/{method}")
                with pytest.raises(grpc.aio.AioRpcError):
                    await call(b"", timeout=DEADLINE)
    client = await site.client(site.grant(workflows), "made up")
    with pytest.raises((RPCError, RuntimeError)):
        await client.get_workflow_handle("made/up").describe()
    samples = [sample for metric in site.metrics.registry.collect() for sample in metric.samples]
    methods = {*CALLS, *METHODS, OTHER_METHOD}
    allowed = {
        "method": methods,
        "outcome": {status.name for status in grpc.StatusCode},
        "reason": {str(reason) for reason in Reason},
    }
    for sample in samples:
        for label, text in sample.labels.items():
            assert label == "le" or text in allowed[label], sample
    assert value(site.metrics, "calls_total", method=OTHER_METHOD, outcome="UNIMPLEMENTED") == 9
    assert value(site.metrics, "refused_total", reason="unknown_method") == 9


async def test_the_page_names_what_is_exported(site: GatewaySite, workflows: Workflows) -> None:
    await site.describe(workflows.job.id)
    port = free_port()
    async with serving_metrics(site.metrics, port):
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read())
    exported = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text.decode(), re.MULTILINE))
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"^\| `(perdure_gateway_\w+)` \| (\w+) \|", page, re.MULTILINE))
    assert told == exported
    reasons = {str(reason) for reason in Reason}
    assert reasons <= set(re.findall(r"`(\w+)`", page.partition("perdure_gateway_refused_total` | counter")[2]))
