"""The course of a job over time, for plots: its worlds, its incidents, and its steps, speed and loss.

A job's own records tell when each world began and ended, and at which steps. What is between these its agents have
sampled (`Progress.course`); agents of releases before 0.4 have not.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import groupby
from typing import NamedTuple, TypeGuard

from perdure.cli import text
from perdure.contract import CourseSample, IncidentView, JobStatus, Resized, RestoreSource, ScalingView

_ENOUGH = 3
"""Points of a world with two samples between its begin and its end."""


class Sample(NamedTuple):
    """The progress at one time."""

    time: datetime
    step: int
    rate: float | None
    """Steps per second."""
    loss: float | None


@dataclass(frozen=True)
class WorldSpan:
    """The time for which one world trained."""

    begin: datetime
    end: datetime
    generation: int
    nodes: int
    choice: str = ""
    """What became of its number of nodes, where the job has chosen that by itself, such as "tried" or "kept"."""


@dataclass(frozen=True)
class Mark:
    """An incident at its time."""

    number: int
    title: str
    begin: datetime
    end: datetime | None
    """None while it is open."""
    is_observation: bool


@dataclass(frozen=True)
class Pace:
    """The mean speed of a world, its pauses included."""

    begin: datetime
    end: datetime
    rate: float


@dataclass(frozen=True)
class Course:
    """What is known of a job, or of one role of it, over time."""

    begin: datetime
    end: datetime
    worlds: Sequence[WorldSpan]
    marks: Sequence[Mark]
    steps: Sequence[Sequence[tuple[datetime, float]]]
    """Points of lines, one for each time of training without an interruption."""
    rates: Sequence[Sequence[tuple[datetime, float]]]
    paces: Sequence[Pace]
    losses: Sequence[Sequence[tuple[datetime, float]]]

    @property
    def node_hours(self) -> float:
        """Hours that nodes were in worlds."""
        return sum(one.nodes * (one.end - one.begin).total_seconds() for one in self.worlds) / 3600


def course_of(status: JobStatus, incidents: Iterable[IncidentView], *, now: datetime) -> Course:
    """Puts the course of the status's role together."""
    samples = [_sample(one) for one in status.progress.course] if status.progress else []
    own = sorted((one for one in incidents if one.role in ("", status.role)), key=lambda one: one.number)
    stops = [one for one in own if one.observation is None and one.generation_before]
    end = status.finished_at or now
    worlds = _with_choices(_worlds(status, stops, end), status.scaling)
    lines = _steps(status, stops, samples, end)
    return Course(
        begin=status.started_at,
        end=end,
        worlds=worlds,
        marks=[
            Mark(one.number, text.incident_line(one), one.started_at, one.over_at, one.observation is not None)
            for one in own
        ],
        steps=lines,
        rates=_pieces(stops, [(one.time, one.rate) for one in samples if _is_finite(one.rate)]),
        paces=[pace for line in lines if (pace := _pace(line)) is not None],
        losses=_pieces(stops, [(one.time, one.loss) for one in samples if _is_finite(one.loss)]),
    )


def _pace(line: Sequence[tuple[datetime, float]]) -> Pace | None:
    """The mean over samples where a world has several: the steps at its begin and end may be known too low, since ranks
    go on until a requested change of the world begins."""
    sampled = line[1:-1] if len(line) > _ENOUGH else line
    (begin, start), (end, made) = sampled[0], sampled[-1]
    if end <= begin or made <= start:
        return None
    return Pace(begin, end, (made - start) / (end - begin).total_seconds())


def _pieces(
    stops: Sequence[IncidentView], points: Sequence[tuple[datetime, float]]
) -> list[list[tuple[datetime, float]]]:
    """Lines without those across interruptions, each of which may have points of its own."""
    edges = sorted(edge for stop in stops for edge in (stop.started_at, stop.over_at) if edge is not None)
    return [list(piece) for _, piece in groupby(points, key=lambda point: bisect(edges, point[0]))]


def _sample(sample: CourseSample) -> Sample:
    return Sample(datetime.fromtimestamp(sample.at, UTC), *sample[1:])


def _is_finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _worlds(status: JobStatus, stops: Sequence[IncidentView], end: datetime) -> list[WorldSpan]:
    found: list[WorldSpan] = []
    begin, nodes, generation = status.started_at, 0, 1
    for stop in stops:
        if stop.nodes_before and begin is not None and stop.started_at > begin:
            found.append(WorldSpan(begin, stop.started_at, stop.generation_before, stop.nodes_before))
        begin = stop.over_at if stop.followed_by is None else None
        nodes, generation = stop.nodes_after or stop.nodes_before, stop.generation_after or stop.generation_before
    if begin is not None and begin < end and status.generation and (nodes or status.nodes):
        if not stops:
            nodes, generation = status.nodes, status.generation
        found.append(WorldSpan(begin, end, generation, nodes or status.nodes))
    return found


def _with_choices(worlds: Sequence[WorldSpan], scaling: ScalingView | None) -> list[WorldSpan]:
    """Adds to the first world of each number of nodes that the job has chosen what became of that number."""
    found = list(worlds)
    resized = () if scaling is None else scaling.resized
    for choice, following in zip(resized, (*resized[1:], None), strict=False):
        at = next((n for n, world in enumerate(found) if world.end > choice.time and world.begin >= choice.time), None)
        if at is not None and found[at].nodes == choice.after:
            kept = scaling is not None and following is None and scaling.chosen == choice.after
            found[at] = replace(found[at], choice=_what_became_of(choice, following, kept=kept))
    return found


def _what_became_of(choice: Resized, following: Resized | None, *, kept: bool) -> str:
    if choice.gave_up:
        return "nodes did not come"
    if kept:
        return "kept"
    if not choice.is_try:
        return "chosen"
    return "taken back" if following is not None and not following.is_try else "tried"


def _steps(
    status: JobStatus, stops: Sequence[IncidentView], samples: Sequence[Sample], end: datetime
) -> list[list[tuple[datetime, float]]]:
    """Lines between the interruptions: each from the step that its world continued with to the last one known."""
    first = 0
    if status.checkpoint.restored_generation == 1 and status.checkpoint.restored_step is not None:
        first = status.checkpoint.restored_step
    lines: list[list[tuple[datetime, float]]] = []
    begin: datetime | None = status.started_at
    start: int | None = first
    for stop in stops:
        line = _line(begin, start, samples, stop.started_at)
        # The job may know of fewer steps than were sampled since.
        if stop.step_before is not None and begin is not None and (not line or stop.step_before >= line[-1][1]):
            line.append((stop.started_at, stop.step_before))
        lines.append(line)
        begin = stop.over_at if stop.followed_by is None else None
        start = _continued(stop)
    line = _line(begin, start, samples, end)
    progress = status.progress
    if progress is not None and begin is not None:
        last = progress.last_step_at or (end if status.finished_at else None)
        if last is not None and (not line or last > line[-1][0]):
            line.append((min(last, end), progress.step))
    lines.append(line)
    return [line for line in lines if line]


def _line(
    begin: datetime | None, start: int | None, samples: Sequence[Sample], end: datetime
) -> list[tuple[datetime, float]]:
    if begin is None:
        return []
    seen: list[tuple[datetime, float]] = [(one.time, one.step) for one in samples if begin < one.time < end]
    # A script without a checkpoint starts over, whatever the job knew of its steps.
    started_over = start is not None and bool(seen) and seen[0][1] < start
    return seen if start is None or started_over else [(begin, start), *seen]


def _continued(stop: IncidentView) -> int | None:
    """The step with which the world after an interruption continued."""
    if stop.restored_step is not None and stop.restored_from is not RestoreSource.NOTHING:
        return stop.restored_step
    return None if stop.step_before is None else stop.step_before - (stop.steps_again or 0)
