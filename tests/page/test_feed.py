"""Tests of what looks at jobs for open pages."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

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
