"""The file through which a rank reports progress to its node's agent: 64 bytes, written through a memory map.

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

_LAYOUT = struct.Struct("<IIQQQQdd8x")
_NUMBER = struct.Struct("<Q")
_REAL = struct.Struct("<d")
_STEP_AT, _TOTAL_AT, _LOSS_AT, _TIME_AT = 24, 32, 40, 48


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
            if os.fstat(descriptor).st_size < _LAYOUT.size:
                os.pwrite(descriptor, bytes(_LAYOUT.size), 0)
            self._map = mmap.mmap(descriptor, _LAYOUT.size)
        finally:
            os.close(descriptor)
        self._map[: _LAYOUT.size] = _LAYOUT.pack(MAGIC, REPORTED, generation, os.getpid(), 0, 0, math.nan, 0.0)

    def write(self, *, step: int, total: int | None, loss: float | None) -> None:
        """Writes a step. It writes the time first, so that a reader never sees a step with an older time."""
        if total is not None:
            _NUMBER.pack_into(self._map, _TOTAL_AT, total)
        if loss is not None:
            # NaN means that no loss was given.
            _REAL.pack_into(self._map, _LOSS_AT, math.inf if math.isnan(loss) else loss)
        _REAL.pack_into(self._map, _TIME_AT, time.time())
        _NUMBER.pack_into(self._map, _STEP_AT, step)


def own_progress_file(environment: Mapping[str, str]) -> ProgressFile | None:
    """Opens this process's file; None if Perdure did not start it as a rank.

    Raises:
        OSError: if the file cannot be created.
        ValueError: if the environment is not as the launcher sets it.
    """
    directory, rank = environment.get("PERDURE_PROGRESS_DIR"), environment.get("RANK")
    run_id = environment.get("PERDURE_RUN_ID")
    # A torchrun that a rank starts for purposes of its own has other ranks with the same numbers.
    if not directory or rank is None or environment.get("TORCHELASTIC_RUN_ID", run_id) != run_id:
        return None
    return ProgressFile(
        Path(directory) / f"rank-{int(rank)}", generation=int(environment.get("PERDURE_GENERATION", "0"))
    )
