"""Tests of an agent that calls the job's store on behalf of its ranks."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import WorkflowHandle
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from perdure.agent import store as agent_store
from perdure.agent.outbox import ControlPlaneBusy, DestinationNotFound
from perdure.agent.pump import NotNow, RefusedRequest
from perdure.agent.store import RankCall, StoreRelay
from perdure.agent.transport import UpdateRefused
from perdure.contract import (
    StoreAction,
    StoreAnswer,
    StoreAnswers,
    StoreCall,
    StoreNeeded,
    StoreRequest,
    StoreView,
)
from perdure.contract.names import store_workflow_id
from perdure.workflows.companion import JobOwner
from perdure.workflows.policy.services.store import StoreState, answer_calls, nodes_to_notify, record_notification
from perdure.workflows.store import KeyValueStore, StoreInput
from tests.agent.bench import IDENTITY, Bench
from tests.agent.harness import RunningAgent, Workflows, recording, running_agent
from tests.support.temporal_server import DevServer, dev_server
from tests.support.waiting import DEADLINE, eventually

NUMBERS = count(1)


@asynccontextmanager
async def store_of(workflows: Workflows, uid: str) -> AsyncIterator[WorkflowHandle[Any, Any]]:
    """The store of the recording job."""
    queue = f"store-{secrets.token_hex(4)}"
    job = workflows.job
    assert job.first_execution_run_id
    owner = JobOwner(job_id=job.id, job_first_run_id=job.first_execution_run_id, check=timedelta(seconds=30))
    runner = UnsandboxedWorkflowRunner()
    async with Worker(workflows.client, task_queue=queue, workflows=[KeyValueStore], workflow_runner=runner):
        handle = await workflows.client.start_workflow(
            KeyValueStore.run, StoreInput(owner=owner, uid=uid), id=store_workflow_id(job.id, uid), task_queue=queue
        )
        yield handle
        await handle.terminate()


def body(action: StoreAction, *keys: str, client: str = "c", generation: int = 1, **fields: Any) -> RankCall:
    call = StoreCall(client=client, sequence=next(NUMBERS), action=action, keys=keys, **fields)
    return RankCall(generation=generation, call=call)


def set_key(key: str, **fields: Any) -> RankCall:
    return body(StoreAction.SET, key, values=(b"\xff",), client=f"sets {key}", **fields)


async def ask(agent: RunningAgent, one: RankCall) -> StoreAnswer | None:
    """One request of a rank; None where it is told to ask again."""
    status, content = await agent.request("POST", "/v1/store", one.model_dump(mode="json"))
    if status == 503:
        return None
    assert status == 200, content
    answer = StoreAnswer.model_validate_json(StoreAnswer.model_validate(content).model_dump_json())
    return None if answer.waits else answer


async def answered(agent: RunningAgent, one: RankCall) -> StoreAnswer:
    """The answer that a rank gets, however often it has to ask."""
    return await eventually(lambda: ask(agent, one))


async def test_ranks_wait_for_keys_while_their_agent_is_killed_and_a_newer_world_ends_their_waits(
    temporal_server: DevServer, tmp_path_factory: pytest.TempPathFactory
):
    async with (
        recording(temporal_server) as workflows,
        running_agent(temporal_server, workflows, tmp_path_factory.mktemp("n")) as agent,
    ):
        await agent.desire(world=agent.world(1))
        first = asyncio.create_task(answered(agent, set_key("begun")))
        (needed,) = await workflows.expect(workflows.group, "store_needed")
        assert needed["sender"] == agent.node.model_dump()
        async with store_of(workflows, agent.node.uid) as store:
            await first

            async def waits() -> bool:
                return (await store.query("usage", result_type=StoreView)).waiting_nodes == 1

            waiting = asyncio.create_task(answered(agent, body(StoreAction.WAIT, "k")))
            await eventually(waits)
            await answered(agent, set_key("k"))
            await asyncio.wait_for(waiting, DEADLINE)

            waiting = asyncio.create_task(answered(agent, body(StoreAction.WAIT, "later")))
            await eventually(waits)
            await agent.kill()
            assert not waiting.done()
            await agent.start()
            await answered(agent, set_key("later"))
            await asyncio.wait_for(waiting, DEADLINE)

            old = asyncio.create_task(answered(agent, body(StoreAction.WAIT, "never")))
            await eventually(waits)
            await agent.desire(world=agent.world(2))
            assert (await asyncio.wait_for(old, DEADLINE)).superseded
            assert (await answered(agent, set_key("k"))).superseded
            count_keys = await answered(agent, body(StoreAction.COUNT, generation=2))
            assert count_keys.number == 0


async def test_ranks_wait_while_the_server_is_away_and_a_sum_counts_once(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
):
    async with (
        dev_server(tmp_path / "temporal.db") as server,
        recording(server) as workflows,
        running_agent(server, workflows, tmp_path_factory.mktemp("n")) as agent,
    ):
        await agent.desire(world=agent.world(1))
        async with store_of(workflows, agent.node.uid):
            waiting = asyncio.create_task(answered(agent, body(StoreAction.WAIT, "k")))
            await answered(agent, set_key("other"))
            once = body(StoreAction.ADD, "n", amount=1, client="adds")
            server.kill()
            adding = asyncio.create_task(answered(agent, once))
            await server.restart()
            assert (await adding).number == 1
            assert (await answered(agent, once)).number == 1
            assert not waiting.done()
            await answered(agent, set_key("k"))
            await asyncio.wait_for(waiting, DEADLINE)


class PlayedStore:
    """A store with the real decisions, which answers when a test lets it, and fails as often as it says."""

    def __init__(self) -> None:
        self.state = StoreState()
        self.errors: list[Exception] = []
        self.requests: list[StoreRequest] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def call(self, request: StoreRequest) -> StoreAnswers:
        self.requests.append(request)
        self.state, answers = answer_calls(self.state, request)
        await self.may_answer.wait()
        if self.errors:
            raise self.errors.pop(0)
        return StoreAnswers(calls=answers)


class Ranks:
    """The ranks of one node."""

    def __init__(self, tmp_path: Path) -> None:
        self.bench = Bench(tmp_path)
        self.bench.apply(1)
        self.played = PlayedStore()
        self.store = StoreRelay(
            IDENTITY,
            send=self.played.call,
            state=lambda: self.bench.node.state,
            changed=self.bench.node.changed,
            to_group=self.bench.group.put,
        )

    def ask(self, one: RankCall) -> asyncio.Task[StoreAnswer]:
        return asyncio.create_task(self.store.answer(one.model_dump_json().encode()))

    def notify(self) -> None:
        """As the workflow does."""
        for path, watch in nodes_to_notify(self.played.state).items():
            self.store.notify()
            self.played.state = record_notification(self.played.state, path, watch.changes)

    async def sent(self, requests: int) -> None:
        await eventually(lambda: len(self.played.requests) >= requests)


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path)


async def test_calls_that_arrive_during_a_request_are_sent_together(ranks: Ranks):
    ranks.played.may_answer.clear()
    first = ranks.ask(set_key("a"))
    await ranks.sent(1)
    others = [ranks.ask(set_key(key)) for key in "bcd"]
    await asyncio.gather(*(asyncio.sleep(0) for _ in others))
    ranks.played.may_answer.set()
    await asyncio.gather(first, *others)
    assert [len(request.calls) for request in ranks.played.requests] == [1, 3]


async def test_a_call_that_waits_is_sent_again_when_the_store_has_changed_and_never_else(ranks: Ranks):
    waiting = ranks.ask(body(StoreAction.WAIT, "k", client="waits"))
    await ranks.sent(1)
    await ranks.ask(set_key("other"))
    ranks.notify()
    assert len(ranks.played.requests) == 2
    await ranks.ask(set_key("k"))
    assert not waiting.done()
    ranks.notify()
    assert not (await waiting).waits
    assert len(ranks.played.requests) == 4


async def test_a_notification_that_overtakes_an_answer_is_not_lost(ranks: Ranks):
    ranks.played.may_answer.clear()
    waiting = ranks.ask(body(StoreAction.WAIT, "k", client="waits"))
    await ranks.sent(1)
    request = StoreRequest(sender=IDENTITY, generation=1, calls=(set_key("k").call,))
    ranks.played.state, _ = answer_calls(ranks.played.state, request)
    ranks.notify()
    ranks.played.may_answer.set()
    assert not (await asyncio.wait_for(waiting, DEADLINE)).waits


async def test_what_fails_is_tried_again_and_changes_the_store_once(ranks: Ranks):
    missing = DestinationNotFound("it does not exist")
    ranks.played.errors = [missing, ControlPlaneBusy("late"), OSError("no route"), missing]
    answer = await ranks.ask(body(StoreAction.ADD, "n", amount=1))
    assert answer.number == 1
    assert len(ranks.played.requests) == 5
    assert len(ranks.bench.group.of(StoreNeeded)) == 1


async def test_a_refusal_reaches_the_rank(ranks: Ranks):
    ranks.played.errors = [UpdateRefused("the sender is not a node of this job")]
    assert (await ranks.ask(set_key("k"))).refused == "the sender is not a node of this job"


async def test_a_rank_asks_again_for_the_answer_to_the_same_call(ranks: Ranks, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(agent_store, "ANSWER_WITHIN", 0.01)
    ranks.played.may_answer.clear()
    one = body(StoreAction.WAIT, "k", client="waits")
    with pytest.raises(NotNow):
        await ranks.ask(one)
    ranks.played.may_answer.set()
    answer = await eventually(lambda: _answer_or_none(ranks, one))
    assert (answer.waits, answer.missing) == (True, ("k",))
    assert len(ranks.played.requests) == 1, "it was sent once"


async def _answer_or_none(ranks: Ranks, one: RankCall) -> StoreAnswer | None:
    try:
        return await ranks.ask(one)
    except NotNow:
        return None


async def test_ranks_beyond_the_connections_that_are_held_ask_again(ranks: Ranks, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(agent_store, "_MOST_HELD", 2)
    held = [ranks.ask(body(StoreAction.WAIT, "k", client=f"held {number}")) for number in range(2)]
    await ranks.sent(1)
    beyond = body(StoreAction.WAIT, "k", client="beyond")
    answer = await eventually(lambda: _answer_or_none(ranks, beyond))
    assert answer.waits
    monkeypatch.setattr(agent_store, "_MOST_HELD", 8)
    await ranks.ask(set_key("k"))
    ranks.notify()
    assert not any(answer.waits for answer in await asyncio.gather(*held))
    assert not (await ranks.ask(beyond)).waits


async def test_a_client_s_newer_call_replaces_its_older_one(ranks: Ranks):
    one, two = body(StoreAction.WAIT, "k"), body(StoreAction.COUNT)
    older = ranks.ask(one)
    await ranks.sent(1)
    assert (await ranks.ask(two)).number == 0
    assert (await older).superseded
    three = body(StoreAction.WAIT, "k")
    newest = ranks.ask(three)
    await ranks.sent(3)
    assert (await ranks.ask(two)).superseded
    newest.cancel()


async def test_calls_of_an_older_world_end(ranks: Ranks):
    older = ranks.ask(body(StoreAction.WAIT, "k"))
    await ranks.sent(1)
    ranks.bench.apply(2)
    assert (await older).superseded
    assert (await ranks.ask(set_key("k"))).superseded
    assert len(ranks.played.requests) == 1


async def test_a_process_that_continues_in_a_newer_world_belongs_to_it(ranks: Ranks):
    for number, lasting in enumerate((True, False)):
        ranks.bench.apply(2 + number, keeps_processes=True)
        one = body(StoreAction.ADD, "n", client="adds", generation=1, amount=1, lasting=lasting)
        answer = await ranks.ask(one)
        assert (answer.number, answer.superseded, answer.generation) == (1, False, 2 + number)


async def test_a_call_that_waits_is_sent_in_the_newer_world_where_its_process_continues(ranks: Ranks):
    ranks.bench.apply(2, keeps_processes=True)
    waiting = ranks.ask(waits := body(StoreAction.WAIT, "k", client="waits", generation=2))
    await ranks.sent(1)
    ranks.bench.apply(3, keeps_processes=True)
    assert (await waiting).waits
    again = ranks.ask(waits)
    await ranks.sent(2)
    newer = await ranks.ask(set_key("k", generation=3))
    ranks.notify()
    answer = await asyncio.wait_for(again, DEADLINE)
    assert [one.generation for one in ranks.played.requests][:2] == [2, 3]
    assert (answer.waits, answer.generation, newer.generation) == (False, 3, 3)


async def test_a_process_that_continues_outlives_a_world_that_another_node_was_in_first(ranks: Ranks):
    ranks.bench.apply(2, keeps_processes=True)
    newer = StoreRequest(
        sender=IDENTITY.replace(rank=1), generation=3, calls=(body(StoreAction.COUNT, client="other").call,)
    )
    ranks.played.state, _ = answer_calls(ranks.played.state, newer)
    adding = ranks.ask(adds := body(StoreAction.ADD, "n", amount=1, lasting=True, generation=2))
    await ranks.sent(1)
    assert not adding.done()
    ranks.bench.apply(3, keeps_processes=True)
    with pytest.raises(NotNow):
        await adding
    assert (await ranks.ask(adds)).number == 1


async def test_processes_that_were_started_again_begin_a_time_of_their_own(ranks: Ranks):
    ranks.bench.apply(2, keeps_processes=True)
    ranks.bench.apply(3)
    ranks.bench.apply(4, keeps_processes=True)
    assert (await ranks.ask(set_key("a", generation=2))).superseded
    assert not (await ranks.ask(set_key("b", generation=3))).superseded


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (body(StoreAction.COUNT, generation=2).model_dump_json().encode(), "not a world of this node"),
        (b"{", "Invalid JSON"),
        (b'{"generation": 1, "call": {"client": "", "sequence": 1, "action": "COUNT"}}', "call.client"),
        (b'{"generation": 1, "call": {"client": "c", "sequence": 0, "action": "COUNT"}}', "call.sequence"),
        (b'{"generation": 1, "call": {"client": "c", "sequence": 1, "action": "ADD"}}', "needs one key"),
        (
            set_key("k").model_dump_json().replace("_w==", "no base64!").encode(),
            "call.values.0",
        ),
    ],
)
async def test_what_a_rank_must_not_send_is_refused(ranks: Ranks, content: bytes, expected: str):
    with pytest.raises(RefusedRequest, match=expected):
        await ranks.store.answer(content)


async def test_a_program_that_names_callers_in_a_loop_is_stopped(ranks: Ranks, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(agent_store, "_MOST_CALLERS", 3)
    ranks.played.may_answer.clear()
    waiting = [ranks.ask(body(StoreAction.WAIT, "k", client=f"{number}")) for number in range(3)]
    await ranks.sent(1)
    with pytest.raises(RefusedRequest, match="more than 3 callers"):
        await ranks.ask(body(StoreAction.COUNT, client="more"))
    for one in waiting:
        one.cancel()
