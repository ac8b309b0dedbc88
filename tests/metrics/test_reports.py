"""Tests of metrics on the event bus: from any endpoint, as events, and as lines for people."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from aiohttp import web

from perdure.base.metrics.endpoint import serving_metrics
from perdure.base.metrics.prometheus import PrometheusMonitor, endpoint_monitors
from perdure.base.metrics.reports import MetricsToEvents, report_line
from perdure.base.metrics.samples import Sample
from perdure.events import AsyncExporter, EventEmitter, EventType, FileExporter
from perdure.events import Event as BusEvent
from tests.training.events.collected import lines

DCGM = b"""# HELP DCGM_FI_DEV_GPU_TEMP GPU temperature (in C).
# TYPE DCGM_FI_DEV_GPU_TEMP gauge
DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-1"} 61
# TYPE DCGM_FI_DEV_XID_ERRORS gauge
DCGM_FI_DEV_XID_ERRORS{gpu="0",UUID="GPU-1"} 0
# TYPE go_goroutines gauge
go_goroutines 12
"""


async def exported() -> bytes:
    return DCGM


class Raising:
    name = "raising"

    def read(self) -> Sequence[Sample]:
        raise RuntimeError("gone")


async def test_what_an_exporter_says_becomes_an_event(tmp_path: Path) -> None:
    exporter = AsyncExporter(FileExporter(tmp_path / "metrics.jsonl"))
    async with serving_metrics(exported, 0) as port:
        monitor = PrometheusMonitor(f"http://127.0.0.1:{port}/metrics", prefixes=("DCGM_FI_DEV_",))
        reports = MetricsToEvents([monitor, Raising()], EventEmitter("gpu", exporter), interval=timedelta(minutes=1))
        await reports.emit()
    exporter.close()
    [event] = lines(tmp_path / "metrics.jsonl")
    assert (event["target"], event["name"], event["type"]) == ("gpu", "metrics", "instant")
    assert event["attributes"] == {
        'DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-1"}': 61.0,
        'DCGM_FI_DEV_XID_ERRORS{gpu="0",UUID="GPU-1"}': 0.0,
    }


async def test_addresses_name_what_is_read_and_what_does_not_fit_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def many() -> bytes:
        return DCGM + b"".join(b"DCGM_FI_%d 1\n" % number for number in range(1000))

    exporter = AsyncExporter(FileExporter(tmp_path / "metrics.jsonl"))
    async with serving_metrics(many, 0) as port:
        address = f"http://127.0.0.1:{port}/metrics"
        few = endpoint_monitors([f"{address}#go_,DCGM_FI_DEV_XID_", "ftp://127.0.0.1/metrics"])
        for monitors in (few, endpoint_monitors([address])):
            await MetricsToEvents(monitors, EventEmitter("gpu", exporter), interval=timedelta(minutes=1)).emit()
    exporter.close()
    chosen, cut_off = (event["attributes"] for event in lines(tmp_path / "metrics.jsonl"))
    assert chosen == {'DCGM_FI_DEV_XID_ERRORS{gpu="0",UUID="GPU-1"}': 0.0, "go_goroutines": 12.0}
    assert cut_off["left_out"] == 1003 - 200
    assert "metrics are not read: address: expected http" in caplog.text


@asynccontextmanager
async def answering(path: str, answer: Callable[[], web.Response]) -> AsyncIterator[str]:
    """Training code that listens in the place of an exporter."""

    async def handle(_: web.Request) -> web.Response:
        return answer()

    application = web.Application()
    application.router.add_get(path, handle)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}{path}"
    finally:
        await runner.cleanup()


async def test_who_answers_does_not_choose_what_is_read() -> None:
    async with serving_metrics(exported, 0) as port:
        elsewhere = {"Location": f"http://127.0.0.1:{port}/metrics"}
        async with answering("/metrics", lambda: web.Response(status=302, headers=elsewhere)) as address:
            with pytest.raises(OSError, match="302"):
                await asyncio.to_thread(PrometheusMonitor(address).read)


async def test_exporters_are_read_without_the_proxy_of_the_environment() -> None:
    code = (
        "import sys; from perdure.base.metrics.prometheus import PrometheusMonitor; "
        "print(len(PrometheusMonitor(sys.argv[1]).read()))"
    )
    environment = {name: value for name, value in os.environ.items() if name.lower() != "no_proxy"}
    async with serving_metrics(exported, 0) as port:
        reader = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", code, f"http://127.0.0.1:{port}/metrics"),
            env={**environment, "http_proxy": "http://127.0.0.1:9"},
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await reader.communicate()
    assert said.decode().strip() == "3"


@pytest.mark.parametrize(
    "content",
    [
        lambda: b"".join(b"DCGM_FI_%d 1\n" % number for number in range(700_000)),
        lambda: b'DCGM_FI_DEV{x="' + b"a" * 8_000_000 + b'"} 1\n',
        lambda: b"#" * 8_000_000,
    ],
    ids=["samples", "one long line", "a comment"],
)
async def test_what_is_read_takes_little_memory(content: Callable[[], bytes]) -> None:
    body = content()
    async with answering("/metrics", lambda: web.Response(body=body)) as address:
        samples = await asyncio.to_thread(PrometheusMonitor(address, prefixes=("DCGM_",)).read)
    assert len(samples) < 50_000
    assert all(len(str(sample)) < 5_000 for sample in samples)


async def test_without_samples_there_is_no_event(tmp_path: Path) -> None:
    exporter = AsyncExporter(FileExporter(tmp_path / "metrics.jsonl"))
    await MetricsToEvents([Raising()], EventEmitter("gpu", exporter), interval=timedelta(minutes=1)).emit()
    exporter.close()
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("address", ["file:///etc/passwd", "/etc/passwd", "ftp://host/x"])
def test_only_http_is_read(address: str) -> None:
    with pytest.raises(ValueError, match="expected http"):
        PrometheusMonitor(address)


def test_a_line_for_people_is_short_and_has_no_control_characters() -> None:
    attributes = {"perdure_host_load1": 3.14159, "x\x1b[31m": 2, "text": "left out"}
    event = BusEvent("1-1", 0.0, "agent", "metrics", EventType.INSTANT, attributes, 1)
    assert report_line(event) == b"00:00:00 agent: host_load1 3.142, x?[31m 2\n"
    other = BusEvent("1-2", 0.0, "agent", "exit", EventType.INSTANT, {}, 1)
    assert report_line(other) == b"00:00:00 agent: exit instant\n"
