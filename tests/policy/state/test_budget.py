"""Tests of restart budgets: sliding windows, progress, pauses."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from perdure.contract import Progress
from perdure.workflows.policy.state.budget import backoff, made_progress, within_window
from tests.policy.scenario import counted, reported

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def ago(*seconds: float) -> tuple[datetime, ...]:
    return tuple(NOW - timedelta(seconds=second) for second in seconds)


@pytest.mark.parametrize(
    ("times", "kept"),
    [((), ()), (ago(61, 60, 59.9, 0), ago(59.9, 0)), (ago(-1), ago(-1)), (ago(3600), ())],
)
def test_restarts_leave_the_window(times: tuple[datetime, ...], kept: tuple[datetime, ...]):
    assert within_window(times, now=NOW, window=timedelta(minutes=1)) == kept


@pytest.mark.parametrize(
    ("progress", "best_step", "last_generation_steps", "expected"),
    [
        (None, -1, -1, False),
        (reported(0), -1, -1, True),
        (reported(10), 10, -1, False),
        (reported(11), 10, 1000, True),
        (reported(9), 10, -1, False),
        (counted(0), -1, -1, False),
        (counted(1), -1, -1, True),
        (counted(100), -1, 100, False),
        (counted(101), 5000, 100, True),
    ],
)
def test_progress_is_beyond_the_best_so_far(
    progress: Progress | None, best_step: int, last_generation_steps: int, expected: bool
):
    assert made_progress(progress, best_step=best_step, last_generation_steps=last_generation_steps) is expected


def test_replacements_that_never_get_ready_are_asked_for_ever_more_slowly():
    pauses = [backoff(failed).total_seconds() for failed in range(12)]
    assert pauses == [0, 0, 5, 10, 20, 40, 80, 160, 300, 300, 300, 300]
    assert backoff(10_000) == timedelta(minutes=5)
