"""Where events go: the interface of all exporters, and the console."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence

from perdure_training.events.event import Event
from perdure_training.events.formats import Format, text_line


class EventsLost(Exception):
    """An exporter could not export some of the events that it was given."""

    def __init__(self, reason: str, *, count: int) -> None:
        """Creates the error.

        Args:
            reason: The reason, for the log.
            count: The number of events that were not exported.
        """
        super().__init__(reason)
        self.count = count


class Exporter(ABC):
    """A destination of events.

    An `AsyncExporter` calls all methods from one thread of its own. They may take any time and raise anything: then
    events are lost and counted, and the program continues.
    """

    @abstractmethod
    def export(self, events: Sequence[Event]) -> None:
        """Exports events, in their order; they contain no secrets that can be recognized.

        Raises:
            EventsLost: if some of them are not exported. Any other exception means that none of them is.
        """

    def flush(self) -> None:
        """Brings all events that were exported to their destination."""

    def close(self) -> None:
        """Releases what the exporter holds. Nothing is exported afterwards."""

    def after_fork(self) -> None:
        """Releases, in a forked child, what belongs to the parent; the parent's thread may have been inside of any
        other method."""


class ConsoleExporter(Exporter):
    """Writes events as lines to a file descriptor, by default that of stderr.

    Python's buffer of the same stream is left out: a child that is forked while another thread writes would find its
    lock taken.
    """

    def __init__(self, *, descriptor: int = 2, format: Format = text_line) -> None:
        """Creates the exporter.

        Args:
            descriptor: The descriptor to write to; it stays open.
            format: Makes the lines: `text_line` or `json_line`.
        """
        self._descriptor = descriptor
        self._format = format

    def export(self, events: Sequence[Event]) -> None:
        lost, reason = 0, ""
        for event in events:
            try:
                write_all(self._descriptor, self._format(event))
            except OSError as error:
                lost, reason = lost + 1, str(error)
        if lost:
            raise EventsLost(reason, count=lost)


def write_all(descriptor: int, data: bytes) -> None:
    """Writes all bytes.

    Raises:
        OSError: if they are not all accepted.
    """
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
