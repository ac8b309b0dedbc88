"""In which order an operator looks at objects, and how often."""

from __future__ import annotations

import asyncio

import pytest

from perdure.operator.workqueue import Workqueue


def queue_of(*, per_second: float, at_once: int = 100) -> Workqueue:
    """A queue whose keys begin with their tenant."""
    return Workqueue(per_second=per_second, tenant_of=lambda key: key.partition("/")[0], at_once=at_once)


async def test_many_are_looked_at_in_turn_and_what_has_happened_first():
    queue = queue_of(per_second=200)
    loop = asyncio.get_running_loop()
    for number in range(50):
        queue.plan(f"all/{number}", after=-1)
    queue.plan("later", after=60)
    queue.plan("happened")
    started = loop.time()
    taken = [await queue.take() for _ in range(51)]
    assert loop.time() - started >= 50 / 200
    assert taken[0] == "happened"
    assert sorted(taken[1:]) == sorted(f"all/{number}" for number in range(50))


async def test_no_task_gets_what_another_one_holds():
    queue = queue_of(per_second=1000)
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
    queue = queue_of(per_second=1000)
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


async def test_a_tenant_with_many_objects_does_not_delay_those_of_others():
    queue = queue_of(per_second=1000)
    for number in range(100):
        queue.plan(f"many/{number}")
    queue.plan("few/1")
    queue.plan("few/2", after=-1)
    taken = [await queue.take() for _ in range(4)]
    assert "few/1" in taken[:2]
    assert "few/2" not in taken, "to the others something has happened"


async def test_a_tenant_whose_objects_take_long_leaves_room_for_others():
    queue = queue_of(per_second=1000, at_once=2)
    for number in range(4):
        queue.plan(f"slow/{number}")
    assert {(await queue.take()).partition("/")[0] for _ in range(2)} == {"slow"}
    waiting = asyncio.create_task(queue.take())
    queue.plan("other/1", after=0.02)
    assert await waiting == "other/1"
    waiting = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    queue.give_back("slow/0")
    assert (await waiting).startswith("slow/")
