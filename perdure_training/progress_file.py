"""The file through which a rank reports progress to its node's agent: 72 bytes, written through a memory map.

The layout is described in docs/node-protocol.md. It is defined here once more, because this package is installed with
the user's script and must work beside a launcher of another release.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path

MAGIC = 0x50524431
REPORTED = 1

_LAYOUT = struct.Struct("<IIQQQQdddd")
_NUMBER = struct.Struct("<Q")
_REAL = struct.Struct("<d")
_GENERATION_AT, _STEP_AT, _TOTAL_AT, _LOSS_AT, _TIME_AT, _SAVE_STALL_AT, _MFU_AT = 8, 24, 32, 40, 48, 56, 64


class ProgressFile:
    """One rank's file. Opening it takes it over from the step counter, which then stops."""

    def __init__(self, path: Path, *, generation: int) -> None:
        """Opens the file.

        Raises:
            OSError: if it cannot be created.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            # Written, not truncated: a mapped hole on a full disk would end the process with SIGBUS.
            size = os.fstat(descriptor).st_size
            if size < _LAYOUT.size:
                os.pwrite(descriptor, bytes(_LAYOUT.size - size), size)
            self._map = mmap.mmap(descriptor, _LAYOUT.size)
        finally:
            os.close(descriptor)
        empty = _LAYOUT.pack(MAGIC, REPORTED, generation, os.getpid(), 0, 0, math.nan, 0.0, 0.0, 0.0)
        self._map[: _LAYOUT.size] = empty

    def write(self, *, step: int, total: int | None, loss: float | None, mfu: float | None) -> None:
        """Writes a step. It writes the time first, so that a reader never sees a step with an older time."""
        if total is not None:
            _NUMBER.pack_into(self._map, _TOTAL_AT, total)
        if loss is not None:
            # NaN means that no loss was given.
            _REAL.pack_into(self._map, _LOSS_AT, math.inf if math.isnan(loss) else loss)
        if mfu is not None:
            _REAL.pack_into(self._map, _MFU_AT, mfu)
        _REAL.pack_into(self._map, _TIME_AT, time.time())
        _NUMBER.pack_into(self._map, _STEP_AT, step)


class SaveStall:
    """The time for which saves have stopped this process, in the progress file that the rank has anyway."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Creates the object; the file is opened when it exists."""
        self._path = _own_path(environment)
        self._generation = int(environment.get("PERDURE_GENERATION", "0")) if self._path else 0
        self._map: mmap.mmap | None = None
        self._seconds = 0.0

    def add(self, seconds: float) -> None:
        """Adds the duration of one save. Without a file it does nothing: the training is more important."""
        self._seconds += seconds
        if self._path is None:
            return
        try:
            self._map = self._map or self._open(self._path)
        except (OSError, ValueError):
            return
        if _NUMBER.unpack_from(self._map, _GENERATION_AT)[0] == self._generation:
            _REAL.pack_into(self._map, _SAVE_STALL_AT, self._seconds)

    @staticmethod
    def _open(path: Path) -> mmap.mmap:
        with path.open("r+b") as file:
            return mmap.mmap(file.fileno(), _SAVE_STALL_AT + _REAL.size)


def own_progress_file(environment: Mapping[str, str]) -> ProgressFile | None:
    """Opens this process's file; None if Perdure did not start it as a rank.

    Raises:
        OSError: if the file cannot be created.
        ValueError: if the environment is not as the launcher sets it.
    """
    path = _own_path(environment)
    return path and ProgressFile(path, generation=int(environment.get("PERDURE_GENERATION", "0")))


def _own_path(environment: Mapping[str, str]) -> Path | None:
    directory, rank = environment.get("PERDURE_PROGRESS_DIR"), environment.get("RANK")
    run_id = environment.get("PERDURE_RUN_ID")
    # A torchrun that a rank starts for purposes of its own has other ranks with the same numbers.
    if not directory or rank is None or environment.get("TORCHELASTIC_RUN_ID", run_id) != run_id:
        return None
    return Path(directory) / f"rank-{int(rank)}"
