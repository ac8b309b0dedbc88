"""Makes spans with OpenTelemetry's packages, and exports them over HTTP from a thread of its own.

The queue is bounded: a collector that hangs or refuses loses spans, and slows nothing.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from perdure_training.events.redaction import Redaction

logger = logging.getLogger(__name__)

END_WITHIN = timedelta(seconds=2)
"""Time for which the end of the process waits for spans that are not exported yet."""

Values = Mapping[str, str | int | float | bool | None]


@dataclass(frozen=True)
class TraceIds:
    """The identifiers of a trace and of its first span."""

    trace: int
    span: int

    @classmethod
    def of(cls, key: str) -> TraceIds:
        """Computes the IDs from a key: all processes with the same key get the same IDs."""
        digest = hashlib.sha256(key.encode()).digest()
        return cls(int.from_bytes(digest[:16]), int.from_bytes(digest[16:24]))

    @property
    def traceparent(self) -> str:
        """The value of W3C's header."""
        return f"00-{self.trace:032x}-{self.span:016x}-01"

    @property
    def context(self) -> Context:
        """A context whose spans belong below the first one."""
        found = SpanContext(self.trace, self.span, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
        return trace.set_span_in_context(NonRecordingSpan(found), Context())


class _Ids(RandomIdGenerator):
    """Random identifiers, but for the first span of a trace whose identifiers are known."""

    def __init__(self) -> None:
        self._known = threading.local()

    @contextmanager
    def use(self, ids: TraceIds) -> Generator[None]:
        self._known.ids = ids
        try:
            yield
        finally:
            self._known.ids = None

    def generate_span_id(self) -> int:
        ids: TraceIds | None = getattr(self._known, "ids", None)
        return ids.span if ids else super().generate_span_id()

    def generate_trace_id(self) -> int:
        ids: TraceIds | None = getattr(self._known, "ids", None)
        return ids.trace if ids else super().generate_trace_id()


class _Counted(SpanExporter):
    """Counts what the collector does not accept, and logs that once."""

    def __init__(self) -> None:
        self._exporter = OTLPSpanExporter()
        self.lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            if not self.lost:
                logger.warning("traces are being lost: the collector does not accept them")
            self.lost += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class Tracing:
    """The spans of this process."""

    def __init__(self, part: str) -> None:
        """Begins to export to the collector that OpenTelemetry's variables name.

        Args:
            part: Names the service, unless a variable does.
        """
        # It reports each batch that is not exported, with a traceback.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        name = os.environ.get("OTEL_SERVICE_NAME") or f"perdure-{part}"
        self._ids = _Ids()
        self._exporter = _Counted()
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": name}), id_generator=self._ids, shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("perdure")
        self._redaction = Redaction()
        self.on_activity: Callable[[Sequence[Any], Context], None] = lambda arguments, context: None
        """Called with the arguments and the trace of each activity that has one."""

    @property
    def lost(self) -> int:
        """Spans that the collector did not accept."""
        return self._exporter.lost

    @contextmanager
    def span(self, name: str, attributes: Values, *, kind: SpanKind, context: Context | None = None) -> Generator[Span]:
        """A span that lasts as long as the body, below the given context or the current one."""
        with self._tracer.start_as_current_span(
            name,
            context=context,
            kind=kind,
            attributes=self._plain(attributes),
            # The texts of exceptions may have secrets.
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield span
            except Exception as error:
                text = self._redaction.text(f"{type(error).__name__}: {error}"[:4096])
                span.set_status(Status(StatusCode.ERROR, text))
                raise

    def first(self, name: str, ids: TraceIds, began: datetime, ended: datetime, attributes: Values, error: str) -> None:
        """Adds the first span of a trace whose identifiers are known."""
        with self._ids.use(ids):
            span = self._start(name, Context(), began, attributes)
        if error:
            span.set_status(Status(StatusCode.ERROR, self._redaction.text(error)))
        span.end(_nanoseconds(ended))

    def below(self, name: str, context: Context, began: datetime, ended: datetime, attributes: Values) -> None:
        """Adds a span that has ended."""
        self._start(name, context, began, attributes).end(_nanoseconds(max(ended, began)))

    def _start(self, name: str, context: Context, began: datetime, attributes: Values) -> Span:
        return self._tracer.start_span(
            name, context, attributes=self._plain(attributes), start_time=_nanoseconds(began)
        )

    def _plain(self, attributes: Values) -> dict[str, str | int | float | bool]:
        return {
            name: self._redaction.text(value) if isinstance(value, str) else value
            for name, value in attributes.items()
            if value is not None
        }

    def end(self) -> None:
        """Exports what waits, for two seconds at most."""
        # The packages' own time limits do not hold while a collector does not answer.
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(END_WITHIN.total_seconds())


def _nanoseconds(moment: datetime) -> int:
    return round(moment.timestamp() * 1e9)
