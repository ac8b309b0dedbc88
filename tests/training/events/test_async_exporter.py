"""Tests that no destination slows, blocks or ends the program, and that no loss goes uncounted."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest

from perdure_training.events import (
    AsyncExporter,
    ConsoleExporter,
    Drop,
    Event,
    EventEmitter,
    EventsLost,
)
from tests.support.waiting import wait_for
from tests.training.events.collected import Collected, lines, run

NO_LINGER = timedelta(0)


def test_a_burst_is_exported_or_counted_and_the_count_is_reported():
    collected = Collected()
    exporter = AsyncExporter(collected, capacity=1000)
    emitter = EventEmitter("test", exporter)
    for number in range(100_000):
        emitter.instant("burst", number=number)
    exporter.close()
    burst = [event for event in collected.events if event.name == "burst"]
    reports = [event for event in collected.events if event.name == "lost"]
    assert exporter.dropped > 0
    assert len(burst) + exporter.dropped == 100_000
    assert [event.attributes["number"] for event in burst] == sorted(event.attributes["number"] for event in burst)
    assert sum(event.attributes["dropped"] for event in reports) == exporter.dropped
    assert reports[-1].attributes["total"] == exporter.dropped
    assert reports[-1].target == "events"


@pytest.mark.parametrize(("drop", "kept"), [(Drop.NEWEST, range(1, 5)), (Drop.OLDEST, range(7, 11))])
def test_the_newest_or_the_oldest_are_dropped(drop: Drop, kept: range):
    collected = Collected()
    collected.gate.clear()
    exporter = AsyncExporter(collected, capacity=4, drop=drop, linger=NO_LINGER)
    emitter = EventEmitter("test", exporter)
    emitter.instant("held", number=0)
    collected.entered.wait()
    for number in range(1, 11):
        emitter.instant("waiting", number=number)
    assert exporter.dropped == 6
    collected.gate.set()
    exporter.close()
    assert [event.attributes["number"] for event in collected.events if event.name == "waiting"] == list(kept)


def test_an_exporter_that_hangs_blocks_neither_the_program_nor_its_end():
    script = """
import threading, time
from datetime import timedelta
from perdure_training.events import AsyncExporter, EventEmitter, Exporter

class Hangs(Exporter):
    def export(self, events):
        threading.Event().wait()

exporter = AsyncExporter(Hangs(), capacity=10, linger=timedelta(0), close_within=timedelta(milliseconds=100))
emitter = EventEmitter("test", exporter)
for number in range(1000):
    emitter.instant("x")
assert not exporter.flush(timedelta(milliseconds=10))
# All but those that are being exported, at most as many as may wait, and those that wait.
print(exporter.dropped >= 980)
"""
    assert run(script) == "True\n"


def test_an_exporter_that_raises_loses_what_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING)
    collected = Collected()
    exporter = AsyncExporter(collected)
    emitter = EventEmitter("test", exporter)
    for error in (RuntimeError("away"), SystemExit(1), EventsLost("half", count=1)):
        collected.error = error
        emitter.instant("lost")
        assert exporter.flush()
    assert exporter.refused == 3
    collected.error = None
    emitter.instant("kept")
    exporter.close()
    kept, report = collected.events
    assert (kept.name, report.name) == ("kept", "lost")
    assert report.attributes == {"dropped": 0, "refused": 3, "total": 3}
    assert [record.message for record in caplog.records] == [
        "events are being lost: RuntimeError: away",
        "events are exported again; 3 were lost",
    ]


def test_events_after_flush_are_exported_and_those_after_close_counted():
    collected = Collected()
    exporter = AsyncExporter(collected)
    emitter = EventEmitter("test", exporter)
    assert exporter.flush()
    emitter.instant("first")
    assert exporter.flush()
    emitter.instant("second")
    assert exporter.flush()
    assert collected.names == ["first", "second"]
    exporter.close()
    exporter.close()
    emitter.instant("third")
    assert exporter.flush(timedelta(0)) is False
    assert (collected.names, exporter.dropped) == (["first", "second"], 1)


def test_events_are_exported_after_a_rest_and_before_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("perdure_training.events.background._RESTS_AFTER", 0.05)
    exporter = AsyncExporter(collected := Collected(), linger=timedelta(milliseconds=1))
    emitter = EventEmitter("test", exporter)
    for _ in range(3):
        collected.entered.clear()
        emitter.instant("first")
        assert collected.entered.wait(30)
        collected.entered.clear()
        emitter.instant("soon")
        assert collected.entered.wait(30)
        wait_for(lambda: exporter._resting)
    exporter.close()
    assert collected.names == ["first", "soon"] * 3


class Reenters(Collected):
    """An exporter that emits events itself, as a log handler does that is connected to the bus."""

    def __init__(self) -> None:
        super().__init__()
        self.emitter: EventEmitter | None = None

    def export(self, events: Sequence[Event]) -> None:
        super().export(events)
        if self.emitter and len(self.events) < 5:
            self.emitter.instant("echo")
            self.emitter.flush()


def test_an_exporter_may_emit_and_flush():
    exporter = AsyncExporter(collected := Reenters(), linger=NO_LINGER)
    collected.emitter = EventEmitter("test", exporter)
    collected.emitter.instant("first")
    while len(collected.events) < 5:
        assert exporter.flush()
    exporter.close()
    assert collected.names == ["first", *["echo"] * 4]


def test_a_closed_pipe_loses_events_and_nothing_else():
    read, write = os.pipe()
    exporter = AsyncExporter(ConsoleExporter(descriptor=write))
    emitter = EventEmitter("test", exporter)
    emitter.instant("kept")
    assert exporter.flush()
    assert b"test kept instant" in os.read(read, 1000)
    os.close(read)
    emitter.instant("lost")
    exporter.close()
    os.close(write)
    assert exporter.refused == 1


def test_a_closed_pipe_does_not_end_a_program_that_dies_by_sigpipe():
    script = """
import os, signal
from perdure_training.events import AsyncExporter, ConsoleExporter, EventEmitter
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
read, write = os.pipe()
os.close(read)
exporter = AsyncExporter(ConsoleExporter(descriptor=write))
EventEmitter("test", exporter).instant("lost")
exporter.close()
print(exporter.refused)
"""
    assert run(script) == "1\n"


FORKS = """
import multiprocessing, os, sys, threading
from datetime import timedelta
from perdure_training.events import AsyncExporter, EventEmitter, FileExporter

class Slow(FileExporter):
    entered, gate = threading.Event(), threading.Event()

    def export(self, events):
        self.entered.set()
        self.gate.wait()
        super().export(events)

exporter = AsyncExporter(Slow(sys.argv[1]), linger=timedelta(0))
emitter = EventEmitter("test", exporter)
for number in range(100):
    emitter.instant("parent", number=number)
Slow.entered.wait()
"""


def test_a_fork_in_the_middle_of_a_write_duplicates_and_loses_nothing(tmp_path: Path):
    script = f"""{FORKS}
if os.fork() == 0:
    Slow.gate.set()
    for number in range(50):
        emitter.instant("child", number=number)
    sys.exit(0)
_, status = os.wait()
assert status == 0, status
Slow.gate.set()
"""
    run(script, path := tmp_path / "events.jsonl")
    found = lines(path)
    assert len({event["id"] for event in found}) == len(found) == 150
    numbers = {
        name: [one["attributes"]["number"] for one in found if one["name"] == name] for name in ("parent", "child")
    }
    assert numbers == {"parent": list(range(100)), "child": list(range(50))}
    assert len({(event["name"], event["pid"]) for event in found}) == 2


def test_a_process_of_multiprocessing_flushes_at_its_end(tmp_path: Path):
    script = f"""{FORKS}
Slow.gate.set()
process = multiprocessing.get_context("fork").Process(target=lambda: emitter.instant("child"))
process.start()
process.join()
assert process.exitcode == 0
"""
    run(script, path := tmp_path / "events.jsonl")
    assert [event["name"] for event in lines(path)].count("child") == 1


SIGNALLED = """
import os, signal, sys, threading
from datetime import timedelta
from perdure_training.events import AsyncExporter, EventEmitter, FileExporter
if sys.argv[2] == "handled":
    signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"handled") and os._exit(3))
exporter = AsyncExporter(FileExporter(sys.argv[1]), linger=timedelta(seconds=50), flush_on=[signal.SIGTERM])
EventEmitter("test", exporter).instant("last")
os.kill(os.getpid(), signal.SIGTERM)
threading.Event().wait()
"""


@pytest.mark.parametrize(("before", "code", "output"), [("default", -signal.SIGTERM, ""), ("handled", 3, "handled")])
def test_a_signal_flushes_and_then_does_what_it_did_before(tmp_path: Path, before: str, code: int, output: str):
    assert run(SIGNALLED, path := tmp_path / "events.jsonl", before, code=code) == output
    assert [event["name"] for event in lines(path)] == ["last"]


def test_signals_keep_their_effect_by_default():
    """A rank inside of a collective operation never comes to run a handler of Python's."""
    before = signal.getsignal(signal.SIGTERM)
    exporter = AsyncExporter(Collected())
    EventEmitter("test", exporter).instant("x")
    exporter.close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_signals_that_arrive_while_events_are_emitted_may_emit_as_well():
    script = """
import signal
from datetime import timedelta
from perdure_training.events import AsyncExporter, EventEmitter, Exporter

class Counts(Exporter):
    count = 0
    def export(self, events):
        self.count += sum(event.target == "test" for event in events)

counts = Counts()
exporter = AsyncExporter(counts, capacity=100)
emitter = EventEmitter("test", exporter)
alarms = 0

def alarm(*_):
    global alarms
    alarms += 1
    emitter.instant("alarm")
    if alarms % 10 == 0:
        exporter.flush()

signal.signal(signal.SIGALRM, alarm)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
emitted = 0
while alarms < 100:
    emitter.instant("x")
    emitted += 1
signal.setitimer(signal.ITIMER_REAL, 0)
exporter.close()
print(counts.count + exporter.dropped - emitted - alarms)
"""
    assert run(script) == "0\n"


def test_the_process_ends_although_events_wait_for_longer():
    script = """
import sys
from datetime import timedelta
from perdure_training.events import AsyncExporter, ConsoleExporter, EventEmitter, json_line
exporter = AsyncExporter(ConsoleExporter(descriptor=1, format=json_line), linger=timedelta(hours=1))
EventEmitter("test", exporter).instant("last")
sys.exit(4)
"""
    assert json.loads(run(script, code=4))["name"] == "last"


def test_arguments_out_of_range_are_refused():
    with pytest.raises(ValueError, match="capacity: expected at least 1, found 0"):
        AsyncExporter(Collected(), capacity=0)
