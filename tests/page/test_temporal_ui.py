"""Tests of jobs in Temporal's own UI, in a real browser: it shows what they do in words.

`PERDURE_PICTURES` names a folder for pictures of the pages: docs/images has some.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

import pytest

from perdure.contract.names import group_workflow_id
from perdure.local.control_plane import LocalControlPlane
from tests.support.command_line import CommandLine
from tests.support.devtools import Tab, open_tab
from tests.support.waiting import eventually
from tests.system.site import WALK, Job, Site

pytestmark = pytest.mark.long("page")

WORDS = """(() => {
    const frames = [...document.querySelectorAll("iframe")].map(one => one.contentDocument?.body?.innerText ?? "");
    return [document.body?.innerText ?? "", ...frames].join("\\n").replaceAll("\\u00a0", "");
})()"""
"""The page's text, with that of the frames in which Markdown is shown."""


@pytest.fixture
async def site(tmp_path: Path, control_plane: LocalControlPlane) -> AsyncIterator[Site]:
    """The shared server and worker, and jobs of the test's own."""
    site = Site(tmp_path, control_plane)
    await site.start()
    try:
        yield site
    finally:
        await site.end_jobs()


class Pages:
    """The UI in a browser that knows a codec server."""

    def __init__(self, site: Site, tab: Tab) -> None:
        self._site = site
        self._tab = tab
        self._home = f"{site.client.endpoint.ui}/namespaces/default/workflows"

    async def use_codec(self, endpoint: str) -> None:
        """Enters the endpoint in the UI's settings, as docs/encryption.md says."""
        await self.open("", "TrainingJob")
        await self._click("[data-testid='data-encoder-status']")
        await self._click("label:has(#use-local-endpoint-radio)")
        await self._click("dialog[open] textarea")
        await self._tab.call("Input.insertText", text=endpoint)
        await self._click("dialog[open] [data-testid='confirm-modal-button']:enabled")
        await eventually(lambda: self._tab.ask("localStorage.getItem('endpoint') !== null"), what="the setting is kept")

    async def _click(self, selector: str) -> None:
        # Not by its place: the dialog moves while it opens.
        element = f"document.querySelector({json.dumps(selector)})"
        clicked = f"(() => {{ {element}?.focus(); {element}?.click(); return {element} !== null; }})()"
        await eventually(
            lambda: self._tab.ask(clicked), what=lambda: f"{selector}, but {self._tab.messages[-3:]}", within=60
        )

    async def show(self, workflow_id: str, view: str, *words: str, picture: str = "") -> str:
        """Opens a page of a workflow, and waits until it shows these words."""
        temporal = await self._site.client.connect()
        run = (await temporal.get_workflow_handle(workflow_id).describe()).run_id
        return await self.open(f"/{quote(workflow_id, safe='')}/{run}/{view}", *words, picture=picture)

    async def open(self, path: str, *words: str, picture: str = "") -> str:
        # The UI draws of a long timeline only what fits into the window.
        await self._tab.call(
            "Emulation.setDeviceMetricsOverride", width=1280, height=4000, deviceScaleFactor=1, mobile=False
        )
        await self._tab.open(self._home + path)
        shown = ""

        async def complete() -> bool:
            nonlocal shown
            shown = await self._tab.ask(WORDS)
            if "Try a refresh" in shown:
                # The browser drops the UI's scripts (ERR_NETWORK_CHANGED) whenever the machine gets or loses a network
                # interface, as by tests of clusters, and the UI shows that as an error 500.
                await self._tab.open(self._home + path)
            return all(word in shown for word in words)

        await eventually(complete, within=60, what=lambda: f"{words} in {shown}")
        if picture and (folder := os.environ.get("PERDURE_PICTURES")):
            await self._tab.picture(Path(folder) / f"{picture}.png", width=1280, height=860)
        return shown


async def interrupted(site: Site) -> Job:
    """A job that trains again after a kill."""
    job = await site.submit("--lr", "3e-4", script=WALK, nodes="2:3")
    await job.running(nodes=3)
    job.signal(1, "rank")
    await job.running(nodes=3, after=1)
    return job


async def failed(site: Site) -> Job:
    raises = "raise TypeError('__init__() got <b>an</b> *unexpected* argument | lr')"
    job = await site.submit(command=["python", "-c", raises], nodes="1", retry={"max_restarts": 0})
    await site.client.wait(job.name)
    return job


async def suspended(site: Site) -> Job:
    job = await site.submit(script=WALK, nodes="1")
    await job.running(nodes=1)
    await site.client.suspend(job.name, reason="maintenance")
    return job


async def test_the_ui_says_what_jobs_do(site: Site, browser: Path, tmp_path: Path) -> None:
    command_line = CommandLine.local(tmp_path, site.state.path)
    running, broken, resting = await interrupted(site), await failed(site), await suspended(site)
    served = command_line.start("codec-server")
    try:
        assert served.stdout is not None
        printed: list[str] = []
        while (endpoint := re.search(r"settings: (\S+)", "".join(printed[-1:]))) is None:
            printed.append(served.stdout.readline())
            assert printed[-1], printed
        async with open_tab(browser) as tab:
            pages = Pages(site, tab)
            await pages.use_codec(endpoint[1])
            await pages.show(
                running.workflow_id,
                "user-metadata",
                "2:3 nodes: ",
                " --lr 3e-4",
                "RUNNING: 3 of 3 nodes, 3 ranks",
                "Next: nothing to do",
                "Last incident: #1 node 1: rank 1 SIGKILL (stepping again after ",
                "World: nodes 3, ranks 3, generation 2; nodes desired: 2 to 3",
                picture="temporal-ui-job",
            )
            await pages.show(
                running.workflow_id, "timeline", f"nodes of {running.name}, role worker", "desire to worker/0"
            )
            group = group_workflow_id(running.workflow_id, running.uid, "worker", 0)
            shown = await pages.show(
                group,
                "timeline",
                "lease of node 0.1",
                "generation 2 to node 1: rank 1 of 3 (#1: node 1: rank 1 SIGKILL)",
                "transitions to the job",
                picture="temporal-ui-group",
            )
            assert "gathers transitions for the job" in shown
            await pages.show(
                group,
                "user-metadata",
                "3 of 3 nodes are ready",
                f"Job: {running.workflow_id}",
                "World: generation 2; members here: 3",
                "READY",
                picture="temporal-ui-group-nodes",
            )
            await pages.show(group, "pending-activities", "hold_lease", '"state": "stepping"')
            await pages.show(
                broken.workflow_id,
                "user-metadata",
                "1 node: python -c ",
                "FAILED: ",
                "TypeError: __init__() got <b>an</b> *unexpected* argument | lr",
                "(it has stopped the job)",
                picture="temporal-ui-failed",
            )
            await pages.show(
                resting.workflow_id,
                "user-metadata",
                "SUSPENDED: suspended by a user: maintenance",
                "Next: nothing, until a user resumes it",
                picture="temporal-ui-suspended",
            )
            query = quote("JobPhase='SUSPENDED'")
            listed = await pages.open(f"?query={query}", resting.workflow_id, picture="temporal-ui-list")
            assert running.workflow_id not in listed
    finally:
        served.terminate()
        served.wait()
