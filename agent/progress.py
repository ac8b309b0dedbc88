"""Reads the ranks' progress files.

Reading costs the ranks nothing, does not need the cooperation of a busy or hanging process, and works while the
control plane is away.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from perdure.agent.stall_detector import GapSketch, StallDetector
from perdure.contract.agents import Progress, RankStarts, RankStepTimes
from perdure.contract.courses import MOST_SAMPLES, CourseSample, thin
from perdure.contract.peaks import Peaks
from perdure.contract.vocabulary import ProgressSource
from perdure_launcher.warm_start.starts import read_starts, read_why_all_cold
from perdure_training.node_api import layout
from perdure_training.node_api.progress_file import (
    RankProgress,
    StepTimes,
    is_without_process_group,
    progress_path,
    read_progress,
)

_RATE_WINDOW = 60.0
_RATE_SAMPLE = 1.0
"""Seconds between two samples that are kept for the rate."""


def _has_stepped(rank: RankProgress) -> bool:
    # A reporting script's first report may be of any step; a count begins at 1.
    return rank.time > 0 if rank.reported else rank.step > 0


class SaveStalls:
    """Adds up the time for which saves stopped each rank, over the processes that it has had."""

    def __init__(self) -> None:
        self._totals: dict[int, float] = {}
        self._known: dict[int, tuple[int, float]] = {}

    @property
    def most(self) -> float:
        """Seconds of the rank with the most."""
        return max(self._totals.values(), default=0.0)

    def follow(self, ranks: Sequence[RankProgress]) -> None:
        """Takes in what the local ranks have reported, in their order."""
        for local, rank in enumerate(ranks):
            pid, before = self._known.get(local, (0, 0.0))
            grown = rank.save_stall - (before if pid == rank.pid else 0.0)
            self._known[local] = (rank.pid, rank.save_stall)
            self._totals[local] = self._totals.get(local, 0.0) + max(grown, 0.0)


class CourseRecorder:
    """Samples the progress over the life of the agent, more rarely the longer that is."""

    def __init__(self) -> None:
        self.kept: tuple[CourseSample, ...] = ()
        self._every = 1

    def add(self, sample: CourseSample) -> None:
        """Keeps the sample if enough time has passed since the last one."""
        if self.kept and sample.at - self.kept[-1].at < self._every:
            return
        self.kept = (*self.kept, sample)
        if len(self.kept) > MOST_SAMPLES:
            self.kept, self._every = thin(self.kept), self._every * 2


class ProgressReader:
    """Follows the progress of one node's ranks across generations; the slowest rank counts."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._folder = run_dir / layout.PROGRESS
        self._warm_folder = run_dir / layout.WARM
        self._generation = 0
        self._first_step: int | None = None
        self._made = 0
        """Steps of the generation, by the newest sample."""
        self._samples: deque[tuple[float, int]] = deque()
        self._is_reported = False
        self._gaps = GapSketch()
        self.stall_detector = StallDetector(self._gaps)
        """The stall detector of the generation last sampled."""
        self.newest: Progress | None = None
        """The progress at the last sample; None before all ranks have stepped."""
        self.all_stepped = False
        """Whether every local rank has made a step in the generation last sampled."""
        self.step_times: tuple[RankStepTimes, ...] = ()
        """How the steps of the local ranks split, as far as they have measured it in the generation last sampled."""
        self.measured: dict[int, StepTimes] = {}
        """The same as the ranks have measured it, by rank."""
        self.peaks: Peaks | None = None
        """The most that the node has used of its machine, which its progress carries."""
        self._save_stalls = SaveStalls()
        self._course = CourseRecorder()

    @property
    def save_stall(self) -> float:
        """Seconds for which saves have stopped the training, of the rank with the most."""
        return self._save_stalls.most

    def starts(self, *, generation: int, processes: int) -> RankStarts | None:
        """Returns how the node's ranks were started for a generation; None if no rank has a record of it."""
        starts = read_starts(self._warm_folder, generation=generation, processes=processes, beneath=self._run_dir)
        if not starts:
            reason = read_why_all_cold(self._warm_folder, beneath=self._run_dir)
            return RankStarts(cold=processes, reason=reason) if reason else None
        cold = [start.reason for start in starts if not start.warm]
        standbys = [start.reason for start in starts if start.standby]
        return RankStarts(
            warm=len(starts) - len(cold),
            cold=len(cold),
            reason=next(iter(cold), ""),
            standbys=len(standbys),
            standby_reason=next(iter(standbys), ""),
        )

    def sample(self, *, generation: int, base_rank: int, processes: int, now: float) -> None:
        """Samples the ranks of a generation; `now` is on the monotonic clock."""
        if generation != self._generation:
            self._generation = generation
            self._first_step = None
            self._samples.clear()
            self.stall_detector = StallDetector(self._gaps)
            self.all_stepped = False
        numbers = range(base_rank, base_rank + processes)
        files = (
            (number, read_progress(progress_path(self._folder, number), beneath=self._run_dir)) for number in numbers
        )
        by_number = {number: file for number, file in files if file is not None and file.generation == generation}
        ranks = list(by_number.values())
        self._save_stalls.follow(ranks)
        self.measured = {number: rank.step_times for number, rank in by_number.items() if rank.step_times is not None}
        self.step_times = tuple(
            RankStepTimes(rank=number, compute=times.compute, wait=times.wait, rest=times.rest)
            for number, times in self.measured.items()
            if times.known
        )
        stepped = [rank for rank in ranks if _has_stepped(rank)]
        self.all_stepped = len(stepped) == processes
        self.stall_detector.follow(tuple(rank.step for rank in stepped), now)
        if self.all_stepped:
            self._follow(min(stepped, key=lambda rank: rank.step), now, is_first=base_rank == 0)

    def end(self) -> None:
        """Handles the end of the generation's ranks: the step count stays valid, the rate does not."""
        if self.newest is not None and self.newest.steps_per_second is not None:
            self.newest = self.newest.model_copy(update={"steps_per_second": None})

    def _follow(self, slowest: RankProgress, now: float, *, is_first: bool) -> None:
        # Counted steps are replaced by reported ones as soon as there are any, so numbers may jump once in either
        # direction: no step was made by that. A script that trains several models, as for the folds of a validation,
        # or a program that starts one training after another, begins again with small numbers.
        begins_again = bool(self._samples) and slowest.step < self._samples[-1][1]
        is_renumbered = slowest.reported != self._is_reported or begins_again
        self._is_reported = slowest.reported
        if self._first_step is not None and is_renumbered:
            self._first_step = slowest.step - self._made
            self._samples.clear()
        elif self._first_step is None or slowest.step < self._first_step:
            self._first_step = slowest.step if slowest.reported else 0
            self._samples.clear()
        self._made = slowest.step - self._first_step
        if not self._samples or now - self._samples[-1][0] >= _RATE_SAMPLE:
            self._samples.append((now, slowest.step))
        while now - self._samples[0][0] > _RATE_WINDOW:
            self._samples.popleft()
        since, earliest = self._samples[0]
        diverged = slowest.loss is not None and not math.isfinite(slowest.loss)
        rate = (slowest.step - earliest) / (now - since) if now - since >= _RATE_SAMPLE else None
        loss = slowest.loss if not diverged else None
        if slowest.time > 0:
            self._course.add(CourseSample(int(slowest.time), slowest.step, rate, loss))
        self.newest = Progress(
            step=slowest.step,
            total_steps=slowest.total,
            steps_per_second=rate,
            loss=loss,
            diverged=diverged,
            mfu=slowest.mfu,
            source=ProgressSource.REPORTED if slowest.reported else ProgressSource.COUNTED,
            generation=self._generation,
            generation_steps=self._made,
            last_step_at=datetime.fromtimestamp(slowest.time, UTC) if slowest.time > 0 else None,
            apart=is_without_process_group(self._folder, generation=self._generation, beneath=self._run_dir),
            course=self._course.kept if is_first else (),
            peaks=self.peaks,
        )
