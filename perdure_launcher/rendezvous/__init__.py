"""The plugin that torchrun loads: replaces the rendezvous, even if the command's own flags name another one.

The flags `torchrun --standalone`, `--rdzv-backend=c10d` and accelerate's `static` override the environment. With them
each of several nodes would train by itself, all writing to the same checkpoints; so the handler is registered under
those names as well.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from perdure_training.node_api.rank_environment import SOLE_VARIABLE, has_job_rank

from ..environment import TORCHRUN_VARIABLE, TorchrunSettings
from ..rank_exits import signal_rank
from ..supervisor.commands import BACKEND
from ..system.user_signals import survive_user_signals
from ..torch_internals import (
    Launch,
    current_launch,
    replace_rendezvous_backends,
    report_termination_in_one_line,
    signal_programs,
)
from ..warm_start.names import EXECUTABLE_VARIABLE, PYTHON_VARIABLE
from ..warm_start.plan import Plan
from ..warm_start.starts import record_all_cold
from ..warm_start.supervisor import InterpreterSupervisor, offer
from .torch_events import export_torch_events

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousParameters

logger = logging.getLogger(__name__)

_LOOKED_THROUGH = (
    "the command starts torchrun by itself. Perdure sees the steps of its first rank, and starts the command again if "
    "one of its ranks fails. Set the role's `rendezvous` to `torchrun`, and it starts the ranks alone again, and warm"
)
"""Printed once by a torchrun that the job's only rank starts."""


def get_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Registers the handler; the entry point in the group `torchrun.handlers`, called after torch's own
    registrations."""
    text = os.environ.get(TORCHRUN_VARIABLE)
    if text is not None:
        survive_user_signals()
        replace_rendezvous_backends(create)
        signal_programs(signal_rank)
        report_termination_in_one_line()
        settings = TorchrunSettings.load(text)
        if settings.warm_starts and (reason := offer(settings.warm_folder, os.environ)):
            logger.info("ranks start cold: %s", reason)
            record_all_cold(settings.warm_folder, reason)
    elif SOLE_VARIABLE in os.environ and has_job_rank(os.environ):
        sys.stderr.write(f"perdure: {_LOOKED_THROUGH}\n")
    return create


def create(parameters: RendezvousParameters) -> RendezvousHandler:
    """Creates the handler, and removes the launcher's variables from the environment that ranks inherit.

    Raises:
        RendezvousError: if torchrun was not started by Perdure's launcher.
    """
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    from .handler import PerdureRendezvous

    text = os.environ.get(TORCHRUN_VARIABLE)
    if text is None:
        raise RendezvousError(
            f"the rendezvous backend {BACKEND!r} works only in a command that Perdure's launcher started"
        )
    settings = TorchrunSettings.load(text)
    export_torch_events(Path(settings.run_directory))
    for name in settings.exported:
        os.environ.pop(name, None)
    launch = current_launch()
    processes = launch.processes if launch else settings.processes
    return PerdureRendezvous(parameters, settings, processes=processes, warm=_interpreter_supervisor(settings, launch))


def _interpreter_supervisor(settings: TorchrunSettings, launch: Launch | None) -> InterpreterSupervisor | None:
    """Returns the supervisor of the warm interpreter if ranks start through the shim. Call it when the environment is
    as ranks will inherit it."""
    shim, python = os.environ.pop(EXECUTABLE_VARIABLE, None), os.environ.get(PYTHON_VARIABLE)
    if python is None or shim is None:
        return None
    if launch is None or launch.entrypoint != shim:
        why = "does not show what it starts" if launch is None else f"starts {launch.entrypoint} itself (--no-python)"
        record_all_cold(settings.warm_folder, f"torchrun {why}")
        return None
    plan = Plan.of_ranks(launch.arguments, os.environ)
    return InterpreterSupervisor(folder=settings.warm_folder, python=python, plan=plan)
