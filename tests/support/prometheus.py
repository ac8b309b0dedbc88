"""A real Prometheus server, built from its Go module, that scrapes one address."""

from __future__ import annotations

import asyncio
import json
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.support.temporal_server import free_port
from tests.support.waiting import eventually

START = 60.0


class Prometheus:
    """The server's API."""

    def __init__(self, port: int) -> None:
        self._address = f"http://127.0.0.1:{port}"

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Returns an expression's result now: series with their labels and values."""
        return self._get("query", query=expression)["result"]

    def label_values(self, series: str, label: str) -> list[str]:
        """Returns all values of a label, as Grafana asks for them."""
        return self._get(f"label/{label}/values", **{"match[]": series})

    def _get(self, call: str, **arguments: str) -> Any:
        address = f"{self._address}/api/v1/{call}?{urllib.parse.urlencode(arguments)}"
        with urllib.request.urlopen(address, timeout=20) as answer:
            return json.loads(answer.read())["data"]

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._address}/-/ready", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False


@asynccontextmanager
async def prometheus(program: Path, folder: Path, *, target: int, rules: Path) -> AsyncIterator[Prometheus]:
    """Runs the server while the context is open.

    Args:
        program: The program.
        folder: For its configuration and its data.
        target: The port on loopback that it scrapes, each second.
        rules: A file with rules, which it evaluates each second.
    """
    port = free_port()
    configuration = folder / "prometheus.yml"
    configuration.write_text(
        yaml.safe_dump(
            {
                "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(rules)],
                "scrape_configs": [{"job_name": "perdure", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}],
            }
        )
    )
    with (folder / "prometheus.log").open("w") as log:
        process = await asyncio.create_subprocess_exec(
            program,
            f"--config.file={configuration}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            stdout=log,
            stderr=log,
        )
        try:
            server = Prometheus(port)
            await eventually(lambda: asyncio.to_thread(server.is_ready), within=START)
            yield server
        finally:
            process.terminate()
            await process.wait()
