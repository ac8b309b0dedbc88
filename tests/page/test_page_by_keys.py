"""Tests of the page for users of a keyboard and of a screen reader, by what a real browser tells such programs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from perdure.page.server import serve_pages
from tests.page.played import PlayedClient, PlayedJob, failed, interrupted
from tests.page.site import PlayedApi, site_pages
from tests.support.devtools import Tab, open_tab
from tests.support.waiting import eventually

pytestmark = pytest.mark.long("page")

JOB = "jobs/default/llama/"
PAGES = ("", JOB, f"{JOB}logs", f"{JOB}change/scale?nodes=2", f"{JOB}change/goal", "cluster/")
NAMED = {"button", "link", "textbox", "searchbox", "checkbox", "combobox", "progressbar", "image", "table", "region"}
"""Roles whose elements say nothing without a name."""

LEAST_CONTRAST = 4.5
"""Of text, by WCAG 2.2, level AA."""

CONTRASTS = """
(() => {
  const parse = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, at) => sum + c * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const color = parse(getComputedStyle(one).backgroundColor);
      if (color.length < 4 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const element of document.querySelectorAll('body *')) {
    const words = [...element.childNodes].filter((one) => one.nodeType === 3 && one.data.trim());
    const isHidden = element.matches(':disabled, [hidden], [hidden] *') || !element.getClientRects().length;
    if (!words.length || isHidden) continue;
    const style = getComputedStyle(element);
    const color = element.closest('svg') ? style.fill : style.color;
    const [one, other] = [light(parse(color)), light(behind(element))].sort((a, b) => b - a);
    const ratio = (one + 0.05) / (other + 0.05);
    if (ratio < LEAST) found.push(`${element.tagName} ${words[0].data.trim().slice(0, 40)}: ${ratio.toFixed(2)}`);
  }
  return found;
})()
""".replace("LEAST", str(LEAST_CONTRAST))


@pytest.fixture
async def tab(browser: Path) -> AsyncIterator[Tab]:
    async with open_tab(browser) as tab:
        yield tab


async def elements(tab: Tab) -> list[dict[str, Any]]:
    """What a screen reader is told, in its order."""
    nodes = (await tab.call("Accessibility.getFullAXTree"))["nodes"]
    return [node for node in nodes if not node["ignored"]]


def value(node: dict[str, Any], name: str) -> Any:
    return node.get(name, {}).get("value", "")


async def focused(tab: Tab) -> str:
    """The element with the focus, as a user knows it."""
    words = "(e.ariaLabel || e.labels?.[0]?.innerText || e.innerText || '').trim().split('\\n')[0]"
    return await tab.ask(f"(e => e.tagName + ' ' + {words})(document.activeElement)")


async def stops(tab: Tab, most: int = 60) -> list[str]:
    """The elements that Tab leads to, from the one with the focus until the page's end; each shows that it has it."""
    found: list[str] = []
    while len(found) < most:
        await tab.press("Tab")
        if await tab.ask("document.activeElement === document.body || document.activeElement.dataset.seen === '1'"):
            break
        await tab.ask("document.activeElement.dataset.seen = '1'")
        found.append(await focused(tab))
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        assert await tab.ask(f"{outline} !== 'none' || document.activeElement.matches('.skip')"), found[-1]
    return found


async def tab_to(tab: Tab, element: str) -> None:
    """Presses Tab until the element has the focus."""
    for _ in range(60):
        await tab.press("Tab")
        if (await focused(tab)).startswith(element):
            return
    raise AssertionError(f"Tab does not lead to {element}")


@pytest.mark.parametrize("path", PAGES)
async def test_everything_has_a_name_headings_skip_no_level_and_text_has_contrast(
    tab: Tab, client: PlayedClient, path: str
) -> None:
    client.jobs["default", "gpt"] = PlayedJob(failed(), name="gpt")
    async with serve_pages(client, port=0) as link:
        await tab.open(link)
        await tab.open(f"{link.partition('?')[0]}{path}")
        await eventually(lambda: tab.ask("document.readyState === 'complete'"))
        await tab.ask("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        known = await elements(tab)
        nameless = [value(node, "role") for node in known if value(node, "role") in NAMED and not value(node, "name")]
        assert nameless == []
        roles = [value(node, "role") for node in known]
        assert roles.count("main") == 1
        assert value(known[0], "name"), "the title of the page"
        levels = await tab.ask("[...document.querySelectorAll('h1, h2, h3')].map((one) => Number(one.tagName[1]))")
        assert levels[0] == 1
        assert all(after <= before + 1 for before, after in pairwise(levels)), levels
        assert await tab.ask("document.documentElement.lang") == "en"
        for scheme in ("light", "dark"):
            await tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            assert await tab.ask(CONTRASTS) == [], scheme


async def test_a_job_is_read_and_changed_without_a_mouse(tab: Tab, client: PlayedClient) -> None:
    async with site_pages(client, PlayedApi()) as address:
        await tab.open(f"{address}{JOB}")
        await eventually(lambda: tab.ask("document.activeElement.name === 'token'"), what="the field has the focus")
        for key in "ana":
            await tab.press(key)
        await tab.press("Enter")
        await eventually(lambda: tab.ask("document.querySelectorAll('.cell').length === 4"))
        known = await stops(tab)
        assert known[:2] == ["A Skip to the content", "A Jobs"]
        assert sum(one.startswith("BUTTON node ") for one in known) == 1, "the map is one stop"
        await tab.open(f"{address}{JOB}")
        await eventually(lambda: tab.ask("document.querySelectorAll('.cell').length === 4"))
        await tab_to(tab, "BUTTON node 0")
        await tab.press("ArrowRight")
        await tab.press("Enter")
        assert "node 1 (gpu-1)" in await tab.ask("document.querySelector('#node').innerText")
        await tab_to(tab, "SUMMARY")
        await tab.press("Enter")
        assert await tab.ask("document.querySelector('#incident-1').open")
        await tab.open(f"{address}{JOB}")
        await tab_to(tab, "A Suspend")
        await tab.press("Enter")
        await eventually(lambda: tab.ask("document.querySelector('.plan') !== null"))
        await tab_to(tab, "BUTTON Suspend")
        await tab.press("Enter")
        await eventually(lambda: tab.ask("document.body?.innerText.includes('will suspend') ?? false"))
    assert [change[0] for change in client.changed] == ["suspend"]


async def test_what_changes_is_told_and_what_is_hidden_is_not(tab: Tab, client: PlayedClient) -> None:
    async with serve_pages(client, port=0) as link:
        await tab.open(link)
        await tab.open(f"{link.partition('?')[0]}{JOB}")
        alerts = [node for node in await elements(tab) if value(node, "role") == "alert"]
        assert alerts == [], "the page has its server"
        assert await tab.ask("document.querySelector('#headline').closest('[aria-live]').ariaLive") == "polite"
        states = [value(node, "name") for node in await elements(tab) if value(node, "role") == "button"]
        assert any("node 0" in one and "stepping" in one for one in states), "a color is no state"
        client.jobs["default", "llama"] = PlayedJob(interrupted())
    shown = "!document.querySelector('#away').hidden"
    await eventually(lambda: tab.ask(shown))
    alerts = [node for node in await elements(tab) if value(node, "role") == "alert"]
    assert len(alerts) == 1
