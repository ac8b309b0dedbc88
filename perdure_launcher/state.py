"""State that survives torchrun: the handler's PID, the newest generation entered, and the command's stage.

A restarted torchrun must not enter the generation in which the last one died, so the number is kept in a small file of
the run directory. Its bytes are allocated when the launcher starts, so that a full disk cannot prevent an update.
"""

from __future__ import annotations

import contextlib
import os
import struct
from dataclasses import astuple, dataclass
from pathlib import Path

from perdure_training.node_api.layout import RENDEZVOUS_STATE

_LAYOUT = struct.Struct("<QQQQ")


@dataclass(frozen=True)
class RendezvousState:
    handler_pid: int = 0
    """The PID of the torchrun that last created a handler; 0 for none yet."""
    generation: int = 0
    """The newest generation entered; 0 for none yet."""
    stage: int = 0
    """The number of torchruns of the running command that have ended with 0, and so the index of the current one."""
    launch: int = 0
    """Identifies the command line of the torchrun that entered a world in this stage; 0 for none yet."""


class StateFile:
    def __init__(self, run_directory: Path) -> None:
        self._path = run_directory / RENDEZVOUS_STATE

    def create(self) -> None:
        """Allocates the file; an existing one is kept.

        Raises:
            OSError: if the folder cannot be written.
        """
        if self.read() != RendezvousState():
            return
        with open(self._path, "wb") as file:
            file.write(_LAYOUT.pack(0, 0, 0, 0))
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> RendezvousState:
        try:
            content = self._path.read_bytes()
            return RendezvousState(*_LAYOUT.unpack(content))
        except (OSError, struct.error):
            return RendezvousState()

    def write(self, state: RendezvousState) -> None:
        """Overwrites the file in place. Errors are ignored, since the agent also receives the state through its
        socket."""
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(descriptor, _LAYOUT.pack(*astuple(state)), 0)
            finally:
                os.close(descriptor)
