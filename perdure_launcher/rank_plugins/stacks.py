"""Lets the launcher ask a rank where it is: a signal makes the rank write the stacks of its threads into a file.

faulthandler answers inside the signal's handler and needs neither the interpreter's lock nor memory, so a rank that
hangs in C code, or never gives up the lock, answers as well.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
import stat
from pathlib import Path
from typing import Any

from perdure_training.node_api.layout import STACKS
from perdure_training.node_api.rank_environment import generation_of, run_directory_of

from ..system.processes import read_process
from .stack_file import StackFile

STACKS_SIGNAL = signal.SIGRTMIN + 13
"""A signal that neither Python, glibc and torch nor a resource manager uses."""

_files: list[int] = []
"""The descriptors that handlers write to: they stay open for as long as the process runs."""


def answer_with_stacks() -> None:
    """Makes this rank answer the signal, and tell its collectives where it has others to wait for.

    Raises:
        OSError, ValueError: if it cannot: there is no folder, or the rank's variables are not as the launcher sets
            them.
    """
    run_directory, own = run_directory_of(os.environ), read_process(os.getpid())
    if run_directory is None or own is None:
        return
    mark = StackFile(generation_of(os.environ), int(os.environ["RANK"]), own.pid, own.start_ticks)
    path = run_directory / STACKS / mark.name
    draft = Path(f"{path}.new")
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    _files.append(file)
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True, chain=False)
    # The launcher signals only who has a file, since the signal would end a process without a handler.
    os.replace(draft, path)
    _notice_other_handlers(path, own.pid)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from .collectives import serve_collectives

        serve_collectives(path.with_name(mark.socket))


def is_answered_by(path: Path) -> bool:
    """Returns whether the process of this file still has our handler: a script that takes all signals has its own."""
    try:
        return bool(path.lstat().st_mode & stat.S_IWUSR)
    except OSError:
        return False


def _notice_other_handlers(path: Path, pid: int) -> None:
    """Marks the file as read-only before the script sets a handler of its own for our signal: that would be called
    whenever the launcher asks, and mostly ends the training."""
    set_handler = signal.signal

    @functools.wraps(set_handler)
    def noticing(signalnum: Any, handler: Any) -> Any:
        # A process that the rank forks has handlers of its own.
        if signalnum == STACKS_SIGNAL and os.getpid() == pid:
            with contextlib.suppress(OSError):
                path.chmod(stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH)
        return set_handler(signalnum, handler)

    signal.signal = noticing
