"""Tests of what ranks may do to a dataset at most: its state and the time of an exchange stay bounded."""

from __future__ import annotations

from perdure.contract import (
    DatasetParameters,
    DatasetRequest,
    FailedShard,
    NodeCredentials,
    Position,
    SetAside,
    ShardRequest,
    Term,
)
from perdure.contract.datasets import LARGEST_POSITION, MOST_SPANS
from perdure.workflows.policy.services.dataset_views import view
from perdure.workflows.policy.services.datasets import (
    MOST_ASIDE,
    MOST_HELD,
    MOST_LOOKED_AT,
    DatasetState,
    begin,
    exchange,
    exchange_all,
)
from perdure.workflows.policy.services.failed_shards import MOST_FAILED, MOST_TRIES
from perdure.workflows.policy.services.spans import size
from tests.policy.services.test_datasets import FIRST, LARGE, WHOLE, asked
from tests.support.processor_time import ends_within

NODE = NodeCredentials(uid="0", role="worker", rank=0, incarnation=1, token="t")


def every_other_sample(first: int) -> tuple[FailedShard, ...]:
    return tuple(FailedShard(span=(first + 2 * at, first + 2 * at + 1)) for at in range(MOST_SPANS))


def leased_to(ranks: int) -> DatasetState:
    state = begin(LARGE)
    for rank in range(ranks):
        state, _ = exchange(state, LARGE, FIRST, ShardRequest(rank=rank, world_size=ranks, shards=1))
    return state


def report_failures() -> None:
    state = leased_to(256)
    for _ in range(5):
        ranks = tuple(
            ShardRequest(rank=rank, holds=held, failed=every_other_sample(held[0][0]))
            for rank, held in state.leases.items()
        )
        state, answers = exchange_all(state, DatasetRequest(sender=NODE, parameters=LARGE, term=FIRST, ranks=ranks))
        assert not any(answer.refused for answer in answers)
        assert size(state.leased) + size(state.free) + size(state.aside) == state.next


def test_failures_that_are_made_to_keep_a_worker_busy_take_little_time():
    assert ends_within(15, report_failures)


def test_more_failures_than_an_exchange_takes_in_are_granted_again_and_not_counted():
    state = leased_to(3)
    ranks = tuple(ShardRequest(rank=rank, failed=every_other_sample(held[0][0])) for rank, held in state.leases.items())
    state, answers = exchange_all(state, DatasetRequest(sender=NODE, parameters=LARGE, term=FIRST, ranks=ranks))
    assert len(state.failures) == MOST_FAILED
    counted = (MOST_SPANS, MOST_FAILED - MOST_SPANS, 0)
    assert [size(answer.granted) for answer in answers] == [LARGE.shard_size - number for number in counted]


def test_a_position_at_the_end_of_all_numbers_leaves_nothing_to_read():
    endless = DatasetParameters(size=4, shard_size=4, epochs=0)
    loaded = ShardRequest(rank=0, shards=2, position=Position(next=LARGEST_POSITION - 2))
    state, answer = exchange(begin(endless), endless, FIRST, loaded)
    assert (answer.granted, answer.drained) == (((LARGEST_POSITION - 2, LARGEST_POSITION),), False)
    _, answer = exchange(state, endless, FIRST, loaded.replace(done=answer.granted))
    assert (answer.granted, answer.drained) == ((), True)


def test_a_rank_that_takes_its_lease_to_pieces_is_refused_and_changes_nothing():
    state, refused = leased_to(1), ""
    for step in range(10):
        first = 2 * MOST_SPANS * step
        done = tuple(one.span for one in every_other_sample(first))
        before = state
        state, answer = exchange(state, LARGE, FIRST, ShardRequest(rank=0, done=done))
        if refused := answer.refused:
            assert state == before
            break
    assert str(MOST_HELD) in refused


def test_a_dataset_of_which_too_much_fails_is_refused_with_the_first_errors():
    aside = tuple((2**21 + 2 * at, 2**21 + 2 * at + 1) for at in range(MOST_ASIDE))
    first = SetAside(epoch=0, first=2**21, end=2**21 + 1, error="no such file")
    state = leased_to(1).replace(aside=aside, details=(first,))
    failed = (FailedShard(span=(0, 1)),)
    for _ in range(MOST_TRIES - 1):
        state, answer = exchange(state, LARGE, FIRST, ShardRequest(rank=0, holds=((1, 2**20),), failed=failed))
        state, _ = exchange(state, LARGE, FIRST, ShardRequest(rank=0, holds=((1, 2**20),), shards=1))
        assert not answer.refused
    _, answer = exchange(state, LARGE, FIRST, ShardRequest(rank=0, holds=((1, 2**20),), failed=failed))
    assert "no such file" in answer.refused


def test_what_is_kept_for_a_rank_that_is_gone_is_leased_to_others_when_nothing_else_is_left():
    state = begin(WHOLE.replace(size=8, epochs=3))
    for rank in range(3):
        state, answer = asked(state, Term(generation=1), rank=rank, shards=1)
        assert answer.granted
    state, answer = exchange(
        state,
        state.parameters,
        Term(generation=2),
        ShardRequest(rank=0, holds=((0, 8),), continues=True, shards=1),
        keeps_processes=True,
    )
    assert (answer.granted, answer.drained) == (((8, 16),), False)
    assert state.leased == ((0, 24),)
    state, answer = asked(
        state, Term(generation=2), rank=1, shards=1, continues=True, holds=((8, 16),), done=((8, 16),)
    )
    assert answer.granted == ((16, 24),), "what was leased to another rank meanwhile is not taken from it"
    state, answer = asked(state, Term(generation=2), rank=0, done=((0, 16),), shards=1)
    state, answer = asked(state, Term(generation=2), rank=1, done=((16, 24),), shards=1)
    assert answer.drained
    assert view(state).done == 24


def test_a_process_that_is_started_again_beside_others_may_fail_as_often_as_before():
    state = begin(WHOLE)
    failed = (FailedShard(span=(0, 8), error="no such file", number=1),)
    state, _ = asked(state, Term(generation=1), rank=0, shards=1)
    state, _ = asked(state, Term(generation=1), rank=0, failed=failed)
    state, _ = exchange(state, WHOLE, Term(generation=2), ShardRequest(rank=0, shards=1), keeps_processes=True)
    state, _ = asked(state, Term(generation=2), rank=0, failed=failed)
    assert [one.tries for one in state.failures] == [2], "its first failure is no repeat of its predecessor's"


def in_pieces(ranks: int, pieces: int) -> tuple[DatasetState, DatasetRequest]:
    """A dataset of which ranks have loaded a position with many holes, and a request of many ranks."""
    holes = tuple((2 * at, 2 * at + 1) for at in range(pieces))
    loaded = Position(next=2 * pieces, holes=holes)
    state, _ = exchange(begin(LARGE), LARGE, FIRST, ShardRequest(rank=0, position=loaded))
    asked_for = tuple(ShardRequest(rank=rank, world_size=ranks, shards=1_000_000) for rank in range(ranks))
    return state, DatasetRequest(sender=NODE, parameters=LARGE, term=FIRST, ranks=asked_for)


def ask_for_pieces() -> None:
    state, request = in_pieces(256, 50_000)
    for _ in range(10):
        state, _ = exchange_all(state, request)


def test_a_position_that_is_made_to_keep_a_worker_busy_takes_little_time():
    assert ends_within(15, ask_for_pieces)


def test_ranks_for_which_no_time_is_left_are_granted_shards_when_they_ask_again():
    state, request = in_pieces(4, MOST_LOOKED_AT // 2 + 100)
    state, first = exchange_all(state, request)
    assert [bool(answer.granted) for answer in first] == [True, True, False, False]
    assert not any(answer.drained or answer.refused for answer in first)
    state, again = exchange_all(state, request.replace(ranks=request.ranks[2:]))
    assert all(answer.granted for answer in again)
    whole, _ = exchange_all(in_pieces(4, MOST_LOOKED_AT // 2 + 100)[0], request, bounded=False)
    assert size(whole.leased) == size(state.leased), "a run of an earlier release grants all at once"
