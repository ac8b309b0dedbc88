"""Looks at ranks that do not step, several times and before anything is done to them, and reports what the looks show.

One look cannot tell a rank that hangs from one that works. Several can: whether its calls and its collectives changed,
whether its main thread ever ran, and how much of a processor it used meanwhile. The job compares the ranks of all nodes
(`perdure.workflows.policy.diagnosis.hangs`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import chain, count
from typing import NamedTuple, Self

from perdure.agent.node import Node
from perdure.agent.outbox import MessageSink, envelope
from perdure.agent.stacks import StackReader, StacksUnknown
from perdure.contract.agents import Progress
from perdure.contract.hangs import (
    MOST_COLLECTIVES,
    MOST_FRAMES,
    MOST_RANKS,
    MOST_STACKS,
    StalledRank,
    StallEvidence,
    StallLook,
)
from perdure.contract.stacks import CollectiveCall, NodeStacks, RankPosition, StackFrame
from perdure.spec.timing import StallTiming

logger = logging.getLogger(__name__)

_FIRST_LOOK_STEPS = 5
"""Usual steps without which the ranks are looked at for the first time, where steps are slow."""
_LOOKS = 3
"""Looks for one report, in addition to the first look of the stall."""
_BETWEEN_LOOKS = 1.0
"""Seconds between them; the last one is due when the report is."""
_SOONER = 1.0
"""Seconds by which an unusual gap is told before its limit: a sample may be half a second late, and the job has yet to
compare the nodes."""
_OWN_SWITCHES = 3
"""How often a look itself lets a main thread run, at most: it answers the signal, and sleeps again."""
_TRANSFER = 2**20
"""Bytes that a rank reads or writes between the first look and the last if it works with files. An answer to a look has
a few kilobytes, and a line of a log less."""
_SILENT = ("T", "D")
"""States of the kernel in which a process answers no signal."""
_INNERMOST = 6
"""Calls of libraries that are kept: they tell what the script's own call waits for."""


class StallLimits(NamedTuple):
    """Seconds without a step of any rank after which a node does something about it."""

    first_look: float
    compared: float
    """The pause is longer than those that have ended by themselves: the job compares the collectives of all ranks."""
    unusual: float
    """The pause is far longer than the gaps between the node's steps: where the ranks are is told, and no stall is
    reported. The same as `stalled` where too little is known of the steps."""
    stalled: float
    """The stall is reported, with where the ranks are."""
    long: float
    """A rank that is elsewhere, in the same calls all the time, does no work."""

    @classmethod
    def of(cls, timing: StallTiming, *, usual: float, pauses: Sequence[float], learned: float | None = None) -> Self:
        """The limits of a node.

        Args:
            timing: The job's.
            usual: Seconds of a usual step.
            pauses: The node's newest pauses that have ended by themselves.
            learned: Seconds that the gaps between its steps do not explain.
        """
        known = timing.pauses * max(pauses, default=0.0)
        stalled = max(timing.after.total_seconds(), timing.steps * usual, known)
        first_look = min(max(timing.first_look.total_seconds(), _FIRST_LOOK_STEPS * usual), stalled / 2)
        unusual = stalled if learned is None else min(max(first_look, known, learned) - _SOONER, stalled)
        # The first look comes before the others.
        first_look = min(first_look, max(unusual - _LOOKS * _BETWEEN_LOOKS, unusual / 2))
        return cls(first_look, max(first_look, known), unusual, stalled, timing.elsewhere * stalled)


class _Look(NamedTuple):
    time: float
    """Seconds on the monotonic clock."""
    stacks: NodeStacks
    asked: bool
    """The ranks were asked, and not only the kernel."""


class _Summary(NamedTuple):
    """What several looks at the ranks of a node show; the fields are those of `StallLook`."""

    ranks: tuple[StalledRank, ...]
    stacks: tuple[tuple[StackFrame, ...], ...]
    collectives: tuple[CollectiveCall, ...]


class Looks:
    """The looks at the ranks of one node during one stall."""

    def __init__(self) -> None:
        self._taken: list[_Look] = []

    def add(self, stacks: NodeStacks, now: float, *, asked: bool = True) -> None:
        """Adds a look; without `asked`, only the kernel was asked."""
        self._taken.append(_Look(now, stacks, asked))

    @property
    def stopped(self) -> bool:
        """Whether a rank was stopped at the newest look."""
        return any(rank.state == "T" for look in self._taken[-1:] for rank in look.stacks.ranks)

    @property
    def waiting(self) -> bool:
        """Whether a rank was in the same collective at each look."""
        newest = self._taken[-1].stacks.ranks if self._taken else ()
        return any(not call.ended for rank in newest for call in self._constant_collectives(rank))

    def summarize(self) -> _Summary:
        """Returns what the looks show of each rank, and the different calls and collectives of all."""
        stacks: dict[tuple[StackFrame, ...], int] = {}
        collectives: dict[CollectiveCall, int] = {}
        ranks: list[StalledRank] = []
        for position in self._taken[-1].stacks.ranks[:MOST_RANKS] if self._taken else ():
            calls = essential(_calls(position))
            if calls and len(stacks) < MOST_STACKS:
                stacks.setdefault(calls, len(stacks))
            for collective in self._constant_collectives(position):
                if len(collectives) < MOST_COLLECTIVES:
                    collectives.setdefault(collective, len(collectives))
            ranks.append(self._summarize_rank(position, stack=stacks.get(calls), collectives=collectives))
        return _Summary(tuple(ranks), tuple(stacks), tuple(collectives))

    def _constant_collectives(self, newest: RankPosition) -> tuple[CollectiveCall, ...]:
        """The collectives in which a rank was at each look; none where they have changed or it did not tell them once:
        it may have gone on."""
        seen = {rank.collectives for _, rank in self._seen(newest)}
        return newest.collectives if len(seen) == 1 else ()

    def _seen(self, newest: RankPosition) -> list[tuple[_Look, RankPosition]]:
        """The looks at a process."""
        return [
            (look, rank)
            for look in self._taken
            for rank in look.stacks.ranks
            if (rank.rank, rank.pid, rank.generation) == (newest.rank, newest.pid, newest.generation)
        ]

    def _summarize_rank(
        self, newest: RankPosition, *, stack: int | None, collectives: Mapping[CollectiveCall, int]
    ) -> StalledRank:
        seen = self._seen(newest)
        own = self._constant_collectives(newest)
        (begun, first), (ended, _) = seen[0], seen[-1]
        cpu, moved, transfers = None, True, False
        if ended.time > begun.time and first.cpu_seconds is not None and newest.cpu_seconds is not None:
            cpu = round(100 * max(newest.cpu_seconds - first.cpu_seconds, 0.0) / (ended.time - begun.time), 1)
        if len(seen) > 1 and first.switches is not None and newest.switches is not None:
            moved = newest.switches - first.switches > _OWN_SWITCHES * (len(seen) - 1)
        if first.transferred_bytes is not None and newest.transferred_bytes is not None:
            transfers = newest.transferred_bytes - first.transferred_bytes >= _TRANSFER
        doing = [_doing(rank) for look, rank in seen if look.asked or rank.state in _SILENT]
        return StalledRank(
            rank=newest.rank,
            state=newest.state,
            steady=len(doing) > 1 and len(set(doing)) == 1,
            runs=all(rank.state == "R" for _, rank in seen),
            moved=moved,
            transfers=transfers,
            cpu_percent=cpu,
            silent=not any(rank.collectives for _, rank in seen),
            stack=stack,
            collectives=tuple(collectives[one] for one in own) if all(one in collectives for one in own) else (),
        )


class StallWatch:
    """Watches the stalls of one node: at most one at a time."""

    def __init__(
        self, node: Node, stacks: StackReader, *, progress: Callable[[], Progress | None], to_group: MessageSink
    ) -> None:
        self._node = node
        self._stacks = stacks
        self._progress = progress
        self._to_group = to_group
        self._watching: asyncio.Task[None] | None = None

    def begin(self, limits: StallLimits, *, idle: float, usual: float) -> None:
        """Watches a stall, unless that is done already.

        Args:
            limits: When something is done about it.
            idle: Seconds since the last step.
            usual: Seconds of a usual step.
        """
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch(limits, idle=idle, usual=usual))

    def end(self) -> None:
        """Stops to watch: a rank has stepped, or none need step any longer."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None

    async def _watch(self, limits: StallLimits, *, idle: float, usual: float) -> None:
        loop = asyncio.get_running_loop()
        looks, generation = Looks(), self._node.state.entered
        last_step, since = loop.time() - idle, datetime.now(UTC) - timedelta(seconds=idle)

        async def until(limit: float) -> None:
            await asyncio.sleep(max(0.0, last_step + limit - loop.time()))

        def report_stall() -> None:
            self._node.training.report_stall(since=since, usual_step=timedelta(seconds=usual) if usual > 0 else None)

        def report(*, early: bool = False, unusual: bool = False, long: bool = False) -> None:
            seen = looks.summarize()
            if not seen.ranks:
                return
            look = StallLook(
                generation=generation,
                since=since,
                taken_at=datetime.now(UTC),
                usual_steps=int((loop.time() - last_step) / usual) if usual > 0 else 0,
                **seen._asdict(),
                progress=self._progress(),
                early=early,
                unusual=unusual,
                long=long,
            )
            states = ", ".join(f"rank {rank.rank} {rank.state}" for rank in seen.ranks)
            logger.info("%d usual steps were not made: %s", look.usual_steps, states)
            self._to_group.put(StallEvidence(**envelope(self._node.config.node), look=look))

        await until(limits.first_look)
        await self._look(looks, by_signal=False)
        if looks.stopped:
            await asyncio.sleep(_BETWEEN_LOOKS)
            await self._look(looks, by_signal=False)
            if looks.stopped:
                report_stall()
                report(early=True)
        if limits.compared < limits.unusual:
            await until(limits.compared)
            await asyncio.sleep(_BETWEEN_LOOKS)
            if looks.waiting:
                await self._look(looks)
                if looks.waiting:
                    report(early=True)
        sooner = (limits.unusual,) if limits.unusual < limits.stalled else ()
        # What a report leads to may be prevented: a node cannot be reached for a moment, or a report is late.
        for limit in chain(sooner, (limits.stalled,), (limits.long * 2**number for number in count())):
            await until(limit - _LOOKS * _BETWEEN_LOOKS)
            for _ in range(_LOOKS):
                await asyncio.sleep(_BETWEEN_LOOKS)
                await self._look(looks)
            await until(limit)
            if limit >= limits.stalled:
                report_stall()
            report(unusual=limit < limits.stalled, long=limit >= limits.long)

    async def _look(self, looks: Looks, *, by_signal: bool = True) -> None:
        try:
            stacks = await self._stacks.read(by_signal=by_signal)
        except StacksUnknown as error:
            logger.warning("no step is made, and where the ranks are is unknown: %s", error)
        else:
            looks.add(stacks, asyncio.get_running_loop().time(), asked=by_signal)


def essential(calls: Sequence[StackFrame]) -> tuple[StackFrame, ...]:
    """Returns the innermost calls, and those of the script itself, the innermost first."""
    kept = [call for number, call in enumerate(calls) if number < _INNERMOST or not call.of_library]
    return tuple(kept[:MOST_FRAMES])


def _calls(position: RankPosition) -> tuple[StackFrame, ...]:
    return position.threads[0].frames if position.threads else ()


def _doing(position: RankPosition) -> object:
    """What a rank does, comparable with what it did at another look: a loop runs through several lines."""
    if position.state in _SILENT:
        # Another thread of it may still answer, so its calls are known at some looks only.
        return position.state
    return tuple((call.file, call.function) for call in _calls(position)) or object()
