"""The event bus: what happens in a training job, as structured events in files, on the console, or elsewhere.

It needs the standard library only. Nothing here waits for a destination or raises into the program; events that a
destination does not accept are counted, and the count is an event, too. docs/events.md describes the formats.

    from perdure_training.events import TrainerEvents

    events = TrainerEvents()
    with events.save(step=100):
        torch.save(model.state_dict(), path)
"""

from __future__ import annotations

from perdure_training.events.background import AsyncExporter, Drop
from perdure_training.events.emitter import EventEmitter, Span
from perdure_training.events.event import Event, EventType
from perdure_training.events.exporter import ConsoleExporter, EventsLost, Exporter
from perdure_training.events.files import FileExporter
from perdure_training.events.formats import json_line, text_line
from perdure_training.events.process import to_collector
from perdure_training.events.redaction import Redaction
from perdure_training.events.vocabulary import AgentEvents, JobEvents, TrainerEvents

__all__ = [
    "AgentEvents",
    "AsyncExporter",
    "ConsoleExporter",
    "Drop",
    "Event",
    "EventEmitter",
    "EventType",
    "EventsLost",
    "Exporter",
    "FileExporter",
    "JobEvents",
    "Redaction",
    "Span",
    "TrainerEvents",
    "json_line",
    "text_line",
    "to_collector",
]
