"""A collector that accepts everything that it is sent by OTLP over HTTP, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Collector(ThreadingHTTPServer):
    """Counts the bytes that it gets."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Accepts)
        self.size = 0


class _Accepts(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    """Connections stay open, as with every collector."""
    server: Collector

    def do_POST(self) -> None:
        self.server.size += len(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer(b"{}" if self.headers["Content-Type"] == "application/json" else b"")

    def do_GET(self) -> None:
        self._answer(b"%d" % self.server.size)

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def collecting() -> Iterator[str]:
    """Runs a collector while the context is open; yields its endpoint, where GET returns the number of bytes."""
    words = [sys.executable, "-m", "benchmarks.events.collector"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


if __name__ == "__main__":
    with Collector() as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()
