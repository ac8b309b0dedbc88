"""What each demo plays on: a folder that goes with it, lines that begin with the time, an exit that says why."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from examples.demo.places import cancel_on


@dataclass(frozen=True)
class Stage:
    """What a demo prints to, and writes in."""

    console: Console
    folder: Path
    started: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        """Prints a line that begins with the seconds since the start."""
        self.console.print(f"[dim]{time.monotonic() - self.started:6.1f}s[/]  {text}", highlight=False, soft_wrap=True)


@contextmanager
def stage(*, keep: bool, width: int) -> Iterator[Stage]:
    """Yields the stage of a demo, which a signal to end cancels.

    Args:
        keep: Whether the folder stays, and its path is printed.
        width: Columns of what is printed to a file.
    """
    cancel_on(signal.SIGTERM, signal.SIGHUP)
    made = Stage(Console(width=None if sys.stdout.isatty() else width), Path(tempfile.mkdtemp(prefix="perdure-demo-")))
    try:
        yield made
    finally:
        if keep:
            made.console.print(f"kept: {made.folder}")
        else:
            shutil.rmtree(made.folder, ignore_errors=True)


def play(main: Callable[[], Coroutine[None, None, int]]) -> None:
    """Runs a demo and exits with its code, or with the reason for which it ended early."""
    try:
        sys.exit(asyncio.run(main()))
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit("interrupted; all processes of the demo have ended")
    except TimeoutError as error:
        sys.exit(f"demo: {error}; all processes of the demo have ended")
