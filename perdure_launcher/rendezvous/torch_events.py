"""Exports torch's own events and metrics of a torchrun to the node's event file.

torch records the starts and ends of workers, its rendezvous and its own end, by default to nowhere and without times:
the time at which it records them is theirs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from perdure_training.events.background import AsyncExporter
from perdure_training.events.emitter import EventEmitter
from perdure_training.events.event import EventType
from perdure_training.events.files import FileExporter
from perdure_training.events.process import VARIABLE
from perdure_training.node_api.layout import torchrun_events
from perdure_training.node_api.rank_environment import GENERATION_VARIABLE

from ..torch_internals import hear_events

if TYPE_CHECKING:
    from torch.distributed.elastic.metrics.api import MetricData

logger = logging.getLogger(__name__)

TARGET = "torchelastic"
_FREQUENT = "_monitor_workers"
"""A function that torchrun calls ten times a second: its durations would fill the file."""


def export_torch_events(run_directory: Path) -> None:
    """Begins to export the events of this process; torchrun works as well without them."""
    if os.environ.get(VARIABLE) == "off":
        return
    try:
        emitter = EventEmitter(TARGET, AsyncExporter(FileExporter(torchrun_events(run_directory))))
        hear_events(_EventHandler(emitter))
        _hear_metrics(emitter)
    except Exception as error:
        logger.warning("torch's own events are not exported: %s", error)


class _EventHandler(logging.Handler):
    """Receives torch's events, which are log records whose messages are JSON."""

    def __init__(self, emitter: EventEmitter) -> None:
        super().__init__()
        self._emitter = emitter

    def emit(self, record: logging.LogRecord) -> None:
        # An exception would reach torchrun's own code.
        with contextlib.suppress(Exception):
            fields = _mapping(json.loads(record.getMessage()))
            metadata = _mapping(fields.get("metadata"))
            # Details about a worker are JSON in a text, and each is a list with one item.
            details = {
                name: _only_item(value) for name, value in _mapping(_parse(metadata.pop("metadata", None))).items()
            }
            recorded = fields.get("timestamp")
            self._emitter.emit(
                None,
                str(fields["name"]),
                EventType.INSTANT,
                recorded / 1000 if recorded else record.created,
                _number(metadata.pop("global_rank", None)),
                _generation(),
                {
                    "source": fields.get("source"),
                    **{name: value for name, value in {**metadata, **details}.items() if value is not None},
                },
            )


def _hear_metrics(emitter: EventEmitter) -> None:
    from torch.distributed.elastic.metrics.api import MetricHandler, configure

    class ToEvents(MetricHandler):
        def emit(self, metric_data: MetricData) -> None:
            data = cast("Any", metric_data)
            name = str(data.name)
            if _FREQUENT not in name:
                emitter.instant("metric", time=data.timestamp, generation=_generation(), metric=name, value=data.value)

    configure(ToEvents(), TARGET)


def _generation() -> int | None:
    """Returns the generation that this torchrun entered last."""
    text = os.environ.get(GENERATION_VARIABLE, "")
    return int(text) if text.isdecimal() else None


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _mapping(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _parse(text: Any) -> Any:
    return json.loads(text) if isinstance(text, str) else None


def _only_item(value: Any) -> Any:
    if isinstance(value, list) and len(cast("list[Any]", value)) == 1:
        return cast("list[Any]", value)[0]
    return cast("Any", value)
