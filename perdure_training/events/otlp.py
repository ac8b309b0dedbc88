"""Exports events as log records of OpenTelemetry, to a collector that accepts OTLP over HTTP.

It sends OTLP's JSON encoding with the standard library: ranks run in users' images, where nothing can be installed, and
collectors accept this encoding at the same port and path as the binary one. OpenTelemetry's own variables configure it.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from json.encoder import encode_basestring
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from perdure_training.events.background import AsyncExporter
from perdure_training.events.connection import Connection
from perdure_training.events.event import Event, EventType
from perdure_training.events.exporter import EventsLost, Exporter
from perdure_training.events.redaction import Redaction

logger = logging.getLogger(__name__)

TIMEOUT = timedelta(seconds=10)
"""Time for one batch, retries included: OpenTelemetry's default."""
LINGER = timedelta(seconds=1)
"""Time for which events are collected before they are sent: each request has a cost for sender and collector."""
_LONGEST_BODY = 1 << 20
"""Bytes of a request, about: collectors and proxies before them refuse large ones."""
_RETRIED = {429, 502, 503, 504}
"""Statuses after which OTLP has clients send the same again."""
_FIRST_PAUSE = 0.5
_INFO, _ERROR = 9, 17
"""OpenTelemetry's numbers of severities."""
_LOGS = "OTEL_EXPORTER_OTLP_LOGS_"
_ALL = "OTEL_EXPORTER_OTLP_"


@dataclass(frozen=True, kw_only=True)
class OtlpSettings:
    """Where log records go, and how."""

    endpoint: str
    """The whole address, such as `http://collector:4318/v1/logs`."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """More headers of each request; they often have a credential."""
    timeout: timedelta = TIMEOUT
    compress: bool = False
    certificate: str | None = None
    """A file with the authorities to trust; None for the system's."""
    resource: Mapping[str, str] = field(default_factory=dict[str, str])
    """What sends the records, as attributes of OpenTelemetry's resource."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> OtlpSettings | None:
        """Reads OpenTelemetry's variables.

        Returns:
            The settings; None where the variables name no endpoint, or turn logs off.

        Raises:
            ValueError: if a variable cannot be used; the text names it.
        """

        def value(name: str) -> str:
            return environment.get(_LOGS + name) or environment.get(_ALL + name, "")

        endpoint = environment.get(f"{_LOGS}ENDPOINT", "")
        if not endpoint and (base := environment.get(f"{_ALL}ENDPOINT", "")):
            endpoint = f"{base.rstrip('/')}/v1/logs"
        off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
        exporters = environment.get("OTEL_LOGS_EXPORTER", "otlp").split(",")
        if not endpoint or off or "otlp" not in exporters:
            return None
        if urlsplit(endpoint).scheme not in ("http", "https"):
            raise ValueError(f"{_LOGS}ENDPOINT: expected http:// or https://, found {_without_password(endpoint)!r}")
        if value("PROTOCOL") == "grpc":
            raise ValueError(f"{_LOGS}PROTOCOL: expected http/json, found 'grpc'; set it, and the endpoint of HTTP")
        milliseconds = value("TIMEOUT") or "10000"
        if not milliseconds.isdecimal() or int(milliseconds) == 0:
            raise ValueError(f"{_LOGS}TIMEOUT: expected milliseconds, found {milliseconds!r}")
        name = environment.get("OTEL_SERVICE_NAME")
        return cls(
            endpoint=endpoint,
            headers=_pairs(value("HEADERS")),
            timeout=timedelta(milliseconds=int(milliseconds)),
            compress=value("COMPRESSION") == "gzip",
            certificate=value("CERTIFICATE") or None,
            resource={
                "service.name": "perdure",
                "host.name": socket.gethostname(),
                **_pairs(environment.get("OTEL_RESOURCE_ATTRIBUTES", "")),
                **({"service.name": name} if name else {}),
            },
        )


class OtlpExporter(Exporter):
    """Sends events to a collector. One that hangs, refuses or fails loses events, which are counted."""

    def __init__(self, settings: OtlpSettings, *, resource: Mapping[str, str] | None = None) -> None:
        """Creates the exporter; it connects with the first events.

        Args:
            settings: Where the events go, and how.
            resource: More attributes of what sends them.
        """
        self._settings = settings
        attributes = _attributes({**settings.resource, **(resource or {})})
        self._resource = f'{{"attributes":[{attributes}]}}'.encode(errors="replace")
        headers = {"Content-Type": "application/json", **settings.headers}
        if settings.compress:
            headers["Content-Encoding"] = "gzip"
        self._connection = Connection(settings.endpoint, headers, certificate=settings.certificate)

    def close(self) -> None:
        self._connection.close()

    def after_fork(self) -> None:
        self._connection.forget()

    def export(self, events: Sequence[Event]) -> None:
        lost, reason = 0, ""
        until = time.monotonic() + self._settings.timeout.total_seconds()
        for records in _parts(events):
            try:
                refused = self._send(records, until)
            except (OSError, ValueError) as error:
                refused, reason = len(records), str(error)
            lost += refused
        if lost:
            where = _without_password(self._settings.endpoint)
            raise EventsLost(f"{where}: {reason or 'the collector rejected a part of them'}", count=lost)

    def _send(self, records: list[bytes], until: float) -> int:
        """Sends one request, and repeats it for as long as the collector is busy and there is time.

        Returns:
            The number of records that the collector rejected.

        Raises:
            OSError: if it did not accept the request.
        """
        body = self._body(records)
        if self._settings.compress:
            body = gzip.compress(body, compresslevel=1)
        pause = _FIRST_PAUSE
        while True:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError("no time is left")
            answer = self._connection.post(body, timeout=left)
            if 200 <= answer.status < 300:
                return _rejected(answer.body)
            pause = float(answer.retry_after) if answer.retry_after.isdecimal() else pause
            if answer.status not in _RETRIED or time.monotonic() + pause >= until:
                raise OSError(f"it answered {answer.status}")
            time.sleep(pause)
            pause *= 2

    def _body(self, records: list[bytes]) -> bytes:
        return (
            b'{"resourceLogs":[{"resource":%b,"scopeLogs":[{"scope":{"name":"perdure.events"},"logRecords":[%b]}]}]}'
            % (
                self._resource,
                b",".join(records),
            )
        )


def exporter_to_collector(
    environment: Mapping[str, str], *, resource: Mapping[str, str] | None
) -> AsyncExporter | None:
    """Implements `perdure_training.events.to_collector`."""
    try:
        settings = OtlpSettings.from_environment(environment)
    except ValueError as error:
        logger.warning("events are not sent to a collector: %s", error)
        return None
    if settings is None:
        return None
    return AsyncExporter(OtlpExporter(settings, resource=resource), linger=LINGER, redaction=Redaction(environment))


def log_record(event: Event) -> bytes:
    """Returns the event as a log record of OTLP's JSON encoding.

    It is written as a text: an encoder takes six times as long for it, and the time is the training's.
    """
    target, name, type_, attributes = event.target, event.name, event.type.value, event.attributes
    failed = attributes.get("success") is False or (event.type is EventType.INSTANT and bool(attributes.get("error")))
    own = {
        "perdure.target": target,
        "perdure.event.id": event.id,
        "perdure.event.type": type_,
        "process.pid": event.pid,
    }
    if event.rank is not None:
        own["perdure.rank"] = event.rank
    if event.generation is not None:
        own["perdure.generation"] = event.generation
    severity = f'{_ERROR},"severityText":"ERROR"' if failed else f'{_INFO},"severityText":"INFO"'
    return (
        f'{{"timeUnixNano":"{round(event.time * 1e9)}","observedTimeUnixNano":"{time.time_ns()}",'
        f'"severityNumber":{severity},"eventName":{encode_basestring(f"{target}.{name}")},'
        f'"body":{{"stringValue":{encode_basestring(f"{target} {name} {type_}")}}},'
        f'"attributes":[{_attributes({**own, **attributes})}]}}'
        # UTF-8 has no halves of characters.
    ).encode(errors="replace")


def _parts(events: Iterable[Event]) -> Iterable[list[bytes]]:
    """The records of one request each."""
    part, size = list[bytes](), 0
    for event in events:
        record = log_record(event)
        if part and size + len(record) > _LONGEST_BODY:
            yield part
            part, size = [], 0
        part.append(record)
        size += len(record)
    if part:
        yield part


def _attributes(values: Mapping[str, Any]) -> str:
    return ",".join([f'{{"key":{encode_basestring(name)},"value":{_value(value)}}}' for name, value in values.items()])


def _value(value: Any) -> str:
    if isinstance(value, str):
        return f'{{"stringValue":{encode_basestring(value)}}}'
    if isinstance(value, bool):
        return '{"boolValue":true}' if value else '{"boolValue":false}'
    if isinstance(value, int):
        # 64 bits, which JSON's readers may not have: OTLP writes them as texts.
        return f'{{"intValue":"{value}"}}'
    if isinstance(value, float):
        return f'{{"doubleValue":{value!r}}}'
    if value is None:
        return "{}"
    if isinstance(value, dict):
        return f'{{"kvlistValue":{{"values":[{_attributes(cast("dict[str, Any]", value))}]}}}}'
    return f'{{"arrayValue":{{"values":[{",".join(map(_value, cast("list[Any]", value)))}]}}}}'


def _rejected(answer: bytes) -> int:
    with contextlib.suppress(ValueError, AttributeError, TypeError):
        return int(json.loads(answer).get("partialSuccess", {}).get("rejectedLogRecords", 0))
    return 0


def _pairs(text: str) -> dict[str, str]:
    """The pairs of a variable such as `key=value,key=value`, whose values are percent-encoded."""
    found = (pair.partition("=") for pair in text.split(",") if "=" in pair)
    return {unquote(name.strip()): unquote(value.strip()) for name, _, value in found}


def _without_password(address: str) -> str:
    return Redaction({}).text(address)
