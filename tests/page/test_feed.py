"""Tests of what looks at jobs for open pages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import timedelta

import pytest

from perdure.page import feed as feeds
from perdure.page.feed import Feed
from tests.support.waiting import DEADLINE

INTERVAL = timedelta(seconds=20)


def feed_of(looks: list[int]) -> Feed[int]:
    async def look() -> int:
        looks.append(len(looks))
        return len(looks)

    return Feed(look, lambda _: INTERVAL, lambda: None)


async def turns() -> None:
    """Lets everything run that need not wait."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_it_ends_at_once_although_something_new_came_in_the_same_moment():
    looks: list[int] = []
    feed = feed_of(looks)
    await feed.newest()
    await turns()
    feed.refresh()
    await asyncio.sleep(0)
    async with asyncio.timeout(DEADLINE):
        await feed.close()


async def test_pages_that_are_opened_together_are_one_look():
    looks: list[int] = []
    feed = feed_of(looks)
    assert await asyncio.gather(*(feed.newest() for _ in range(50))) == [1] * 50
    assert looks == [0]
    await feed.close()


async def test_what_does_not_exist_is_asked_for_once_and_not_kept():
    asked, ended = 0, 0

    async def look() -> int:
        nonlocal asked
        asked += 1
        await turns()
        raise LookupError("there is no such job")

    def end() -> None:
        nonlocal ended
        ended += 1

    feed = Feed(look, lambda _: INTERVAL, end)
    found = await asyncio.gather(*(feed.newest() for _ in range(50)), return_exceptions=True)
    assert {type(one) for one in found} == {LookupError}
    assert (asked, ended) == (1, 1)


async def test_a_page_that_goes_away_takes_no_look_from_the_others():
    looks: list[int] = []
    feed = feed_of(looks)
    gone, stays = asyncio.create_task(feed.newest()), asyncio.create_task(feed.newest())
    await asyncio.sleep(0)
    gone.cancel()
    assert await stays == 1
    with pytest.raises(asyncio.CancelledError):
        await gone
    await feed.close()


async def test_a_page_that_is_opened_just_before_looking_would_end_is_shown_each_later_look(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(feeds, "LINGER", 0.0)
    asked, ended = 0, 0

    async def look() -> int:
        nonlocal asked
        asked += 1
        return asked

    def end() -> None:
        nonlocal ended
        ended += 1

    async def news() -> AsyncGenerator[None]:
        await asyncio.Event().wait()
        yield

    feed = Feed(look, lambda _: INTERVAL, end, news)
    await feed.newest()
    await turns()
    async with asyncio.timeout(DEADLINE), aclosing(feed.follow()) as looks:
        shown = [await anext(looks)]
        for _ in range(3):
            feed.refresh()
            shown.append(await anext(looks))
        assert (shown, ended) == ([1, 2, 3, 4], 0)
    feed.refresh()
    await turns()
    assert ended == 0, "the last page has just been closed"
    feed.refresh()
    async with asyncio.timeout(DEADLINE):
        while not ended:
            await turns()
    assert ended == 1
    await feed.close()
