"""Telemetry of a worker: the metrics of Temporal's SDK, listed in docs/metrics.md, and the log lines of its core."""

from __future__ import annotations

import logging

from temporalio.runtime import (
    LogForwardingConfig,
    LoggingConfig,
    PrometheusConfig,
    Runtime,
    TelemetryConfig,
    TelemetryFilter,
)

_WORKFLOW_TASKS = "temporalio_sdk_core::worker::workflow"
"""The logger of the SDK core's part that fails workflow tasks."""


def worker_runtime(metrics_port: int | None) -> Runtime:
    """The SDK's runtime of a worker, which serves Prometheus metrics if a port is given.

    The SDK's own log lines, which repeat through an outage, are reduced to errors and go to Python's log. So do its
    warnings about failing workflow tasks: a worker that cannot replay a job reports that only there.
    """
    filter = f"{TelemetryFilter(core_level='ERROR', other_level='ERROR').formatted()},{_WORKFLOW_TASKS}=WARN"
    return Runtime(
        telemetry=TelemetryConfig(
            logging=LoggingConfig(
                filter=filter,
                forwarding=LogForwardingConfig(logger=logging.getLogger("temporalio.core")),
            ),
            metrics=PrometheusConfig(bind_address=f"0.0.0.0:{metrics_port}") if metrics_port else None,
        )
    )
