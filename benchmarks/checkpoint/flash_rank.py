"""One of two ranks that `dlrover-run` started: saves the same state by DLRover's flash checkpoint.

As its documentation has it for DDP, the node's first rank saves, and DLRover's agent stores what is in memory.
"""

from __future__ import annotations

import importlib
import time
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.checkpoint.rank import Measurement, run_as_rank

DURABLE_WITHIN = 600.0
TRACKER = "dlrover_latest.txt"
"""The file in which DLRover's agent names the newest complete checkpoint."""


class FlashMeasurement(Measurement):
    """Measures saves in memory, and those that are stored as well."""

    def run(self) -> None:
        # It is installed in another environment than this checkout's.
        ddp: Any = importlib.import_module("dlrover.trainer.torch.flash_checkpoint.ddp")
        checkpointer = ddp.DdpCheckpointer(str(self.folder / "flash"))
        # A step that is not newer than the last one is not saved.
        numbers = count(1)
        newest = 0

        def save(kind: Any, _: int) -> None:
            nonlocal newest
            newest = next(numbers)
            checkpointer.save_checkpoint(newest, self.dictionaries(), storage_type=kind)

        self.times("DLRover, memory", partial(save, ddp.StorageType.MEMORY))
        self.times("DLRover, durable", partial(save, ddp.StorageType.DISK), after=lambda: self.until_stored(newest))

    def until_stored(self, step: int) -> None:
        if dist.get_rank() == 0:
            await_step(self.folder / "flash" / TRACKER, step)


def await_step(tracker: Path, step: int) -> None:
    """Waits until a checkpoint is stored; DLRover's own function looks every three seconds."""
    deadline = time.monotonic() + DURABLE_WITHIN
    while not tracker.exists() or tracker.read_text(encoding="utf-8").strip() != str(step):
        if time.monotonic() > deadline:
            raise TimeoutError(f"DLRover has not stored step {step} within {DURABLE_WITHIN:.0f} s")
        time.sleep(0.005)


if __name__ == "__main__":
    run_as_rank(FlashMeasurement)
