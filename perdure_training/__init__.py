"""Reports the exact progress of training, from training scripts.

Optional. Without it Perdure counts optimizer steps, which show that a rank is alive but not the training's progress:
counts start at 0 in every process. It needs the standard library only, costs about a microsecond a call, and does
nothing in a process that Perdure did not start.

    from perdure_training import report

    for step in range(start, total):
        ...
        report(step=step, total=total, loss=loss.item() if step % 100 == 0 else None)
"""

from __future__ import annotations

import logging
import operator
import os
import threading
import time
from typing import SupportsFloat, SupportsIndex

from perdure_training.node_api.progress_file import REPORTED, NotTheRank, ProgressFile, own_progress_path
from perdure_training.node_api.rank_environment import generation_of, is_rank_itself
from perdure_training.numbers import watch

__all__ = ["report"]

logger = logging.getLogger(__name__)


class _Reporter:
    """This process's progress file, opened by the first report."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file: ProgressFile | None = None
        self._opened = False
        self._warned = False
        os.register_at_fork(after_in_child=self._forget)

    def report(
        self, step: int, total: int | None, loss: float | None, gradient_norm: float | None, mfu: float | None
    ) -> None:
        watch.follow(step, loss=loss, gradient_norm=gradient_norm)
        with self._lock:
            if not self._opened:
                self._opened = True
                self._file = self._open()
            if self._file is not None:
                try:
                    self._file.write(step, time=time.time(), total=total, loss=loss, mfu=mfu)
                except NotTheRank:
                    self._file = None

    def number(self, name: str, value: SupportsFloat | None) -> float | None:
        """A value as a number; None if reading it would make the program wait for a GPU."""
        if value is None:
            return None
        device = getattr(getattr(value, "device", None), "type", "cpu")
        if device == "cpu":
            return float(value)
        if not self._warned:
            self._warned = True
            logger.warning(
                "report(%s=…) was given a tensor on %r and ignores it: reading it would make every step wait for the "
                "device. Pass %s.item() in the steps in which you read it anyway",
                name,
                device,
                name,
            )
        return None

    def _open(self) -> ProgressFile | None:
        try:
            path = own_progress_path(os.environ)
            if path is None:
                return None
            return ProgressFile(
                path,
                generation=generation_of(os.environ),
                pid=os.getpid(),
                source=REPORTED,
                stands_in=not is_rank_itself(os.environ),
            )
        except (OSError, ValueError) as error:
            logger.warning("progress is not reported: %s", error)
            return None

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._file, self._opened = None, False


_reporter = _Reporter()


def report(
    *,
    step: SupportsIndex,
    total: SupportsIndex | None = None,
    loss: SupportsFloat | None = None,
    grad_norm: SupportsFloat | None = None,
    mfu: float | None = None,
) -> None:
    """Reports this rank's progress. Call it once per step, on every rank: the slowest one counts.

    May be called by any thread. Never fails because of the disk or of Perdure. A loss or a gradient norm that is not a
    finite number is reported to the job: see docs/numbers.md.

    Args:
        step: The step just done, counted over the whole training: after a restart it continues from the checkpoint.
        total: The planned number of steps, once known; kept until another one is given.
        loss: A number, or a tensor in main memory; kept until another one is given. A tensor on a GPU is ignored, since
            reading it would make the program wait for the GPU.
        grad_norm: The norm of the step's gradients, as `clip_grad_norm_` returns it; as for `loss`.
        mfu: The model FLOPs utilization, as the script computes it: its floating point operations per second as a share
            of what the GPUs could do, such as 0.4. Kept until another one is given.

    Raises:
        TypeError: if `step` or `total` is not a whole number, or `loss`, `grad_norm` or `mfu` not a number.
        ValueError: if `step` or `mfu` is negative or `total` less than 1.
    """
    step_number = operator.index(step)
    total_number = None if total is None else operator.index(total)
    if step_number < 0:
        raise ValueError(f"step: expected 0 or more, found {step_number}")
    if total_number is not None and total_number < 1:
        raise ValueError(f"total: expected at least 1, found {total_number}; leave it out while it is unknown")
    share = None if mfu is None else float(mfu)
    if share is not None and share < 0:
        raise ValueError(f"mfu: expected a share such as 0.4, found {mfu}")
    numbers = _reporter.number("loss", loss), _reporter.number("grad_norm", grad_norm)
    _reporter.report(step_number, total_number, *numbers, share)
