"""Reads and changes settings that torchrun does not pass to handlers, in the stack frames of its callers."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from ..environment import UNLIMITED_RESTARTS

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import RendezvousHandler

logger = logging.getLogger(__name__)

_DEEPEST_FRAME = 12


@dataclass(frozen=True)
class Launch:
    """The processes that torchrun is about to start, from its flags, which override the launcher's options."""

    processes: int
    entrypoint: Any
    arguments: tuple[str, ...]


def current_launch() -> Launch | None:
    """Returns the launch of the torchrun that requests a handler."""
    for frame in _callers():
        if frame.f_code.co_name == "launch_agent":
            found = frame.f_locals
            count = getattr(found.get("config"), "nproc_per_node", None)
            if isinstance(count, int):
                arguments = found.get("args") or ()
                return Launch(count, found.get("entrypoint"), tuple(str(word) for word in arguments))
    logger.warning("torchrun's --nproc-per-node cannot be seen; taken to be as in the job")
    return None


def let_the_job_decide(handler: RendezvousHandler) -> None:
    """Removes torchrun's own settings that conflict with the job's control.

    With `--rdzv-backend=static`, which accelerate uses as well, torchrun takes the master's address from its own flags,
    so a world could neither move nor form again on another port. And accelerate by default never restarts ranks; a
    number of restarts in the command itself is kept.
    """
    for frame in _callers():
        spec: Any = frame.f_locals.get("spec")
        agent: Any = frame.f_locals.get("self")
        if spec is None or getattr(spec, "rdzv_handler", None) is not handler:
            continue
        spec.master_addr = spec.master_port = None
        missing = UNLIMITED_RESTARTS - spec.max_restarts
        if missing > 0 and not _names_restarts(sys.argv) and hasattr(agent, "_remaining_restarts"):
            spec.max_restarts += missing
            agent._remaining_restarts += missing
        return
    logger.warning("torchrun's own settings cannot be seen; a master that is named in the command stays")


def _names_restarts(command: list[str]) -> bool:
    names = (word.partition("=")[0] for word in command if word.startswith("--"))
    return any(name.replace("-", "_") == "__max_restarts" for name in names)


def _callers() -> Iterator[FrameType]:
    frame = inspect.currentframe()
    for _ in range(_DEEPEST_FRAME):
        if frame is None:
            return
        yield frame
        frame = frame.f_back
