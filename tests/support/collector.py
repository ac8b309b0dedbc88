"""A collector of OTLP over HTTP, which decodes what it is sent as OpenTelemetry's own messages."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from google.protobuf.json_format import Parse
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.trace.v1.trace_pb2 import Span

MESSAGES = {"/v1/logs": ExportLogsServiceRequest, "/v1/traces": ExportTraceServiceRequest}


class Collector(ThreadingHTTPServer):
    """Keeps the requests that it accepts. `status` is what it answers; while `gate` is closed, it answers nothing."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.status = 200
        self.answer: dict[str, Any] = {}
        self.answer_headers: dict[str, str] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.reached = threading.Event()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def records(self) -> list[LogRecord]:
        return [
            record
            for request in list(self.requests)
            if isinstance(request, ExportLogsServiceRequest)
            for resource in request.resource_logs
            for scope in resource.scope_logs
            for record in scope.log_records
        ]

    @property
    def spans(self) -> list[tuple[dict[str, Any], Span]]:
        """The spans, each with the attributes of its resource."""
        return [
            (attributes(resource.resource.attributes), span)
            for request in list(self.requests)
            if isinstance(request, ExportTraceServiceRequest)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


def attributes(pairs: Any) -> dict[str, Any]:
    """OpenTelemetry's attributes as Python's values."""
    found: list[KeyValue] = list(pairs)
    return {pair.key: _value(pair.value) for pair in found}


def _value(value: AnyValue) -> Any:
    match value.WhichOneof("value"):
        case None:
            return None
        case "kvlist_value":
            return attributes(value.kvlist_value.values)
        case "array_value":
            return [_value(item) for item in value.array_value.values]
        case kind:
            return getattr(value, kind)


@contextmanager
def collecting() -> Iterator[Collector]:
    """Runs a collector while the context is open."""
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield collector
        finally:
            collector.gate.set()
            collector.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.reached.set()
        self.server.gate.wait()
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        if self.server.status == 200:
            message = MESSAGES[self.path]()
            if self.headers["Content-Type"] == "application/json":
                # Identifiers are hexadecimal in OTLP's JSON and base64 in that of protobuf; events have none.
                Parse(body, message)
            else:
                message.ParseFromString(body)
            self.server.requests.append(message)
            self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        answer = json.dumps(self.server.answer).encode()
        self.send_response(self.server.status)
        for name, value in {**self.server.answer_headers, "Content-Length": str(len(answer))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        pass
