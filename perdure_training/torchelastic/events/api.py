"""The events API of torchelastic 0.2.0, as its documentation describes it, with the event bus behind it.

Scripts change their import only:

    from perdure_training.torchelastic.events import BusEventHandler, configure, record

    configure(BusEventHandler())
    record(event_name="epoch_done", event_type="training", metadata={"epoch": 3})

docs/events.md says what is the same and what differs.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from typing import Any

from perdure_training.events.emitter import EventEmitter
from perdure_training.events.event import EventType
from perdure_training.events.plain import describe_error

__all__ = [
    "BusEventHandler",
    "ConsoleEventHandler",
    "Event",
    "EventHandler",
    "NullEventHandler",
    "configure",
    "record",
    "record_event",
]

logger = logging.getLogger(__name__)

_DEFAULT_TYPE = "torchelastic"


class Event:
    """Something that happened in a job."""

    __slots__ = ("metadata", "name", "timestamp", "type")

    def __init__(
        self,
        name: str,
        type: str = _DEFAULT_TYPE,
        metadata: dict[str, Any] | None = None,
        timestamp: int = 0,
        *,
        event_type: str | None = None,
    ) -> None:
        """Creates an event.

        Args:
            name: What happened.
            type: Decides which handler records it.
            metadata: More about it.
            timestamp: When, in milliseconds since the epoch; 0 for the time at which it is recorded.
            event_type: The same as `type`; torchelastic's documentation has both names.
        """
        self.name = name
        self.type = type if event_type is None else event_type
        self.metadata = {} if metadata is None else metadata
        self.timestamp = timestamp

    @property
    def event_type(self) -> str:
        """The same as `type`."""
        return self.type

    def __repr__(self) -> str:
        return f"Event(name={self.name!r}, type={self.type!r}, metadata={self.metadata!r}, timestamp={self.timestamp})"


class EventHandler(ABC):
    """Records the events of the types that it is configured for."""

    @abstractmethod
    def record(self, event: Event) -> None:
        """Records an event. An exception is logged, and does not reach the program that recorded the event."""


class ConsoleEventHandler(EventHandler):
    """Prints events to stdout."""

    def record(self, event: Event) -> None:
        print(f"[{event.timestamp}] {event.type}:{event.name}")  # noqa: T201 - stdout is what the handler is for


class NullEventHandler(EventHandler):
    """Records nothing; the default."""

    def record(self, event: Event) -> None:
        pass


class BusEventHandler(EventHandler):
    """Emits events to the event bus: the type becomes the target, and the metadata the attributes."""

    def __init__(self, emitter: EventEmitter | None = None) -> None:
        """Creates the handler.

        Args:
            emitter: Emits the events; None for one that writes to this rank's event file.
        """
        self._emitter = emitter or EventEmitter(_DEFAULT_TYPE)

    def record(self, event: Event) -> None:
        self._emitter.emit(
            None,
            event.name,
            EventType.INSTANT,
            event.timestamp / 1000,
            None,
            None,
            dict(event.metadata),
            target=event.type,
        )


class _Handlers:
    def __init__(self) -> None:
        self.by_type: dict[str, EventHandler] = {}
        self.default: EventHandler = NullEventHandler()


_handlers = _Handlers()


def configure(handler: EventHandler, event_type: str = "") -> None:
    """Sets the handler of a type of events.

    Args:
        handler: Records the events.
        event_type: The type; empty for all types that have no handler of their own.

    Raises:
        TypeError: if it cannot record an event.
    """
    if isinstance(handler, type) or not callable(getattr(handler, "record", None)):
        raise TypeError(
            f"handler: expected an object with a method record(event), such as ConsoleEventHandler(), found {handler!r}"
        )
    if event_type:
        _handlers.by_type[event_type] = handler
    else:
        _handlers.default = handler


def record_event(event: Event) -> None:
    """Records an event by the handler of its type.

    Args:
        event: The event.
    """
    if not event.timestamp:
        event.timestamp = round(time.time() * 1000)
    handler = _handlers.by_type.get(event.type, _handlers.default)
    try:
        handler.record(event)
    except Exception as error:
        logger.warning("the event %s is not recorded: %s", event.name, describe_error(error))


def record(event_name: str, event_type: str = _DEFAULT_TYPE, metadata: dict[str, Any] | None = None) -> None:
    """Records an event that happens now.

    Args:
        event_name: What happened.
        event_type: Decides which handler records it.
        metadata: More about it.
    """
    record_event(Event(event_name, event_type, metadata))
