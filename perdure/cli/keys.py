"""Reads single keys from the terminal while a live view is shown."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import tty
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def owns_terminal() -> bool:
    """Whether keys come here: to a program in the background the terminal sends a signal that stops it instead."""
    if not sys.stdin.isatty():
        return False
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except OSError:
        return True  # A terminal that controls no processes, such as that of a container.


@asynccontextmanager
async def single_keys(on_key: Callable[[str], None], console: Console) -> AsyncGenerator[None]:
    """Calls for each key, in lower case, while the context is open; with an empty one when the terminal has closed.

    Ctrl-Z gives the terminal back as it was before, and the program stops until it is continued (`fg`, `bg`).
    """
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    loop = asyncio.get_running_loop()

    def read() -> None:
        try:
            key = os.read(descriptor, 1)
        except OSError:
            key = b""
        if not key:
            loop.remove_reader(descriptor)
        on_key(key.decode(errors="replace").lower())

    def begin() -> None:
        # Not the default, which discards input that was typed before.
        tty.setcbreak(descriptor, termios.TCSANOW)
        loop.add_reader(descriptor, read)

    def end() -> None:
        loop.remove_reader(descriptor)
        # The terminal may be gone.
        with suppress(termios.error):
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

    def stop() -> None:
        end()
        # Live views hide it.
        console.show_cursor()
        console.file.flush()
        os.kill(os.getpid(), signal.SIGSTOP)
        # In the background, keys are the shell's.
        if owns_terminal():
            begin()
            console.show_cursor(False)

    begin()
    loop.add_signal_handler(signal.SIGTSTP, stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTSTP)
        end()


@asynccontextmanager
async def event_of_interrupt() -> AsyncGenerator[asyncio.Event]:
    """Yields an event that Ctrl-C sets, instead of ending the program."""
    interrupted = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, interrupted.set)
    try:
        yield interrupted
    finally:
        loop.remove_signal_handler(signal.SIGINT)
