"""Tests of leases: whatever ranks do and lose, each sample is leased to one rank at a time, and done once."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from perdure.contract import (
    DatasetParameters,
    FailedShard,
    Position,
    SetAside,
    ShardAnswer,
    ShardRequest,
    Term,
)
from perdure.contract.datasets import PARTITION_SIZE, Span, Spans
from perdure.workflows.policy.services.dataset_views import samples_done, unprocessed, view
from perdure.workflows.policy.services.datasets import MOST_FRAGMENTS, DatasetState, Shards, _rest, begin, exchange
from perdure.workflows.policy.services.failed_shards import MOST_TRIES
from perdure.workflows.policy.services.spans import difference, intersection, size, union

NOW = datetime(2026, 1, 1, tzinfo=UTC)
RANKS = 3
WHOLE = DatasetParameters(size=100, shard_size=8, epochs=2)
LARGE = DatasetParameters(size=2**30, shard_size=2**20)
FIRST = Term(generation=1)


class Rank:
    """A rank that keeps what it was granted, and works on it in any order."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.holds: Spans = ()
        self.done: Spans = ()
        """Done, and not reported yet."""
        self.failed: tuple[FailedShard, ...] = ()
        self.continues = False

    def request(self, shards: int = 0, **fields: Any) -> ShardRequest:
        return ShardRequest(
            **dict[str, Any](
                rank=self.number,
                world_size=RANKS,
                holds=self.holds,
                done=self.done,
                failed=self.failed,
                shards=shards,
                continues=self.continues,
            )
            | fields
        )

    def take(self, answer: ShardAnswer) -> None:
        assert not intersection(self.holds, answer.granted), "granted twice"
        self.holds = union(self.holds, answer.granted)
        self.done, self.failed = (), ()


class Machine(RuleBasedStateMachine):
    """Ranks of one generation after another, each with a position that may be restored."""

    @initialize(size=st.integers(1, 40), shard_size=st.integers(1, 7), epochs=st.integers(1, 3))
    def begin(self, size: int, shard_size: int, epochs: int) -> None:
        self._begin(DatasetParameters(size=size, shard_size=shard_size, epochs=epochs))

    def _begin(self, parameters: DatasetParameters) -> None:
        self.parameters = parameters
        self.state = begin(parameters)
        self.term = Term(generation=0)
        self.saved: list[tuple[Position, Spans]] = []
        self.consumed: Spans = ()
        """By the model as it is: what was consumed after a restored position is not in it."""
        self.failing: frozenset[int] = frozenset()
        self._new_ranks(Term(generation=1), None)

    def _new_ranks(self, term: Term, loaded: Position | None) -> None:
        old = getattr(self, "ranks", [])
        self.ranks = [Rank(number) for number in range(RANKS)]
        self.keeps_processes = False
        for rank in self.ranks:
            self.exchange(rank, rank.request(position=loaded), term)
        for rank in old:
            before = self.state
            self.state, answer = exchange(self.state, self.parameters, self.term, rank.request(shards=2))
            assert answer.superseded
            assert self.state == before
        self.term = term

    def exchange(
        self, rank: Rank, request: ShardRequest, term: Term | None = None, *, now: datetime | None = None
    ) -> ShardAnswer:
        self.state, answer = exchange(
            self.state, self.parameters, term or self.term, request, keeps_processes=self.keeps_processes, now=now
        )
        assert not answer.refused
        assert not answer.superseded
        rank.take(answer)
        return answer

    @rule(number=st.integers(0, RANKS - 1), shards=st.integers(0, 5), lost=st.booleans())
    def asks(self, number: int, shards: int, lost: bool) -> None:
        rank = self.ranks[number]
        if lost:
            request = rank.request(shards=shards)
            self.state, _ = exchange(
                self.state, self.parameters, self.term, request, keeps_processes=self.keeps_processes
            )
        self.exchange(rank, rank.request(shards=shards))

    @rule(number=st.integers(0, RANKS - 1), data=st.data())
    def consumes(self, number: int, data: st.DataObject) -> None:
        rank = self.ranks[number]
        if not rank.holds:
            return
        first, end = data.draw(st.sampled_from(rank.holds))
        begin = data.draw(st.integers(first, end - 1))
        span: Span = (begin, data.draw(st.integers(begin + 1, end)))
        assert not intersection(self.consumed, (span,)), "consumed twice"
        self.consumed = union(self.consumed, (span,))
        rank.holds = difference(rank.holds, (span,))
        rank.done = union(rank.done, (span,))

    @rule(number=st.integers(0, RANKS - 1), data=st.data())
    def fails(self, number: int, data: st.DataObject) -> None:
        rank = self.ranks[number]
        if rank.holds:
            span = data.draw(st.sampled_from(rank.holds))
            rank.holds = difference(rank.holds, (span,))
            rank.failed = (*rank.failed, FailedShard(span=span, error="no such file"))
            self.exchange(rank, rank.request())

    @rule()
    def saves(self) -> None:
        """What all ranks have consumed, as they agree on it at a checkpoint."""
        last = self.consumed[-1][1] if self.consumed else 0
        self.saved.append(
            (Position(next=last, holes=difference(((0, last),), self.consumed) if last else ()), self.consumed)
        )

    @precondition(lambda self: self.saved)
    @rule(data=st.data(), same_world=st.booleans())
    def restores(self, data: st.DataObject, same_world: bool) -> None:
        position, consumed = data.draw(st.sampled_from(self.saved))
        rewound = Term(generation=self.term.generation, rewinds=self.term.rewinds + 1)
        self.consumed = consumed
        self._new_ranks(
            rewound
            if same_world and not self.keeps_processes
            else Term(generation=self.term.generation + 1, rewinds=1),
            position,
        )

    @rule()
    def is_killed(self) -> None:
        """All ranks end; what they had not reported is consumed again."""
        for rank in self.ranks:
            self.consumed = difference(self.consumed, rank.done)
        self._new_ranks(Term(generation=self.term.generation + 1), None)

    @rule(number=st.integers(0, RANKS - 1), shards=st.integers(0, 3), data=st.data())
    def is_killed_alone(self, number: int, shards: int, data: st.DataObject) -> None:
        """One process is started again, and the others continue: what they hold stays theirs, and what they have done
        stays done, whichever position the new one loads."""
        position = data.draw(st.sampled_from([None, *(position for position, _ in self.saved)]))
        killed, self.ranks[number] = self.ranks[number], Rank(number)
        self.consumed = difference(self.consumed, killed.done)
        self.term = Term(generation=self.term.generation + 1, rewinds=self.term.rewinds)
        self.keeps_processes = True
        others = [rank for rank in self.ranks if rank.number != number]
        if not _rest(self.state):
            # Others would get what is kept for a rank that has not reported yet.
            shards = 0
        rewound = self.term.replace(rewinds=self.term.rewinds + (position is not None))
        for rank, request, term in (
            (self.ranks[number], self.ranks[number].request(shards=min(shards, 1), position=position), rewound),
            *((rank, rank.request(continues=True), self.term) for rank in others),
        ):
            answer = self.exchange(rank, request, term)
            assert answer.not_taken == (request.position is not None)
            rank.continues = rank.number != number

    @invariant()
    def leases_are_apart(self) -> None:
        leases = list(self.state.leases.values())
        assert size(union(*leases, self.state.free)) == sum(map(size, leases)) + size(self.state.free)
        assert not intersection(union(*leases, self.state.free), self.state.aside)
        for rank in self.ranks:
            assert difference(rank.holds, self.state.leases.get(rank.number, ())) == ()

    def teardown(self) -> None:
        if not hasattr(self, "state"):
            return
        self._read_to_the_end()
        aside = difference(self.state.aside, self.consumed)
        assert union(self.consumed, aside) == self._whole(), "every sample once, but those set aside"
        seen = view(self.state)
        assert seen.leased == 0
        assert seen.done + size(intersection(self.state.aside, self._whole())) == size(self._whole()) == seen.total

    def _whole(self) -> Spans:
        return ((0, self.parameters.end or 0),)

    def _read_to_the_end(self) -> None:
        for _ in range(1000):
            answers: list[ShardAnswer] = []
            for rank in self.ranks:
                answers.append(self.exchange(rank, rank.request(shards=3)))
                for span in rank.holds:
                    assert not intersection(self.consumed, (span,)), "consumed twice"
                self.consumed = union(self.consumed, rank.holds)
                rank.done, rank.holds = union(rank.done, rank.holds), ()
                self.exchange(rank, rank.request())
            if all(answer.drained for answer in answers):
                return
        raise AssertionError("it does not end")


TestMachine = Machine.TestCase
TestMachine.settings = settings(stateful_step_count=30)


class StreamMachine(Machine):
    """The same of a stream whose partitions grow meanwhile."""

    @initialize(starts=st.lists(st.integers(0, 9), min_size=1, max_size=3), shard_size=st.integers(1, 7))
    def begin(self, starts: list[int], shard_size: int) -> None:
        self.ends = [0] * len(starts)
        self.starts = starts
        self._begin(stream(starts, shard_size=shard_size))

    @rule(number=st.integers(0, RANKS - 1), data=st.data())
    def grows(self, number: int, data: st.DataObject) -> None:
        """A rank reports what it knows; another one may have known more."""
        partition = data.draw(st.integers(0, len(self.ends) - 1))
        known = [data.draw(st.integers(0, end)) for end in self.ends]
        known[partition] += data.draw(st.integers(0, 20))
        self.ends = list(map(max, self.ends, known))
        self.exchange(self.ranks[number], self.ranks[number].request(grown=tuple(known)))

    def _read_to_the_end(self) -> None:
        assert not self.exchange(self.ranks[0], self.ranks[0].request(shards=1)).drained, "it may grow"
        self.exchange(self.ranks[0], self.ranks[0].request(complete=True))
        super()._read_to_the_end()

    def _whole(self) -> Spans:
        lines = zip(range(0, PARTITION_SIZE * len(self.ends), PARTITION_SIZE), self.starts, self.ends, strict=True)
        return tuple((line + start, line + end) for line, start, end in lines if end > start)


TestStreamMachine = StreamMachine.TestCase
TestStreamMachine.settings = settings(stateful_step_count=30)


class TimedMachine(Machine):
    """The same while time passes: shards that have failed are tried again after a pause."""

    def exchange(
        self, rank: Rank, request: ShardRequest, term: Term | None = None, *, now: datetime | None = None
    ) -> ShardAnswer:
        self.now = getattr(self, "now", NOW) + timedelta(seconds=1)
        return super().exchange(rank, request, term, now=self.now)


TestTimedMachine = TimedMachine.TestCase
TestTimedMachine.settings = settings(stateful_step_count=30)


def stream(starts: list[int], *, shard_size: int = 10) -> DatasetParameters:
    names = tuple(f"p{number}" for number in range(len(starts)))
    return DatasetParameters(
        size=PARTITION_SIZE, epochs=len(starts), partitions=names, starts=tuple(starts), shard_size=shard_size
    )


def asked(state: DatasetState, term: Term, **request: Any) -> tuple[DatasetState, ShardAnswer]:
    return exchange(state, state.parameters, term, ShardRequest(**dict[str, Any](rank=0) | request))


def test_a_billion_samples_done_out_of_order_take_a_few_kilobytes():
    state = DatasetState(parameters=DatasetParameters(size=10**9, shard_size=64, epochs=3, shuffle=True))
    term = Term(generation=1)
    held: list[Spans] = [()] * 64
    for turn in range(40):
        for rank, spans in enumerate(held):
            done = spans if (turn + rank) % 3 else spans[:1]
            rest = difference(spans, done)
            state, answer = asked(state, term, rank=rank, holds=rest, done=done, shards=1000, world_size=64)
            held[rank] = union(rest, answer.granted)
    assert view(state).done > 10**7
    assert view(state).state_bytes < 64 * 1024


def test_a_rank_that_finishes_every_other_sample_is_granted_no_more_fragments_than_it_may_hold():
    state = DatasetState(parameters=DatasetParameters(size=10**6, shard_size=1))
    term = Term(generation=1)
    state, answer = asked(state, term, shards=2 * MOST_FRAGMENTS)
    held = answer.granted
    odd = tuple((number, number + 1) for number in range(1, 2 * MOST_FRAGMENTS, 2))
    held = difference(held, odd)
    state, answer = asked(state, term, holds=held, done=odd, shards=1000)
    assert not answer.granted
    assert not answer.drained, "it is not the end of the data"
    state, answer = asked(state, term, done=held, shards=10)
    assert answer.granted == ((2 * MOST_FRAGMENTS, 2 * MOST_FRAGMENTS + 10),)


def test_a_shard_is_set_aside_after_its_last_try_and_named():
    state, term = DatasetState(parameters=WHOLE), Term(generation=1)
    for _ in range(MOST_TRIES):
        state, answer = asked(state, term, shards=1)
        assert answer.granted == ((0, 8),), "tried again at once"
        state, _ = asked(state, term, failed=(FailedShard(span=(0, 8), error="bad header"),))
    state, answer = asked(state, term, shards=1)
    assert answer.granted == ((8, 16),)
    (named,) = view(state).set_aside
    assert (named.epoch, named.first, named.end, named.error) == (0, 0, 8, "bad header")


def test_a_failure_that_is_reported_again_is_one_try_and_one_of_another_rank_or_term_is_another():
    state, term = DatasetState(parameters=WHOLE), Term(generation=1)
    state, _ = asked(state, term, shards=1)
    first = (FailedShard(span=(0, 8), number=1),)
    for _ in range(MOST_TRIES):
        state, answer = asked(state, term, failed=first, shards=1)
        assert answer.granted == ((0, 8),)
    state, _ = asked(state, term, failed=(FailedShard(span=(0, 8), number=2),))
    state, answer = asked(state, term, rank=1, shards=1)
    assert answer.granted == ((0, 8),)
    assert not view(state).set_aside
    state, _ = asked(state, Term(generation=2), rank=1, shards=1)
    state, _ = asked(state, Term(generation=2), rank=1, failed=first)
    assert view(state).set_aside


def test_the_job_is_told_of_the_first_shards_and_counts_the_others():
    parameters = DatasetParameters(size=100, shard_size=10)
    state = DatasetState(parameters=parameters, aside=((0, 70),))
    details = tuple(SetAside(epoch=0, first=10 * n, end=10 * n + 10, error="x" * 500) for n in range(7))
    told = unprocessed(state.model_copy(update={"details": details}), "train")
    assert told.summary.startswith("70 samples of dataset train were set aside, as each try failed: epoch 0, 0 to 9 (x")
    assert told.summary.endswith("; and 20 more samples")
    assert len(told.model_dump_json()) < 5_000, "a job carries it"


def test_a_rewind_does_not_bring_back_what_was_set_aside():
    state, term = DatasetState(parameters=WHOLE), Term(generation=1)
    for _ in range(MOST_TRIES):
        state, _ = asked(state, term, shards=3, world_size=1)
        state, _ = asked(state, term, holds=((0, 8), (16, 24)), failed=(FailedShard(span=(8, 16)),))
    for loaded in (Position(), Position(next=24, holes=((8, 24),))):
        term = Term(generation=1, rewinds=term.rewinds + 1)
        state, answer = asked(state, term, position=loaded, shards=25)
        assert not intersection(answer.granted, ((8, 16),))
        assert size(answer.granted) == 200 - loaded.next + size(loaded.holes) - 8


def test_a_shard_that_succeeds_at_its_second_try_is_counted_anew_later():
    state, term = DatasetState(parameters=WHOLE), Term(generation=1)
    state, answer = asked(state, term, shards=1)
    state, answer = asked(state, term, failed=(FailedShard(span=(0, 8)),), shards=1)
    state, _ = asked(state, term, done=answer.granted)
    assert not state.failures


def test_ranks_that_load_different_positions_are_refused():
    state, term = DatasetState(parameters=WHOLE), Term(generation=2, rewinds=1)
    state, first = asked(state, term, position=Position(next=16), shards=1)
    assert first.granted == ((16, 24),)
    _, second = asked(state, term, rank=1, position=Position(next=8), shards=1)
    assert "another data position" in second.refused
    again, third = asked(state, term, rank=1, position=Position(next=16), shards=1, world_size=2)
    assert third.granted == ((24, 32),)
    assert again.base == Position(next=16)


def test_other_parameters_under_the_same_name_are_refused_and_named():
    state = DatasetState(parameters=WHOLE)
    other = WHOLE.model_copy(update={"shard_size": 4, "shuffle": True})
    unchanged, answer = exchange(state, other, Term(generation=1), ShardRequest(rank=0, shards=1))
    assert unchanged == state
    assert "shard_size 4 instead of 8, shuffle True instead of False" in answer.refused


@pytest.mark.parametrize("shard_size", [1, 7, 8, 100, 1000])
def test_shards_do_not_reach_into_the_next_epoch(shard_size: int):
    shards = Shards(DatasetParameters(size=100, shard_size=shard_size, epochs=3))
    for index in range(3 * shards.per_epoch):
        first, end = shards.first(index), shards.first(index + 1)
        assert first // 100 == (end - 1) // 100
        assert {shards.index(position) for position in range(first, end)} == {index}


def test_near_the_end_no_rank_takes_all_that_is_left():
    state, term = DatasetState(parameters=DatasetParameters(size=100, shard_size=1)), Term(generation=1)
    state, answer = asked(state, term, shards=1000, world_size=4)
    assert size(answer.granted) == 12


def test_a_stream_with_a_partition_without_an_end_also_leases_what_the_others_have():
    state, answer = begin(stream([0, 5])), ShardAnswer()
    term = Term(generation=1)
    granted: Spans = ()
    for _ in range(6):
        state, answer = asked(state, term, shards=2, holds=granted, grown=(PARTITION_SIZE, 15))
        granted = union(granted, answer.granted)
    assert intersection(granted, ((PARTITION_SIZE, 2 * PARTITION_SIZE),)) == (
        (PARTITION_SIZE + 5, PARTITION_SIZE + 15),
    )
    assert not answer.drained
    seen = view(state)
    assert [(one.name, one.next, one.end) for one in seen.partitions] == [("p0", 0, None), ("p1", 5, 15)]
    assert seen.total is None
    assert seen.done == 0


def test_a_shard_of_a_stream_is_named_by_its_partition_and_offsets():
    state = begin(stream([0, 0]))
    term = Term(generation=1)
    for _ in range(MOST_TRIES):
        state, answer = asked(state, term, shards=1, grown=(0, 7))
        state, _ = asked(state, term, failed=(FailedShard(span=answer.granted[0], error="KeyError"),))
    assert unprocessed(state, "clicks").shards[0].summary == "partition p1, 0 to 6 (KeyError)"


@pytest.mark.parametrize(
    "changed", [{"starts": (0,)}, {"partitions": ("a", "a")}, {"shuffle": True}, {"size": 5}, {"epochs": 3}]
)
def test_a_stream_that_is_none_is_refused(changed: dict[str, object]):
    with pytest.raises(ValueError, match="stream"):
        DatasetParameters.model_validate(stream([0, 0]).model_dump() | changed)


def test_a_stream_of_many_partitions_read_out_of_order_takes_a_few_kilobytes():
    number = 256
    state = begin(stream([10**9] * number, shard_size=64))
    term = Term(generation=1)
    ends = (10**12,) * number
    held: list[Spans] = [()] * 64
    for turn in range(8):
        for rank, spans in enumerate(held):
            done = spans[:1] if turn % 3 else ()
            rest = difference(spans, done)
            state, answer = asked(state, term, rank=rank, holds=rest, done=done, shards=16, world_size=64, grown=ends)
            held[rank] = union(rest, answer.granted)
    assert size(state.leased) > 0
    assert view(state).state_bytes < 64_000


def test_a_rank_that_never_reports_holds_up_no_other_and_the_next_world_reads_what_it_had():
    state = begin(DatasetParameters(size=100, shard_size=10))
    term = Term(generation=1)
    state, silent = asked(state, term, rank=1, shards=2, world_size=2)
    read: Spans = ()
    while True:
        state, answer = asked(state, term, holds=read, shards=10, world_size=2)
        if answer.drained:
            break
        read = union(read, answer.granted)
        state, _ = asked(state, term, done=answer.granted)
    assert union(read, silent.granted) == ((0, 100),)
    assert samples_done(state) == 80, "what no rank has reported is not done"
    state, answer = asked(state, Term(generation=2), rank=0, shards=10)
    assert answer.granted == silent.granted


def test_a_dataset_without_an_end_is_never_drained():
    state = DatasetState(parameters=DatasetParameters(size=10, shard_size=4, epochs=0))
    term = Term(generation=1)
    for _ in range(5):
        state, answer = asked(state, term, shards=20, done=state.leases.get(0, ()))
        assert not answer.drained
    assert view(state).total is None
    assert state.next > 300
