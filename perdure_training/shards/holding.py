"""What one rank has of a dataset: shards that it holds, has handed out, has processed and has not reported yet."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from perdure_training.node_api.agent_client import Json
from perdure_training.shards.spans import Span, length, merge, without

MOST_SPANS = 200
"""Spans in one list of a request; the agent takes 256."""
_MOST_FAILED = 100


@dataclass(frozen=True)
class Failed:
    """Positions that could not be processed."""

    span: Span
    error: str
    number: int
    """Counts these in a term: a request that was not answered is repeated, and may have arrived each time."""


@dataclass(frozen=True)
class Report:
    """What is reported in one exchange, and what is held besides."""

    done: list[Span]
    failed: list[Failed]
    holds: list[Span]


class Holding:
    """The positions that a rank has in one term. The caller's lock is held for every call.

    Invariant: a position is held, handed out, in the batch that the loop was given last, or done.
    """

    def __init__(self, parameters: Json) -> None:
        """Begins with nothing.

        Args:
            parameters: The dataset's, which say where its shards end.
        """
        self._size: int = parameters["size"]
        self._shard_size: int = parameters["shard_size"]
        self._held: deque[Span] = deque()
        self._out: deque[Span] = deque()
        """What was handed out and is not done, in that order."""
        self._batch: list[Span] = []
        """The batch that the loop was given last, until it is done."""
        self._done: list[Span] = []
        """What is done and not reported yet."""
        self._failed: list[Failed] = []
        self._failures = 0
        """Of this term."""
        self._consumed: list[Span] = []
        """What was done since the position that all ranks had agreed on last."""
        self._merge_at = 2 * MOST_SPANS

    def __bool__(self) -> bool:
        return bool(self._held)

    @property
    def shards(self) -> int:
        """The number of shards that are held, and not handed out."""
        return sum(math.ceil((end - first) / self._shard_size) for first, end in self._held)

    @property
    def is_reported(self) -> bool:
        """Whether all that is done or has failed was reported."""
        return not (self._done or self._failed)

    @property
    def must_report(self) -> bool:
        """Whether a report should not wait: something has failed, or much is done."""
        return len(self._done) > MOST_SPANS or bool(self._failed)

    @property
    def is_untouched(self) -> bool:
        """Whether nothing was consumed or is in progress."""
        return not (self._consumed or self._out or self._batch)

    @property
    def has_progress(self) -> bool:
        """Whether the loop has a batch, or has reported samples."""
        return bool(self._batch or self._consumed)

    @property
    def consumed(self) -> list[Span]:
        """What was done since the position that all ranks had agreed on last."""
        return merge(self._consumed)

    @property
    def of_step(self) -> list[Span]:
        """What belongs to the current step: what was consumed, and the batch that the loop has."""
        return merge(self._consumed, self._batch)

    def add(self, granted: Iterable[Span]) -> None:
        """Takes what was leased to the rank."""
        self._held.extend(granted)

    def hand_out(self) -> Span:
        """Hands out the next shard: at most up to the next boundary of shards."""
        first, end = self._held.popleft()
        epoch, sample = divmod(first, self._size)
        cut = min(end, epoch * self._size + min((sample // self._shard_size + 1) * self._shard_size, self._size))
        if cut < end:
            self._held.appendleft((cut, end))
        self._out.append((first, cut))
        return first, cut

    def put_back(self) -> None:
        """Takes back what was handed out and is not done."""
        self._held.extendleft(reversed(self._out))
        self._out.clear()

    def withdraw(self, spans: list[Span]) -> list[Span]:
        """Takes these positions out of what is in progress.

        Raises:
            ValueError: if they are not.
        """
        rest = [one for out in self._out for one in without(out, spans)]
        if length(self._out) - length(rest) != length(spans):
            raise ValueError("the samples are not in progress: they were reported before, or fetched by another client")
        self._out = deque(rest)
        return spans

    def withdraw_next(self, samples: int) -> list[Span]:
        """Takes the next positions out of what is in progress, in their order.

        Raises:
            ValueError: if fewer are.
        """
        if samples > length(self._out):
            raise ValueError(f"{samples} samples are done, but fewer are in progress")
        spans: list[Span] = []
        while samples > 0:
            first, end = self._out.popleft()
            cut = min(end, first + samples)
            spans.append((first, cut))
            samples -= cut - first
            if cut < end:
                self._out.appendleft((cut, end))
        return spans

    def finish(self, spans: list[Span]) -> None:
        """Records that positions that were withdrawn are done."""
        self._done = merge(self._done, spans)
        self._consumed += spans
        if len(self._consumed) > self._merge_at:
            self._consumed = merge(self._consumed)
            self._merge_at = 2 * (len(self._consumed) + MOST_SPANS)

    def fail(self, spans: list[Span], error: str) -> None:
        """Records that positions that were withdrawn could not be processed."""
        for span in spans:
            self._failures += 1
            self._failed.append(Failed(span, error, self._failures))

    def hand_over(self, batch: int | list[Span]) -> None:
        """Records that the loop was given a batch, as a number of samples or by its positions. The one before it is
        done.

        Raises:
            ValueError: if they are not in progress.
        """
        self.finish_batch()
        self._batch = self.withdraw_next(batch) if isinstance(batch, int) else self.withdraw(batch)

    def finish_batch(self) -> None:
        """Records that the batch which the loop was given last is done."""
        batch, self._batch = self._batch, []
        self.finish(batch)

    def begin_step(self) -> None:
        """Records that all ranks have agreed on a position after what was consumed."""
        self._consumed = []

    def report(self) -> Report:
        """Returns what the next request says; `settle` follows once it has arrived."""
        done, failed = self._done[:MOST_SPANS], self._failed[:_MOST_FAILED]
        unreported = (self._done[MOST_SPANS:], [one.span for one in self._failed[_MOST_FAILED:]])
        return Report(done, failed, merge(self._held, self._out, self._batch, *unreported))

    def settle(self, report: Report) -> None:
        """Records that a report has arrived."""
        reported = merge(report.done)
        self._done = [one for span in self._done for one in without(span, reported)]
        self._failed = [one for one in self._failed if one not in report.failed]
