"""The claim of one machine on the local nodes of a state folder.

Local nodes are processes, which only workers on their own machine can see and signal. Other machines, and containers,
may reach the same folder, as in a home folder on a network: their workers would take nodes that train for nodes that
have ended. So the first machine has the folder, until its last worker has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict

from perdure.activities.nodes.local.spawn import boot_id, pid_namespace
from perdure.base.errors import StateFolderError
from perdure.base.files import read_record

logger = logging.getLogger(__name__)

_CLAIM: Final = "machine.json"
RENEWED_EVERY = 5.0
"""Seconds between two signs of life in the folder."""
ABANDONED_AFTER = 20.0
"""Seconds without any after which the folder is another machine's to take. Clocks of machines are not compared."""
_LOOK = 0.5


class Claim(BaseModel):
    """The machine whose nodes a folder has."""

    model_config = ConfigDict(frozen=True)

    boot: str
    namespace: str
    """The namespace of its PIDs; containers of one machine have several."""
    host: str
    machine: str = ""
    """`/etc/machine-id`; empty where there is none."""

    @classmethod
    def own(cls) -> Claim:
        """Returns that of this process."""
        machine = ""
        with contextlib.suppress(OSError):
            machine = Path("/etc/machine-id").read_text(encoding="ascii").strip()
        return cls(boot=boot_id(), namespace=pid_namespace(), host=socket.gethostname(), machine=machine)

    def is_of_same_machine(self, other: Claim) -> bool:
        """Whether both are of one machine, or container, which may have been started again since."""
        same_processes = (self.boot, self.namespace) == (other.boot, other.namespace)
        return same_processes or (self.host, self.machine) == (other.host, other.machine)


@contextlib.asynccontextmanager
async def claimed(folder: Path, *, lost: Callable[[], None] = lambda: None) -> AsyncGenerator[None]:
    """Has the folder for this machine until the context ends.

    Args:
        folder: The state folder, which exists.
        lost: Is called if another machine takes the folder nevertheless, as where this one was cut off from it.

    Raises:
        StateFolderError: if a worker on another machine has it.
    """
    path, own = folder / _CLAIM, Claim.own()
    try:
        await _take(path, own)
    except OSError as error:
        raise StateFolderError(f"{path} cannot be written: {error.strerror}") from error
    renewing = asyncio.create_task(_renew(path, own, lost))
    try:
        yield
    finally:
        renewing.cancel()


async def _take(path: Path, own: Claim) -> None:
    draft = path.with_name(f".{path.name}.{own.boot[:8]}.{os.getpid()}")
    draft.write_text(own.model_dump_json())
    try:
        with contextlib.suppress(FileExistsError):
            # Of two machines that begin at once, one succeeds.
            os.link(draft, path)
            return
        known = read_record(path, Claim)
        if known is not None and not known.is_of_same_machine(own) and await _lives(path):
            raise StateFolderError(
                f"{path.parent} has the nodes of a worker on {known.host}, which runs. Local nodes are processes of "
                "one machine, and workers on another one cannot see them",
                remedy="Set PERDURE_STATE to a folder that only this machine uses, and PERDURE_TASK_QUEUE to a queue "
                "of its own; or have this machine join jobs: `perdure join`.",
            )
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


async def _lives(path: Path) -> bool:
    """Whether another machine renews its claim. The folder's times are compared with each other only."""
    seen, waited = _renewed_at(path), 0.0
    while waited < ABANDONED_AFTER:
        await asyncio.sleep(_LOOK)
        waited += _LOOK
        if _renewed_at(path) != seen:
            return True
    return False


def _renewed_at(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


async def _renew(path: Path, own: Claim, lost: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(RENEWED_EVERY)
        try:
            known = read_record(path, Claim)
            if known is not None and not known.is_of_same_machine(own):
                logger.error("a worker on %s has taken %s: this one ends", known.host, path.parent)
                lost()
                return
            os.utime(path)
        except OSError as error:
            logger.warning("%s cannot be renewed, retrying: %s", path, error)
