"""Notices in the rank itself, and at once, that its loss or its gradient norm is not a finite number.

What a script reports is followed here: by `report`, by `TrainerEvents.metrics`, and by the callbacks for trainers. A
finite number costs one comparison. The first one that is not is written to a file, which the node's agent reads. So is
the first spike, in a job that wants them reported.

A loss is computed from the state of the step before. So a finite loss shows that this state is sound, and a loss that
is not finite that it may not be: gradients that overflow, or that a device computes wrongly, spoil the state one step
before the loss shows it.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

from perdure_training.node_api.number_file import GRADIENT_NORM, LOSS, SPIKES, FoundNumber, number_path, write_numbers
from perdure_training.node_api.progress_file import speaks_for_rank
from perdure_training.node_api.rank_environment import (
    PROGRESS_VARIABLE,
    ROLLS_BACK_VARIABLE,
    SPIKES_VARIABLE,
    generation_of,
)
from perdure_training.recent_numbers import RecentNumbers

logger = logging.getLogger(__name__)


class NumberWatch:
    """The numbers of one process."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        """Creates the object; the environment is read when a number is not finite.

        Args:
            environment: The variables that say which rank this process is, if it is any.
        """
        self._environment = environment
        self._lock = threading.Lock()
        self._last_finite: int | None = None
        self._last_reported: int | None = None
        self._found: dict[str, FoundNumber] = {}
        self._recent: dict[str, RecentNumbers] | None = None
        """By name, where spikes are followed; None before the first number."""
        self._spoiled_by = ""
        self._samples: list[weakref.WeakMethod[Callable[[], str]]] = []
        os.register_at_fork(after_in_child=self._forget)

    def follow(self, step: int, *, loss: float | None = None, gradient_norm: float | None = None) -> None:
        """Takes in the numbers of a step; None for one that is not known. Never fails because of the disk."""
        if loss is not None:
            self._last_reported = step
            if math.isfinite(loss):
                self._last_finite = step
            self._look(LOSS, step, loss)
        if gradient_norm is not None:
            self._look(GRADIENT_NORM, step, gradient_norm)

    @property
    def found(self) -> tuple[FoundNumber, ...]:
        """The first number of each name that is not finite."""
        return tuple(self._found.values())

    @property
    def spoiled_by(self) -> str:
        """Why the state may not be sound and is not saved any more, in a job that goes back for that; else empty."""
        if LOSS in self._found and self._environment.get(ROLLS_BACK_VARIABLE):
            return "the loss was not a number"
        return self._spoiled_by

    def reported_beyond(self, step: int) -> int | None:
        """The newest step whose loss was reported, where it is beyond one that is saved now: the script counts what it
        saves otherwise, as by epochs. None where it counts both the same."""
        reported = self._last_reported
        return reported if reported is not None and reported > step + 1 else None

    def spoil(self, reason: str) -> None:
        """Records that the state may not be sound for another reason, for which every job goes back."""
        self._spoiled_by = reason

    def name_samples(self, method: Callable[[], str]) -> None:
        """Has an object's method asked which samples a step had, for as long as the object lives."""
        self._samples.append(weakref.WeakMethod(method))

    def _look(self, name: str, step: int, value: float) -> None:
        if not math.isfinite(value):
            if name not in self._found:
                self._find(name, step, repr(value))
            return
        if self._recent is None:
            names = (LOSS, GRADIENT_NORM) if self._environment.get(SPIKES_VARIABLE) else ()
            self._recent = {name: RecentNumbers() for name in names}
        recent = self._recent.get(name)
        if recent is not None and recent.is_spike(value) and SPIKES[name] not in self._found:
            self._find(SPIKES[name], step, f"{value:.4g}, where {recent.usual:.4g} is usual,")

    def _forget(self) -> None:
        self._lock = threading.Lock()

    def _find(self, name: str, step: int, value: str) -> None:
        with self._lock:
            self._found[name] = FoundNumber(
                name=name,
                value=value,
                step=step,
                last_finite=self._last_finite,
                time=time.time(),
                samples=tuple(filter(None, map(_ask, self._samples))),
            )
            self._write()

    def _write(self) -> None:
        try:
            if speaks_for_rank(self._environment):
                path = number_path(Path(self._environment[PROGRESS_VARIABLE]), int(self._environment["RANK"]))
                write_numbers(path, self.found, generation=generation_of(self._environment))
        except (OSError, ValueError) as error:
            logger.warning("a number that is not finite is not reported: %s", error)


def _ask(source: weakref.WeakMethod[Callable[[], str]]) -> str:
    method = source()
    try:
        return method() if method is not None else ""
    except Exception as error:
        logger.debug("samples are not named: %s", error)
        return ""


watch = NumberWatch()
"""This process's."""
