"""What a worker exports: the metrics of Temporal's SDK, which docs/metrics.md lists, and the log lines of its core."""

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
"""What the SDK's core calls the part of it that fails workflow tasks."""


def worker_runtime(metrics_port: int | None) -> Runtime:
    """The SDK's runtime of a worker, which serves Prometheus metrics where a port is given.

    The SDK's own log lines, which repeat through an outage, are kept to errors and go where ours go. So do its warnings
    of workflow tasks that fail: a worker that cannot replay a job reports it here alone.
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
