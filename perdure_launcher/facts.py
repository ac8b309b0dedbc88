"""What the launcher and the handler tell the agent about ranks that ended, and where torch's error files say why."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

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
    except (OSError, ValueError):
        return None
    return parse_error(content)


def parse_error(content: Any) -> RankError | None:
    """Understands torch's forms: `{"message": "…"}` and `{"message": {"message": "…", "extraInfo": {…}}}`."""
    message = cast("dict[str, Any]", content).get("message") if isinstance(content, dict) else None
    if isinstance(message, str):
        return RankError(_one_line(message))
    if not isinstance(message, dict):
        return None
    fields = cast("dict[str, Any]", message)
    extra = cast("dict[str, Any]", fields.get("extraInfo") or {})
    callstack = extra.get("py_callstack")
    moment: float | None = None
    with contextlib.suppress(TypeError, ValueError):
        moment = float(extra.get("perdure_time") or extra["timestamp"]) if extra else None
    return RankError(
        _one_line(str(fields.get("message", ""))),
        callstack[-LONGEST_TRACEBACK:] if isinstance(callstack, str) else None,
        moment,
    )


def error_content(error: BaseException, callstack: str) -> dict[str, Any]:
    """The same as torch's own `@record` writes, with the time to the millisecond: it tells culprit from victim."""
    now = time.time()
    return {
        "message": {
            "message": f"{type(error).__name__}: {error}",
            "extraInfo": {"py_callstack": callstack, "timestamp": str(int(now)), "perdure_time": now},
        }
    }


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_ERROR else line[: LONGEST_ERROR - 1] + "…"


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

    def read(self, *, started_after: float) -> list[dict[str, Any]]:
        """The exits that a process since `started_after` left."""
        try:
            if self._path.stat().st_mtime < started_after:
                return []
            return cast("list[dict[str, Any]]", json.loads(self._path.read_text())["exits"])
        except (OSError, ValueError, KeyError, TypeError):
            return []

    def clear(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()
