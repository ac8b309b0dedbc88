"""What survives torchrun: its handler's process, the newest generation entered, and how far the command is.

A torchrun that is started again must not enter the generation in which the last one died, so the number is kept in a
small file of the run directory. Its bytes are allocated when the launcher starts, so that a full disk cannot lose it.
"""

from __future__ import annotations

import contextlib
import os
import struct
from dataclasses import astuple, dataclass
from pathlib import Path

_LAYOUT = struct.Struct("<QQQQ")
NAME = "rendezvous-state"


@dataclass(frozen=True)
class RendezvousState:
    handler_pid: int = 0
    """Of the torchrun that last created a handler; 0 for none yet."""
    generation: int = 0
    """The newest one entered; 0 for none yet."""
    stage: int = 0
    """How many torchruns of the running command have ended with 0: the number of the next one, from 0."""
    launch: int = 0
    """Identifies the command line of the torchrun that entered a world in this stage; 0 for none yet."""


class StateFile:
    def __init__(self, run_directory: Path) -> None:
        self._path = run_directory / NAME

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
        """Overwrites in place; best effort, since the agent hears the same through its socket."""
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(descriptor, _LAYOUT.pack(*astuple(state)), 0)
            finally:
                os.close(descriptor)
