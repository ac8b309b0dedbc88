"""The event bus for the control plane: the code is that of the training library, which users' images have as well."""

from perdure_training.events import (
    AgentEvents,
    AsyncExporter,
    ConsoleExporter,
    Drop,
    Event,
    EventEmitter,
    EventsLost,
    EventType,
    Exporter,
    FileExporter,
    JobEvents,
    Redaction,
    Span,
    TrainerEvents,
    json_line,
    text_line,
)

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
]
