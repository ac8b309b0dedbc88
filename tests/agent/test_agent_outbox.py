"""Tests of the outbox: order, numbers, coalescing, and its content after crashes, outages and full disks."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.agent import outbox as outbox_module
from perdure.agent.outbox import (
    MOST_OF_A_KIND,
    ControlPlaneBusy,
    DestinationNotFound,
    MessageRefused,
    Outbox,
    envelope,
    spread_of,
)
from perdure.contract import (
    AgentMessage,
    BadNumber,
    CheckpointRef,
    CheckpointRestored,
    CheckpointStored,
    DatasetNeeded,
    DatasetParameters,
    Failure,
    FailureKind,
    Finished,
    Joined,
    NodeCredentials,
    NumberKind,
    PortsChanged,
    RankNumber,
    Ready,
    Restore,
    RestoreSource,
    Stepping,
    StoredCheckpoint,
)
from tests.support.waiting import eventually, tasks_wait

NODE = NodeCredentials(uid="0a1b2c3d", role="worker", rank=0, incarnation=1, token="secret")


def failure(generation: int) -> Failure:
    return Failure(**envelope(NODE), generation=generation, kind=FailureKind.RANKS)


def joined() -> Joined:
    common = envelope(NODE)
    return Joined(**common, agent_started_at=common["time"], address="127.0.0.1")


class Destination:
    """A workflow that can be away."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, AgentMessage]] = []
        self.attempts = 0
        self.problem: Exception | None = None
        self.loses_answers = False
        self.not_found = 0
        self.refuses: set[type[AgentMessage]] = set()
        self.refused: list[int] = []

    async def send(self, message: AgentMessage) -> None:
        self.attempts += 1
        if type(message) in self.refuses:
            self.refused.append(message.sequence)
            raise MessageRefused("not a message of this release")
        if self.problem is not None:
            raise self.problem
        self.heard.append((message.route.name, message))
        if self.loses_answers:
            raise ConnectionError("the answer was lost")

    def missing(self) -> None:
        self.not_found += 1

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.heard]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "_FIRST_PAUSE", 0.005)
    monkeypatch.setattr(outbox_module, "_LONGEST_PAUSE", 0.02)


@pytest.fixture
def destination() -> Destination:
    return Destination()


def make(path: Path, destination: Destination, *, spread: float = 0.0) -> Outbox:
    return Outbox(path / "outbox.json", send=destination.send, not_found=destination.missing, spread=spread)


@asynccontextmanager
async def running(outbox: Outbox) -> AsyncIterator[None]:
    task = asyncio.create_task(outbox.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_failures_go_first_and_numbers_follow_the_order_of_sending(
    tmp_path: Path, destination: Destination
) -> None:
    outbox = make(tmp_path, destination)
    outbox.put(Finished(**envelope(NODE), generation=1))
    outbox.put(failure(1))
    outbox.put(failure(2))
    outbox.put(joined(), first=True)
    async with running(outbox):
        await eventually(lambda: len(destination.heard) == 4)
    assert destination.names == ["failure", "failure", "joined", "finished"]
    generations = [message.generation for _, message in destination.heard[:2] if isinstance(message, Failure)]
    assert generations == [1, 2]
    numbers = [message.sequence for _, message in destination.heard]
    assert numbers == sorted(set(numbers))
    assert await outbox.flush(within=0)


def test_a_message_about_an_earlier_event_also_has_the_time_at_which_the_agent_learned_of_it():
    now = envelope(NODE)
    earlier = envelope(NODE, now["time"] - timedelta(seconds=30))
    assert "reported_at" not in now
    assert earlier["time"] < now["time"] <= earlier.get("reported_at", earlier["time"])


async def test_an_outage_keeps_what_matters_and_only_the_newest_of_the_rest(
    tmp_path: Path, destination: Destination
) -> None:
    outbox = make(tmp_path, destination)
    destination.problem = ConnectionError("away")
    async with running(outbox):
        for generation in range(1, 51):
            outbox.put(PortsChanged(**envelope(NODE), store_ports=(generation,)))
            outbox.put(Stepping(**envelope(NODE), generation=generation))
            outbox.put(failure(generation))
        await eventually(lambda: destination.attempts > 5)
        assert not await outbox.flush(within=0.01)
        assert outbox.pending == 51
        destination.problem = None
        await eventually(lambda: len(destination.heard) == 52)
    assert destination.names.count("failure") == 50
    assert [m.store_ports for _, m in destination.heard if isinstance(m, PortsChanged)] == [(50,)]
    assert [m.generation for _, m in destination.heard if isinstance(m, Stepping)] == [50]
    numbers = [message.sequence for _, message in destination.heard]
    assert numbers == sorted(set(numbers))


async def test_a_repeat_carries_the_same_number(tmp_path: Path, destination: Destination) -> None:
    outbox = make(tmp_path, destination)
    destination.loses_answers = True
    outbox.put(failure(1))
    async with running(outbox):
        await eventually(lambda: len(destination.heard) >= 3)
        outbox.put(failure(2))
        destination.loses_answers = False
        await eventually(lambda: outbox.pending == 0)
    first = {m.sequence for _, m in destination.heard if isinstance(m, Failure) and m.generation == 1}
    assert len(first) == 1
    assert destination.heard[-1][1].sequence > first.pop()


async def test_a_closed_workflow_holds_nothing_up_for_ever_and_loses_nothing(
    tmp_path: Path, destination: Destination
) -> None:
    outbox = make(tmp_path, destination)
    destination.problem = DestinationNotFound("closed")
    outbox.put(failure(1))
    async with running(outbox):
        await eventually(lambda: destination.not_found >= 2)
        assert outbox.pending == 1
        destination.problem = None
        await eventually(lambda: destination.names == ["failure"])


async def test_a_message_that_is_refused_holds_no_other_up_and_is_tried_again(
    tmp_path: Path, destination: Destination, caplog: pytest.LogCaptureFixture
) -> None:
    outbox = make(tmp_path, destination)
    destination.refuses = {Ready}
    outbox.put(Ready(**envelope(NODE), after_generation=1))
    async with running(outbox):
        await eventually(lambda: len(destination.refused) >= 2)
        outbox.put(failure(1))
        await eventually(lambda: destination.names == ["failure"])
        outbox.put(Finished(**envelope(NODE), generation=1))
        await eventually(lambda: destination.names == ["failure", "finished"])
        assert not await outbox.flush(within=60), "nothing but the refused one is left, so nothing is waited for"
        assert outbox.pending == 1
        tried = len(destination.refused)
        await eventually(lambda: len(destination.refused) > tried)
        destination.refuses = set()
        await eventually(lambda: destination.names == ["failure", "finished", "ready"])
    assert not outbox.pending
    numbers = [message.sequence for _, message in destination.heard]
    assert numbers == sorted(set(numbers))
    assert caplog.text.count("does not take a ready: not a message of this release") == 1


@pytest.mark.parametrize("kind", [Failure, PortsChanged])
async def test_of_refused_messages_no_more_wait_than_of_others(
    tmp_path: Path, destination: Destination, kind: type[AgentMessage]
) -> None:
    outbox = make(tmp_path, destination)
    destination.refuses = {kind}
    async with running(outbox):
        for generation in range(MOST_OF_A_KIND + 20):
            outbox.put(failure(generation) if kind is Failure else PortsChanged(**envelope(NODE)))
            await eventually(lambda generation=generation: len(destination.refused) > generation)
        outbox.put(joined())
        await eventually(lambda: destination.names == ["joined"])
    assert len(kept(outbox)) == (MOST_OF_A_KIND if kind is Failure else 1)


async def test_a_restarted_agent_has_lost_no_failure(tmp_path: Path, destination: Destination) -> None:
    destination.problem = ConnectionError("away")
    first = make(tmp_path, destination)
    async with running(first):
        first.put(failure(1))
        first.put(Ready(**envelope(NODE), after_generation=1))
        first.put(PortsChanged(**envelope(NODE)))
        await eventually(lambda: destination.attempts > 1)
        first.put(failure(2))
    [entry, *_] = json.loads((tmp_path / "outbox.json").read_bytes())["entries"]
    destination.problem = None
    second = make(tmp_path, destination)
    second.put(joined(), first=True)
    async with running(second):
        await eventually(lambda: second.pending == 0)
    assert destination.names == ["failure", "failure", "joined", "ready"]
    assert destination.heard[0][1].sequence == entry["sequence"]
    numbers = [message.sequence for _, message in destination.heard]
    assert numbers == sorted(set(numbers))


async def test_numbers_grow_over_restarts_even_if_the_disk_forgets(
    tmp_path: Path, destination: Destination, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = 0
    for attempt in range(3):
        outbox = make(tmp_path, destination)
        outbox.put(failure(attempt))
        async with running(outbox):
            await eventually(lambda outbox=outbox: outbox.pending == 0)
        number = destination.heard[-1][1].sequence
        assert number > last
        last = number
    (tmp_path / "outbox.json").unlink()
    # A count continues from the clock, in seconds.
    monkeypatch.setattr(outbox_module.time, "time", lambda: last + 1.0)
    outbox = make(tmp_path, destination)
    outbox.put(failure(9))
    async with running(outbox):
        await eventually(lambda: outbox.pending == 0)
    assert destination.heard[-1][1].sequence > last


async def test_a_disk_that_takes_nothing_costs_only_memory_of_it(tmp_path: Path, destination: Destination) -> None:
    missing = tmp_path / "gone"
    outbox = make(missing, destination)
    outbox.put(failure(1))
    async with running(outbox):
        await eventually(lambda: destination.names == ["failure"])
        missing.mkdir()
        outbox.put(failure(2))
        assert (missing / "outbox.json").exists()


async def test_a_broken_journal_is_not_the_end(tmp_path: Path, destination: Destination) -> None:
    (tmp_path / "outbox.json").write_text('{"entries": [{"signal": "fail')
    outbox = make(tmp_path, destination)
    outbox.put(failure(1))
    async with running(outbox):
        await eventually(lambda: destination.names == ["failure"])


async def test_an_entry_that_this_release_cannot_read_is_kept_aside_and_holds_nothing_up(
    tmp_path: Path, destination: Destination, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, destination).put(failure(1))
    journal = json.loads((tmp_path / "outbox.json").read_text())
    (good,) = journal["entries"]
    bad = [
        {**good, "message": {"sender": "not an identity"}},
        {**good, "signal": "signal_of_the_next_release"},
        "no entry at all",
    ]
    newer = {**good, "message": {**good["message"], "kind": "KIND_OF_THE_NEXT_RELEASE", "field": 1}}
    (tmp_path / "outbox.json").write_text(json.dumps({**journal, "entries": [*bad, newer]}))
    outbox = make(tmp_path, destination)
    async with running(outbox):
        assert await outbox.flush(within=10)
    ((name, message),) = destination.heard
    assert (name, message.model_dump()["kind"]) == ("failure", FailureKind.UNKNOWN)
    assert json.loads((tmp_path / "outbox.json.rejected").read_text()) == bad
    assert "cannot be read" in caplog.text


REPORTS: dict[str, Callable[[int], AgentMessage]] = {
    "exit": lambda number: Failure(**envelope(NODE), generation=number, kind=FailureKind.COMMAND),
    "ranks": failure,
    "finished": lambda number: Finished(**envelope(NODE), generation=number),
    "joined": lambda number: joined().replace(generation=number),
    "stored": lambda number: CheckpointStored(
        **envelope(NODE), stored=StoredCheckpoint(checkpoint=CheckpointRef(step=number, run="r", generation=number))
    ),
    "number": lambda number: BadNumber(
        **envelope(NODE),
        generation=number,
        number=RankNumber(rank=0, kind=NumberKind.LOSS, value="nan", step=number, last_finite=0),
    ),
    "dataset": lambda number: DatasetNeeded(
        **envelope(NODE), name=f"set-{number}", parameters=DatasetParameters(size=1, shard_size=1)
    ),
}
"""Reports of which each counts, by what they are about: of the launcher, and of a training loop."""


def kept(outbox: Outbox) -> list[AgentMessage]:
    return [entry.message for entry in outbox._entries]


@settings(deadline=None, max_examples=30)
@given(
    runs=st.lists(st.tuples(st.sampled_from(list(REPORTS)), st.sampled_from([1, 2, 60, 230])), max_size=8),
    is_sent=st.booleans(),
)
def test_reports_that_come_in_a_loop_push_out_the_oldest_of_their_own_kind_only(
    runs: list[tuple[str, int]], is_sent: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        outbox = make(Path(folder), Destination())
        outbox._save = lambda: None
        put: dict[str, list[AgentMessage]] = {}
        for name, count in runs:
            for _ in range(count):
                message = REPORTS[name](len(put.setdefault(name, [])))
                put[name].append(message)
                outbox.put(message)
                if is_sent:
                    outbox._entries[0].sequence = 1
        for messages in put.values():
            of_kind = [one for one in kept(outbox) if any(one is message for message in messages)]
            assert of_kind[-min(len(messages), MOST_OF_A_KIND - 1) :] == messages[-MOST_OF_A_KIND + 1 :]
            assert len(of_kind) <= MOST_OF_A_KIND
            assert [messages.index(one) for one in of_kind] == sorted(messages.index(one) for one in of_kind)


def test_a_report_that_may_have_arrived_is_kept_for_its_repeat(tmp_path: Path) -> None:
    outbox = make(tmp_path, Destination())
    outbox.put(failure(1))
    outbox._entries[0].sequence = 7
    for generation in range(2, 2 * MOST_OF_A_KIND):
        outbox.put(failure(generation))
    assert outbox._entries[0].sequence == 7
    assert len(kept(outbox)) == MOST_OF_A_KIND


async def test_the_end_of_a_command_is_reported_after_two_hundred_reports_of_its_ranks(
    tmp_path: Path, destination: Destination
) -> None:
    outbox = make(tmp_path, destination)
    destination.problem = ConnectionError("away")
    for generation in range(230):
        outbox.put(REPORTS["number"](generation))
    outbox.put(REPORTS["exit"](230))
    outbox.put(REPORTS["finished"](230))
    destination.problem = None
    async with running(make(tmp_path, destination)):
        await eventually(lambda: "finished" in destination.names)
    assert destination.names.count("failure") == 1
    newest = [one.generation for _, one in destination.heard if isinstance(one, BadNumber)]
    assert newest == [*range(230 - MOST_OF_A_KIND, 230)]


def restored(place: str, step: int, *unusable: str) -> CheckpointRestored:
    restore = Restore(step=step, source=RestoreSource.STORAGE, place=place, unusable=unusable)
    return CheckpointRestored(**envelope(NODE), generation=1, restored=restore)


async def test_of_each_checkpointer_of_a_script_it_is_reported_with_what_it_continues(
    tmp_path: Path, destination: Destination
) -> None:
    outbox = make(tmp_path, destination)
    destination.problem = ConnectionError("away")
    for message in (restored("model", 1), restored("average", 0, "step-9-run-1: torn"), restored("model", 2)):
        outbox.put(message)
    outbox.put(restored("average", 3))
    destination.problem = None
    async with running(make(tmp_path, destination)):
        await eventually(lambda: len(destination.heard) == 3)
    heard = [one.restored for _, one in destination.heard if isinstance(one, CheckpointRestored)]
    assert [(one.place, one.step, bool(one.unusable)) for one in heard] == [
        ("average", 0, True),
        ("model", 2, False),
        ("average", 3, False),
    ]


def test_checkpointers_without_end_fill_no_outbox(tmp_path: Path) -> None:
    outbox = make(tmp_path, Destination())
    for number in range(2 * MOST_OF_A_KIND):
        outbox.put(restored(f"fold-{number}", 1))
    assert len(kept(outbox)) == MOST_OF_A_KIND


def stepping(generation: int) -> Stepping:
    common = envelope(NODE)
    return Stepping(**common, generation=generation, entered_at=common["time"])


@pytest.fixture
def latest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every spread choose its latest time."""
    monkeypatch.setattr(outbox_module.random, "uniform", lambda low, high: high)


@pytest.mark.usefixtures("latest")
async def test_what_all_nodes_say_at_once_waits_its_turn_and_holds_nothing_up(
    tmp_path: Path, destination: Destination
) -> None:
    outbox = make(tmp_path, destination, spread=3600.0)
    async with running(outbox):
        outbox.put(stepping(1))
        outbox.put(PortsChanged(**envelope(NODE)))
        await tasks_wait()
        assert not destination.attempts, "in an hour"
        outbox.put(failure(1))
        await eventually(lambda: destination.names == ["failure"])
        outbox.put(Ready(**envelope(NODE), after_generation=1, store_ports=(1,)))
        await eventually(lambda: destination.names == ["failure", "stepping", "ports_changed", "ready"])


@pytest.mark.usefixtures("latest")
async def test_an_agent_that_leaves_says_everything_at_once(tmp_path: Path, destination: Destination) -> None:
    outbox = make(tmp_path, destination, spread=3600.0)
    async with running(outbox):
        outbox.put(stepping(1))
        assert await outbox.flush(within=10)


async def test_a_busy_server_is_left_alone_for_longer_but_hears_a_failure(
    tmp_path: Path, destination: Destination
) -> None:
    destination.problem = ControlPlaneBusy("deadline exceeded")
    outbox = make(tmp_path, destination, spread=3600.0)
    away = Destination()
    away.problem = ConnectionError("away")
    asking_it = make(tmp_path / "other", away, spread=3600.0)
    async with running(outbox), running(asking_it):
        for one in (outbox, asking_it):
            one.put(Ready(**envelope(NODE), after_generation=0, store_ports=(1,)))
        await eventually(lambda: destination.attempts == 1 and away.attempts >= 10)
        assert destination.attempts == 1, "not as often as a server that is away is asked"
        destination.problem = None
        outbox.put(failure(1))
        await eventually(lambda: destination.names == ["failure", "ready"])


def test_small_jobs_spread_nothing() -> None:
    assert [spread_of(nodes) for nodes in (1, 99, 100, 1000)] == [0.0, 0.0, 0.5, 5.0]
