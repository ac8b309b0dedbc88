"""Tests of how many nodes a store notifies at a time."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from temporalio import workflow

from perdure.contract import NodeCredentials, StoreAction, StoreCall, StoreChanged, StoreRequest
from perdure.workflows import options
from perdure.workflows.companion import JobOwner
from perdure.workflows.store import KeyValueStore, StoreInput
from tests.support.waiting import tasks_wait

NODES = 50
AT_ONCE = 20

SERVERS_LIMIT = 2_000
"""Activities of one workflow that are pending."""


def request(rank: int, action: StoreAction, **fields: Any) -> StoreRequest:
    sender = NodeCredentials(uid="0123abcd", role="worker", rank=rank, incarnation=1, token="token")
    call = StoreCall(client=f"rank {rank}", sequence=1, action=action, keys=("go",), **fields)
    return StoreRequest(sender=sender, generation=1, calls=(call,))


async def test_a_key_for_which_many_nodes_wait_notifies_all_and_not_all_at_once(
    monkeypatch: pytest.MonkeyPatch,
):
    pending: set[int] = set()
    most, reached, taken = 0, set[int](), asyncio.Event()

    async def execute_activity(_: str, change: StoreChanged, **options: Any) -> None:
        nonlocal most
        pending.add(change.node.rank)
        most = max(most, len(pending))
        await taken.wait()
        pending.remove(change.node.rank)
        reached.add(change.node.rank)

    monkeypatch.setattr(workflow, "execute_activity", execute_activity)
    assert options.STORE_NOTIFICATIONS < SERVERS_LIMIT - 1
    monkeypatch.setattr(options, "STORE_NOTIFICATIONS", AT_ONCE)
    owner = JobOwner(job_id="job/default/large", job_first_run_id="run", check=timedelta(seconds=1))
    # The decorator's type knows no call of the method itself.
    store: Any = KeyValueStore(StoreInput(owner=owner, uid="0123abcd"))
    for rank in range(1, NODES):
        store.call(request(rank, StoreAction.WAIT))
    store.call(request(0, StoreAction.SET, values=(b"1",)))
    await tasks_wait()
    assert len(pending) == AT_ONCE
    taken.set()
    await tasks_wait()
    assert reached == set(range(1, NODES))
    assert most == AT_ONCE
