"""Spans of a node's part in an incident: what the agent did, and what its launcher reported.

They are made of the agent's events, in the thread that exports those. The launcher itself makes none: it runs in users'
images, which have no packages of OpenTelemetry, and pods of jobs may reach no collector.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from opentelemetry.context import Context

from perdure.base.tracing.provider import Tracing
from perdure.contract.commands import ApplyDesired
from perdure.events import Event, Exporter

_KEPT = 16
"""Generations whose traces are remembered."""


class NodeSpans(Exporter):
    """Makes the spans of one node."""

    def __init__(self, tracing: Tracing, *, job: str, node: str) -> None:
        """Creates the exporter, which learns of traces from the commands that the agent carries out.

        Args:
            tracing: Makes the spans.
            job: The workflow ID of the job.
            node: The node's name.
        """
        self._tracing = tracing
        self._job = job
        self._node = node
        self._traces = OrderedDict[int, Context]()
        """The trace that each generation belongs to."""
        self._began: dict[str, Event] = {}
        tracing.on_activity = self._on_activity

    def _on_activity(self, arguments: Sequence[Any], context: Context) -> None:
        world = arguments[0].desired.world if arguments and isinstance(arguments[0], ApplyDesired) else None
        if world is not None:
            self._traces.setdefault(world.generation, context)
            while len(self._traces) > _KEPT:
                self._traces.popitem(last=False)

    def export(self, events: Sequence[Event]) -> None:
        for event in events:
            match event.name:
                case "rank_exited":
                    self._began.setdefault("fault", event)
                case "fault_detected":
                    self._began.setdefault("fault", event)
                    self._began["reported"] = event
                case "world":
                    self._end("fault", self._began.pop("reported", None), of=event)
                    self._began["rendezvous"] = event
                case "entered":
                    self._end("rendezvous", event, of=event)
                    self._began["first step"] = event
                case "stepping":
                    self._end("first step", event, of=event)
                case _:
                    pass

    def _end(self, name: str, event: Event | None, *, of: Event) -> None:
        """Adds a span that began with an earlier event, to the trace of the generation that `of` returns."""
        began = self._began.pop(name, None)
        context = self._traces.get(of.attributes.get("generation", of.generation) or 0)
        if began is None or event is None or context is None:
            return
        attributes = {"perdure.job": self._job, "perdure.node": self._node, "perdure.generation": of.generation}
        for known in ("kind", "message", "error", "exit_code", "signal"):
            value = event.attributes.get(known, began.attributes.get(known))
            if isinstance(value, str | int):
                attributes[known] = value
        self._tracing.below(name, context, _moment(began), _moment(event), attributes)


def _moment(event: Event) -> datetime:
    return datetime.fromtimestamp(event.time, UTC)
