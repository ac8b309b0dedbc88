"""What a node's machine has and uses, as events; apart from metrics for Prometheus, which few agents import."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Final

from perdure.agent.config import AgentConfig
from perdure.base.metrics.machine import GpuMonitor, HostMonitor
from perdure.base.metrics.reports import MetricsToEvents
from perdure.base.metrics.samples import Monitor
from perdure.events import AsyncExporter, EventEmitter

_SHARED_MEMORY: Final = Path("/dev/shm")


def machine_monitors(config: AgentConfig) -> tuple[Monitor, ...]:
    """Returns monitors of the machine of a node."""
    return HostMonitor({"run": config.run_dir, "shm": _SHARED_MEMORY}), GpuMonitor()


def machine_reports(config: AgentConfig, exporter: AsyncExporter, *, interval: timedelta) -> MetricsToEvents:
    """Returns what emits the figures of a node's machine, and of the endpoints that its configuration names, as events.

    Args:
        config: The agent's configuration.
        exporter: The destination of the events.
        interval: The time between two events.
    """
    monitors = list(machine_monitors(config))
    if config.monitors:
        from perdure.base.metrics.prometheus import endpoint_monitors

        monitors += endpoint_monitors(config.monitors)
    return MetricsToEvents(monitors, EventEmitter("agent", exporter), interval=interval)
