"""What an import may leave in a process beside modules: most of it does not survive a fork."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

_DEVICE_FILES = ("/dev/nvidia", "/dev/kfd")


@dataclass(frozen=True)
class Marks:
    """What there is in this process."""

    threads: int
    files: int
    shared_mappings: int
    """Memory that forks share, as that of semaphores is."""
    children: str

    @classmethod
    def now(cls) -> Marks:
        return cls(count_threads(), len(os.listdir("/proc/self/fd")), _count_shared_mappings(), list_children())

    def beyond(self, before: Marks) -> str:
        """Names what is there now and was not before, and what a fork would lose or share."""
        if self.threads > before.threads:
            return f"its import started {self.threads - before.threads} threads"
        if self.files > before.files:
            return f"its import left {self.files - before.files} files open"
        if self.shared_mappings > before.shared_mappings:
            return "its import made a lock or other memory that forks share"
        return ""


def count_threads() -> int:
    """Threads beside this one, as a fork would lose them."""
    if len(os.listdir("/proc/self/task")) == 1:
        return 0
    # Libraries that know forks, as OpenBLAS does, put their threads away at the first one.
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return len(os.listdir("/proc/self/task")) - 1


def _count_shared_mappings() -> int:
    with open("/proc/self/maps", "rb") as file:
        return file.read().count(b" rw-s ")


def list_children() -> str:
    """This process's children, as the kernel writes them."""
    try:
        return Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
    except OSError:
        return ""


def end_children() -> None:
    """Ends what imports have started, in a process that was only to try them."""
    for pid in list_children().split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def holds_devices() -> bool:
    """Whether this process has woken the driver of a GPU, which then works in no fork of it.

    `torch.cuda.is_initialized()` is false after `torch.cuda.is_available()`, which wakes the driver.
    """
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}").startswith(_DEVICE_FILES):
                return True
    return False
