"""Limits on restarts: a budget in a sliding window, and a limit on restarts without progress.

A job that runs for months may restart hundreds of times; a job with a bug must stop after a few. So the window slides,
and a job with a bug ends early because its restarts make no progress.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from perdure.contract import Progress, ProgressSource


def within_window(times: tuple[datetime, ...], *, now: datetime, window: timedelta) -> tuple[datetime, ...]:
    """The restarts that still count in the window."""
    return tuple(time for time in times if now - time < window)


def follows(times: tuple[datetime, ...], *, now: datetime, within: timedelta) -> bool:
    """Whether a failure now belongs to the last restart that counted.

    The time counts from that restart, so that nodes which are lost again and again do count.
    """
    return bool(times) and now - times[-1] < within


def made_progress(progress: Progress | None, *, best_step: int, last_generation_steps: int) -> bool:
    """Whether an attempt that has just failed got further than those before it.

    A reported step is absolute, so it must exceed the best so far of the training that goes on. Counted steps begin at
    0 in every attempt and say nothing about the checkpoint that the attempt began from; there, doing no better than the
    attempt before it is no progress, which is what a deterministic error looks like.
    """
    if progress is None:
        return False
    if progress.source is ProgressSource.REPORTED:
        return progress.step > best_step
    return progress.generation_steps > max(last_generation_steps, 0)


def backoff(failed_starts: int) -> timedelta:
    """The pause after so many starts in a row that failed, of a node that never became ready or of ranks that ended at
    once: 0, 5, 10, 20 … 300 s.

    The next start after the first failure is never delayed: most nodes are lost only once.
    """
    if failed_starts <= 1:
        return timedelta()
    return min(timedelta(seconds=5) * 2 ** min(failed_starts - 2, 10), timedelta(minutes=5))
