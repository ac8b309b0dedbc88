"""A real browser with a page of an attacker: what the page reads and starts on the embedded control plane."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from aiohttp import web
from temporalio.client import Client as TemporalClient
from temporalio.runtime import PrometheusConfig, Runtime, TelemetryConfig
from temporalio.service import RPCError, RPCStatusCode

from perdure.base.encryption.codec import PayloadEncryption
from perdure.base.encryption.codec_server import codec_server
from perdure.base.services import health_endpoint
from perdure.base.state_folder import StateFolder
from perdure.client.connection import connect, payload_encryption
from perdure.local import control_plane as module
from perdure.local.control_plane import LocalControlPlane
from tests.support.browser import open_page
from tests.support.command_line import end_nodes
from tests.support.temporal_server import free_port

PAGE = Path(__file__).with_name("page.html")

NOTHING = (401, 403, 404, 405)
"""Statuses of refusals, and of paths and methods that a server does not have."""

Address = tuple[str, int]


@dataclass(frozen=True)
class Attempt:
    """One request of the page. Status 0 and no text: the page learned nothing of the answer."""

    what: str
    url: str
    status: int
    text: str


@dataclass(frozen=True)
class Report:
    """What a page could do."""

    attempts: tuple[Attempt, ...]
    tried: tuple[str, ...]
    """IDs of workflows that it tried to start."""

    @property
    def read(self) -> list[Attempt]:
        """Answers that the page could read, but for those that have no content."""
        return [one for one in self.attempts if one.text and one.status not in NOTHING]


class Attacker:
    """A web site, and what stands for a name server that first names the site and then this machine."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reports: dict[str, Report] = {}
        self.given: dict[str, Any] = {}
        self._expected: set[str] = set()
        self._all = asyncio.Event()
        self._site: Address = ("", 0)
        self._leads: dict[str, Address] = {}
        self._switched: set[str] = set()
        self._open: dict[str, set[asyncio.StreamWriter]] = {}

    async def attack(self, browser: Path, targets: Iterable[Address]) -> dict[str, Report]:
        """Has the page attack these addresses from its own origin, and each of them under a name that leads there.

        Returns:
            Reports by the host name of the page: `evil.example`, and `rebind-PORT.example`.
        """
        application = web.Application(client_max_size=64 * 1024 * 1024)
        application.router.add_get("/", self._page)
        application.router.add_post("/switch", self._switch)
        application.router.add_post("/report", self._report)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        fronts: list[asyncio.Server] = []
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self._site = runner.addresses[0][:2]
            names = {"evil.example": f"127.0.0.1:{self._site[1]}"}
            rebinding: dict[str, int] = {}
            for address in targets:
                name = f"rebind-{address[1]}.example"
                self._leads[name] = address
                front = await asyncio.start_server(self._passing(name), "127.0.0.1", 0)
                fronts.append(front)
                names[name] = f"127.0.0.1:{front.sockets[0].getsockname()[1]}"
                rebinding[name] = address[1]
            self._expected = {"evil.example", *rebinding}
            hosts = {host for address in self._leads.values() for host in (address[0], "localhost")}
            home = f"http://evil.example:{self._site[1]}"
            self.given = {
                "name": self.name,
                "home": home,
                "start": {"workflowType": {"name": "TrainingJob"}, "taskQueue": {"name": "perdure"}},
                "rebinding": rebinding,
                "targets": [f"http://{host}:{port}" for host in sorted(hosts) for port in rebinding.values()],
            }
            async with open_page(browser, f"{home}/", names=names), asyncio.timeout(120):
                await self._all.wait()
        finally:
            for front in fronts:
                front.close()
            await runner.cleanup()
        return self.reports

    async def _page(self, _: web.Request) -> web.Response:
        return web.Response(text=PAGE.read_text().replace("GIVEN", json.dumps(self.given), 1), content_type="text/html")

    async def _switch(self, request: web.Request) -> web.Response:
        name = request.query["name"]
        self._switched.add(name)
        for writer in self._open.pop(name, set()):
            writer.close()
        return web.Response()

    async def _report(self, request: web.Request) -> web.Response:
        said = json.loads(await request.text())
        attempts = tuple(Attempt(**one) for one in said["attempts"])
        tried = tuple(f"{self.name}-{said['page']}-{number}" for number in range(said["started"]))
        self.reports[said["page"]] = Report(attempts, tried)
        if self.reports.keys() == self._expected:
            self._all.set()
        return web.Response()

    def _passing(self, name: str) -> Any:
        """Passes bytes on to where a name leads now."""

        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._open.setdefault(name, set()).add(writer)
            to = self._leads[name] if name in self._switched else self._site
            try:
                others_reader, others_writer = await asyncio.open_connection(*to)
            except OSError:
                writer.close()
                return
            await asyncio.gather(copy(reader, others_writer), copy(others_reader, writer))

        return pass_on


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while chunk := await reader.read(65536):
            writer.write(chunk)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


def listening(pid: int) -> set[Address]:
    """Addresses at which a process accepts connections."""
    connections = psutil.Process(pid).net_connections("tcp")
    return {(one.laddr.ip, one.laddr.port) for one in connections if one.status == psutil.CONN_LISTEN}


async def started(client: TemporalClient, reports: dict[str, Report]) -> set[str]:
    """The workflows that the pages have started."""
    found: set[str] = set()
    for workflow in (one for report in reports.values() for one in report.tried):
        try:
            await client.get_workflow_handle(workflow).describe()
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise
        else:
            found.add(workflow)
    return found


async def test_a_page_reads_and_starts_nothing_by_any_name(control_plane: LocalControlPlane, browser: Path) -> None:
    """All ports that a page can find: of the server, of the worker, which serves the UI, and of a codec server.

    A worker serves metrics and a probe only where it is told to; here they are served beside it.
    """
    status = control_plane.status()
    assert status.server
    assert status.worker
    ours = listening(status.server.pid) | listening(status.worker.pid)
    ui = ("127.0.0.1", status.server.ui_port)
    assert ui in ours
    # The UI itself is where no page finds it.
    hidden = urlsplit(status.server.ui_backend)
    assert {address for address in ours if address[0] != "127.0.0.1"} == {(hidden.hostname, hidden.port)}
    found = [address for address in ours if address[0] == "127.0.0.1"]
    assert len(found) >= 4
    attacker = Attacker(f"page-{secrets.token_hex(3)}")
    endpoint = await control_plane.ensure_server()
    encryption, metrics, health = PayloadEncryption.of(payload_encryption(endpoint).keys), free_port(), free_port()
    runtime = Runtime(telemetry=TelemetryConfig(metrics=PrometheusConfig(bind_address=f"127.0.0.1:{metrics}")))
    async with codec_server(encryption, origins=[status.server.ui]) as codec, health_endpoint(health):
        codec_port = urlsplit(codec.endpoint).port
        assert codec_port
        found += [("127.0.0.1", port) for port in (codec_port, metrics, health)]
        reports = await attacker.attack(browser, found)
    del runtime
    assert await started(await connect(endpoint), reports) == set()
    assert all(report.tried for report in reports.values())
    assert reports["evil.example"].read == []
    by_port = {address[1]: reports[f"rebind-{address[1]}.example"] for address in found}
    refusals = {port for port, report in by_port.items() if any(one.status == 403 for one in report.attempts)}
    assert refusals >= {status.server.ui_port, codec_port}
    # They have no option that closes them: counts, without names of jobs, and that the worker runs.
    readable = [one for report in by_port.values() for one in report.read]
    assert {one.url for one in readable} <= {"/metrics", "/healthz"}
    assert not [one for one in readable if "job/" in one.text]


@asynccontextmanager
async def open_plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalControlPlane]:
    """A server without what keeps pages out."""
    open_to_all = [option for option in module.SERVER_OPTIONS if "httpAllowedHosts" not in option[1]]
    monkeypatch.setattr(module, "SERVER_OPTIONS", tuple(open_to_all))
    plane = LocalControlPlane(StateFolder(tmp_path / "state"))
    try:
        await plane.ensure_server()
        yield plane
    finally:
        await plane.stop_server()
        end_nodes(plane.state.path)


async def test_the_page_reads_and_starts_where_nothing_forbids_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, browser: Path
) -> None:
    """Otherwise the test above would prove nothing."""
    async with open_plane(tmp_path, monkeypatch) as plane:
        server = plane.status().server
        assert server
        ui = urlsplit(server.ui_backend)
        assert ui.hostname
        assert ui.port
        reports = await Attacker("page").attack(browser, listening(server.pid))
        begun = await started(await connect(await plane.ensure_server()), reports)
    rebound = reports[f"rebind-{ui.port}.example"]
    assert {one.what for one in rebound.read} >= {"read", "read with credentials"}
    assert begun & set(rebound.tried)
    assert begun & set(reports["evil.example"].tried)
