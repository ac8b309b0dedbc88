"""Tests of a real browser on jobs in every state, in two tabs, behind a proxy, of users with and without rights."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from benchmarks.recovery.processes import free_port
from perdure.contract import JobPhase
from perdure.page import looks
from perdure.page.server import serve_pages
from tests.page.conftest import proxied
from tests.page.played import HOSTILE, PlayedClient, PlayedJob, failed, interrupted
from tests.page.site import PlayedApi, site_pages
from tests.policy.scenario import Scenario
from tests.support.devtools import Tab, open_tab
from tests.support.waiting import eventually

pytestmark = pytest.mark.long("page")

JOB = "jobs/default/llama/"


@pytest.fixture
async def tab(browser: Path) -> AsyncIterator[Tab]:
    async with open_tab(browser) as tab:
        yield tab


def home(link: str) -> str:
    return link.partition("?")[0]


async def says(tab: Tab, text: str, element: str = "body") -> bool:
    """Whether an element contains the text; between two pages there is none."""
    try:
        return await tab.ask(f"document.querySelector({element!r})?.innerText.includes({text!r}) ?? false")
    except AssertionError as error:
        if "navigated" in str(error):
            return False
        raise


async def complaints(tab: Tab) -> list[str]:
    """Errors of scripts, and what the browser has refused to do for the page."""
    entries = [one["params"]["entry"] for one in tab.messages if one["method"] == "Log.entryAdded"]
    return [one["text"] for one in entries if one["level"] == "error"]


def ended(phase: JobPhase, scenario: Scenario | None = None) -> PlayedJob:
    job = PlayedJob(scenario or interrupted())
    job.fields = {"phase": phase, "finished_at": datetime.now(UTC)}
    return job


def suspended() -> PlayedJob:
    job = PlayedJob(interrupted())
    job.fields = {"phase": JobPhase.SUSPENDED}
    return job


STATES = {
    "finished": (lambda: ended(JobPhase.SUCCEEDED), "SUCCEEDED", False),
    "cancelled": (lambda: ended(JobPhase.CANCELLED), "CANCELLED", False),
    "failed": (lambda: ended(JobPhase.FAILED, failed()), "FAILED", False),
    "suspended": (suspended, "SUSPENDED", True),
    "never started": (lambda: PlayedJob(Scenario("2")), "STARTING", True),
}


@pytest.mark.parametrize("state", STATES)
async def test_a_job_of_every_state_has_a_page(tab: Tab, client: PlayedClient, state: str) -> None:
    make, phase, has_buttons = STATES[state]
    client.jobs["default", "llama"] = make()
    async with serve_pages(client, port=0) as link:
        await tab.open(link)
        await eventually(lambda: says(tab, phase, "#jobs"))
        await tab.open(f"{home(link)}{JOB}")
        await eventually(lambda: says(tab, phase, "#headline"))
        assert await tab.ask("document.querySelectorAll('.actions a[href^=change]').length > 0") == has_buttons
        assert await tab.ask("document.documentElement.scrollWidth <= innerWidth + 1")
        if state == "suspended":
            assert await says(tab, "Resume", ".actions")
            assert not await says(tab, "Suspend …", ".actions")
    assert await complaints(tab) == []


async def test_a_job_that_is_reset_while_its_page_is_open_shows_its_new_run(tab: Tab, client: PlayedClient) -> None:
    async with serve_pages(client, port=0) as link:
        await tab.open(link)
        await tab.open(f"{home(link)}{JOB}")
        await eventually(lambda: says(tab, "rank 1", "main"))
        client.jobs["default", "llama"] = fresh = PlayedJob(Scenario("2").running())
        fresh.uid = "89abcdef"
        await client.tell()
        await eventually(lambda: tab.ask("document.querySelectorAll('#main details[id^=incident]').length === 0"))
        assert await says(tab, "RUNNING", "#headline")


async def test_10_kb_of_html_and_controls_in_an_exception_and_a_label_stay_text(
    tab: Tab, client: PlayedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = HOSTILE + "z" * 10_000
    scenario = Scenario("2", retry={"max_restarts": 0}).running().wait(30)
    scenario.rank_raised(1, long)
    client.jobs["default", "llama"] = PlayedJob(scenario)

    async def spec(*_: object, **__: object) -> dict[str, object]:
        return {"name": "llama", "labels": {long: long}}

    monkeypatch.setattr(looks, "recorded_spec", spec)
    async with serve_pages(client, port=0) as link:
        await tab.open(link)
        title = await tab.ask("document.title")
        await tab.open(f"{home(link)}{JOB}")
        await eventually(lambda: says(tab, "<img src=x", "main"))
        await tab.ask("document.querySelectorAll('details').forEach(one => one.open = true)")
        assert await tab.ask("document.querySelectorAll('main img, main script').length") == 0
        assert (title, await tab.ask("document.title")) == ("Jobs of namespace default · Perdure", "llama · Perdure")
        assert "\x1b" not in await tab.ask("document.body.innerText")
        assert await tab.ask("document.documentElement.scrollWidth <= innerWidth + 1"), "a long word breaks no layout"
    assert await complaints(tab) == []


async def test_a_change_in_one_tab_is_seen_in_the_other(browser: Path, tab: Tab, client: PlayedClient) -> None:
    job = client.jobs["default", "llama"]
    async with serve_pages(client, port=0) as link, open_tab(browser) as other:
        for one in (tab, other):
            await one.open(link)
            await one.open(f"{home(link)}{JOB}")
        await tab.open(f"{home(link)}{JOB}change/suspend")
        await tab.click("form[method=post] button")
        await eventually(lambda: says(tab, "will suspend"))
        job.fields = {"phase": JobPhase.SUSPENDED}
        await eventually(lambda: says(other, "SUSPENDED", "#headline"))
        assert [change[0] for change in client.changed] == ["suspend"]


async def test_a_proxy_shows_a_live_page_below_a_path(tab: Tab, client: PlayedClient) -> None:
    async with proxied(client, strips=True, keeps_name=True) as visitor:
        await tab.open(str(visitor.link))
        await eventually(lambda: says(tab, "llama", "#jobs"))
        assert await tab.ask("getComputedStyle(document.querySelector('.phase')).borderRadius") == "10px", "its style"
        await tab.click("#jobs th a")
        await eventually(lambda: tab.ask("location.pathname.startsWith('/perdure/jobs/default/')"))
        await tab.open(f"{home(str(visitor.link))}{JOB}")
        client.jobs["default", "llama"].scenario.rank_killed(0)
        await eventually(lambda: tab.ask("document.querySelector('#incident-2') !== null"), what="events pass")
        await tab.click(".actions a[href='change/suspend']")
        await eventually(lambda: says(tab, "would release all nodes"))
        await tab.click("form[method=post] button")
        await eventually(lambda: says(tab, "will suspend"))
    assert await complaints(tab) == []


async def test_a_reader_sees_disabled_buttons_and_says_who_it_is(tab: Tab, client: PlayedClient) -> None:
    async with site_pages(client, PlayedApi()) as address:
        await tab.open(f"{address}{JOB}")
        await eventually(lambda: says(tab, "Sign in"))
        for key in "ben":
            await tab.press(key)
        await tab.click("form button")
        await eventually(lambda: tab.ask("document.querySelectorAll('.actions button:disabled').length > 3"))
        assert await tab.ask("document.querySelectorAll('.actions a').length") == 0
        assert await says(tab, "ben", "header")
        await tab.click(".actions button:disabled")
        assert await tab.ask(f"location.pathname === '/{JOB}'")
        await tab.click(".who button")
        await eventually(lambda: says(tab, "Sign in", "h1"))
    assert client.changed == []


async def test_a_site_s_server_that_is_replaced_under_an_open_page_is_found_again(
    tab: Tab, client: PlayedClient
) -> None:
    """The server keeps nothing: the next one knows the user by the same token."""
    port, api = free_port(), PlayedApi()
    async with site_pages(client, api, port=port) as address:
        await tab.open(f"{address}{JOB}")
        await eventually(lambda: says(tab, "Sign in"))
        for key in "ana":
            await tab.press(key)
        await tab.click("form button")
        await eventually(lambda: tab.ask("document.querySelectorAll('.cell').length === 4"))
    await eventually(lambda: tab.ask("!document.querySelector('#away').hidden"))
    client.jobs["default", "llama"].scenario.rank_killed(0)
    async with site_pages(client, api, port=port):
        await eventually(lambda: tab.ask("document.querySelector('#incident-2') !== null"), what="it goes on by itself")
        assert await tab.ask("document.querySelector('#away').hidden")
