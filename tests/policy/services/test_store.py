"""Tests of the store's decisions: what each call does, that a repeat does it once, and what is refused."""

from __future__ import annotations

import builtins
import os
from itertools import count
from typing import Any

import pytest

from perdure.contract import NodeCredentials, StoreAction, StoreAnswer, StoreCall, StoreRequest
from perdure.contract.store import LARGEST_CALL, MOST_CALLS
from perdure.workflows.carrying import pack
from perdure.workflows.policy.services.store import (
    ANSWER_BYTES,
    MOST_BYTES,
    MOST_CLIENTS,
    MOST_KEYS,
    MOST_WATCHED,
    Barrier,
    Namespace,
    StoreState,
    answer_calls,
    nodes_to_notify,
    record_notification,
    view,
)
from tests.support.processor_time import ends_within

NUMBERS = count(1)


def node(rank: int = 0, role: str = "worker") -> NodeCredentials:
    return NodeCredentials(uid="abcdef01", role=role, rank=rank, incarnation=1, token="t")


def call(action: StoreAction, *keys: str, client: str = "c", **fields: Any) -> StoreCall:
    return StoreCall(**dict[str, Any](client=client, sequence=next(NUMBERS), action=action, keys=keys) | fields)


class Held:
    """A store, and what a node gets from it."""

    def __init__(self) -> None:
        self.state = StoreState()

    def request(
        self, *calls: StoreCall, generation: int = 1, rank: int = 0, role: str = "worker"
    ) -> tuple[StoreAnswer, ...]:
        request = StoreRequest(sender=node(rank, role), generation=generation, calls=calls)
        self.state, answers = answer_calls(self.state, StoreRequest.model_validate_json(request.model_dump_json()))
        return answers

    def ask(
        self, action: StoreAction, *keys: str, generation: int = 1, rank: int = 0, role: str = "worker", **fields: Any
    ) -> StoreAnswer:
        (answer,) = self.request(call(action, *keys, **fields), generation=generation, rank=rank, role=role)
        return answer

    def set(self, key: str, value: bytes, **fields: Any) -> StoreAnswer:
        return self.ask(StoreAction.SET, key, values=(value,), **fields)

    def get(self, key: str, **fields: Any) -> bytes | None:
        answer = self.ask(StoreAction.GET, key, **fields)
        return None if answer.waits else answer.values[0]

    @property
    def due(self) -> builtins.set[str]:
        return {watch.node.path for watch in nodes_to_notify(self.state).values()}


@pytest.fixture
def store() -> Held:
    return Held()


def test_what_is_set_can_be_read_counted_checked_and_deleted(store: Held):
    assert store.ask(StoreAction.CHECK, "a").number == 0
    store.ask(StoreAction.SET, "a", "b", values=(b"\x00\xff", b""))
    assert store.ask(StoreAction.GET, "b", "a").values == (b"", b"\x00\xff")
    assert store.ask(StoreAction.CHECK, "a", "b").number == 1
    assert store.ask(StoreAction.COUNT).number == 2
    assert store.ask(StoreAction.LIST).keys == ("a", "b")
    assert [store.ask(StoreAction.DELETE, "a").number for _ in range(2)] == [1, 0]
    assert store.get("a") is None
    assert store.state.bytes == len("b")


def test_sums_are_numbers_of_64_bits(store: Held):
    assert [store.ask(StoreAction.ADD, "n", amount=amount).number for amount in (5, -7)] == [5, -2]
    assert store.get("n") == b"-2"
    store.set("text", b"seven")
    assert "'text'" in store.ask(StoreAction.ADD, "text", amount=1).refused
    store.set("most", str(2**63 - 1).encode())
    assert "64 bits" in store.ask(StoreAction.ADD, "most", amount=1).refused
    assert store.get("most") == str(2**63 - 1).encode()


def test_compare_set_answers_as_torchs_stores_do(store: Held):
    def compare_set(key: str, *values: bytes) -> bytes:
        return store.ask(StoreAction.COMPARE_SET, key, values=values).values[0]

    assert compare_set("k", b"wrong", b"new") == b"wrong"
    assert store.get("k") is None
    assert compare_set("k", b"", b"first") == b"first"
    assert compare_set("k", b"wrong", b"new") == b"first"
    assert compare_set("k", b"first", b"second") == b"second"
    assert store.get("k") == b"second"


@pytest.mark.parametrize(
    ("action", "fields"),
    [
        (StoreAction.ADD, {"amount": 3}),
        (StoreAction.APPEND, {"values": (b"x",)}),
        (StoreAction.COMPARE_SET, {"values": (b"1", b"2")}),
        (StoreAction.DELETE, {}),
        (StoreAction.JOIN, {"member": 0, "size": 1}),
    ],
)
def test_a_repeated_call_changes_the_store_once_and_gets_the_same_answer(
    store: Held, action: StoreAction, fields: dict[str, Any]
):
    store.set("k", b"1", client="other")
    once = call(action, "k", **fields)
    first = store.request(once)
    after = store.state
    store.set("else", b"1", client="other")
    again = store.request(once)
    assert again == first
    assert store.state.own.values == {**after.own.values, "else": b"1"}
    assert store.state.own.barriers == after.own.barriers


def test_a_repeat_after_a_newer_call_of_its_client_is_superseded(store: Held):
    older, newer = call(StoreAction.ADD, "n", amount=1), call(StoreAction.ADD, "n", amount=1)
    store.request(newer)
    assert store.request(older)[0].superseded
    assert store.get("n") == b"1"


def test_a_generation_begins_without_the_keys_of_the_one_before_except_lasting_ones(store: Held):
    store.set("k", b"old")
    store.set("k", b"lasts", lasting=True)
    store.ask(StoreAction.JOIN, "b", size=2)
    assert store.get("k", generation=2) is None
    assert store.get("k", generation=2, lasting=True) == b"lasts"
    assert store.set("k", b"late", generation=1).superseded
    assert store.set("k", b"late", generation=1, lasting=True).superseded
    assert store.get("k", generation=2, lasting=True) == b"lasts"
    assert store.ask(StoreAction.JOIN, "b", generation=2, size=2, member=1).complete is False


def test_each_role_has_generations_of_its_own_and_lasting_keys_are_those_of_all(store: Held):
    store.set("path", b"of the trainer", generation=1, role="trainer")
    store.set("secret", b"s", lasting=True, generation=1, role="trainer")
    assert store.ask(StoreAction.GET, "never", generation=1, role="trainer").waits
    before = store.state.bytes
    assert store.get("path", generation=5, role="rollout") is None
    assert store.get("secret", generation=5, role="rollout", lasting=True) == b"s"
    store.set("path", b"of the rollout", generation=5, role="rollout")
    assert store.get("path", generation=1, role="trainer") == b"of the trainer"
    assert view(store.state).keys == 2
    assert view(store.state).generation == 5
    assert view(store.state).waiting_nodes == 1, "the newer generation of another role ends no wait"

    assert store.get("path", generation=6, role="rollout") is None
    assert store.state.bytes == before
    assert store.ask(StoreAction.CHECK, "path", generation=5, role="rollout").superseded
    assert store.get("path", generation=1, role="trainer") == b"of the trainer"


def test_a_change_is_repeated_in_a_newer_generation_where_its_keys_have_ended_and_else_not(store: Held):
    lasting = call(StoreAction.ADD, "n", client="a", amount=1, lasting=True)
    own = call(StoreAction.ADD, "n", client="b", amount=1)
    store.ask(StoreAction.COUNT, generation=5, role="rollout")
    for generation in (1, 1, 2, 2, 3):
        assert [answer.number for answer in store.request(lasting, own, generation=generation)] == [1, 1]


def test_the_state_of_an_earlier_release_belongs_to_the_role_that_calls(store: Held):
    store.set("path", b"p")
    store.state = StoreState.model_validate(store.state.model_dump(exclude={"role", "others"}))
    assert store.get("path") == b"p"


def test_a_node_that_waits_is_notified_of_a_change_that_concerns_it_until_it_is_reached(store: Held):
    assert store.ask(StoreAction.WAIT, "a", "b", rank=1).missing == ("a", "b")
    store.set("c", b"")
    assert not store.due
    store.set("a", b"", lasting=True)
    assert not store.due
    store.set("a", b"")
    assert store.due == {node(1).path}
    (watch,) = nodes_to_notify(store.state).values()
    store.ask(StoreAction.WAIT, "b", rank=1)
    store.set("b", b"")
    store.state = record_notification(store.state, node(1).path, watch.changes)
    assert store.due == {node(1).path}, "it may have sent its call before the second change"
    store.state = record_notification(store.state, node(1).path, watch.changes + 1)
    assert not store.state.watches


def test_a_newer_generation_ends_the_waits_of_the_older(store: Held):
    store.ask(StoreAction.WAIT, "a", rank=1)
    store.set("a", b"")
    assert store.due
    store.ask(StoreAction.COUNT, generation=2)
    assert not store.due
    assert not store.state.watches


def test_nodes_that_wait_for_more_than_can_be_watched_are_notified_of_each_change(store: Held):
    names = tuple(f"{number:0500}" for number in range(MOST_WATCHED // 500 + 1))
    store.ask(StoreAction.WAIT, *names, rank=1)
    assert sum(map(len, store.state.watches[node(1).path].keys)) < MOST_WATCHED
    store.set("other", b"")
    assert store.due == {node(1).path}


def test_ranks_meet_at_a_barrier_again_and_again(store: Held):
    for number in range(3):
        first = store.ask(StoreAction.JOIN, "b", member=0, size=2, rank=0)
        assert (first.number, first.complete) == (number, False)
        wait = store.ask(StoreAction.AWAIT_JOINS, "b", amount=number, rank=0)
        assert (wait.waits, wait.missing) == (True, ("1",))
        store.ask(StoreAction.JOIN, "b", member=0, size=2, rank=0)
        last = store.ask(StoreAction.JOIN, "b", member=1, size=2, rank=1)
        assert (last.number, last.complete) == (number, True)
        assert store.due == {node(0).path}
        assert not store.ask(StoreAction.AWAIT_JOINS, "b", amount=number, rank=0).waits
    assert store.ask(StoreAction.COUNT).number == 0


def test_ranks_that_disagree_on_the_size_of_a_barrier_are_told(store: Held):
    store.ask(StoreAction.JOIN, "b", member=0, size=2)
    assert "3 ranks, and others wait for 2" in store.ask(StoreAction.JOIN, "b", member=1, size=3).refused


def join_again_and_again() -> None:
    store = Held()
    names = [f"{number}" for number in range(MOST_KEYS)]
    space = Namespace(values=dict.fromkeys(names, b""), barriers=dict.fromkeys(names, Barrier(size=2)))
    before = 2 * sum(map(len, names))
    store.state = StoreState(role="worker", generation=1, own=space, bytes=before)
    for _ in range(8):
        joins = [call(StoreAction.JOIN, names[number], member=0, size=2) for number in range(MOST_CALLS)]
        assert not any(answer.refused for answer in store.request(*joins))
    assert store.state.bytes == before + 8 * MOST_CALLS


def test_ranks_that_join_barriers_of_a_full_store_take_little_time():
    assert ends_within(8, join_again_and_again)


def test_a_store_that_is_full_refuses_and_names_limit_and_value(store: Held):
    for number in range(4):
        assert not store.set(f"{number}", bytes(MOST_BYTES // 4 - 1)).refused
    answer = store.set("more", b"123")
    assert f"{MOST_BYTES + 7} bytes" in answer.refused
    assert str(MOST_BYTES) in answer.refused
    assert store.get("more") is None
    assert not store.set("0", b"smaller").refused
    assert not store.set("more", b"123").refused
    assert store.state.bytes == sum(len(key) + len(value) for key, value in store.state.own.values.items())


def test_there_are_only_so_many_keys(store: Held):
    names = [f"{number}" for number in range(MOST_KEYS)]
    for first in range(0, MOST_KEYS, 1000):
        store.ask(StoreAction.SET, *names[first : first + 1000], values=(b"",) * 1000)
    assert str(MOST_KEYS) in store.set("more", b"").refused
    assert not store.set("0", b"").refused
    store.ask(StoreAction.DELETE, "0")
    assert not store.set("more", b"").refused


def test_a_call_that_is_too_large_or_incomplete_is_no_call():
    with pytest.raises(ValueError, match=str(LARGEST_CALL)):
        call(StoreAction.SET, "k", values=(bytes(LARGEST_CALL),))
    with pytest.raises(ValueError, match="needs 2, found 1"):
        call(StoreAction.SET, "a", "b", values=(b"",))
    with pytest.raises(ValueError, match="needs one key"):
        call(StoreAction.ADD)


def test_answers_stay_below_what_the_server_takes(store: Held):
    store.set("large", bytes(ANSWER_BYTES - 100))
    gets = [call(StoreAction.GET, "large", client=str(number)) for number in range(3)]
    answers = store.request(*gets, call(StoreAction.ADD, "n", client="adds", amount=1))
    assert [answer.later for answer in answers] == [False, False, True, True]
    assert store.get("n") is None


@pytest.mark.long("workflows")
def test_the_largest_state_can_be_carried_into_the_next_run(store: Held):
    per_key = MOST_BYTES // MOST_KEYS - 8
    for number in range(MOST_KEYS):
        values = (os.urandom(per_key),)
        assert not store.ask(StoreAction.SET, f"{number:08}", values=values, client=os.urandom(16).hex()).refused
    assert len(store.state.clients) == MOST_CLIENTS
    for rank in range(50):
        store.ask(StoreAction.WAIT, *(os.urandom(100).hex() for _ in range(10)), rank=rank)
    assert len(pack(store.state).model_dump_json()) < 1_800_000
    assert view(store.state).waiting_nodes == 50
