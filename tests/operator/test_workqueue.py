"""In which order an operator looks at objects, and how often."""

from __future__ import annotations

import asyncio

import pytest

from perdure.operator.workqueue import Workqueue


async def test_many_are_looked_at_in_turn_and_what_has_happened_first():
    queue = Workqueue(per_second=200)
    loop = asyncio.get_running_loop()
    for number in range(50):
        queue.plan(str(number), after=-1)
    queue.plan("later", after=60)
    queue.plan("happened")
    started = loop.time()
    taken = [await queue.take() for _ in range(51)]
    assert loop.time() - started >= 50 / 200
    assert taken[0] == "happened"
    assert sorted(taken[1:], key=int) == [str(number) for number in range(50)]


async def test_no_task_gets_what_another_one_holds():
    queue = Workqueue(per_second=1000)
    queue.plan("one")
    assert await queue.take() == "one"
    queue.plan("one")
    waiting = asyncio.create_task(queue.take())
    queue.plan("two", after=0.02)
    assert await waiting == "two"
    waiting = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    queue.give_back("one")
    assert await waiting == "one"


async def test_a_key_is_free_again_when_handling_it_has_failed():
    queue = Workqueue(per_second=1000)
    handled: list[str] = []

    async def handle(key: str) -> None:
        handled.append(key)
        if key == "wrong":
            raise ValueError(key)

    queue.plan("right")
    queue.plan("wrong", after=0)
    with pytest.raises(ValueError, match="wrong"):
        await queue.serve(handle)
    assert handled == ["right", "wrong"]
    queue.plan("wrong")
    assert await queue.take() == "wrong"
