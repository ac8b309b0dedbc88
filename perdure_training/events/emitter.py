"""Emits events from programs: moments, and spans with a beginning and an end."""

from __future__ import annotations

import logging
import time as clock
from types import TracebackType
from typing import Any

from perdure_training.events.background import AsyncExporter
from perdure_training.events.event import EventType, Id, id_text, ids, new_id
from perdure_training.events.plain import IMMUTABLE, LONGEST_TEXT, describe_error, plain
from perdure_training.events.process import Place, own_place

logger = logging.getLogger(__name__)

_LATEST = 2.0**36
"""Seconds since the epoch, in the year 4147: times may come from other programs."""


class EventEmitter:
    """Emits the events of one target.

    Nothing here raises into the program, and nothing waits: an event that cannot be made is left out, and the first one
    is logged.
    """

    def __init__(
        self, target: str, *exporters: AsyncExporter, rank: int | None = None, generation: int | None = None
    ) -> None:
        """Creates an emitter.

        Args:
            target: The part of the program that the events are about.
            exporters: Their destinations. Without any, events go to this process's event file if Perdure started it as
                a rank, and nowhere otherwise.
            rank: The rank of this process, where exporters are given.
            generation: The generation of its world, where exporters are given.
        """
        self.target = target
        self._place = Place(exporters, rank, generation) if exporters else None
        self._failed = False

    @property
    def is_of_this_process(self) -> bool:
        """Whether its events are those of this process, and not told on behalf of another one."""
        return self._place is None

    def instant(
        self,
        name: str,
        /,
        *,
        time: float | None = None,
        rank: int | None = None,
        generation: int | None = None,
        **attributes: Any,
    ) -> None:
        """Emits an event that has no duration.

        Args:
            name: What happened.
            time: When, in seconds since the epoch; None for now.
            rank: The rank that it is about; None for this process's.
            generation: Its generation; None for this process's.
            attributes: More about it. Texts are cut off after 16,384 characters, and objects that JSON does not have
                are named only.
        """
        self.emit(None, name, EventType.INSTANT, time, rank, generation, attributes)

    def span(self, name: str, /, *, rank: int | None = None, generation: int | None = None, **attributes: Any) -> Span:
        """Returns a span, which begins as a context manager or by `begin`.

        Args:
            name: What happens.
            rank: The rank that it is about; None for this process's.
            generation: Its generation; None for this process's.
            attributes: More about it, as for `instant`; the end has them, too.
        """
        return Span(self, name, rank, generation, attributes)

    def flush(self) -> bool:
        """Waits, for two seconds at most, until all events have reached their destinations; returns whether they
        have."""
        place = self._place or own_place()
        flushed = [exporter.flush() for exporter in place.exporters]
        return all(flushed)

    def emit(
        self,
        id: Id | str | None,
        name: str,
        type_: EventType,
        time: float | None,
        rank: int | None,
        generation: int | None,
        attributes: dict[str, Any],
        *,
        target: str | None = None,
    ) -> None:
        """Emits one event; `instant` and `span` are the usual ways.

        Args:
            id: The id; None for a new one.
            name: What happened.
            type_: The part of it that the event reports.
            time: Seconds since the epoch; None for now.
            rank: The rank that it is about; None for this process's.
            generation: Its generation; None for this process's.
            attributes: More about it; the mapping is changed.
            target: The part that it is about; None for the emitter's.
        """
        try:
            place = self._place or own_place()
            if not place.exporters:
                return
            for attribute, value in attributes.items():
                kind = type(value)  # A cast would be a call.
                if kind not in IMMUTABLE and (kind is not str or len(value) > LONGEST_TEXT):
                    attributes[attribute] = plain(value)
            # Everything else is made of it in the threads of exporters: this one belongs to the training.
            draft = (
                id or (ids.prefix, next(ids.numbers)),
                time if time is not None and 0 <= time < _LATEST else clock.time(),
                target or self.target,
                name,
                type_,
                attributes,
                place.rank if rank is None else rank,
                place.generation if generation is None else generation,
            )
            for exporter in place.exporters:
                exporter.put(draft)
        except Exception as error:
            if not self._failed:
                self._failed = True
                logger.warning("the event %s is left out: %s", name, describe_error(error))


class Span:
    """Something with a duration: its begin and its end are two events with the same id.

    It ends once: by `succeed`, by `fail`, or with the block of its context manager, which fails with an exception of
    the block and lets it pass.
    """

    def __init__(
        self,
        emitter: EventEmitter,
        name: str,
        rank: int | None,
        generation: int | None,
        attributes: dict[str, Any],
    ) -> None:
        self._emitter = emitter
        self._name = name
        self._rank = rank
        self._generation = generation
        self._attributes = attributes
        self._began: float | None = None
        self._ended = False
        self._id = new_id()

    @property
    def id(self) -> str:
        """The id of its events."""
        return id_text(self._id)

    def begin(self) -> Span:
        """Begins the span, if it has not begun; returns it."""
        if self._began is None:
            # The duration is measured by a clock that is never set back.
            self._began = clock.monotonic()
            self._emit(EventType.BEGIN, dict(self._attributes))
        return self

    def add(self, **attributes: Any) -> Span:
        """Adds attributes to the events that follow; returns the span."""
        self._attributes.update(attributes)
        return self

    def stage(self, name: str, /, **attributes: Any) -> Span:
        """Returns a span within this one. Its name is `span.name`, and its attribute `within` this span's id."""
        return Span(
            self._emitter,
            f"{self._name}.{name}",
            self._rank,
            self._generation,
            {**self._attributes, **attributes, "within": self.id},
        )

    def succeed(self, **attributes: Any) -> None:
        """Ends the span with success."""
        self._end({"success": True, **attributes})

    def fail(self, error: BaseException | str, /, **attributes: Any) -> None:
        """Ends the span without success.

        Args:
            error: The reason; of an exception, its type and text.
            attributes: More about it.
        """
        self._end({"success": False, "error": error, **attributes})

    def __enter__(self) -> Span:
        return self.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.succeed()
        else:
            self.fail(error)

    def _end(self, attributes: dict[str, Any]) -> None:
        self.begin()
        if self._ended or self._began is None:
            return
        self._ended = True
        duration = round(clock.monotonic() - self._began, 6)
        self._emit(EventType.END, {**self._attributes, "duration_s": duration, **attributes})

    def _emit(self, type_: EventType, attributes: dict[str, Any]) -> None:
        self._emitter.emit(self._id, self._name, type_, None, self._rank, self._generation, attributes)
