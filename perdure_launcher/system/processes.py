"""Reads processes from /proc, and sets up parents and children so that a launcher loses none of its descendants."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_PF_FORKNOEXEC = 0x40
"""The kernel's flag of a process that was forked and has executed no program yet."""
PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Process:
    """One line of `/proc/<pid>/stat`."""

    pid: int
    parent: int
    group: int
    state: str
    cpu_ticks: int
    start_ticks: int
    threads: int = 1
    executed: bool = True
    """Whether it has begun a program of its own since it was forked; until then it shows its parent's."""

    @property
    def zombie(self) -> bool:
        """Whether all of it has ended. A main thread may end before others, which keep memory and devices."""
        return self.state in "ZX" and self.threads <= 1


def become_subreaper() -> None:
    """Makes orphaned descendants children of this process instead of init's.

    Raises:
        OSError: if the kernel refuses.
    """
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def die_with_parent() -> None:
    """Makes the kernel kill this process when the thread that started it ends. Safe between fork and exec."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def begin_child() -> None:
    """Prepares a child between fork and exec: it dies with its parent, and handles signals by default.

    A shell makes background processes ignore SIGINT and SIGQUIT, and exec passes that on. torchrun handles
    these signals, so its ranks would start with the default anyway.
    """
    die_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


def read_file(pid: int, name: str) -> bytes:
    """Returns the content of a file of a process; empty if the process is gone or the file may not be read."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""


def read_process(pid: int) -> Process | None:
    """Returns the process; None if it is gone."""
    if not (content := read_file(pid, "stat")):
        return None
    # The command's name is in parentheses and may contain any character, including parentheses.
    fields = content[content.rindex(b")") + 2 :].split()
    return Process(
        pid=pid,
        state=fields[0].decode(),
        parent=int(fields[1]),
        group=int(fields[2]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        start_ticks=int(fields[19]),
        threads=int(fields[17]),
        executed=not int(fields[6]) & _PF_FORKNOEXEC,
    )


def started_at(process: Process) -> float:
    """Returns when a process began, in seconds since the epoch."""
    since_boot = process.start_ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot


def is_traced(pid: int) -> bool:
    """Whether a debugger is attached to the process, also while it lets the process run."""
    tracer = next((line for line in read_file(pid, "status").splitlines() if line.startswith(b"TracerPid:")), b"")
    return tracer.split()[1:] not in ([], [b"0"])


def all_processes() -> Iterator[Process]:
    for name in os.listdir("/proc"):
        if name.isdecimal() and (process := read_process(int(name))):
            yield process


def descendants(root: int | None = None) -> list[Process]:
    """Returns all descendants of `root` (this process by default), including zombies."""
    children: dict[int, list[Process]] = {}
    for process in all_processes():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    pending = [os.getpid() if root is None else root]
    while pending:
        offspring = children.get(pending.pop(), [])
        found.extend(offspring)
        pending.extend(process.pid for process in offspring)
    return found


def context_switches(pid: int) -> int | None:
    """Returns how often the process's main thread has left a processor, for whatever reason; None if it is gone."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            return sum(int(line.split()[1]) for line in file if "voluntary_ctxt_switches:" in line)
    except (OSError, ValueError, IndexError):
        return None


def transferred_bytes(pid: int) -> int | None:
    """Returns the bytes that the process has read and written by calls for files, pipes and terminals; None if it is
    gone or may not be read."""
    try:
        with open(f"/proc/{pid}/io", encoding="ascii", errors="replace") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith(("rchar:", "wchar:")))
    except (OSError, ValueError, IndexError):
        return None


def environment_of(pid: int) -> dict[str, str]:
    """Returns the environment that a process was started with; empty if it is gone or may not be read."""
    pairs = (item.split(b"=", 1) for item in read_file(pid, "environ").split(b"\0") if b"=" in item)
    return {os.fsdecode(name): os.fsdecode(value) for name, value in pairs}


def pid_namespace() -> str:
    """Returns the PID namespace of this process, which its own PID and all PIDs that it sees belong to."""
    return os.readlink("/proc/self/ns/pid")


def command_of(pid: int) -> list[str]:
    """Returns the command line of a process; empty if it is gone or may not be read."""
    return [os.fsdecode(word) for word in read_file(pid, "cmdline").split(b"\0")[:-1]]


def waited_ns(pid: int) -> dict[int, int]:
    """Returns the nanoseconds for which each thread could run and waited for a processor, by the thread's ID; empty if
    the process is gone or the kernel does not count."""
    threads: list[str] = []
    with contextlib.suppress(OSError):
        threads = os.listdir(f"/proc/{pid}/task")
    waited: dict[int, int] = {}
    for thread in threads:
        if fields := read_file(pid, f"task/{thread}/schedstat").split():
            waited[int(thread)] = int(fields[1])
    return waited


def resident_bytes(pid: int) -> tuple[int, int]:
    """Returns a process's resident memory and the part of it that is shared; zeros if the process is gone."""
    _, resident, shared, *_ = read_file(pid, "statm").split() or (0, 0, 0)
    return int(resident) * PAGE_SIZE, int(shared) * PAGE_SIZE


def available_bytes() -> int | None:
    """Returns the machine's available memory, which can be used without swapping; None if the kernel does not report
    it."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            sizes = dict(line.split(":", 1) for line in file)
        return int(sizes["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def is_there(known: Process) -> bool:
    """Returns whether a process has not ended."""
    process = read_process(known.pid)
    return process is not None and process.start_ticks == known.start_ticks and not process.zombie


def is_protected(pid: int) -> bool:
    """Returns whether there is such a process, and this one may not signal it."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except ProcessLookupError:
        return False
    return False


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Signals processes; ignores those that are gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def send_to_groups(groups: Iterable[int], number: signal.Signals) -> None:
    """Signals process groups; ignores those that are gone."""
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
