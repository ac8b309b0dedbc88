"""Reads monitors in threads of their own: a driver or an exporter that hangs delays nothing else."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from perdure.base.metrics.samples import Monitor, Sample

logger = logging.getLogger(__name__)

PATIENCE: Final = timedelta(seconds=3)
"""Time that a monitor has. Prometheus gives up a scrape after ten seconds, by default."""


class Reading:
    """Reads one monitor.

    Invariant: at most one thread is in the monitor. One that hangs stays there, and nothing is read meanwhile.
    """

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._thread: threading.Thread | None = None
        self._failing = False

    async def samples(self, patience: timedelta = PATIENCE) -> Sequence[Sample]:
        """Returns what the monitor reads; no samples if it raises or takes too long."""
        if self._thread is not None and self._thread.is_alive():
            return ()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Sequence[Sample]] = loop.create_future()

        def deliver(samples: Sequence[Sample]) -> None:
            if not done.done():
                done.set_result(samples)

        def read() -> None:
            samples = self._read()
            try:
                loop.call_soon_threadsafe(deliver, samples)
            except RuntimeError:
                # The loop has ended.
                return

        self._thread = threading.Thread(target=read, name=f"monitor {self._monitor.name}", daemon=True)
        self._thread.start()
        try:
            async with asyncio.timeout(patience.total_seconds()):
                return await done
        except TimeoutError:
            logger.warning("%s did not answer within %.0f s", self._monitor.name, patience.total_seconds())
            return ()

    def _read(self) -> Sequence[Sample]:
        try:
            samples = tuple(self._monitor.read())
        except Exception as error:
            if not self._failing:
                logger.warning("%s cannot be read: %s", self._monitor.name, error)
            self._failing = True
            return ()
        self._failing = False
        return samples
