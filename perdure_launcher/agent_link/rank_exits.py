"""What the launcher and the handler tell the agent about ranks that ended, and where torch's error files say why."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from .encoding import well_formed

LONGEST_TRACEBACK = 2000
LONGEST_ERROR = 500
SUPERSEDED_EXIT_CODE = 87
"""torchrun leaves with it from the exit barrier of a generation that is over."""


@dataclass(frozen=True, kw_only=True)
class RankExit:
    """One rank that ended badly."""

    local_rank: int
    global_rank: int | None = None
    pid: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    error: str | None = None
    traceback: str | None = None
    time: float | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Any) -> RankExit | None:
        """Reads what `as_json` gave, from a file that ranks can write to; None where it is something else."""
        fields = _fields(content)
        local_rank = _whole(fields.get("local_rank"))
        if local_rank is None:
            return None
        return cls(
            local_rank=local_rank,
            global_rank=_whole(fields.get("global_rank")),
            pid=_whole(fields.get("pid")),
            exit_code=_whole(fields.get("exit_code")),
            signal=_whole(fields.get("signal")),
            error=_text(fields.get("error")),
            traceback=_text(fields.get("traceback")),
            time=_moment(fields.get("time")),
        )


def split_status(code: int) -> tuple[int | None, int | None]:
    """Exit code and signal, of which one is None, from a code that is negative for signals (as `Popen.returncode`)."""
    return (None, -code) if code < 0 else (code, None)


def describe_status(exit_code: int | None, signal_number: int | None) -> str:
    if signal_number is None:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(signal_number).name
    except ValueError:
        return f"signal {signal_number}"


@dataclass(frozen=True)
class RankError:
    """The content of one error file, in torch's format."""

    message: str
    traceback: str | None = None
    time: float | None = None


def read_error_file(path: str | os.PathLike[str] | None) -> RankError | None:
    """Reads what `torch.distributed.elastic` or our excepthook left; None where there is nothing to read."""
    if not path:
        return None
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):
        return None
    return parse_error(content)


def parse_error(content: Any) -> RankError | None:
    """Understands torch's forms: `{"message": "…"}` and `{"message": {"message": "…", "extraInfo": {…}}}`."""
    message = _fields(content).get("message")
    if isinstance(message, str):
        return RankError(_one_line(message))
    if not isinstance(message, dict):
        return None
    fields = _fields(message)
    extra = _fields(fields.get("extraInfo"))
    callstack = _text(extra.get("py_callstack"))
    return RankError(
        _one_line(str(fields.get("message", ""))),
        None if callstack is None else well_formed(callstack[-LONGEST_TRACEBACK:])[-LONGEST_TRACEBACK:],
        _moment(extra.get("perdure_time")) or _moment(extra.get("timestamp")),
    )


def error_content(error: BaseException, callstack: str) -> dict[str, Any]:
    """The same as torch's own `@record` writes, with the time to the millisecond: it tells culprit from victim."""
    now = time.time()
    return {
        "message": {
            "message": f"{type(error).__name__}: {_described(error)}",
            "extraInfo": {"py_callstack": callstack, "timestamp": str(int(now)), "perdure_time": now},
        }
    }


def _described(error: BaseException) -> str:
    """The exception's own text, which is code of its class and may fail."""
    try:
        return str(error)
    except Exception:
        return "<its text cannot be made>"


def _one_line(text: str) -> str:
    line = well_formed(" ".join(text.split()))
    return line if len(line) <= LONGEST_ERROR else line[: LONGEST_ERROR - 1] + "…"


def _fields(content: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", content) if isinstance(content, dict) else {}


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


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

    def write(self, *, owner: int, exits: Sequence[RankExit]) -> None:
        """Best effort: on a full disk the exits still go through the socket."""
        with contextlib.suppress(OSError):
            scratch = self._path.with_suffix(".new")
            scratch.write_text(json.dumps({"owner": owner, "exits": [item.as_json() for item in exits]}))
            scratch.replace(self._path)

    def read(self, *, started_after: float) -> list[RankExit]:
        """The exits that a process since `started_after` left."""
        try:
            if self._path.stat().st_mtime < started_after:
                return []
            exits = _fields(json.loads(self._path.read_text()))["exits"]
            return [item for item in map(RankExit.from_json, exits) if item is not None]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return []

    def clear(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()
