"""Builds a program from its module with Go, and reports progress, because minutes of silence look like a hang."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import IO

PROGRESS_INTERVAL = timedelta(seconds=15)
"""The time between two lines about a build that continues."""

_COUNTED = {"get": "modules fetched", "mod": "modules fetched", "build": "packages compiled"}
"""The meaning of a subcommand's output lines. Packages in Go's cache are not printed."""

Report = Callable[[str], None]
"""A function that is called with lines about the build, for people."""


class GoFailed(Exception):
    """Go ended with an error; the message holds its last lines."""


async def run_go(
    go: str, subcommand: str, *arguments: str, folder: Path, report: Report, interval: timedelta = PROGRESS_INTERVAL
) -> str:
    """Runs one subcommand in a folder that holds a `go.mod`, and returns its output. If it is cancelled, Go ends with
    all its compilers.

    Args:
        go: The toolchain.
        subcommand: The subcommand, such as `get` or `build`.
        arguments: The subcommand's arguments.
        folder: The folder in which it runs.
        report: Is called after each interval with a line about the elapsed time and the progress.
        interval: The time between two reports.

    Raises:
        GoFailed: if it fails.
    """
    verbose = ("-v",) if subcommand == "build" else ()
    lines: list[str] = []
    started = time.monotonic()
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as printed,
        _start([go, subcommand, *verbose, *arguments], folder, printed) as process,
    ):
        ended = asyncio.ensure_future(asyncio.to_thread(_follow, process, lines))
        try:
            while not (await asyncio.wait({ended}, timeout=interval.total_seconds()))[0]:
                report(f"  {_elapsed_text(started)}: {_progress(subcommand, lines)}")
        finally:
            if not ended.done():
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await asyncio.wait({ended})
        code = ended.result()
        printed.seek(0)
        answer = printed.read()
    if code:
        last = " ".join([*answer.strip().splitlines(), *lines][-3:])
        raise GoFailed(f"`go {subcommand}` failed: {last}")
    return answer


def _start(command: list[str], folder: Path, printed: IO[str]) -> subprocess.Popen[str]:
    # Not by asyncio: a cancellation between the start and its answer would leave the compilers running.
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "GOFLAGS": "-mod=mod", "GOWORK": "off"},
        stdout=printed,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def _follow(process: subprocess.Popen[str], lines: list[str]) -> int:
    assert process.stderr is not None
    lines.extend(line.strip() for line in process.stderr)
    return process.wait()


def _progress(subcommand: str, lines: list[str]) -> str:
    done = f"{len(lines):,} {_COUNTED.get(subcommand, 'lines')}"
    return f"{done}, the last {lines[-1].removeprefix('go: downloading ')}" if lines else done


def _elapsed_text(started: float) -> str:
    minutes, seconds = divmod(int(time.monotonic() - started), 60)
    return f"{minutes}:{seconds:02d} min"
