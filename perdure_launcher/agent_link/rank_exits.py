"""How a rank ended: from its status and its error file, and kept on disk until the agent has it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

from ..protocol import RankExit
from ..system.text import well_formed
from .codec import Malformed, decode

LONGEST_TRACEBACK = 2000
LONGEST_ERROR = 500
SUPERSEDED_EXIT_CODE = 87
"""torchrun leaves with it from the exit barrier of a generation that is over."""


def rank_exit(
    *, local_rank: int, global_rank: int, pid: int, code: int, error_file: str | os.PathLike[str] | None
) -> RankExit:
    """A rank that ended just now.

    Args:
        local_rank: Its number on the node.
        global_rank: Its number in the world.
        pid: Its process.
        code: Negative for signals.
        error_file: Where it says why, if it does.
    """
    exit_code, signal_number = split_status(code)
    ended = with_error(
        RankExit(local_rank=local_rank, global_rank=global_rank, pid=pid, exit_code=exit_code, signal=signal_number),
        error_file,
    )
    return ended if ended.time else replace(ended, time=time.time())


def split_status(code: int) -> tuple[int | None, int | None]:
    """Exit code and signal, of which one is None, from a code that is negative for signals (as `Popen.returncode`)."""
    return (None, -code) if code < 0 else (code, None)


def describe_status(exit_code: int | None, signal_number: int | None) -> str:
    """The status in two words for people."""
    if signal_number is None:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(signal_number).name
    except ValueError:
        return f"signal {signal_number}"


def with_error(ended: RankExit, error_file: str | os.PathLike[str] | None) -> RankExit:
    """The exit with what `torch.distributed.elastic` or our excepthook wrote about it, where there is anything.

    The forms are torch's: `{"message": "…"}` and `{"message": {"message": "…", "extraInfo": {…}}}`.
    """
    if not error_file:
        return ended
    try:
        content = json.loads(Path(error_file).read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):
        return ended
    message = _fields(content).get("message")
    if isinstance(message, str):
        return replace(ended, error=_one_line(message))
    if not isinstance(message, dict):
        return ended
    fields = _fields(message)
    extra = _fields(fields.get("extraInfo"))
    callstack = extra.get("py_callstack")
    return replace(
        ended,
        error=_one_line(str(fields.get("message", ""))),
        traceback=_last_lines(callstack) if isinstance(callstack, str) else None,
        time=_moment(extra.get("perdure_time")) or _moment(extra.get("timestamp")),
    )


def _one_line(text: str) -> str:
    line = well_formed(" ".join(text.split()))
    return line if len(line) <= LONGEST_ERROR else line[: LONGEST_ERROR - 1] + "…"


def _last_lines(callstack: str) -> str:
    return well_formed(callstack[-LONGEST_TRACEBACK:])[-LONGEST_TRACEBACK:]


def _fields(content: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", content) if isinstance(content, dict) else {}


def _moment(value: Any) -> float | None:
    """Seconds since the epoch; torch writes them as text."""
    try:
        moment = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return moment if math.isfinite(moment) else None


class ExitSpool:
    """Ranks' exits that torchrun has seen and the agent does not have yet; the launcher finds them if torchrun dies."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, exits: Sequence[RankExit]) -> None:
        """Best effort: on a full disk the exits still go through the socket."""
        with contextlib.suppress(OSError):
            scratch = self._path.with_suffix(".new")
            scratch.write_text(json.dumps({"exits": [asdict(item) for item in exits]}))
            scratch.replace(self._path)

    def read(self, *, started_after: float) -> tuple[RankExit, ...]:
        """The exits that a process since `started_after` left. Ranks can write to the file, so it may hold anything."""
        try:
            if self._path.stat().st_mtime < started_after:
                return ()
            exits = _fields(json.loads(self._path.read_text())).get("exits")
        except (OSError, ValueError, RecursionError):
            return ()
        found: list[RankExit] = []
        for item in cast("list[Any]", exits) if isinstance(exits, list) else []:
            with contextlib.suppress(Malformed):
                found.append(decode(RankExit, item))
        return tuple(found)

    def clear(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()
