"""Reads single keys from the terminal while a live view is shown."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import tty
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager


def owns_terminal() -> bool:
    """Whether keys come here: to a program in the background the terminal sends a signal that stops it instead."""
    if not sys.stdin.isatty():
        return False
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except OSError:
        return True  # A terminal that controls no processes, such as that of a container.


@asynccontextmanager
async def single_keys(on_key: Callable[[str], None]) -> AsyncGenerator[None]:
    """Calls for each key, in lower case, while the context is open; with an empty one when the terminal has closed."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    loop = asyncio.get_running_loop()
    # Not the default, which discards input that was typed before.
    tty.setcbreak(descriptor, termios.TCSANOW)
    loop.add_reader(descriptor, lambda: on_key(os.read(descriptor, 1).decode(errors="replace").lower()))
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


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
