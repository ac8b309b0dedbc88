"""Tests of threads for work that users can make last."""

from __future__ import annotations

import asyncio
import threading

import pytest

from perdure.base.own_threads import Occupied, OwnThreads
from tests.support.waiting import eventually


async def test_results_and_errors_are_those_of_the_work():
    threads = OwnThreads("test", most=1)
    assert await threads.run("a", lambda: 7) == 7
    with pytest.raises(ValueError, match="seven"):
        await threads.run("a", lambda: int("seven"))
    assert await threads.run("a", lambda: 8) == 8


async def test_work_that_does_not_end_keeps_only_its_own_key_from_more():
    threads, over, begun = OwnThreads("test", most=2), threading.Event(), threading.Barrier(3)

    def hang() -> bool:
        begun.wait()
        return over.wait()

    stuck = [asyncio.create_task(threads.run("a", hang)) for _ in range(2)]
    await asyncio.to_thread(begun.wait)
    stuck[0].cancel()
    with pytest.raises(Occupied, match="2 earlier attempts"):
        await threads.run("a", lambda: 1)
    assert await threads.run("b", lambda: 2) == 2
    over.set()
    assert await stuck[1]

    async def runs_again() -> int | None:
        try:
            return await threads.run("a", lambda: 3)
        except Occupied:
            return None

    assert await eventually(runs_again) == 3


async def test_work_with_patience_begins_when_other_work_of_its_key_ends():
    threads, over, begun = OwnThreads("test", most=1), threading.Event(), threading.Event()

    def hang() -> bool:
        begun.set()
        return over.wait()

    first = asyncio.create_task(threads.run("a", hang))
    await asyncio.to_thread(begun.wait)
    with pytest.raises(Occupied):
        await threads.run("a", lambda: 1, patience=0.01)
    waiting = [asyncio.create_task(threads.run("a", lambda: 2, patience=1000.0)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    over.set()
    assert await first
    assert [await one for one in waiting[1:]] == [2, 2]
