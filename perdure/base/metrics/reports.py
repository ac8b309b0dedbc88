"""Metrics on the event bus: what monitors read becomes events, for files and log stores, and lines for people."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from perdure.base.metrics.monitors import Reading
from perdure.base.metrics.samples import Monitor, Sample
from perdure.events import Event, EventEmitter

NAME: Final = "metrics"
"""The name of the events."""
_MOST_SAMPLES: Final = 200
"""Samples in one event, at most: what one line has room for."""


class MetricsToEvents:
    """Reads monitors from time to time, and emits what they read as one event."""

    def __init__(self, monitors: Iterable[Monitor], emitter: EventEmitter, *, interval: timedelta) -> None:
        """Creates the object.

        Args:
            monitors: What is read.
            emitter: Emits the events, named `metrics`.
            interval: The time between two events.
        """
        self._readings = [Reading(monitor) for monitor in monitors]
        self._emitter = emitter
        self._interval = interval.total_seconds()

    async def emit(self) -> None:
        """Reads all monitors now, and emits one event."""
        groups = await asyncio.gather(*(reading.samples() for reading in self._readings))
        samples = [sample for group in groups for sample in group]
        if samples:
            values: dict[str, Any] = {series_name(sample): sample.value for sample in samples[:_MOST_SAMPLES]}
            if len(samples) > _MOST_SAMPLES:
                values["left_out"] = len(samples) - _MOST_SAMPLES
            self._emitter.instant(NAME, **values)

    async def run(self) -> None:
        """Emits until cancelled."""
        while True:
            await self.emit()
            await asyncio.sleep(self._interval)


def series_name(sample: Sample) -> str:
    """Returns a sample's name with its labels, as Prometheus writes them."""
    labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
    return f"{sample.name}{{{labels}}}" if labels else sample.name


def report_line(event: Event) -> bytes:
    """Formats an event for people: metrics as a short line, others by their names.

    It is a format of exporters: `ConsoleExporter(format=report_line)`.
    """
    time = datetime.fromtimestamp(event.time, UTC).strftime("%H:%M:%S")
    if event.name != NAME:
        return f"{time} {_plain(event.target)}: {_plain(event.name)} {event.type}\n".encode()
    parts = [
        f"{_plain(name.removeprefix('perdure_'))} {value:.4g}"
        for name, value in event.attributes.items()
        if isinstance(value, int | float)
    ]
    return f"{time} {_plain(event.target)}: {', '.join(parts)}\n".encode()


def _plain(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)
