"""Tests of the page in a real browser: what users do with it, and what training code and other pages try."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from perdure.contract import NodePhase, NodeView
from perdure.page import looks
from perdure.page.server import serve_pages
from tests.page.conftest import spec_of_all
from tests.page.played import HOSTILE, PlayedClient, PlayedJob, interrupted
from tests.policy.scenario import Scenario
from tests.support.devtools import Tab, open_tab
from tests.support.waiting import eventually

pytestmark = pytest.mark.long("page")


@pytest.fixture
async def tab(browser: Path) -> AsyncIterator[Tab]:
    async with open_tab(browser) as tab:
        yield tab


@pytest.fixture
async def link(client: PlayedClient) -> AsyncIterator[str]:
    """The link of a server of pages."""
    async with serve_pages(client, port=0) as link:
        yield link


def home(link: str) -> str:
    return link.partition("?")[0]


def refused(tab: Tab) -> list[str]:
    """What the browser has not done because our policy forbids it."""
    entries = [one["params"]["entry"]["text"] for one in tab.messages if one["method"] == "Log.entryAdded"]
    return [text for text in entries if "Content Security Policy" in text]


async def shown(tab: Tab, selector: str) -> str:
    return await tab.ask(f"document.querySelector({json.dumps(selector)}).innerText")


async def says(tab: Tab, text: str) -> bool:
    """Whether the page contains the text; between two pages there is no body."""
    return await tab.ask(f"document.body?.innerText.includes({json.dumps(text)}) ?? false")


async def test_hostile_names_messages_and_lines_stay_text(tab: Tab, link: str, client: PlayedClient) -> None:
    name = (HOSTILE + "x" * 10_000).replace("/", "_")
    hostile = PlayedJob(interrupted(), name=name)
    client.jobs["default", name] = hostile
    client.jobs["default", "gpt"].lines = [HOSTILE, "\x1b[2J" + "y" * 10_000]
    await tab.open(link)
    await eventually(lambda: tab.ask("document.querySelectorAll('#jobs tr').length === 3"))
    assert await tab.ask("document.title") == "Jobs of namespace default · Perdure"
    assert "<img src=x" in await shown(tab, "#jobs")
    assert await tab.ask("document.documentElement.scrollWidth <= innerWidth + 1"), "a long name breaks no layout"
    await tab.open(f"{home(link)}jobs/default/gpt/")
    await eventually(lambda: tab.ask("document.querySelectorAll('#facts dd').length > 3"))
    assert "<img src=x" in await shown(tab, "#facts")
    await tab.open(f"{home(link)}jobs/default/gpt/logs")
    await eventually(lambda: tab.ask("document.querySelectorAll('#log div').length === 2"))
    assert await tab.ask("document.querySelectorAll('#log *:not(div)').length") == 0
    assert "<script>" in await shown(tab, "#log")
    assert await tab.ask("document.title") == "Logs of gpt · Perdure"
    assert await tab.ask("document.documentElement.scrollWidth <= innerWidth + 1")
    assert refused(tab) == []


async def test_jobs_are_found_sorted_and_followed_by_keys(tab: Tab, link: str, client: PlayedClient) -> None:
    await tab.open(link)
    await eventually(lambda: tab.ask("document.querySelectorAll('#jobs tr').length === 2"))
    await tab.press("/")
    for key in "GPT":
        await tab.press(key)
    visible = (
        "[...document.querySelectorAll('#jobs tr')].filter(row => !row.hidden).map(row => row.children[0].innerText)"
    )
    assert await eventually(lambda: tab.ask(f"{visible}.join() === 'gpt'"))
    await tab.ask("document.querySelector('#find').value = ''")
    await tab.click("thead th:first-child .sort")
    assert await tab.ask(f"{visible}.join()") == "gpt,llama"
    await tab.click("thead th:first-child .sort")
    assert await tab.ask(f"{visible}.join()") == "llama,gpt"
    client.jobs["default", "new"] = PlayedJob(interrupted(), name="new")
    await eventually(lambda: tab.ask(f"{visible}.join() === 'new,llama,gpt'"), what="still sorted")


async def test_a_job_is_live_and_what_was_opened_stays_open(tab: Tab, link: str, client: PlayedClient) -> None:
    await tab.open(link)
    await tab.open(f"{home(link)}jobs/default/llama/#incident-1")
    await eventually(lambda: tab.ask("document.querySelector('#incident-1').open"))
    assert "rank-failure/1" in await shown(tab, "#incident-1")
    before = await shown(tab, "#headline")
    await eventually(lambda: tab.ask(f"document.querySelector('#headline').innerText !== {json.dumps(before)}"))
    client.jobs["default", "llama"].scenario.rank_killed(0)
    await eventually(lambda: tab.ask("document.querySelector('#incident-2') !== null"))
    assert await tab.ask("document.querySelector('#incident-1').open")
    await tab.click(".cell")
    assert "node 0 (gpu-0)" in await shown(tab, "#node")
    await tab.press("ArrowRight")
    assert await tab.ask("document.activeElement.dataset.node") == "1"
    await eventually(lambda: tab.ask("document.querySelector('#headline').innerText.length > 10"))
    assert await tab.ask("document.activeElement.dataset.node") == "1", "a change keeps the focus"
    assert refused(tab) == []


async def test_a_button_shows_its_plan_and_a_stale_one_changes_nothing(
    tab: Tab, link: str, client: PlayedClient
) -> None:
    await tab.open(link)
    await tab.open(f"{home(link)}jobs/default/llama/change/suspend")
    assert "would release all nodes" in await shown(tab, ".plan")
    # The job is started again under this page.
    client.jobs["default", "llama"].uid = "89abcdef"
    await tab.click("form[method=post] button")
    await eventually(lambda: says(tab, "earlier run"))
    assert client.changed == []
    await tab.click("form.change button")
    await eventually(lambda: tab.ask("document.querySelector('form[method=post]') !== null"))
    await tab.click("form[method=post] button")
    await eventually(lambda: says(tab, "will suspend"))
    assert [change[0] for change in client.changed] == ["suspend"]


async def test_a_foreign_page_reads_changes_and_frames_nothing(tab: Tab, link: str, client: PlayedClient) -> None:
    """The user has opened the page, and then another site's, which runs at another port of this very machine."""
    await tab.open(link)
    target = f"{home(link)}jobs/default/llama/"
    page = (
        f'<form id=f method=post action="{target}change/cancel"><input name=csrf value=x></form>'
        f'<iframe src="{target}"></iframe><script src="{home(link)}static/page.js"></script>'
    )

    async def attack(_: web.Request) -> web.Response:
        return web.Response(text=page, content_type="text/html")

    application = web.Application()
    application.router.add_get("/", attack)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        await tab.open(f"http://127.0.0.1:{runner.addresses[0][1]}/")
        read = f"fetch('{target}', {{credentials: 'include'}}).then(a => a.text()).catch(e => 'failed')"
        assert await tab.ask(read) == "failed"
        post = f"fetch('{target}change/cancel', {{method: 'POST', credentials: 'include', mode: 'no-cors'}})"
        await tab.ask(f"{post}.then(a => a.type).catch(e => 'failed')")
        framed = "(() => { try { return frames[0].document.body.innerText } catch { return '' } })()"
        assert await tab.ask(framed) == ""
        await tab.ask("document.querySelector('#f').submit()")
        await eventually(lambda: says(tab, "are refused"))
    finally:
        await runner.cleanup()
    assert client.changed == []


async def test_a_server_that_is_away_and_back(tab: Tab, link: str, client: PlayedClient) -> None:
    await tab.open(link)
    await tab.open(f"{home(link)}jobs/default/llama/")
    client.away = True
    await eventually(lambda: tab.ask("document.querySelector('#problem').innerText.includes('does not answer')"))
    assert await tab.ask("document.querySelectorAll('.cell').length") == 4, "the last answer stays"
    client.away = False
    await eventually(lambda: tab.ask("document.querySelector('#problem').innerText === ''"))


async def test_the_page_says_when_its_own_server_has_ended(tab: Tab, client: PlayedClient) -> None:
    async with serve_pages(client, port=0) as link:
        await tab.open(link)
        await eventually(lambda: tab.ask("document.querySelector('#away').hidden"))
    await eventually(lambda: tab.ask("!document.querySelector('#away').hidden"))


class LargeJob(PlayedJob):
    """A job of 2,000 nodes, of which each look finds some in another state."""

    def __init__(self) -> None:
        super().__init__(Scenario("2").running(), name="large")
        self.looks = 0

    @property
    def nodes(self) -> tuple[NodeView, ...]:
        self.looks += 1
        known = super().nodes[0]
        return tuple(
            known.replace(rank=rank, group_rank=rank, host=f"gpu-{rank}", reachable=(rank + self.looks) % 97 != 0)
            if (rank + self.looks) % 89
            else NodeView(rank=rank, incarnation=1, phase=NodePhase.LOST, since=known.since)
            for rank in range(2_000)
        )


async def test_500_jobs_and_2000_nodes_stay_fluid(
    tab: Tab, link: str, client: PlayedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(looks, "recorded_spec", spec_of_all)
    for number in range(500):
        client.jobs["default", f"job-{number}"] = PlayedJob(interrupted(), name=f"job-{number}")
    client.jobs["default", "large"] = LargeJob()
    frames = (
        "new Promise(done => { const began = performance.now(); let longest = 0, last = began;"
        " const tick = now => { longest = Math.max(longest, now - last); last = now;"
        " now - began > 3000 ? done(longest) : requestAnimationFrame(tick); }; requestAnimationFrame(tick); })"
    )
    for path, count in (("", "#jobs tr"), ("jobs/default/large/", ".cell")):
        began = time.monotonic()
        await tab.open(link if not path else f"{home(link)}{path}")
        await eventually(lambda count=count: tab.ask(f"document.querySelectorAll('{count}').length >= 500"))
        opened = time.monotonic() - began
        longest = await tab.ask(frames)
        print(f"{path or 'list'}: opened in {opened:.2f} s, longest frame {longest:.0f} ms")
        assert opened < 10
        assert longest < 1_000
