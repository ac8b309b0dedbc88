"""Carries traces through Temporal: in the headers of workflows, signals and activities.

The interceptor of Temporal's SDK makes a span of each call. A job has thousands of heartbeats and leases that last for
weeks, so this one makes spans of what belongs to an incident or to a user's request only. It uses the same header, so
that programs with the SDK's interceptor and jobs have common traces.

Workflows make no spans: they pass headers on, which replays do not compare.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from temporalio import activity, client, worker, workflow
from temporalio.api.common.v1 import Payload
from temporalio.converter import PayloadConverter

from perdure.base.tracing.provider import TraceIds, Tracing

HEADER = "_tracer-data"
"""The header of the SDK's own interceptor."""

_LONG = frozenset({"hold_lease", "watch_nodes", "watch_dataset"})
"""Activities that last as long as a node or a job."""
_OF_MACHINES = frozenset({"exchange", "call", "join"})
"""Updates that no user requests."""
_WITH_CAUSE = frozenset({"desire", "adopt"})
"""Signals after which a group acts for what the job has decided."""

_propagator = CompositePropagator([TraceContextTextMapPropagator()])


def header_of(carrier: Mapping[str, str]) -> Payload:
    """Returns the header with a trace."""
    return PayloadConverter.default.to_payloads([dict(carrier)])[0]


def context_of(headers: Mapping[str, Payload]) -> Context | None:
    """Returns the context that headers carry; None if they carry none that can be read."""
    payload = headers.get(HEADER)
    if payload is None:
        return None
    try:
        context = _propagator.extract(PayloadConverter.default.from_payloads([payload], [dict])[0], Context())
    except Exception:
        # Another program may have sent anything.
        return None
    return context if trace.get_current_span(context).get_span_context().is_valid else None


class Traces(client.Interceptor, worker.Interceptor):
    """Given to a client, it works in the workers that use the client, too."""

    def __init__(self, tracing: Tracing) -> None:
        """Creates the interceptor.

        Args:
            tracing: Makes the spans.
        """
        self.tracing = tracing

    def intercept_client(self, next: client.OutboundInterceptor) -> client.OutboundInterceptor:
        return _Calls(next, self.tracing)

    def intercept_activity(self, next: worker.ActivityInboundInterceptor) -> worker.ActivityInboundInterceptor:
        return _Activities(next, self.tracing)

    def workflow_interceptor_class(
        self, input: worker.WorkflowInterceptorClassInput
    ) -> type[worker.WorkflowInboundInterceptor] | None:
        return _Workflows


class _Calls(client.OutboundInterceptor):
    """Spans of what users request, and the headers of what follows from a span."""

    def __init__(self, next: client.OutboundInterceptor, tracing: Tracing) -> None:
        super().__init__(next)
        self._tracing = tracing

    async def start_workflow(self, input: client.StartWorkflowInput) -> client.WorkflowHandle[Any, Any]:
        with self._tracing.span(f"start {input.workflow}", {"temporalWorkflowID": input.id}, kind=SpanKind.CLIENT):
            input.headers = _with_current(input.headers)
            return await super().start_workflow(input)

    async def start_workflow_update(self, input: client.StartWorkflowUpdateInput) -> client.WorkflowUpdateHandle[Any]:
        if input.update in _OF_MACHINES:
            return await super().start_workflow_update(input)
        with self._tracing.span(f"request {input.update}", {"temporalWorkflowID": input.id}, kind=SpanKind.CLIENT):
            input.headers = _with_current(input.headers)
            return await super().start_workflow_update(input)

    async def signal_workflow(self, input: client.SignalWorkflowInput) -> None:
        if trace.get_current_span().get_span_context().is_valid:
            input.headers = _with_current(input.headers)
        await super().signal_workflow(input)


class _Activities(worker.ActivityInboundInterceptor):
    """Spans of activities that follow from an incident or a request."""

    def __init__(self, next: worker.ActivityInboundInterceptor, tracing: Tracing) -> None:
        super().__init__(next)
        self._tracing = tracing

    async def execute_activity(self, input: worker.ExecuteActivityInput) -> Any:
        context = context_of(input.headers)
        if context is None:
            return await super().execute_activity(input)
        info = activity.info()
        attributes = {
            "temporalActivityID": info.activity_id,
            "temporalWorkflowID": info.workflow_id,
            "temporalRunID": info.workflow_run_id,
            "attempt": info.attempt,
        }
        with self._tracing.span(info.activity_type, attributes, kind=SpanKind.SERVER, context=context):
            self._tracing.on_activity(input.args, context)
            return await super().execute_activity(input)


class _Workflows(worker.WorkflowInboundInterceptor):
    """Remembers why a workflow acts: for an incident that is open, what a job decided, or what started it."""

    def __init__(self, next: worker.WorkflowInboundInterceptor) -> None:
        super().__init__(next)
        self._cause: Payload | None = None

    def init(self, outbound: worker.WorkflowOutboundInterceptor) -> None:
        super().init(_Effects(outbound, self))

    async def execute_workflow(self, input: worker.ExecuteWorkflowInput) -> Any:
        self._cause = input.headers.get(HEADER)
        return await super().execute_workflow(input)

    async def handle_signal(self, input: worker.HandleSignalInput) -> None:
        if input.signal in _WITH_CAUSE:
            self._cause = input.headers.get(HEADER)
        await super().handle_signal(input)

    def cause(self) -> Payload | None:
        """The header of what the workflow does now."""
        now: tuple[str, bool] | None = getattr(workflow.instance(), "traced", None)
        if now is None:
            return self._cause
        incident, starts = now
        if incident:
            return header_of({"traceparent": incident_ids(workflow.info().workflow_id, incident).traceparent})
        # What started a job is the cause until it trains, and not of all that it does for weeks.
        return self._cause if starts else None


class _Effects(worker.WorkflowOutboundInterceptor):
    """Gives activities and children the header of their cause."""

    def __init__(self, next: worker.WorkflowOutboundInterceptor, root: _Workflows) -> None:
        super().__init__(next)
        self._root = root

    def _headers(self, headers: Mapping[str, Payload]) -> Mapping[str, Payload]:
        cause = self._root.cause()
        return headers if cause is None else {**headers, HEADER: cause}

    def start_activity(self, input: worker.StartActivityInput) -> workflow.ActivityHandle[Any]:
        if input.activity not in _LONG:
            input.headers = self._headers(input.headers)
        return super().start_activity(input)

    def start_local_activity(self, input: worker.StartLocalActivityInput) -> workflow.ActivityHandle[Any]:
        input.headers = self._headers(input.headers)
        return super().start_local_activity(input)

    async def start_child_workflow(
        self, input: worker.StartChildWorkflowInput
    ) -> workflow.ChildWorkflowHandle[Any, Any]:
        input.headers = self._headers(input.headers)
        return await super().start_child_workflow(input)


def incident_ids(job_id: str, incident: str) -> TraceIds:
    """The identifiers of the trace of an incident.

    Args:
        job_id: The workflow ID of its job.
        incident: The id of its event: the job's uid and the incident's number.
    """
    return TraceIds.of(f"{job_id}/{incident}")


def _with_current(headers: Mapping[str, Payload]) -> Mapping[str, Payload]:
    carrier = dict[str, str]()
    _propagator.inject(carrier)
    return {**headers, HEADER: header_of(carrier)} if carrier else headers
