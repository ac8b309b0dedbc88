"""Telemetry of Temporal's SDK: its metrics, listed in docs/metrics.md, and the log lines of its core."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass
from typing import Final

from temporalio.runtime import (
    LogForwardingConfig,
    LoggingConfig,
    PrometheusConfig,
    Runtime,
    TelemetryConfig,
    TelemetryFilter,
)

from perdure_training.node_api.addresses import host_and_port

logger = logging.getLogger(__name__)

_WORKFLOW_TASKS: Final = "temporalio_sdk_core::worker::workflow"
"""The logger of the SDK core's part that fails workflow tasks."""
_LOOPBACK: Final = "127.0.0.1"
_TRIES: Final = 10
"""Ports that are tried: another process may take one that was free a moment ago."""
_PATIENCE: Final = 4.0
"""Seconds."""


@dataclass(frozen=True)
class SdkRuntime:
    """The SDK's runtime, and where it serves its metrics."""

    runtime: Runtime
    port: int | None
    """The port on loopback; None where it serves none."""

    async def text(self) -> bytes:
        """Returns the SDK's metrics in Prometheus' text format; nothing if they cannot be read."""
        if self.port is None:
            return b""
        import aiohttp

        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_PATIENCE)) as session,
                session.get(f"http://{host_and_port(_LOOPBACK, self.port)}/metrics") as answer,
            ):
                answer.raise_for_status()
                return await answer.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            logger.warning("the SDK's metrics cannot be read: %s", error or type(error).__name__)
            return b""


def worker_runtime(*, with_metrics: bool) -> SdkRuntime:
    """Creates the SDK's runtime of a worker.

    The SDK's own log lines, which repeat through an outage, are reduced to errors and go to Python's log. So do its
    warnings about failing workflow tasks: a worker that cannot replay a job reports that only there.

    Its metrics are served by the SDK itself, at a port of loopback, from where the worker reads them for its own port:
    the SDK has no other way to read them as Prometheus' text.

    Args:
        with_metrics: Whether it keeps metrics.

    Raises:
        RuntimeError: if no port is free.
    """
    filter = f"{TelemetryFilter(core_level='ERROR', other_level='ERROR').formatted()},{_WORKFLOW_TASKS}=WARN"
    logs = LoggingConfig(filter=filter, forwarding=LogForwardingConfig(logger=logging.getLogger("temporalio.core")))
    if not with_metrics:
        return SdkRuntime(Runtime(telemetry=TelemetryConfig(logging=logs)), None)
    problem: Exception | None = None
    for _ in range(_TRIES):
        port = _free_port()
        config = PrometheusConfig(bind_address=host_and_port(_LOOPBACK, port))
        try:
            return SdkRuntime(Runtime(telemetry=TelemetryConfig(logging=logs, metrics=config)), port)
        except (RuntimeError, ValueError) as error:
            problem = error
    raise RuntimeError(f"no port of loopback is free for the SDK's metrics: {problem}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        return int(probe.getsockname()[1])
