"""Tests of how a watch tells its group what happens to nodes, while the group cannot be reached and afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import cast

from temporalio.client import Client

from perdure.activities.nodes.activities import _Telling
from perdure.contract import NodeEvent, NodeEvents
from perdure.contract import NodeEventKind as Kind
from tests.support.waiting import DEADLINE

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LARGEST = 2_000_000
"""Bytes of a signal that the server takes."""


def event(kind: Kind, rank: int = 0, reason: str = "") -> NodeEvent:
    return NodeEvent(kind=kind, rank=rank, incarnation=1, time=NOW, reason=reason)


class Group:
    """A client whose every workflow is this group; it takes signals while it may be reached."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[NodeEvents] = asyncio.Queue()
        self.reached = asyncio.Event()
        self.asked = asyncio.Event()

    def get_workflow_handle(self, workflow_id: str) -> Group:
        return self

    async def signal(self, name: str, message: NodeEvents, *, rpc_timeout: timedelta) -> None:
        self.asked.set()
        await self.reached.wait()
        if len(message.model_dump_json()) > LARGEST:
            raise ValueError("the server refuses a signal of this size")
        self.told.put_nowait(message)


@asynccontextmanager
async def telling(group: Group) -> AsyncIterator[_Telling]:
    told = _Telling(cast(Client, group), "group")
    running = asyncio.create_task(told.run())
    try:
        async with asyncio.timeout(DEADLINE):
            yield told
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def seen(message: NodeEvents) -> list[tuple[Kind, int, str]]:
    return [(one.kind, one.rank, one.reason) for one in message.events]


async def test_what_many_nodes_waited_for_during_an_outage_is_told_in_a_signal_that_the_server_takes():
    group, ranks = Group(), range(128)
    async with telling(group) as told:
        for number in range(100):
            told.events([event(Kind.PENDING, rank, f"{number} machines: {'x' * 250}") for rank in ranks])
        told.events([event(Kind.GONE, 5, "evicted")])
        group.reached.set()
        message = seen(await group.told.get())
    assert message == [
        *((Kind.PENDING, rank, f"99 machines: {'x' * 250}") for rank in ranks),
        (Kind.GONE, 5, "evicted"),
    ]


async def test_what_happens_while_a_signal_is_on_its_way_is_told_after_it():
    group = Group()
    async with telling(group) as told:
        told.events([event(Kind.PENDING, 0, "no machine"), event(Kind.PENDING, 1, "no machine")])
        await group.asked.wait()
        told.events([event(Kind.PENDING, 0, "its image is pulled"), event(Kind.RUNNING, 1)])
        told.events([event(Kind.GONE, 1, "evicted"), event(Kind.GONE, 2, "evicted")])
        group.reached.set()
        assert seen(await group.told.get()) == [(Kind.PENDING, 0, "no machine"), (Kind.PENDING, 1, "no machine")]
        assert seen(await group.told.get()) == [
            (Kind.PENDING, 0, "its image is pulled"),
            (Kind.RUNNING, 1, ""),
            (Kind.GONE, 1, "evicted"),
            (Kind.GONE, 2, "evicted"),
        ]
        assert group.told.empty()


async def test_each_end_is_told_and_of_other_states_the_newest_in_the_order_in_which_they_came():
    group = Group()
    async with telling(group) as told:
        told.events([event(Kind.PENDING, 0, "no machine"), event(Kind.RUNNING)])
        told.events([event(Kind.RUNNING, 0, "its machine does not answer"), event(Kind.GONE, 0, "a")])
        told.events([event(Kind.GONE, 0, "b")])
        group.reached.set()
        assert seen(await group.told.get()) == [
            (Kind.PENDING, 0, "no machine"),
            (Kind.RUNNING, 0, "its machine does not answer"),
            (Kind.GONE, 0, "a"),
            (Kind.GONE, 0, "b"),
        ]
