"""Side effects of imports on a process, most of which do not survive a fork: threads, files, mappings, children."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

_DEVICE_FILES = ("/dev/nvidia", "/dev/kfd")


@dataclass(frozen=True)
class ProcessResources:
    """A snapshot of this process's resources that forks affect."""

    threads: int
    files: int
    shared_mappings: int
    """The number of mappings that forks share, such as those of semaphores."""
    children: str

    @classmethod
    def now(cls) -> ProcessResources:
        return cls(count_threads(), len(os.listdir("/proc/self/fd")), _count_shared_mappings(), list_children())

    def first_new_since(self, before: ProcessResources) -> str:
        """Describes the first new resource since `before` that a fork would lose or share; empty if there is none."""
        if self.threads > before.threads:
            return f"its import started {self.threads - before.threads} threads"
        if self.files > before.files:
            return f"its import left {self.files - before.files} files open"
        if self.shared_mappings > before.shared_mappings:
            return "its import created a lock or other memory that forks share"
        return ""


def count_threads() -> int:
    """Counts the threads beside this one that a fork would lose."""
    if len(os.listdir("/proc/self/task")) == 1:
        return 0
    # Libraries with fork handlers, such as OpenBLAS, end their threads at the first fork.
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return len(os.listdir("/proc/self/task")) - 1


def _count_shared_mappings() -> int:
    with open("/proc/self/maps", "rb") as file:
        return file.read().count(b" rw-s ")


def list_children() -> str:
    """Returns the PIDs of this process's children, in the kernel's format."""
    try:
        return Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
    except OSError:
        return ""


def end_children() -> None:
    """Kills the processes that imports have started, in a process that only tries those imports."""
    for pid in list_children().split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def holds_devices() -> bool:
    """Returns whether this process has initialized a GPU's driver, which then works in no fork of it.

    `torch.cuda.is_initialized()` is false after `torch.cuda.is_available()`, which initializes the driver.
    """
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}").startswith(_DEVICE_FILES):
                return True
    return False
