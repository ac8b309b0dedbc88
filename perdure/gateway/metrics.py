"""The gateway's own Prometheus metrics, listed in docs/metrics.md.

Labels come from fixed lists: methods that the gateway has, statuses of gRPC, and reasons below. So a caller cannot make
new time series, whatever it sends.
"""

from __future__ import annotations

from collections import Counter as Occurrences
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from enum import StrEnum
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from perdure.base.metrics import endpoint

_SECONDS: Final = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Bounds of the histogram: a call takes Temporal's few milliseconds, and at most as long as its caller waits."""

OTHER_METHOD: Final = "other"
"""The label of all methods that the gateway does not have."""


class Reason(StrEnum):
    """Why a call is refused."""

    NOT_PROVEN = "not_proven"
    """Grant, token or ticket are missing, wrong, or of different holders."""
    PLACE_LOST = "place_lost"
    """A machine that joined does not have its place any more."""
    NOT_ALLOWED = "not_allowed"
    """The request is not one that the caller may make."""
    FOREIGN_TASK = "foreign_task"
    """The task was handed to another node."""
    TOO_MANY = "too_many"
    """The caller is over its limit."""
    UNREADABLE = "unreadable"
    """The request is not a message of its method."""
    CONNECTION = "connection"
    """A connection, in place of a call: nothing was proven on it in time, or there are too many."""
    UNKNOWN_METHOD = "unknown_method"
    """The gateway does not have the method."""


class CallRecord:
    """One call in progress; `outcome` is set when it has ended."""

    outcome = "CANCELLED"
    """A status of gRPC. A call whose caller hangs up ends without another one."""


class GatewayMetrics:
    """The metrics of one gateway."""

    def __init__(self) -> None:
        # Times of creation double the number of series, and no query here needs them.
        disable_created_metrics()
        self.registry = CollectorRegistry()
        self._calls = Counter(
            "perdure_gateway_calls", "Calls that have ended.", ("method", "outcome"), registry=self.registry
        )
        self._refused = Counter("perdure_gateway_refused", "Calls refused.", ("reason",), registry=self.registry)
        self._seconds = Histogram(
            "perdure_gateway_call_seconds",
            "Duration of calls that do not wait for something to happen.",
            ("method",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._waiting = Gauge(
            "perdure_gateway_calls_in_progress", "Calls in progress.", ("method",), registry=self.registry
        )
        self._agents = Gauge("perdure_gateway_agents", "Agents with a call in progress.", registry=self.registry)
        self._calls_of_agents = Occurrences[str]()
        self._agents.set_function(lambda: float(len(self._calls_of_agents)))
        self._silence = Gauge(
            "perdure_gateway_api_server_silence_seconds",
            "Time for which the API server has answered no review of a token.",
            registry=self.registry,
        )
        ProcessCollector(namespace="perdure_gateway", registry=self.registry)

    @contextmanager
    def one_call(self, method: str, *, long: bool) -> Generator[CallRecord]:
        """Counts a call for as long as the context is open.

        Args:
            method: One of the gateway's methods.
            long: It waits for something to happen, so its duration says nothing.
        """
        record = CallRecord()
        with self._waiting.labels(method).track_inprogress():
            try:
                if long:
                    yield record
                else:
                    with self._seconds.labels(method).time():
                        yield record
            finally:
                self._calls.labels(method, record.outcome).inc()

    @contextmanager
    def of_agent(self, node: str) -> Generator[None]:
        """Counts an agent, or a machine, that has proven who it is, as connected while the context is open."""
        self._calls_of_agents[node] += 1
        try:
            yield
        finally:
            self._calls_of_agents[node] -= 1
            if not self._calls_of_agents[node]:
                del self._calls_of_agents[node]

    def count_refusal(self, reason: Reason) -> None:
        """Counts a refusal."""
        self._refused.labels(reason.value).inc()

    def watch_reviews(self, silence: Callable[[], float]) -> None:
        """Shows how long the API server has answered no review, in seconds."""
        self._silence.set_function(silence)

    def unknown_method(self) -> None:
        """Counts a call of a method that the gateway does not have."""
        self._calls.labels(OTHER_METHOD, "UNIMPLEMENTED").inc()
        self.count_refusal(Reason.UNKNOWN_METHOD)

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


@asynccontextmanager
async def serving_metrics(metrics: GatewayMetrics, port: int | None) -> AsyncGenerator[None]:
    """Answers `GET /metrics` on a port, if one is given, while the context is open."""

    async def collect() -> bytes:
        return metrics.text()

    async with endpoint.serving_metrics(collect, port):
        yield
