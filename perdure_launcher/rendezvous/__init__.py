"""The plugin that torchrun loads: takes the rendezvous's place, also where the command's own flags name another one.

`torchrun --standalone` and `--rdzv-backend=c10d` win over the environment. On several nodes each would be a training
of its own, all writing to the same checkpoints; so our handler answers to those names as well.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from ..commands import BACKEND
from ..environment import TORCHRUN_VARIABLE, TorchrunSettings

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousParameters

logger = logging.getLogger(__name__)

_DEEPEST_FRAME = 12


def get_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """The entry point, in the group `torchrun.handlers`; torch's own handlers are registered by then."""
    if TORCHRUN_VARIABLE in os.environ:
        _take_over()
    return create


def create(parameters: RendezvousParameters) -> RendezvousHandler:
    """Makes the handler, and takes the launcher's variables out of the environment that ranks will inherit.

    Raises:
        RendezvousError: if no launcher of ours started this torchrun.
    """
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    from .handler import PerdureRendezvous

    text = os.environ.get(TORCHRUN_VARIABLE)
    if text is None:
        raise RendezvousError(
            f"the rendezvous backend {BACKEND!r} works only in a command that Perdure's launcher started"
        )
    settings = TorchrunSettings.load(text)
    for name in settings.exported:
        os.environ.pop(name, None)
    return PerdureRendezvous(parameters, settings, processes=_processes(settings))


def _take_over() -> None:
    from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry

    registry: dict[str, Any] = rendezvous_handler_registry._registry  # pyright: ignore[reportPrivateUsage]
    registry["c10d"] = create
    registry["static"] = _instead_of_static(registry["static"])


def _instead_of_static(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_static(parameters: RendezvousParameters) -> RendezvousHandler:
        from torch.distributed.elastic.rendezvous.api import RendezvousError

        if parameters.max_nodes > 1:
            raise RendezvousError(
                "--rdzv-backend=static fixes the master's address in torchrun's own flags, so the world could not be "
                "formed again after a failure; leave --rdzv-backend out of the command"
            )
        return original(parameters)

    return create_static


def _processes(settings: TorchrunSettings) -> int:
    """Ranks that torchrun will start: `--nproc-per-node` of the command wins over what we asked for."""
    frame: FrameType | None = inspect.currentframe()
    for _ in range(_DEEPEST_FRAME):
        if frame is None:
            break
        if frame.f_code.co_name == "launch_agent":
            count = getattr(frame.f_locals.get("config"), "nproc_per_node", None)
            if isinstance(count, int):
                return count
        frame = frame.f_back
    logger.warning("torchrun's --nproc-per-node cannot be seen; taken to be %s, as in the job", settings.processes)
    return settings.processes
