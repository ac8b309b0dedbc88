"""Tests of the goal of a job on its page: shown, previewed by the job itself, and changed."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from html import unescape
from pathlib import Path

import pytest

from perdure.page.server import serve_pages
from tests.page.conftest import Visitor
from tests.page.played import PlayedClient, PlayedJob
from tests.policy.capacity.test_scaling import ScaledJob
from tests.policy.capacity.test_throughput import shared
from tests.support.devtools import Tab, open_tab
from tests.support.waiting import eventually

JOB = "/jobs/default/llama/"


@pytest.fixture
def scaled(client: PlayedClient) -> PlayedJob:
    """A job that has measured its speed, and has chosen 6 nodes of 16 by it."""
    job = client.jobs["default", "llama"] = PlayedJob(ScaledJob(law=shared(8, 0.5), total=8000).settle())
    return job


async def test_another_goal_is_previewed_by_the_job_and_then_set(
    visitor: Visitor, client: PlayedClient, scaled: PlayedJob
) -> None:
    assert "policy efficient, batch global; 6 nodes chosen" in await visitor.get(JOB)
    path = f"{JOB}change/goal"
    page = await visitor.get(path)
    assert "Now: policy efficient" in page
    assert "Nothing was changed" not in page, "it needs a goal first"
    query = f"{path}?finish_by=10h&price=2&reason=the+review"
    page = await visitor.get(query)
    assert "This would have policy deadline" in page
    assert "It would choose 3 nodes: 3 nodes finish at" in page
    assert re.search(r'<th scope="row">3</th>.*expected, in time, chosen', page, re.DOTALL)
    assert client.changed == []
    form = await visitor.hidden(query)
    due = datetime.fromisoformat(form["finish_by"])
    assert abs(due - datetime.now(UTC) - timedelta(hours=10)) < timedelta(minutes=1)
    assert "llama will scale" in await visitor.post(path, form)
    ((_, _, change),) = client.changed
    assert change["scaling"] == {
        "policy": "deadline",
        "finish_by": form["finish_by"],
        "price": 2.0,
        "batch": "global",
    }
    assert change["reason"] == "the review"


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("finish_by=tomorrow", 'Finish by: got "tomorrow"; expected a time with its zone'),
        ("max_cost=much", 'Max cost: got "much"; expected a number'),
        ("steps=1.5", 'Steps of the training: got "1.5"; expected a whole number'),
        ("policy=efficient&finish_by=6h", "finish_by"),
        ("min_efficiency=7", "min_efficiency"),
    ],
)
async def test_a_goal_that_means_nothing_is_told_and_changes_nothing(
    visitor: Visitor, client: PlayedClient, scaled: PlayedJob, query: str, problem: str
) -> None:
    page = unescape(await visitor.get(f"{JOB}change/goal?{query}"))
    assert problem in page
    assert "Nothing was changed yet" not in page
    assert client.changed == []


async def test_the_goal_of_a_worker_that_cannot_change_it_is_told(
    visitor: Visitor, client: PlayedClient, scaled: PlayedJob
) -> None:
    scaled.fields = {"goal": None}
    assert "of a release that cannot change" in await visitor.get(f"{JOB}change/goal?policy=max")


@pytest.fixture
async def tab(browser: Path) -> AsyncIterator[Tab]:
    async with open_tab(browser) as tab:
        yield tab


@pytest.mark.long("page")
async def test_a_goal_is_changed_in_a_browser(tab: Tab, client: PlayedClient, scaled: PlayedJob) -> None:
    async with serve_pages(client, port=0) as link:
        await tab.open(link)
        await tab.open(f"{link.partition('?')[0]}{JOB[1:]}")
        await eventually(lambda: tab.ask("document.querySelector('#facts')?.innerText.includes('policy efficient')"))
        await tab.click(".actions a[href='change/goal']")
        await eventually(lambda: tab.ask("document.querySelector('[name=finish_by]') !== null"))
        assert await tab.ask("[...document.querySelectorAll('.change input')].every(one => one.labels.length)")
        await tab.ask("document.querySelector('[name=finish_by]').value = '10h'")
        await tab.click(".change button")
        await eventually(lambda: tab.ask("document.querySelector('.sizes')?.innerText.includes('chosen')"))
        assert await tab.ask("document.documentElement.scrollWidth <= innerWidth + 1")
        await tab.click("form[method=post]:not(.who) button")
        await eventually(lambda: tab.ask("document.body?.innerText.includes('llama will scale') ?? false"))
    assert client.changed[0][2]["scaling"]["policy"] == "deadline"
