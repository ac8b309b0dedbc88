"""The events API of torchelastic 0.2.0 under both of its names: this package, and the module `api`, which the
documentation names."""

from perdure_training.torchelastic.events.api import (
    BusEventHandler,
    ConsoleEventHandler,
    Event,
    EventHandler,
    NullEventHandler,
    configure,
    record,
    record_event,
)

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
