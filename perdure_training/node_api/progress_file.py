"""Progress files: each rank's progress, written without a system call per step and polled by the agent.

A file has 104 bytes, little endian (docs/node-protocol.md). `time` is written before `step`, so a reader that sees a
step sees a time that is not older.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from perdure_training.node_api.rank_environment import (
    PROGRESS_VARIABLE,
    generation_of,
    is_child_of_training_rank,
    is_rank,
    is_rank_itself,
)
from perdure_training.node_api.untrusted_files import read_below

MAGIC = 0x50524431
COUNTED = 0
REPORTED = 1

_WITHOUT_PROCESS_GROUP = "without-process-group"
_LAYOUT = struct.Struct("<IIQQQQdddddddQ")
_SOURCE = struct.Struct("<I")
_NUMBER = struct.Struct("<Q")
_OWNER = struct.Struct("<QQ")
"""Generation and PID."""
_REAL = struct.Struct("<d")
_STEP_TIMES = struct.Struct("<dddQ")
_LARGEST = 2**63 - 1
"""Steps, at most: what reads them further on counts in 64 bits with a sign."""
_LATEST = 2.0**36
"""Seconds since the epoch, in the year 4147: any program may write to the file."""
_NOTHING = (0, 0, math.nan, *(0.0,) * 6, 0)
_SOURCE_AT, _GENERATION_AT, _STEP_AT, _TOTAL_AT = 4, 8, 24, 32
_LOSS_AT, _TIME_AT, _SAVE_STALL_AT, _MFU_AT, _STEP_TIMES_AT = 40, 48, 56, 64, 72


class StepTimes(NamedTuple):
    """How a rank's usual step splits, in seconds. All are NaN where the rank cannot tell it."""

    compute: float
    """From the end of a step, or of a collective right after it, to the first collective of the next."""
    wait: float
    """From there to the optimizer: in collectives, or in computation that overlaps with them."""
    rest: float
    readings: int
    """Counts the rank's measurements, from 1."""

    @property
    def known(self) -> bool:
        return all(0 <= part < _LATEST for part in self[:3])


@dataclass(frozen=True)
class RankProgress:
    """One progress file."""

    source: int
    """`COUNTED` or `REPORTED`."""
    generation: int
    pid: int
    step: int
    total: int | None
    loss: float | None
    time: float
    """The time of the last step."""
    save_stall: float = 0.0
    """Seconds for which saves of the process have stopped it."""
    mfu: float | None = None
    """The model FLOPs utilization that the script reported."""
    step_times: StepTimes | None = None
    """None before the first measurement."""

    @property
    def reported(self) -> bool:
        return self.source == REPORTED


def progress_path(directory: Path, rank: int) -> Path:
    """Returns the path of a global rank's progress file."""
    return directory / f"rank-{rank}"


def read_progress(path: Path, *, beneath: Path | None = None) -> RankProgress | None:
    """Reads a progress file; None if it does not exist or is incomplete.

    Args:
        path: The file.
        beneath: The folder below which no link is followed; by default the file's own.
    """
    try:
        content = read_below(beneath, path, limit=_LAYOUT.size)
    except OSError:
        return None
    if len(content) < _LAYOUT.size:
        return None
    magic, source, generation, pid, step, total, loss, time, save_stall, mfu, *step_times = _LAYOUT.unpack(content)
    if magic != MAGIC or not 0 <= time < _LATEST or max(step, total) > _LARGEST:
        return None
    return RankProgress(
        source=source,
        generation=generation,
        pid=pid,
        step=step,
        total=total or None,
        loss=None if math.isnan(loss) else loss,
        time=time,
        save_stall=save_stall if 0 <= save_stall < _LATEST else 0.0,
        mfu=mfu if 0 < mfu < math.inf else None,
        step_times=StepTimes(*step_times) if step_times[-1] else None,
    )


def steps(directory: Path, rank: int, *, generation: int) -> bool:
    """Returns whether a rank has made a step in this generation."""
    progress = read_progress(progress_path(directory, rank))
    return progress is not None and progress.generation == generation and progress.time > 0


def mark_without_process_group(directory: Path, *, generation: int) -> None:
    """Records that a rank of this node steps without a process group, although there are several ranks.

    Raises:
        OSError: if it cannot be written.
    """
    (directory / _WITHOUT_PROCESS_GROUP).write_text(str(generation), encoding="utf-8")


def is_without_process_group(directory: Path, *, generation: int, beneath: Path | None = None) -> bool:
    """Returns whether `mark_without_process_group` was called in this generation; `beneath` as in `read_progress`."""
    try:
        return read_below(beneath, directory / _WITHOUT_PROCESS_GROUP, limit=_LAYOUT.size) == str(generation).encode()
    except OSError:
        return False


class NotTheRank(OSError):
    """The file is that of a rank that makes its own steps; this process is one that the rank has started."""


class ProgressFile:
    """One rank's progress file, mapped into memory.

    A rank that makes no step may be a wrapper around the program that trains, so a process that it has started may
    write in its place, until the rank itself does.
    """

    def __init__(self, path: Path, *, generation: int, pid: int, source: int, stands_in: bool = False) -> None:
        """Opens the file, and takes it over from the previous process.

        A script that reports takes it over from the step counter of its own process, too, which then stops.

        Args:
            path: The file.
            generation: The generation of the process.
            pid: The process's.
            source: `COUNTED` or `REPORTED`.
            stands_in: The process is not the rank itself, but one that the rank has started.

        Raises:
            NotTheRank: if the process was started by the rank, and the rank or another such process steps.
            OSError: if the file cannot be created.
        """
        if stands_in and _steps_elsewhere(read_progress(path), generation=generation, pid=pid):
            raise NotTheRank(f"{path} is written by another process")
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            # The bytes are written: a mapped hole on a full disk would end the process with SIGBUS.
            size = os.fstat(descriptor).st_size
            if size < _LAYOUT.size:
                os.pwrite(descriptor, bytes(_LAYOUT.size - size), size)
            self._map = mmap.mmap(descriptor, _LAYOUT.size)
        finally:
            os.close(descriptor)
        self._generation, self._pid, self._source, self._stands_in = generation, pid, source, stands_in
        magic, _, generation_before, pid_before, *_ = _LAYOUT.unpack_from(self._map)
        if source == REPORTED or (magic, generation_before, pid_before) != (MAGIC, generation, pid):
            self._begin()

    @property
    def source(self) -> int:
        return _SOURCE.unpack_from(self._map, _SOURCE_AT)[0]

    def write(
        self, step: int, *, time: float, total: int | None = None, loss: float | None = None, mfu: float | None = None
    ) -> None:
        """Writes a step; what is None keeps its value.

        Raises:
            NotTheRank: if the process wrote in the rank's place, and the rank itself has begun to.
        """
        if _OWNER.unpack_from(self._map, _GENERATION_AT) != (self._generation, self._pid):
            self._take_back()
        if total is not None:
            _NUMBER.pack_into(self._map, _TOTAL_AT, total)
        if loss is not None:
            # NaN means that no loss was given.
            _REAL.pack_into(self._map, _LOSS_AT, math.inf if math.isnan(loss) else loss)
        if mfu is not None:
            _REAL.pack_into(self._map, _MFU_AT, mfu)
        _REAL.pack_into(self._map, _TIME_AT, time)
        _NUMBER.pack_into(self._map, _STEP_AT, step)

    def _begin(self) -> None:
        self._map[: _LAYOUT.size] = _LAYOUT.pack(MAGIC, self._source, self._generation, self._pid, *_NOTHING)

    def _take_back(self) -> None:
        generation, _ = _OWNER.unpack_from(self._map, _GENERATION_AT)
        if self._stands_in or generation > self._generation:
            raise NotTheRank("another process writes the progress of this rank")
        self._begin()


class _OwnFile:
    """The progress file that the rank has anyway, for what others than its step counter write there."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Creates the object; the file is opened when it exists."""
        self._path = own_progress_path(environment)
        self._generation = generation_of(environment) if self._path else 0
        self._map: mmap.mmap | None = None

    def put(self, layout: struct.Struct, offset: int, *values: float) -> None:
        """Writes values. Without a file it does nothing: the training is more important."""
        if self._path is None:
            return
        try:
            self._map = self._map or self._open(self._path)
        except (OSError, ValueError):
            return
        if _NUMBER.unpack_from(self._map, _GENERATION_AT)[0] == self._generation:
            layout.pack_into(self._map, offset, *values)

    @staticmethod
    def _open(path: Path) -> mmap.mmap:
        with path.open("r+b") as file:
            return mmap.mmap(file.fileno(), _LAYOUT.size)


class SaveStall:
    """The time for which saves have stopped this process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._file = _OwnFile(environment)
        self._seconds = 0.0

    def add(self, seconds: float) -> None:
        """Adds the duration of one save."""
        self._seconds += seconds
        self._file.put(_REAL, _SAVE_STALL_AT, self._seconds)


class OwnStepTimes:
    """How the steps of this process split."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._file = _OwnFile(environment)

    def write(self, times: StepTimes) -> None:
        """Writes the newest measurement."""
        self._file.put(_STEP_TIMES, _STEP_TIMES_AT, *times)


def own_progress_path(environment: Mapping[str, str]) -> Path | None:
    """Returns the path of this process's file; None if it does not speak for a rank (`speaks_for_rank`).

    Raises:
        ValueError: if the environment is not as the launcher sets it.
    """
    if not speaks_for_rank(environment):
        return None
    return progress_path(Path(environment[PROGRESS_VARIABLE]), int(environment["RANK"]))


def speaks_for_rank(environment: Mapping[str, str]) -> bool:
    """Returns whether what this process does is its rank's doing: it is the rank, or the rank has started it and makes
    no steps itself, as a wrapper around the program that trains does.

    Raises:
        ValueError: if the environment is not as the launcher sets it.
    """
    if not is_rank(environment):
        return False
    if is_rank_itself(environment):
        return True
    if is_child_of_training_rank(environment):
        return False
    path = progress_path(Path(environment[PROGRESS_VARIABLE]), int(environment["RANK"]))
    return not _steps_elsewhere(read_progress(path), generation=generation_of(environment), pid=os.getpid())


def _steps_elsewhere(progress: RankProgress | None, *, generation: int, pid: int) -> bool:
    """Returns whether another process makes the rank's steps, in this generation or a newer one."""
    if progress is None or progress.generation < generation:
        return False
    if progress.generation > generation:
        return True
    return progress.pid != pid and progress.time > 0 and _lives(progress.pid)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
