"""Tests of the agent's question to the launcher where the ranks are, and of what it makes of the answer."""

from __future__ import annotations

import asyncio

import pytest

from perdure.agent import stacks
from perdure.agent.stacks import StackReader, StacksUnknown, stacks_of
from perdure.contract import NodeStacks, StackFrame
from perdure_training.node_api.bodies import RankCollective, RankStacks, StacksReport
from tests.agent.bench import Bench
from tests.support.waiting import DEADLINE

TEXT = """Current thread 0x00007f (most recent call first):
  File "/job/train.py", line 12 in wait
  File "/job/train.py", line 30 in <module>

Thread 0x00007e (most recent call first):
  File "/usr/lib/threading.py", line 355 in wait"""


async def asked(bench: Bench, reader: StackReader) -> asyncio.Task[NodeStacks]:
    """A reader whose request the launcher can see."""
    before = bench.node.state.desired.stacks
    reading = asyncio.create_task(reader.read())
    assert await bench.node.changed.wait_for(lambda: bench.node.state.desired.stacks > before, within=DEADLINE)
    return reading


async def test_readers_at_the_same_time_are_one_request_and_get_one_answer(bench: Bench):
    reader = StackReader(bench.node)
    before = bench.node.state.desired
    first, second = asyncio.create_task(reader.read()), asyncio.create_task(reader.read())
    assert await bench.node.changed.wait_for(lambda: bench.node.state.desired.stacks > before.stacks, within=DEADLINE)
    desired = bench.node.state.desired
    assert (desired.stacks, desired.version) == (before.stacks + 1, before.version + 1)
    reader.on_report(StacksReport(request=desired.stacks, ranks=(RankStacks(global_rank=3, pid=7, text=TEXT),)))
    assert await first == await second
    (rank,) = (await first).ranks
    assert [frame.function for frame in rank.threads[0].frames] == ["wait", "<module>"]


async def test_an_answer_to_an_earlier_request_is_none(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stacks, "ANSWER_WITHIN", 0.2)
    reader = StackReader(bench.node)
    reading = await asked(bench, reader)
    reader.on_report(StacksReport(request=bench.node.state.stacks_requested - 1))
    with pytest.raises(StacksUnknown, match="has not answered within"):
        await reading
    # The next reader asks again.
    again = await asked(bench, reader)
    reader.on_report(StacksReport(request=bench.node.state.stacks_requested))
    assert (await again).ranks == ()


async def test_a_restarted_agent_counts_on(bench: Bench):
    """The launcher answers a number once."""
    first = bench.node.request_stacks()
    assert bench.start().request_stacks() == first + 1


def test_frames_are_read_and_the_rest_is_left_out():
    answer = stacks_of(2, StacksReport(request=1, ranks=(RankStacks(global_rank=3, pid=7, state="SX", text=TEXT),)))
    (rank,) = answer.ranks
    assert (answer.node, rank.rank, rank.state, rank.problem) == (2, 3, "S", "")
    assert rank.threads[0].frames[0] == StackFrame(function="wait", file="/job/train.py", line=12)
    assert len(rank.threads) == 2


@pytest.mark.parametrize("text", ["", "nonsense", '  File "a", line 99999999999 in f', "\n\n\n\n"])
def test_an_answer_without_a_stack_says_so(text: str):
    (rank,) = stacks_of(0, StacksReport(request=1, ranks=(RankStacks(global_rank=0, pid=1, text=text),))).ranks
    assert (rank.threads, rank.problem) == ((), "its answer holds no stack")


def test_collectives_are_kept_and_the_thread_that_tells_them_is_left_out():
    thread = 'T:\n  File "/inject/perdure_launcher/rank_plugins/collectives.py", line 70 in _serve'
    own = RankCollective(group="0 (default_pg)", sequence=7, name="gloo:all_reduce", ended=False)
    told = RankStacks(global_rank=0, pid=1, text=f"{TEXT}\n\n{thread}", collectives=(own,) * 9)
    (rank,) = stacks_of(0, StacksReport(request=1, ranks=(told,))).ranks
    assert len(rank.threads) == 2
    assert len(rank.collectives) == 8
    assert (rank.collectives[0].sequence, rank.collectives[0].ended) == (7, False)


def test_an_answer_fits_into_a_payload_whatever_the_launcher_says():
    thread = "T:\n" + "\n".join(f'  File "/a/{"x" * 80}.py", line {n} in f' for n in range(150))
    ranks = tuple(RankStacks(global_rank=n, pid=n, text="\n\n".join([thread] * 40)[:16_384]) for n in range(500))
    answer = stacks_of(0, StacksReport(request=1, ranks=ranks))
    assert len(answer.ranks) == 64
    assert len(answer.model_dump_json()) < 1_900_000
    assert NodeStacks.model_validate_json(answer.model_dump_json()) == answer
