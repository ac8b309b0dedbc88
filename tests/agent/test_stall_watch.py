"""Tests of how an agent looks at ranks that do not step, and of what several looks show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from perdure.agent import stall_watch
from perdure.agent.stacks import StackReader, StacksUnknown
from perdure.agent.stall_watch import Looks, StallLimits, StallWatch
from perdure.contract import (
    CollectiveCall,
    NodeStacks,
    Progress,
    RankPosition,
    StackFrame,
    Stall,
    StalledRank,
    StallEvidence,
    StallLook,
    ThreadStack,
)
from perdure.contract.hangs import MOST_COLLECTIVES, MOST_FRAMES, MOST_RANKS, MOST_STACKS
from tests.agent.bench import IDENTITY, Bench
from tests.support.waiting import eventually, tasks_wait

LIBRARY = "/usr/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
LIMITS = StallLimits(first_look=0.1, compared=0.3, unusual=0.3, stalled=0.3, long=0.6)


def calls(*functions: str, file: str = "/job/train.py") -> tuple[ThreadStack, ...]:
    frames = tuple(
        StackFrame(function=function, file=file, line=number) for number, function in enumerate(functions, 1)
    )
    return (ThreadStack(frames=frames),)


def position(rank: int = 0, *functions: str, **fields: Any) -> RankPosition:
    known: dict[str, Any] = {"pid": 10 + rank, "state": "S", "cpu_seconds": 1.0, "switches": 100, **fields}
    return RankPosition(rank=rank, threads=calls(*functions) if functions else (), **known)


def in_collective(number: int, *, group: str = "0 (default_pg)", ended: bool = False) -> CollectiveCall:
    return CollectiveCall(group=group, sequence=number, name="gloo:all_reduce", sizes="4", elements=4, ended=ended)


def summary(*looks: RankPosition) -> StalledRank:
    """What looks at one rank show, ten seconds apart."""
    taken = Looks()
    for number, look in enumerate(looks):
        taken.add(NodeStacks(node=0, ranks=(look,)), 10.0 * number)
    (rank,) = taken.summarize().ranks
    return rank


def test_one_that_sleeps_in_the_same_calls_is_steady_and_has_not_moved():
    rank = summary(*(position(0, "wait", "main", switches=100 + 2 * number) for number in range(4)))
    assert (rank.state, rank.steady, rank.moved, rank.cpu_percent, rank.stack) == ("S", True, False, 0.0, 0)


def test_one_that_ran_between_the_looks_has_moved():
    assert summary(position(0, "wait"), position(0, "wait", switches=140)).moved
    assert summary(position(0, "wait", switches=None), position(0, "wait", switches=None)).moved


def test_one_that_is_in_other_calls_is_not_steady_and_another_line_is_the_same_call():
    assert not summary(position(0, "forward", "main"), position(0, "read", "main")).steady
    line = ThreadStack(frames=(StackFrame(function="loop", file="/job/train.py", line=9),))
    first = position(0, "loop")
    assert summary(first, first.model_copy(update={"threads": (line,)})).steady


def test_one_that_runs_at_each_look_runs_however_little_it_gets_of_a_busy_machine():
    assert summary(position(0, "loop", state="R"), position(0, "loop", state="R", cpu_seconds=1.5)).runs
    assert not summary(position(0, "loop", state="S"), position(0, "loop", state="R")).runs


def test_one_look_and_another_process_show_nothing():
    assert not summary(position(0, "wait")).steady
    other = summary(position(0, "wait"), position(0, "wait", pid=99))
    assert (other.steady, other.moved, other.cpu_percent) == (False, True, None)


def test_a_look_at_the_kernels_account_alone_tells_nothing_of_calls():
    taken = Looks()
    taken.add(NodeStacks(node=0, ranks=(position(0, cpu_seconds=0.0),)), 0.0, asked=False)
    for number in range(1, 4):
        taken.add(NodeStacks(node=0, ranks=(position(0, "wait"),)), 10.0 * number)
    (rank,) = taken.summarize().ranks
    assert (rank.steady, rank.cpu_percent) == (True, 3.3)


@pytest.mark.parametrize(("state", "steady"), [("T", True), ("D", True), ("S", False), ("R", False)])
def test_silence_means_something_only_where_the_kernel_explains_it(state: str, steady: bool):
    assert summary(position(0, state=state), position(0, state=state)).steady is steady


def test_one_that_sleeps_in_the_kernel_is_steady_also_where_another_thread_of_it_answers():
    taken = Looks()
    taken.add(NodeStacks(node=0, ranks=(position(0, state="D", cpu_seconds=0.0),)), 0.0, asked=False)
    for time in (1.0, 2.0):
        taken.add(NodeStacks(node=0, ranks=(position(0, "save", state="D", cpu_seconds=0.0),)), time)
    (seen,), (calls,), _ = taken.summarize()
    assert (seen.steady, seen.moved, calls[0].function) == (True, False, "save")


def test_one_that_tells_its_collectives_at_no_look_is_silent():
    told = (in_collective(7),)
    assert summary(position(0, "wait"), position(0, "wait")).silent
    assert not summary(position(0, "wait", collectives=told), position(0, "wait")).silent


def test_the_use_of_processors_is_that_of_the_whole_time():
    assert summary(position(0, "loop"), position(0, "loop", cpu_seconds=10.5)).cpu_percent == 95.0


@pytest.mark.parametrize(("size", "transfers"), [(2**19, False), (2**21, True), (None, False)])
def test_one_that_reads_or_writes_much_works_with_files(size: int | None, transfers: bool):
    first = position(0, "dump", transferred_bytes=7)
    assert summary(first, position(0, "dump", transferred_bytes=size)).transfers is transfers


def test_ranks_in_the_same_calls_share_a_stack_and_the_scripts_own_calls_are_kept():
    deep = tuple(StackFrame(function=f"f{number}", file=LIBRARY, line=number) for number in range(20))
    own = StackFrame(function="main", file="/job/train.py", line=1)
    shared = (ThreadStack(frames=(*deep, own)),)
    taken = Looks()
    ranks = tuple(RankPosition(rank=number, pid=number, state="S", threads=shared) for number in range(8))
    taken.add(NodeStacks(node=0, ranks=ranks), 0.0)
    found, stacks, _ = taken.summarize()
    assert [rank.stack for rank in found] == [0] * 8
    assert stacks == ((*deep[:6], own),)


def test_a_report_is_small_whatever_the_ranks_do():
    taken = Looks()
    ranks = tuple(
        RankPosition(
            rank=n,
            pid=n,
            threads=calls(*(f"{n}{'x' * 300}{m}" for m in range(100)), file="/a" * 400),
            collectives=tuple(in_collective(n, group=f"{m}{'g' * 99}") for m in range(99)),
        )
        for n in range(500)
    )
    taken.add(NodeStacks(node=0, ranks=ranks), 0.0)
    look = StallLook.model_validate(
        {
            "generation": 1,
            "since": "2026-01-01T00:00:00Z",
            "taken_at": "2026-01-01T00:00:00Z",
            **{field: TypeAdapter(Any).dump_python(value) for field, value in taken.summarize()._asdict().items()},
        }
    )
    assert (len(look.ranks), len(look.stacks), len(look.stacks[0])) == (MOST_RANKS, MOST_STACKS, MOST_FRAMES)
    assert len(look.collectives) == MOST_COLLECTIVES
    assert len(look.model_dump_json()) < 26_000


def collectives_of(*looks: tuple[CollectiveCall, ...]) -> list[tuple[CollectiveCall, ...]]:
    """What is known of two ranks that share a node, of which the first one was seen like this."""
    taken = Looks()
    for number, own in enumerate(looks):
        ranks = (position(0, collectives=own), position(1, collectives=(in_collective(7),)))
        taken.add(NodeStacks(node=0, ranks=ranks), float(number))
    seen = taken.summarize()
    return [tuple(seen.collectives[index] for index in rank.collectives) for rank in seen.ranks]


def test_ranks_in_the_same_collective_share_it_and_one_that_goes_on_is_in_none():
    waiting = (in_collective(7),)
    assert collectives_of(waiting, waiting) == [waiting, waiting]
    assert collectives_of((in_collective(6),), waiting) == [(), waiting]
    assert collectives_of((), waiting) == [(), waiting]


class Answers(StackReader):
    """Answers with one look after another; the last one again and again."""

    def __init__(self, bench: Bench, answers: Sequence[RankPosition | None]) -> None:
        super().__init__(bench.node)
        self._answers = list(answers)
        self.asked = self.signals = 0

    async def read(self, *, by_signal: bool = True) -> NodeStacks:
        self.asked += 1
        self.signals += by_signal
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if answer is None:
            raise StacksUnknown("no answer")
        return NodeStacks(node=IDENTITY.rank, ranks=(answer,))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(stall_watch, "_BETWEEN_LOOKS", 0.01)
    bench = Bench(tmp_path)
    bench.apply(1)
    bench.enter(1)
    return bench


ALL_LOOKS = 1 + 3 * 3
"""The first one, and three for each of three reports."""


def watching(bench: Bench, *answers: RankPosition | None, limits: StallLimits = LIMITS) -> tuple[StallWatch, Answers]:
    reader = Answers(bench, answers)
    watch = StallWatch(bench.node, reader, progress=lambda: Progress(step=7), to_group=bench.group)
    watch.begin(limits, idle=0.0, usual=0.01)
    return watch, reader


async def looks_of(bench: Bench, count: int) -> list[StallLook]:
    await eventually(lambda: len(bench.group.of(StallEvidence)) >= count, what=f"{count} looks")
    return [message.look for message in bench.group.of(StallEvidence)]


async def test_ranks_that_do_not_step_are_reported_again_each_time_that_the_stall_has_doubled(bench: Bench):
    watch, reader = watching(bench, position(0, "wait"))
    first, second, third, *_ = await looks_of(bench, 3)
    assert (first.early, first.long, second.long, first.generation) == (False, False, True, 1)
    assert first.ranks[0].steady
    assert first.progress is not None
    assert second.usual_steps > first.usual_steps >= 30
    assert third.usual_steps >= 120
    watch.begin(LIMITS, idle=9.0, usual=0.01)
    await tasks_wait()
    watch.end()
    assert (len(bench.group.of(StallEvidence)), reader.asked) == (3, ALL_LOOKS)


async def test_the_looks_of_a_report_are_taken_before_it_is_due(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stall_watch, "_BETWEEN_LOOKS", 0.5)
    watch, reader = watching(bench, position(0, "wait"), limits=LIMITS._replace(unusual=2.0, stalled=2.0, long=9.0))
    (first,) = await looks_of(bench, 1)
    watch.end()
    assert (reader.asked, 200 <= first.usual_steps < 320) == (4, True)


async def test_a_stopped_rank_is_reported_at_the_first_look_with_the_stall(bench: Bench):
    watch, reader = watching(bench, position(0, state="T"))
    (early,) = await looks_of(bench, 1)
    watch.end()
    assert (early.early, early.ranks[0].state, early.ranks[0].steady) == (True, "T", True)
    assert (len(bench.group.of(Stall)), reader.asked, reader.signals) == (1, 2, 0)


NEW_PAUSE = LIMITS._replace(compared=0.1)


async def test_ranks_that_wait_in_a_collective_are_reported_early_where_no_pause_was_as_long(bench: Bench):
    watch, reader = watching(bench, position(0, "wait", collectives=(in_collective(7),)), limits=NEW_PAUSE)
    (early,) = await looks_of(bench, 1)
    watch.end()
    assert (early.early, early.collectives, early.ranks[0].collectives) == (True, (in_collective(7),), (0,))
    assert early.stacks
    assert not bench.group.of(Stall)
    # It looks again and again until the stall is over.
    assert reader.signals == reader.asked - 1 >= 1


@pytest.mark.parametrize("own", [(), (in_collective(7, ended=True),)])
async def test_ranks_that_are_in_no_collective_are_not_reported_early(bench: Bench, own: tuple[CollectiveCall, ...]):
    watch, _ = watching(bench, position(0, "wait", collectives=own), limits=NEW_PAUSE)
    (look, *_) = await looks_of(bench, 1)
    watch.end()
    assert not look.early


async def test_ranks_in_an_unusual_pause_are_reported_before_there_is_a_stall(bench: Bench):
    watch, reader = watching(
        bench, position(0, "wait"), limits=LIMITS._replace(compared=0.1, unusual=0.2, stalled=60.0)
    )
    (look,) = await looks_of(bench, 1)
    watch.end()
    assert (look.unusual, look.early, look.long, look.ranks[0].steady) == (True, False, False, True)
    assert (bench.group.of(Stall), reader.asked, reader.signals) == ([], 4, 3)


async def test_one_that_continues_between_two_looks_is_not_reported_early(bench: Bench):
    watch, _ = watching(bench, position(0, state="T"), position(0, "main"))
    (look, *_) = await looks_of(bench, 1)
    watch.end()
    assert not look.early


async def test_nothing_is_reported_of_ranks_that_step_again(bench: Bench):
    watch, reader = watching(bench, position(0, "wait"))
    await eventually(lambda: reader.asked >= 1)
    watch.end()
    await tasks_wait()
    assert reader.asked == 1
    assert not bench.group.of(StallEvidence)


async def test_a_launcher_that_does_not_answer_is_no_evidence(bench: Bench):
    watch, reader = watching(bench, None)
    await eventually(lambda: reader.asked >= ALL_LOOKS)
    watch.end()
    await tasks_wait()
    assert not bench.group.of(StallEvidence)


def test_the_newest_pauses_are_remembered_by_an_agent_that_restarts(bench: Bench):
    bench.node.training.keep_pauses([6.0])
    bench.node.training.keep_pauses([float(number) for number in range(7, 18)])
    assert bench.start().state.pauses == tuple(float(number) for number in range(8, 18))
