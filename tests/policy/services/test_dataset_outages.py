"""Tests of shards that fail: for themselves, and because what a dataset is stored on is away."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from perdure.contract import (
    DatasetParameters,
    FailedShard,
    ShardRequest,
)
from perdure.contract.datasets import Spans
from perdure.workflows.policy.services.dataset_views import samples_done, unreadable
from perdure.workflows.policy.services.datasets import begin, exchange
from perdure.workflows.policy.services.failed_shards import (
    LONGEST_AT_END,
    LONGEST_OUTAGE,
    MOST_FAILURES,
    MOST_TRIES,
    FailedTries,
)
from perdure.workflows.policy.services.spans import difference, size
from tests.policy.services.test_datasets import FIRST, LARGE, NOW, asked


class Readers:
    """Ranks that read a dataset, a shard at a time, whatever fails."""

    def __init__(self, *, size: int, ranks: int = 1) -> None:
        self.parameters = DatasetParameters(size=size, shard_size=1)
        self.state = begin(self.parameters)
        self.held: dict[int, Spans] = dict.fromkeys(range(ranks), ())
        self.now = NOW
        self.tries: dict[int, int] = {}
        self.drained = False

    def read(self, fails: Callable[[int], bool], *, seconds: int, every: int = 1) -> Readers:
        """All ranks try what they hold, every few seconds, and report it, for so long or until the end."""
        for _ in range(seconds // every):
            self.now += timedelta(seconds=every)
            drained = True
            for rank, held in self.held.items():
                failed = tuple(one for one in held if fails(one[0]))
                for first, _ in held:
                    self.tries[first] = self.tries.get(first, 0) + 1
                request = ShardRequest(
                    rank=rank,
                    world_size=len(self.held),
                    done=difference(held, failed),
                    failed=tuple(FailedShard(span=one, error="OSError: stale handle") for one in failed),
                    shards=2,
                )
                self.state, answer = exchange(self.state, self.parameters, FIRST, request, now=self.now)
                assert not answer.refused
                self.held[rank] = tuple((at, at + 1) for first, end in answer.granted for at in range(first, end))
                drained = drained and answer.drained
            if drained:
                self.drained = True
                break
        return self

    @property
    def aside(self) -> Spans:
        return self.state.aside


@pytest.mark.parametrize(
    ("outage", "before", "ranks"), [(30, 0, 1), (30, 3, 4), (600, 3, 1), (600, 0, 4), (3_000, 0, 1)]
)
def test_no_shard_is_set_aside_for_an_outage_of_the_storage(outage: int, before: int, ranks: int):
    readers = Readers(size=2_000, ranks=ranks).read(lambda _: False, seconds=before)
    readers.read(lambda _: True, seconds=outage, every=3)
    assert not readers.aside
    assert len(readers.state.failures) <= MOST_FAILURES
    readers.read(lambda _: False, seconds=2_000)
    assert readers.drained
    assert (readers.aside, samples_done(readers.state)) == ((), 2_000)


def test_an_outage_of_the_storage_has_shards_tried_now_and_then_and_not_in_a_loop():
    readers = Readers(size=10_000).read(lambda _: True, seconds=600)
    assert sum(readers.tries.values()) <= 600


@pytest.mark.parametrize("bad", [range(20, 21), range(20, 60), range(99, 100)], ids=["one", "in a row", "the last"])
def test_shards_that_fail_while_others_are_done_are_set_aside(bad: range):
    readers = Readers(size=100).read(lambda first: first in bad, seconds=1_000)
    assert readers.drained
    assert size(readers.aside) == len(bad)
    assert samples_done(readers.state) == 100 - len(bad)
    assert all(readers.tries[first] >= MOST_TRIES for first in bad)


@pytest.mark.parametrize(("size", "longest"), [(20, LONGEST_AT_END), (3_000, LONGEST_OUTAGE)])
def test_shards_are_set_aside_where_nothing_can_be_read_for_very_long(size: int, longest: timedelta):
    seconds = int(longest.total_seconds())
    readers = Readers(size=size).read(lambda _: True, seconds=seconds - 10, every=5)
    assert not readers.aside
    assert readers.read(lambda _: True, seconds=300, every=5).aside
    readers.read(lambda _: False, seconds=size)
    assert readers.drained


@pytest.mark.parametrize("ranks", [1, 4, 20])
def test_users_are_told_that_nothing_can_be_read_and_that_it_can_again(ranks: int):
    readers = Readers(size=5_000, ranks=ranks).read(lambda _: False, seconds=3)
    since = readers.now
    assert unreadable(readers.read(lambda _: True, seconds=50).state, "train", ranks=ranks, now=readers.now) is None
    told = unreadable(readers.read(lambda _: True, seconds=30).state, "train", ranks=ranks, now=readers.now)
    assert told is not None
    assert since <= told.since <= since + timedelta(seconds=3)
    assert (told.dataset, told.error) == ("train", "OSError: stale handle")
    readers.read(lambda _: False, seconds=70)
    assert unreadable(readers.state, "train", ranks=ranks, now=readers.now) is None


def test_a_shard_that_fails_while_others_take_long_is_no_storage_that_is_away():
    state, _ = asked(begin(DatasetParameters(size=100, shard_size=1)), FIRST, rank=1, shards=2, world_size=2)
    state, answer = asked(state, FIRST, shards=1, world_size=2)
    request = ShardRequest(rank=0, world_size=2, failed=tuple(FailedShard(span=span) for span in answer.granted))
    state, _ = exchange(state, state.parameters, FIRST, request, now=NOW)
    assert unreadable(state, "train", ranks=2, now=NOW + timedelta(minutes=5)) is None


def test_a_last_shard_that_always_fails_is_told():
    readers = Readers(size=100).read(lambda first: first == 99, seconds=200)
    told = unreadable(readers.state, "train", ranks=1, now=readers.now)
    assert told is not None
    assert "could be read since" in told.summary


def test_many_shards_that_fail_while_the_storage_is_away_are_not_set_aside_for_their_number():
    failures = tuple(
        FailedTries(span=(2 * at, 2 * at + 1), tries=1, since=NOW, failed_at=NOW) for at in range(MOST_FAILURES)
    )
    first = 2 * MOST_FAILURES
    state = begin(LARGE).replace(term=FIRST, failures=failures, next=first + 10, leases={0: ((first, first + 10),)})
    failed = (FailedShard(span=(first, first + 1)),)
    later = NOW + timedelta(seconds=5)
    request = ShardRequest(rank=0, holds=((first + 1, first + 10),), failed=failed)
    known, _ = exchange(state, LARGE, FIRST, request, now=later)
    assert (known.aside, size(known.free)) == ((), 1)
    known, _ = exchange(state.replace(done_at=later), LARGE, FIRST, request, now=later)
    assert known.aside == ((first, first + 1),)
