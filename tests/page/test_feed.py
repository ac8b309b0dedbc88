"""Tests of what looks at jobs for open pages."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from perdure.page.feed import Feed

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
    async with asyncio.timeout(5):
        await feed.close()
