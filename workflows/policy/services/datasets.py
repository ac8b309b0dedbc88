"""Decides which rank processes which shards of a dataset: pure functions over `DatasetState`.

Invariants:
    - Every position below `next` is in exactly one of: done, leased to one rank, `kept` for one, `free`, set aside.
      Done is what is in none of the others, so that it takes no memory.
    - Leases belong to the newest term. A request of a newer term returns them all, so no lease waits for a report that
      its node cannot send any more; a request of an older term changes nothing.
    - Where processes continue in a newer generation, their leases are kept for them until they report. What is kept is
      leased to others when nothing else is left, so nothing waits for a rank that is gone.
    - A shard is set aside for tries between which others were done: an outage of the storage, in which all fail, sets
      none aside, and has a few of them tried now and then.
    - The first rank that names a term decides at which position it begins. The others must name the same one. Where
      processes continue in it, what is done stays done, whichever position the process beside them loads.
    - The number of spans is bounded by ranks and partitions, not by samples: a rank that holds too many fragments is
      granted none, and what would make too many of them is refused. So is the time that an exchange takes: training
      code chooses what it reports, and the worker serves other jobs, too.
    - All positions of a stream are below `next`, and `free` until they are leased: those before the ends that ranks
      have reported can be.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, islice

from pydantic import Field

from perdure.contract.base import Message
from perdure.contract.datasets import (
    LARGEST_POSITION,
    MOST_SPANS,
    PARTITION_SIZE,
    DatasetParameters,
    DatasetRequest,
    FailedShard,
    Position,
    SetAside,
    ShardAnswer,
    ShardRequest,
    Span,
    Spans,
    Term,
)
from perdure.workflows.policy.services.failed_shards import (
    LONGEST_AT_END,
    MOST_FAILED,
    MOST_FAILURES,
    MOST_IN_VAIN,
    MOST_TRIES,
    FailedTries,
)
from perdure.workflows.policy.services.spans import difference, intersection, overlaps, union

MOST_FRAGMENTS = 32
"""Spans that one rank holds. Beyond it, the rank is granted nothing until it has finished some."""
MOST_HELD = 2 * MOST_SPANS
"""Spans that one rank may be left with by what it reports: a request names no more than half of them."""
MOST_ASIDE = 20_000
"""Spans that are set aside."""
MOST_LOOKED_AT = 100_000
"""Spans and ranks that one exchange looks through for what it can grant: some 50 ms. Ranks for which nothing is left of
this get nothing, and ask again."""
MOST_RANKS = 100_000
"""Ranks that hold shards: agents of machines that joined may name any."""
MOST_GRANTED_SPANS = 16
"""Spans in one answer."""
MOST_DETAILS = 100
"""Shards set aside whose errors are kept; further ones are counted."""
MOST_NAMED = 5
"""Shards set aside that the job names; it counts the samples of further ones."""
SHARE_OF_REST = 2
"""A rank is granted at most this fraction (1/n) of an equal share of what is left, so that all ranks end together."""


class DatasetState(Message):
    """Everything that a `Dataset` workflow carries into its next run."""

    parameters: DatasetParameters
    term: Term = Term(generation=0)
    loaded: Position | None = None
    """The position that the ranks have loaded for this term; None where it continues what was done before."""
    base: Position = Position()
    """The position at which the term began."""
    next: int = 0
    """No position from this one on has been leased."""
    free: Spans = ()
    """Positions below `next` that were returned."""
    leases: dict[int, Spans] = Field(default={})
    """Keyed by global rank."""
    kept: dict[int, Spans] = Field(default={})
    """What ranks had leased before the term, and have not reported on in it, by global rank: their processes may
    continue."""
    aside: Spans = ()
    details: tuple[SetAside, ...] = ()
    failures: tuple[FailedTries, ...] = ()
    done_at: datetime | None = None
    """When a rank has reported a shard as done last; None in a run of an earlier release, too."""
    error: str = ""
    """The newest error of a shard."""
    failed: dict[int, int] = Field(default={})
    """The number of the newest failure that each rank has reported in this term, by global rank."""
    ends: tuple[int, ...] = ()
    """For a stream: the end of each partition."""
    complete: bool = False
    """For a stream: it will not grow any more."""
    turn: int = 0
    """For a stream: the partition that is leased from next, so that none has to wait for the end of another."""

    @property
    def leased(self) -> Spans:
        return union(*self.leases.values(), *self.kept.values())

    @property
    def position(self) -> Position:
        """What is done; shards set aside count as done."""
        return Position(next=self.next, holes=union(self.free, self.leased))


@dataclass(frozen=True)
class Shards:
    """The arithmetic of shards on the line of positions."""

    parameters: DatasetParameters

    @property
    def per_epoch(self) -> int:
        return -(-self.parameters.size // self.parameters.shard_size)

    def index(self, position: int) -> int:
        """The number of the shard that a position belongs to, counted over all epochs."""
        epoch, sample = divmod(position, self.parameters.size)
        return epoch * self.per_epoch + sample // self.parameters.shard_size

    def first(self, index: int) -> int:
        """The first position of a shard."""
        epoch, number = divmod(index, self.per_epoch)
        return epoch * self.parameters.size + number * self.parameters.shard_size

    def count(self, spans: Spans) -> int:
        """The number of shards that have positions in the spans, counted span by span."""
        return sum(self.index(end - 1) - self.index(first) + 1 for first, end in spans)


def begin(parameters: DatasetParameters) -> DatasetState:
    """A dataset of which nothing was read."""
    if not parameters.partitions:
        return DatasetState(parameters=parameters)
    unread = tuple(
        (partition * PARTITION_SIZE + start, (partition + 1) * PARTITION_SIZE)
        for partition, start in enumerate(parameters.starts)
    )
    return DatasetState(
        parameters=parameters,
        next=parameters.epochs * PARTITION_SIZE,
        free=unread,
        ends=(0,) * parameters.epochs,
    )


def exchange_all(
    state: DatasetState,
    request: DatasetRequest,
    *,
    bounded: bool = True,
    stays_done: bool = True,
    now: datetime | None = None,
) -> tuple[DatasetState, tuple[ShardAnswer, ...]]:
    """Answers the requests of a node's ranks, in their order.

    Args:
        state: The dataset.
        request: The requests.
        bounded: Whether the time of one exchange is bounded for what is granted, too.
        stays_done: Whether a process that begins beside those that continue moves the dataset to no position; not in a
            run of an earlier release.
        now: The time; None for a run of an earlier release, which leases a shard that has failed again at once.
    """
    answers: list[ShardAnswer] = []
    left, looks = MOST_FAILED, MOST_LOOKED_AT
    for one in request.ranks:
        known = one.replace(failed=one.failed[:left], shards=one.shards if looks > 0 else 0)
        left -= len(known.failed)
        state, answer = exchange(
            state,
            request.parameters,
            request.term,
            known,
            keeps_processes=request.keeps_processes,
            stays_done=stays_done,
            now=now,
        )
        looks -= len(state.free) + len(state.leases) + 5 * len(state.failures) if bounded and known.shards else 0
        answers.append(answer)
    return state, tuple(answers)


def exchange(
    state: DatasetState,
    parameters: DatasetParameters,
    term: Term,
    request: ShardRequest,
    *,
    keeps_processes: bool = False,
    stays_done: bool = True,
    now: datetime | None = None,
) -> tuple[DatasetState, ShardAnswer]:
    """Takes in what a rank has done, and grants it what it needs.

    Args:
        state: The dataset.
        parameters: What it is, as the rank names it.
        term: The rank's term.
        request: What the rank has done, and needs.
        keeps_processes: Whether processes of older generations continue in the term's.
        stays_done: As of `exchange_all`.
        now: As of `exchange_all`.
    """
    not_taken = False
    if stays_done and keeps_processes and request.world_size > 1:
        # Each of its processes begins by itself: the number of positions that it has loaded orders nothing.
        term = Term(generation=term.generation)
        if state.term.generation:
            newer = term.order > state.term.order
            not_taken = request.position is not None and (newer or request.position != state.loaded)
            request = request.replace(position=None)
    if parameters != state.parameters:
        return state, ShardAnswer(refused=_difference(state.parameters, parameters))
    if term.order < state.term.order:
        return state, ShardAnswer(superseded=True)
    if term.order > state.term.order:
        keeps = keeps_processes and request.position is None
        state = _continue_in(state, term) if keeps else _begin_term(state, term, request.position)
    elif request.position is not None and request.position != state.loaded:
        return state, ShardAnswer(
            refused="this rank has loaded another data position than a rank before it: all ranks load the same "
            "checkpoint, and load it equally often"
        )
    taken = _take_in(_return_kept(_grow(state, request), request), request, now)
    held = taken.leases.get(request.rank, ())
    if refused := _why_too_many(taken, held):
        return state, ShardAnswer(refused=refused)
    state = taken
    lost = difference(held, request.holds)
    state, granted = _grant(state, request, held, now)
    return state, ShardAnswer(
        granted=union(lost, granted),
        drained=request.shards > 0 and not granted and not _rest(state) and not _may_grow(state),
        base=state.base if request.needs_base else None,
        not_taken=not_taken,
    )


def _grow(state: DatasetState, request: ShardRequest) -> DatasetState:
    """Takes in how far a stream has grown, by what ranks know one after the other."""
    if not state.parameters.partitions:
        return state
    ends = state.ends
    if len(request.grown) == len(ends):
        ends = tuple(map(max, ends, request.grown))
    return state.replace(ends=ends, complete=state.complete or request.complete)


def _may_grow(state: DatasetState) -> bool:
    return bool(state.parameters.partitions) and not state.complete


def _begin_term(state: DatasetState, term: Term, loaded: Position | None) -> DatasetState:
    if loaded is None:
        base = state.position
    else:
        end = state.parameters.end
        base = loaded if end is None else loaded.replace(next=min(loaded.next, end))
    if state.parameters.partitions:
        unread = begin(state.parameters)
        rest = ((base.next, unread.next),) if base.next < unread.next else ()
        base = Position(next=unread.next, holes=intersection(union(base.holes, rest), unread.free))
    return state.replace(
        term=term,
        loaded=loaded,
        base=base,
        next=base.next,
        free=difference(intersection(base.holes, ((0, base.next),) if base.next else ()), state.aside),
        leases={},
        kept={},
        failed={},
    )


def _continue_in(state: DatasetState, term: Term) -> DatasetState:
    """Begins a term in which processes continue."""
    ranks = {*state.kept, *state.leases, *state.failed}
    kept = {rank: union(state.kept.get(rank, ()), state.leases.get(rank, ())) for rank in sorted(ranks)}
    return state.replace(term=term, base=state.position, leases={}, kept=kept)


def _return_kept(state: DatasetState, request: ShardRequest) -> DatasetState:
    """Returns what is kept for a rank to it, or, where its process has been started since, to the dataset."""
    if request.rank not in state.kept:
        return state
    spans = state.kept[request.rank]
    state = state.replace(kept={rank: kept for rank, kept in state.kept.items() if rank != request.rank})
    if request.continues:
        return _with_lease(state, request.rank, union(state.leases.get(request.rank, ()), spans))
    failed = {rank: number for rank, number in state.failed.items() if rank != request.rank}
    return state.replace(free=union(state.free, spans), failed=failed)


def _take_in(state: DatasetState, request: ShardRequest, now: datetime | None) -> DatasetState:
    before = state.leases.get(request.rank, ())
    if not before:
        return state
    held = difference(before, request.done)
    if held != before:
        state = state.replace(done_at=now)
    counted = state.failed.get(request.rank, 0)
    newest = max((failed.number for failed in request.failed), default=0)
    failures, returned, aside, details = list(state.failures), list[Span](), list[Span](), list[SetAside]()
    others_left: bool | None = None
    for failed in request.failed:
        # A request whose answer was late is repeated, and the shard may have been leased to the rank again since.
        if failed.number and failed.number <= counted:
            continue
        spans = intersection(held, (failed.span,))
        if not spans:
            continue
        held = difference(held, spans)
        index = next((index for index, one in enumerate(failures) if overlaps(one.span, spans)), None)
        known = None if index is None else failures.pop(index)
        tries = 1 if known is None else known.tries + 1
        if now is not None and known is not None and known.is_in_vain(state.done_at, now):
            others_left = has_others(state, request.failed) if others_left is None else others_left
            tries -= others_left or known.is_in_vain(state.done_at, now, LONGEST_AT_END)
        if tries < MOST_TRIES and len(failures) < MOST_FAILURES:
            since = known.since if known is not None and known.since is not None else now
            failures.append(FailedTries(span=failed.span, tries=tries, since=since, failed_at=now))
            returned += spans
        elif tries < MOST_TRIES and now is not None and failures[-1].is_in_vain(state.done_at, now):
            returned += spans
        else:
            aside += spans
            details += (_detail(state.parameters, one, failed.error) for one in spans)
    if request.done:
        failures = [one for one in failures if not overlaps(one.span, request.done)]
    return _with_lease(state, request.rank, held).replace(
        free=union(state.free, returned) if returned else state.free,
        aside=union(state.aside, aside) if aside else state.aside,
        details=(*state.details, *details)[:MOST_DETAILS],
        failures=tuple(failures),
        error=next((failed.error for failed in reversed(request.failed) if failed.error), state.error),
        failed={**state.failed, request.rank: newest} if newest > counted else state.failed,
    )


def has_others(state: DatasetState, failed: tuple[FailedShard, ...] = ()) -> bool:
    """Whether ranks have or can be leased what has not failed: whether that can be read tells about the storage."""
    if len(state.free) > 2 * MOST_FAILURES:
        return True
    failing = union(*((one.span,) for one in (*state.failures, *failed)))
    leased = (*state.leases.values(), *state.kept.values())
    return bool(difference(union(_rest(state)), failing)) or any(difference(spans, failing) for spans in leased)


def _why_too_many(state: DatasetState, held: Spans) -> str:
    """Why what a rank has reported is refused, since the state would grow without a bound; empty where it is not."""
    if len(held) > MOST_HELD:
        return f"this rank has reported parts of shards, and would hold {len(held)} pieces; the most are {MOST_HELD}"
    if len(state.leases) > MOST_RANKS:
        return f"more than {MOST_RANKS:,} ranks hold shards of the dataset"
    if len(state.aside) > MOST_ASIDE:
        return f"more than {MOST_ASIDE:,} parts of the dataset have failed {MOST_TRIES} times; the first: " + "; ".join(
            one.summary for one in state.details[:MOST_NAMED]
        )
    return ""


def _detail(parameters: DatasetParameters, span: Span, error: str) -> SetAside:
    epoch, first = divmod(span[0], parameters.size)
    partition = parameters.partitions[epoch] if parameters.partitions else ""
    return SetAside(epoch=epoch, first=first, end=first + span[1] - span[0], error=error, partition=partition)


def _grant(state: DatasetState, request: ShardRequest, held: Spans, now: datetime | None) -> tuple[DatasetState, Spans]:
    shards = Shards(state.parameters)
    missing = request.shards - shards.count(difference(held, request.holds))
    if missing <= 0:
        return state, ()
    wanted = min(missing, _fair_share(state, request))
    granted: list[Span] = []
    room = min(MOST_GRANTED_SPANS, MOST_FRAGMENTS - len(held))
    for first, end in _open(state, request, now):
        if wanted <= 0 or len(granted) >= room:
            break
        cut = min(end, shards.first(shards.index(first) + wanted))
        granted.append((first, cut))
        wanted -= shards.count(((first, cut),))
    if not granted:
        return state, ()
    spans = union(granted)
    end = max(state.next, spans[-1][1])
    # What fails now, and was done once and is to be done again, is passed over.
    passed = difference(((state.next, end),), state.aside) if end > state.next else ()
    state = state.replace(
        next=end,
        free=difference(union(state.free, passed), spans),
        kept={rank: difference(kept, spans) for rank, kept in state.kept.items()},
        turn=granted[-1][0] // state.parameters.size + 1 if state.parameters.partitions else 0,
    )
    return _with_lease(state, request.rank, union(held, spans)), spans


def _open(state: DatasetState, request: ShardRequest, now: datetime | None) -> Iterable[Span]:
    """What can be leased now, in the order in which it is: not what has failed a moment ago, and last what fails while
    nothing is done. Where much does, nothing is leased for a moment: each shard would fail."""
    rest = _rest(state)
    if now is None or not state.failures:
        return rest
    # In an outage those that failed last wait, so that few of many are looked at.
    waiting = (one for one in reversed(state.failures) if one.waits(now) and one.is_in_vain(state.done_at, now))
    most = max(MOST_IN_VAIN, request.world_size)
    if len(tuple(islice(waiting, most))) >= most:
        return ()
    in_vain = [one for one in state.failures if one.is_in_vain(state.done_at, now)]
    too_early = union(one.span for one in state.failures if one.waits(now))
    # What is kept for ranks is for when nothing else is left.
    kept = union(*state.kept.values())
    last = union((one.span for one in in_vain), too_early, kept)
    others = (left for span in rest for left in difference((span,), last))
    after = union(too_early, kept)
    failing = (left for span in rest for left in difference(intersection((span,), last), after))
    return chain(others, failing, () if too_early else kept)


def _rest(state: DatasetState) -> Spans:
    """What can be leased, in the order in which it is."""
    kept = union(*state.kept.values())
    if state.parameters.partitions:
        held = [(at, at + end) for at, end in zip(range(0, state.next, PARTITION_SIZE), state.ends, strict=True) if end]
        rest = intersection(state.free, tuple(held))
        turn = state.turn % len(state.ends) * PARTITION_SIZE
        return (*(span for span in rest if span[0] >= turn), *(span for span in rest if span[0] < turn), *kept)
    end = state.parameters.end
    # A position that was loaded may be any number.
    last = min(state.next + 2**40, LARGEST_POSITION) if end is None else end
    fresh = difference(((state.next, last),), state.aside) if state.next < last else ()
    return (*state.free, *fresh, *kept)


def _fair_share(state: DatasetState, request: ShardRequest) -> int:
    if state.parameters.end is None:
        return 2**40
    ranks = max(len(state.leases) + (request.rank not in state.leases), request.world_size)
    left = Shards(state.parameters).count(_rest(state))
    return max(1, left // (SHARE_OF_REST * ranks)) if ranks > 1 else left


def _with_lease(state: DatasetState, rank: int, spans: Spans) -> DatasetState:
    return state.replace(leases={**state.leases, rank: spans})


def _difference(known: DatasetParameters, named: DatasetParameters) -> str:
    differing = [
        f"{field} {getattr(named, field)} instead of {getattr(known, field)}"
        for field in type(known).model_fields
        if getattr(known, field) != getattr(named, field)
    ]
    return f"the dataset is in use with other parameters: {', '.join(differing)}. Give another dataset another name"
