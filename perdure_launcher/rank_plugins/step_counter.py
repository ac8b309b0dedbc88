"""Plugin that `import torch` loads in every rank: counts and times optimizer steps, and records uncaught exceptions.

A process that a rank has started has the rank's variables, but is none. The plugin does nothing there, unless the
process trains in the place of a rank that makes no step: a wrapper around it, or a program that starts a torchrun.

It does not touch the user's code, and must not fail: torch turns an exception of a plugin into a failure of `import
torch`. Counts are relative (0 after each start): they show that a rank is alive, not the progress of the training,
which `perdure_training.report` reports.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

from perdure_training.node_api.progress_file import (
    COUNTED,
    REPORTED,
    ProgressFile,
    progress_path,
    speaks_for_rank,
)
from perdure_training.node_api.rank_environment import (
    PROGRESS_VARIABLE,
    SOLE_VARIABLE,
    generation_of,
    is_child_of_training_rank,
    is_rank,
    is_rank_below,
    is_rank_itself,
)

from ..environment import PARENT_VARIABLE
from . import build_locks, uncaught
from .rank_process import claim_rank, mark_training


def autoload() -> None:
    """Installs the plugin; the entry point in the group `torch.backends`."""
    with contextlib.suppress(Exception):
        # A copy: warm starts leave out packages that read a rank's variables when they are imported.
        if is_rank_below(os.environ.copy()):
            own = os.getpid()
            _guard_builds()
            uncaught.keep_exceptions(lambda: os.getpid() == own)
            if os.environ["RANK"] == "0":
                StepCounter().install()
            return
        if not is_rank(os.environ.copy()):
            return
        _guard_builds()
        if claim_rank(os.environ):
            _stay_with_parent()
            uncaught.keep_exceptions(_speaks)
            _answer_with_stacks()
            StepCounter().install()
            _time_steps()
        elif is_child_of_training_rank(os.environ):
            # torch's own `@record` writes there, too.
            os.environ.pop(uncaught.FILE_VARIABLE, None)
        else:
            uncaught.keep_exceptions(_speaks)
            # A launcher's ranks have other numbers than the job's only rank, in whose place the first one trains.
            if SOLE_VARIABLE not in os.environ or os.environ["RANK"] == "0":
                StepCounter().install()


def _guard_builds() -> None:
    # A torch without it has other locks.
    with contextlib.suppress(Exception):
        build_locks.install()


class StepCounter:
    """Counts the steps of this process's optimizers into its progress file.

    Several optimizers that step alternately (a GAN, or one per layer) count as one: the highest count is used. An
    optimizer that is created later continues from that count, so that it never stalls for long. Steps inside a graph of
    `torch.compile` are not counted: that would break the graph.
    """

    def __init__(self) -> None:
        self._directory = Path(os.environ[PROGRESS_VARIABLE])
        self._generation = generation_of(os.environ)
        self._rank = int(os.environ["RANK"])
        self._writer: ProgressFile | None = None
        self._step = 0
        self._stopped = False
        """Whether counting has stopped. The hook stays: torch may be iterating over its hooks, and the user's step
        would fail."""
        self._compiling: Any = None

    def install(self) -> None:
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._compiling = torch.compiler.is_compiling
        register_optimizer_step_post_hook(self.on_step)
        os.register_at_fork(after_in_child=self._follow_fork)

    def on_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Counts one optimizer step; the hook that torch calls after it."""
        if self._compiling():
            return
        uncaught.stay_first()
        if self._stopped:
            return
        try:
            self._count(optimizer)
        except Exception:
            self._stop()

    def _count(self, optimizer: Any) -> None:
        step: int = getattr(optimizer, "_perdure_step", -1)
        step = max(self._step - 1, 0) + 1 if step < 0 else step + 1
        optimizer._perdure_step = step
        self._step = max(self._step, step)
        writer = self._writer
        if writer is None:
            stands_in = not is_rank_itself(os.environ)
            if stands_in and os.environ.get("RANK") != str(self._rank):
                # A launcher within the script has made it another one of its ranks.
                self._stop()
                return
            writer = self._writer = ProgressFile(
                progress_path(self._directory, self._rank),
                generation=self._generation,
                pid=os.getpid(),
                source=COUNTED,
                stands_in=stands_in,
            )
            if stands_in:
                _answer_with_stacks()
            else:
                mark_training(os.environ)
                # Imported here: imports at the top would delay every start.
                from ..warm_start import learning

                learning.tell()
        if writer.source == REPORTED:
            self._stop()
            return
        writer.write(self._step, time=time.time())

    def _follow_fork(self) -> None:
        # What a rank forks before it trains may train in its place, as a program may that it starts.
        if self._writer is not None or is_child_of_training_rank(os.environ):
            self._stop()

    def _stop(self) -> None:
        self._stopped = True


def _speaks() -> bool:
    return speaks_for_rank(os.environ)


def _answer_with_stacks() -> None:
    from .stacks import answer_with_stacks

    # A full disk, for example: the rank trains, and is only not asked.
    with contextlib.suppress(OSError, ValueError):
        answer_with_stacks()


def _time_steps() -> None:
    # One rank has nobody to wait for.
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from .step_times import StepTimer

        StepTimer().install()


def _stay_with_parent() -> None:
    """Makes this rank end with its torchrun: without torchrun, no process would stop the rank or report its end."""
    from ..system.processes import die_with_parent, pid_namespace, read_process

    number, _, namespace = os.environ.get(PARENT_VARIABLE, "").partition(" ")
    if namespace != pid_namespace():
        return
    if int(number) == os.getppid():
        die_with_parent()
    # The parent may have died before, while this process was importing.
    parent = read_process(int(number))
    if parent is None or parent.zombie:
        os.kill(os.getpid(), signal.SIGKILL)
