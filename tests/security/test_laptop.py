"""Tests that a web page can neither start nor read anything of the embedded control plane, which authorizes no one."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import aiohttp
import psutil
import pytest
from temporalio.service import RPCError, RPCStatusCode

from perdure.base.state_folder import StateFolder
from perdure.client.connection import connect
from perdure.local import control_plane as module
from perdure.local.control_plane import LocalControlPlane

FROM_A_PAGE = {"Content-Type": "text/plain", "Origin": "https://evil.example"}
"""Headers of a request that a browser sends to another origin without a preflight."""

HOSTS = ("127.0.0.1:{port}", "localhost:{port}", "evil.example")
"""The last one is what the browser says when a name of the attacker leads to this machine."""


async def attack(plane: LocalControlPlane, method: str, path: str, content: object = None) -> list[int]:
    """The statuses with which the HTTP API answers, which listens on a port that the server chose."""
    server = plane.status().server
    assert server is not None
    statuses: list[int] = []
    connections = psutil.Process(server.pid).net_connections("tcp")
    # The UI listens elsewhere: tests/security/test_browser.py.
    addresses = {one.laddr for one in connections if one.status == psutil.CONN_LISTEN}
    for port in {port for host, port in addresses if host == "127.0.0.1"}:
        for host in HOSTS:
            headers = {**FROM_A_PAGE, "Host": host.format(port=port)}
            timeout = aiohttp.ClientTimeout(total=5)
            try:
                async with (
                    aiohttp.ClientSession(timeout=timeout) as session,
                    session.request(
                        method, f"http://127.0.0.1:{port}{path}", data=json.dumps(content), headers=headers
                    ) as answer,
                ):
                    # The port of the metrics answers, too, with a page that says that it has none such.
                    if (await answer.text()).startswith("{"):
                        statuses.append(answer.status)
            except (aiohttp.ClientError, TimeoutError):
                continue
    return statuses


def start(name: str) -> tuple[str, object]:
    content = {
        "workflowType": {"name": "TrainingJob"},
        "taskQueue": {"name": "perdure"},
        "input": [{"name": name, "roles": {"worker": {"nodes": 1, "command": ["touch", "/tmp/owned"]}}}],
    }
    return f"/api/v1/namespaces/default/workflows/{name}", content


async def test_a_web_page_starts_and_reads_nothing(control_plane: LocalControlPlane) -> None:
    name = f"page-{secrets.token_hex(3)}"
    assert set(await attack(control_plane, "POST", *start(name))) == {403}
    assert set(await attack(control_plane, "GET", "/api/v1/namespaces/default/workflows")) == {403}
    temporal = await connect(await control_plane.ensure_server())
    with pytest.raises(RPCError) as missing:
        await temporal.get_workflow_handle(name).describe()
    assert missing.value.status is RPCStatusCode.NOT_FOUND


async def test_the_attack_works_where_nothing_forbids_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test above would prove nothing."""
    open_to_all = [option for option in module.SERVER_OPTIONS if "httpAllowedHosts" not in option[1]]
    monkeypatch.setattr(module, "SERVER_OPTIONS", tuple(open_to_all))
    plane = LocalControlPlane(StateFolder(tmp_path / "state"))
    try:
        await plane.ensure_server()
        assert 200 in await attack(plane, "POST", *start("page"))
        temporal = await connect(await plane.ensure_server())
        assert (await temporal.get_workflow_handle("page").describe()).workflow_type == "TrainingJob"
    finally:
        await plane.stop_server()
