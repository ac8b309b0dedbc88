"""The course of a training: its progress over time, in as few samples as a plot needs.

It is a part of `Progress`, so it comes with every report of a node that has the first rank, and a job keeps it as it
keeps its progress. No decision rests on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

from pydantic import AfterValidator

__all__ = ["Course", "CourseSample"]

MOST_SAMPLES = 160
"""Samples of one course. Where there are more, every second one is left out, so that those that stay are evenly spread
over all of it."""


_LATEST = 2**32
"""A time that every reader can show."""


class CourseSample(NamedTuple):
    """The progress at one time; in JSON a list, since there are many."""

    at: int
    """Seconds since 1970."""
    step: int
    rate: float | None = None
    """Steps per second."""
    loss: float | None = None


def thin(course: Sequence[CourseSample]) -> tuple[CourseSample, ...]:
    """The course with no more samples than a course may have; the last one is kept."""
    kept = tuple(course)
    while len(kept) > MOST_SAMPLES:
        kept = (*kept[:-1:2], kept[-1])
    return kept


def _bounded(course: Sequence[CourseSample]) -> tuple[CourseSample, ...]:
    return thin([sample for sample in course if 0 <= sample.at <= _LATEST])


Course = Annotated[tuple[CourseSample, ...], AfterValidator(_bounded)]


def join_courses(one: Sequence[CourseSample], other: Sequence[CourseSample]) -> tuple[CourseSample, ...]:
    """The course of which both are parts: an agent that was replaced began anew, and reports arrive in any order."""
    if not (one and other):
        return tuple(one or other)
    earlier, later = sorted((one, other), key=lambda course: course[-1].at)
    return thin([sample for sample in earlier if sample.at < later[0].at] + list(later))
