"""Tests of the page of machines in a real browser: a real worker watches this machine while real jobs use it.

`PERDURE_PICTURES` names a folder for a picture of the page.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure.base.state_folder import StateFolder
from perdure.local.control_plane import LocalControlPlane
from perdure.page.server import serve_pages
from tests.support.devtools import Tab, open_tab
from tests.support.waiting import eventually
from tests.system.site import PATIENCE, Job, Site

pytestmark = [pytest.mark.long("page"), pytest.mark.timeout(600)]

NODES = 3
"""Nodes for which this machine has room."""
UNTIL_FINISH = 'while ! test -e "$0"; do sleep 0.1; done'


@pytest.fixture
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    """A server and a worker, on a machine that takes few nodes."""
    monkeypatch.delenv("TEMPORAL_ADDRESS", raising=False)
    monkeypatch.setenv("PERDURE_CLUSTER", "on")
    plane = LocalControlPlane(StateFolder(tmp_path / "state"))
    (plane.state.path / "capacity").write_text(str(NODES))
    site = Site(tmp_path, plane)
    try:
        await site.start()
        yield site
    finally:
        await site.end_jobs()
        await plane.stop_worker()
        await plane.stop_server()


@pytest.fixture
async def tab(browser: Path) -> AsyncIterator[Tab]:
    async with open_tab(browser) as tab:
        yield tab


async def submit(site: Site, name: str, *, nodes: str) -> Job:
    out = site.folder / name
    command = ["sh", "-c", UNTIL_FINISH, str(out / "finish")]
    return await site.submit(name=name, out=out, nodes=nodes, command=command, recovery={"warm_starts": False})


async def row(tab: Tab, list_: str, name: str) -> list[str]:
    """The cells of a row, which begins with a name; empty while there is none."""
    rows = f"[...document.querySelectorAll('tbody[data-list={list_}-local] tr')]"
    return await tab.ask(
        f"(() => {{ const row = {rows}.find(row => row.children[0].innerText === '{name}');"
        " return row ? [...row.children].map(cell => cell.innerText) : []; })()"
    )


async def follow(tab: Tab, link: str) -> None:
    """Follows a link, wherever it is: rows above it come and go."""
    await eventually(lambda: tab.ask(f"document.querySelector({json.dumps(link)}) !== null"))
    await tab.ask(f"document.querySelector({json.dumps(link)}).click()")


async def test_what_jobs_have_of_a_machine_and_what_they_wait_for_changes_on_an_open_page(site: Site, tab: Tab) -> None:
    machine = socket.gethostname()
    first = await submit(site, "llama", nodes="2")
    await first.running(nodes=2)
    second = await submit(site, "resnet", nodes="2")
    async with serve_pages(site.client, port=0) as link:
        await tab.open(link)
        await follow(tab, "a[href='cluster/']")
        # Views of the worker are seconds apart, and so are looks of the page.

        async def waits() -> bool:
            return (await row(tab, "roles", "resnet"))[3:5] == ["1 of 2", "1 node: no free slot"]

        await eventually(waits, within=PATIENCE)
        assert (await row(tab, "roles", "llama"))[3:5] == ["2 of 2", ""]
        held = await row(tab, "machines", machine)
        assert held[3] == "llama 2, resnet 1"
        assert held[2].startswith("0 nodes, "), held
        assert "1 machine, seen" in await tab.ask("document.querySelector('#cluster-local').innerText")
        shown = "[...document.querySelectorAll('section.cluster, table')].filter(one => one.offsetHeight > 0)"
        assert await tab.ask(f"{shown}.map(one => one.tagName).join()") == "SECTION,TABLE,TABLE", (
            "nothing empty is shown"
        )
        assert await tab.ask("document.documentElement.scrollWidth <= innerWidth + 1")
        if folder := os.environ.get("PERDURE_PICTURES"):
            await tab.picture(Path(folder) / "page-machines.png", height=420)
        await tab.ask("window.opened = true")
        first.finish()

        async def has_both() -> bool:
            return (await row(tab, "roles", "resnet"))[3:5] == ["2 of 2", ""]

        await eventually(has_both, within=PATIENCE)

        async def is_left() -> bool:
            held = (await row(tab, "machines", machine))[3]
            return held == "resnet 2" and not await row(tab, "roles", "llama")

        await eventually(is_left, within=PATIENCE)
        assert await tab.ask("window.opened"), "the page was not loaded again"
        await follow(tab, "tbody[data-list=roles-local] a")
        await eventually(lambda: tab.ask("document.title.startsWith('resnet')"))
        errors = [one for one in tab.messages if one["method"] == "Log.entryAdded"]
        assert not [one for one in errors if one["params"]["entry"]["level"] == "error"], errors
    second.finish()
    await site.client.wait("resnet")
