"""Splits the steps of a rank into the time in which it computes and the time in which it waits for others, so that a
slow rank can be told from those that wait for it: in synchronous training all ranks step equally often.

The hooks of an optimizer tell when its step begins and ends, torch's flight recorder when each collective was called.
Only intervals of one process are used, since clocks of machines differ. What stops one rank stops all, so they read
their recorders after the same steps.

Over NCCL, a collective is called long before it runs, so there its time on the device counts, which torch measures if
`TORCH_NCCL_ENABLE_TIMING` is set.
"""

from __future__ import annotations

import math
import os
import sys
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

from perdure_training.node_api.progress_file import OwnStepTimes, StepTimes

from .flight_recorder import Collective, Recorded, read_recorder

_INTERVAL = 5.0
"""Seconds between two readings, at least."""
_SHARE = 1 / 250
"""The share of the time that the first readings may take, at most: a slow rank is named soon after a start."""
_QUICK = 16
"""The readings for which that holds: an experiment of the job takes its measurements from them."""
_LATER_SHARE = 1 / 1000
"""The share that all further readings may take."""
_SLOWER = 1.08
"""How many times as long as at the last reading steps take where the next readings are quick, too: a rank that becomes
slow makes all ranks step more slowly."""
_PARTS = 8
"""Parts of a look at the pace, of which the median counts: a pause for an evaluation is in one of them."""
_QUICK_AGAIN = 600.0
"""Seconds from one time of quick readings to the next, at least."""
_FEWEST_STEPS = 8
"""Steps between two readings, at least."""
_MARKS = 1024
"""Steps that are remembered, at most: more than the recorder has."""
_SHARE_OF_LONGEST = 1 / 4
"""A time between two collectives is no computation if it is shorter than this share of the longest one."""
_UNKNOWN = (math.nan, math.nan, math.nan)


class OptimizerStep(NamedTuple):
    """When a step of an optimizer began and ended, in nanoseconds since the epoch."""

    began: int
    ended: int


def split_steps(steps: Sequence[OptimizerStep], calls: Sequence[int]) -> tuple[float, float, float] | None:
    """Returns the seconds of a usual step in which the rank computes, waits, and does the rest.

    Args:
        steps: The newest steps of optimizers.
        calls: When collectives were called, in nanoseconds since the epoch, ascending.

    Returns:
        None where no collective was called between two steps.
    """
    found: list[tuple[int, int, int]] = []
    since = steps[0].ended if steps else 0
    for step in steps[1:]:
        between = calls[bisect_right(calls, since) : bisect_left(calls, step.began)]
        if not between:
            # Several optimizers step after one another, or gradients are accumulated without the others.
            continue
        # Whether the recorder still has the first collective of an older step is unknown.
        if calls[0] <= since:
            found.append(_split(since, between, step))
        since = step.ended
    if not found:
        return None
    compute, wait, rest = (sorted(part)[len(part) // 2] / 1e9 for part in zip(*found, strict=True))
    return compute, wait, rest


def _split(since: int, calls: Sequence[int], step: OptimizerStep) -> tuple[int, int, int]:
    """Splits the time from the end of one optimizer step to the end of the next.

    A collective right after a step, such as the mean of the losses, is no end of a computation. The time from the last
    call to the optimizer is what is waited in any case, and may be the longest.
    """
    gaps = [later - earlier for earlier, later in pairwise((since, *calls))]
    first = next(at for at, gap in enumerate(gaps) if gap >= max(gaps) * _SHARE_OF_LONGEST)
    wait = step.began - calls[first]
    return gaps[first], wait, step.ended - since - gaps[first] - wait


def split_device_steps(
    steps: Sequence[OptimizerStep], collectives: Sequence[Collective]
) -> tuple[float, float, float] | None:
    """Returns the seconds of a usual step in which the device runs no collectives, and those in which it does.

    A process calls the collectives of several steps before the device runs them, so these are means of all steps.

    Args:
        steps: The newest steps of optimizers.
        collectives: Those that run on the device, the oldest first.

    Returns:
        The times, with 0 for the rest, which is part of the first; None where too few collectives have ended.
    """
    timed = list(takewhile(lambda one: one.seconds is not None, collectives))
    known = [step.ended for step in steps if timed and timed[0].called_at <= step.ended <= timed[-1].called_at]
    if len(known) < 2:
        return None
    count = len(known) - 1
    begun, ended = known[0], known[-1]
    wait = sum(one.seconds or 0.0 for one in timed if begun < one.called_at <= ended) / count
    return max((ended - begun) / 1e9 / count - wait, 0.0), wait, 0.0


def has_stages(steps: Sequence[OptimizerStep], recorded: Recorded) -> bool:
    """Returns whether the rank sends to or receives from single ranks in each step, as a stage of a pipeline does.

    There what a rank waits for another stage would count as computation, and stages have different work.
    """
    oldest = min((*(one.called_at for one in recorded.collectives[:1]), *recorded.transfers[:1]), default=0)
    since = max(steps[0].ended, oldest)
    known = sum(step.began > since for step in steps)
    return len(recorded.transfers) - bisect_left(recorded.transfers, since) >= known > 1


def usual_pace(steps: Sequence[OptimizerStep]) -> int:
    """Returns the nanoseconds of a usual step: the median over parts of these steps; 0 where they are too few."""
    length = (len(steps) - 1) // _PARTS
    if length < 1:
        return 0
    parts = [steps[at + length].ended - steps[at].ended for at in range(0, _PARTS * length, length)]
    return sorted(parts)[_PARTS // 2] // length


def _steps_in(seconds: float, usual: float) -> int:
    """The number of steps that take this time or longer: a power of two, and no fewer than `_FEWEST_STEPS`."""
    return 1 << math.ceil(math.log2(max(_FEWEST_STEPS, seconds / max(usual, 1e-6))))


class StepTimer:
    """Follows the steps of this process's optimizers, and tells the agent how they split."""

    def __init__(self) -> None:
        self._file = OwnStepTimes(os.environ)
        self._steps: deque[OptimizerStep] = deque(maxlen=_MARKS)
        self._began = 0
        self._count = 0
        self._every = 0
        """Steps from one reading to the next: a power of two, so that ranks which differ in it read together."""
        self._read_at = 0.0
        self._readings = 0
        self._quick_until = _QUICK
        """The reading from which on all take the smaller share."""
        self._quick_at = -math.inf
        self._look_every = 0
        """Steps from one look at the pace to the next: a power of two, too."""
        self._usual = 0
        """Nanoseconds of a step at the last reading."""
        self._stopped = False
        """As in `StepCounter`."""
        self._compiling: Any = None

    def install(self) -> None:
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self._compiling = torch.compiler.is_compiling
        register_optimizer_step_pre_hook(self.on_begin)
        register_optimizer_step_post_hook(self.on_end)
        os.register_at_fork(after_in_child=self._stop)

    def on_begin(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Remembers the time; the hook that torch calls before a step of an optimizer."""
        if not self._stopped and not self._compiling():
            self._began = time.time_ns()

    def on_end(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Remembers the step, and seldom reads the recorder; the hook that torch calls after it."""
        if self._stopped or self._compiling():
            return
        self._steps.append(OptimizerStep(self._began, time.time_ns()))
        self._count += 1
        if self._is_due():
            try:
                self._read()
            except Exception as error:
                self._give_up(f"{type(error).__name__}: {error}")

    def _is_due(self) -> bool:
        if self._every:
            return self._count % self._every == 0 or self._is_slower()
        if self._count < _FEWEST_STEPS or self._count.bit_count() > 1:
            self._read_at = self._read_at or time.monotonic()
            return False
        return time.monotonic() - self._read_at >= _INTERVAL

    def _is_slower(self) -> bool:
        """Whether steps have become slower since the last reading, which is seldom looked at; only these steps are left
        then, so that the reading shows what has changed."""
        if self._readings < self._quick_until or self._count % self._look_every or not self._usual:
            return False
        now = time.monotonic()
        steps = list(self._steps)[-self._look_every :]
        if now - self._quick_at < _QUICK_AGAIN or usual_pace(steps) < _SLOWER * self._usual:
            return False
        self._quick_until, self._quick_at = self._readings + _QUICK, now
        self._steps = deque(steps[len(steps) // 2 :], maxlen=_MARKS)
        return True

    def _read(self) -> None:
        began = time.thread_time()
        usual = (time.monotonic() - self._read_at) / (self._every or self._count)
        recorded = read_recorder()
        self._readings += 1
        parts = self._split(recorded) if recorded is not None else None
        self._file.write(StepTimes(*(parts or _UNKNOWN), readings=self._readings))
        if recorded is None:
            self._give_up("this torch does not record collectives")
        self._usual = usual_pace(list(self._steps))
        self._steps = deque([self._steps[-1]], maxlen=_MARKS)
        self._read_at = time.monotonic()
        share = _SHARE if self._readings < self._quick_until else _LATER_SHARE
        self._every = _steps_in(max(_INTERVAL, (time.thread_time() - began) / share), usual)
        self._look_every = _steps_in(_INTERVAL, usual)

    def _split(self, recorded: Recorded) -> tuple[float, float, float] | None:
        if has_stages(self._steps, recorded):
            self._give_up("the ranks pass data on in each step, as stages of a pipeline: their work differs")
            return None
        on_device = [one for one in recorded.collectives if one.on_device]
        if not on_device:
            return split_steps(list(self._steps), [one.called_at for one in recorded.collectives])
        if all(one.seconds is None for one in on_device):
            self._give_up("torch does not time collectives of NCCL, unless TORCH_NCCL_ENABLE_TIMING is 1")
        return split_device_steps(self._steps, on_device)

    def _give_up(self, why: str) -> None:
        self._stop()
        self._file.write(StepTimes(*_UNKNOWN, readings=self._readings + 1))
        # Without `logging`, whose configuration belongs to the script.
        sys.stderr.write(
            f"perdure: the steps of rank {os.environ.get('RANK')} are not split into computation and waiting: {why}\n"
        )

    def _stop(self) -> None:
        self._stopped = True
