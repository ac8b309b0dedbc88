"""Signals a program, and not the helpers that it needs to act on the signal.

A rank that saves after SIGTERM still reads from its DataLoader workers and other children. A signal to the whole
process group, which torchrun sends, ends those children first, and the save is lost. A signal to the group's leader
alone is lost if the leader is a shell or another wrapper.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Mapping, Sequence

from . import processes

SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh"})
"""Shells do not pass a signal on by themselves, even if they trap it."""

_HANDLED = ("SigCgt", "SigIgn")
"""Fields of `/proc/<pid>/status` whose signals do not end the process: it has a handler, or ignores them."""
_AWAITED = "SigBlk"
"""The field of the signals that a program may wait for. A shell blocks some only while it forks."""


def signal_program(leader: int, number: signal.Signals) -> list[int]:
    """Signals the program that leads a process group; ignores processes that are gone.

    From the leader downwards: a process that handles the signal is responsible for its children, so they do not receive
    it. A process that ends by the signal, and a shell, are not: their children receive it, too, except those that end
    with their input. Without a leader the whole group receives it.

    Returns:
        The processes that were signaled.
    """
    found = _recipients(leader, number)
    processes.send(found, number)
    return found


def signal_child(leader: int, number: signal.Signals) -> list[int]:
    """Signals a program whose leader's end the caller takes for the program's end, as torchrun does.

    A leader that would end before the processes that handle the signal is stopped until they have ended, so that it
    neither ends nor continues with its next line: the caller then calls `continue_child`, which signals the leader,
    too. Of two signals that are pending a process takes the one with the lower number first: together with the signal
    that stops it, the leader would often have ended by this one instead.

    Returns:
        The pidfds of those processes, which the caller closes; empty if the leader is not stopped.
    """
    found = _recipients(leader, number)
    handling: list[int] = []
    if _passes_on(leader, number):
        for pid in found[1:]:
            if not _passes_on(pid, number):
                with contextlib.suppress(ProcessLookupError):
                    handling.append(os.pidfd_open(pid))
    if handling:
        processes.send([leader], signal.SIGSTOP)
        found = [pid for pid in found if pid != leader]
    processes.send(found, number)
    return handling


def continue_child(leader: int, number: signal.Signals) -> None:
    """Signals the leader that is stopped, and lets it act on the signal."""
    processes.send([leader], number)
    processes.send([leader], signal.SIGCONT)


def any_runs(pids: Iterable[int]) -> bool:
    """Returns whether one of the processes has not ended yet."""
    return any((process := processes.read_process(pid)) and not process.zombie for pid in pids)


def ends_with_input(pid: int, number: signal.Signals) -> bool:
    """Returns whether a process reads a pipe and would end by the signal, as a `tee` behind the program does.

    It ends when those that write to the pipe have. The signal would end it before, and they would fail with their next
    line: while they save.
    """
    return _reads_pipe(pid) and not _handles(pid, number)


def _reads_pipe(pid: int) -> bool:
    if _is_pipe(pid, "0"):
        return True
    # A shell that was just forked for `> >(filter)` has not made the pipe its input yet, or does so meanwhile.
    waits = _is_shell(pid) and any(_is_pipe(pid, name) and _is_read(pid, name) for name in _descriptors(pid))
    return waits or _is_pipe(pid, "0")


def _descriptors(pid: int) -> Sequence[str]:
    try:
        return os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return ()


def _is_pipe(pid: int, descriptor: str) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/fd/{descriptor}").startswith("pipe:")
    except OSError:
        return False


def _is_read(pid: int, descriptor: str) -> bool:
    """Whether the descriptor was opened for reading only."""
    lines = processes.read_file(pid, f"fdinfo/{descriptor}").decode(errors="replace").split("\n")
    return any(int(line.split()[1], 8) & os.O_ACCMODE == os.O_RDONLY for line in lines if line.startswith("flags:"))


def _recipients(leader: int, number: signal.Signals) -> list[int]:
    running = {process.pid: process for process in processes.all_processes() if not process.zombie}
    if leader not in running:
        return [process.pid for process in running.values() if process.group == leader]
    children: dict[int, list[processes.Process]] = {}
    for process in running.values():
        children.setdefault(process.parent, []).append(process)
    # A leader that was just forked has not created its group yet.
    return [leader, *_recipients_below(leader, children, running, number)]


def _recipients_below(
    parent: int,
    children: Mapping[int, Sequence[processes.Process]],
    running: Mapping[int, processes.Process],
    number: signal.Signals,
) -> list[int]:
    if not _passes_on(parent, number):
        return []
    shell, found = _is_shell(parent), list[int]()
    for child in children.get(parent, ()):
        # What a program has moved to another group it does not expect to end with itself. A shell does: `timeout`, and
        # each job under `set -m`, lead a group of their own.
        if not shell and child.group != running[parent].group:
            continue
        below = _recipients_below(child.pid, children, running, number)
        if not ends_with_input(child.pid, number) or any(_handles(pid, number) for pid in below):
            found += [child.pid, *below]
    return found


def _passes_on(pid: int, number: signal.Signals) -> bool:
    """Returns whether the children of a process have to receive the signal, too."""
    return _is_shell(pid) or not _handles(pid, number)


def _is_shell(pid: int) -> bool:
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")) in {*SHELLS, "busybox"}
    except OSError:
        return False


def _handles(pid: int, number: signal.Signals) -> bool:
    lines = processes.read_file(pid, "status").decode(errors="replace").split("\n")
    fields = _HANDLED if _is_shell(pid) else (*_HANDLED, _AWAITED)
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(fields)]
    return any(mask >> (number - 1) & 1 for mask in masks)
