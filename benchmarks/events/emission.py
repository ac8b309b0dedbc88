"""What one event costs its program, with destinations that work, hang and fail; and how many reach a file."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.events.steps import training
from perdure_training.events import AsyncExporter, Event, EventEmitter, Exporter, FileExporter

FAILS = "a destination that fails"
FILLS = "a destination that hangs, until the queue is full"
FULL = "a destination that hangs, with a full queue"
DEAD = (FAILS, FILLS, FULL)
"""Situations without a destination that works."""
IN_TRAINING = "a file, after a step of a training"
NOTHING = "no event: an empty function, after a step of a training"
_FLUSHED = 8_000
"""Events that are emitted before the next flush: fewer than may wait, so that none is dropped."""


class Hangs(Exporter):
    """A destination that never answers."""

    def export(self, events: Sequence[Event]) -> None:
        threading.Event().wait()


class Fails(Exporter):
    """A destination that is away."""

    def export(self, events: Sequence[Event]) -> None:
        raise ConnectionError("away")


@dataclass(frozen=True)
class Cost:
    """The cost of one event, in microseconds of its program."""

    p50: float
    p99: float
    longest: float
    dropped: int


def measure_cost(exporter: Exporter, *, count: int) -> Cost:
    """Emits events one after another.

    Args:
        exporter: Their destination.
        count: The number of events.
    """
    background = AsyncExporter(exporter)
    emitter = EventEmitter("bench", background, rank=0, generation=1)
    taken: list[int] = []
    for number in range(count):
        began = time.perf_counter_ns()
        emitter.instant("step", step=number, loss=0.25, phase="forward")
        taken.append(time.perf_counter_ns() - began)
    dropped = background.dropped
    if not isinstance(exporter, Hangs):
        background.close()
    return _cost(taken, dropped)


def measure_in_training(exporter: Exporter, *, steps: int) -> dict[str, Cost]:
    """Emits an event after every second step of a training, and calls an empty function after the others.

    A step replaces what the processor's caches hold, so that even the empty function takes longer than in a loop.
    """
    background = AsyncExporter(exporter)
    emitter = EventEmitter("bench", background, rank=0, generation=1)
    step, emitted, empty = training(), list[int](), list[int]()

    def nothing(number: int) -> None:
        pass

    # The first event starts the thread.
    emitter.instant("first")
    for number in range(steps):
        step()
        began = time.perf_counter_ns()
        emitter.instant("step", step=number, loss=0.25, phase="forward")
        emitted.append(time.perf_counter_ns() - began)
        step()
        began = time.perf_counter_ns()
        nothing(number)
        empty.append(time.perf_counter_ns() - began)
    background.close()
    return {NOTHING: _cost(empty, 0), IN_TRAINING: _cost(emitted, background.dropped)}


def _cost(taken: list[int], dropped: int) -> Cost:
    taken.sort()
    p50, p99 = (taken[len(taken) * part // 100] / 1000 for part in (50, 99))
    return Cost(p50=p50, p99=p99, longest=taken[-1] / 1000, dropped=dropped)


def measure_costs(folder: Path, *, count: int) -> dict[str, Cost]:
    """Measures all situations; those that keep a thread that hangs come last."""
    return {
        **measure_in_training(FileExporter(folder / "paced.jsonl"), steps=max(count // 200, 100)),
        "a file, in a burst": measure_cost(FileExporter(folder / "burst.jsonl"), count=count),
        FAILS: measure_cost(Fails(), count=count),
        FILLS: measure_cost(Hangs(), count=16_000),
        FULL: measure_cost(Hangs(), count=count),
    }


def events_per_second(folder: Path, *, count: int) -> float:
    """Measures how many events a second reach a file, none of them dropped.

    Raises:
        AssertionError: if an event is lost.
    """
    background = AsyncExporter(FileExporter(folder / "rate.jsonl"))
    emitter = EventEmitter("bench", background, rank=0, generation=1)
    began = time.perf_counter()
    for number in range(count):
        emitter.instant("step", step=number, loss=0.25, phase="forward")
        if number % _FLUSHED == _FLUSHED - 1:
            background.flush()
    background.close()
    seconds = time.perf_counter() - began
    assert background.dropped == background.refused == 0, "events were lost"
    return count / seconds
