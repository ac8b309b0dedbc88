"""Writes the error file of a rank, in the format of torch's own `@record`, with the process whose error it is.

Several processes of a rank may write: one that prepares it, one that trains in its place, the rank itself.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any, cast

from .failed_below import failed_below

WRITER = "perdure_pid"
"""The field with the PID of the process that wrote."""
STATUS = "errorCode"
"""torch's field with the status of the process that failed: its exit code, or its signal with a minus."""


def writer_of(path: str | os.PathLike[str]) -> int | None:
    """Returns the process that wrote an error file; None if there is none, or torch wrote it."""
    try:
        content: Any = json.loads(Path(path).read_text(encoding="utf-8", errors="replace"))
        pid: Any = cast("dict[str, Any]", content)["message"]["extraInfo"][WRITER]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None
    return pid if isinstance(pid, int) else None


def is_kept_already(path: str | os.PathLike[str], error: BaseException) -> bool:
    """Returns whether what the file holds explains the end of this process better than the error with which it ends."""
    if not os.path.exists(path):
        return False
    below = failed_below(error)
    if below is not None and below.status == -signal.SIGKILL:
        # What others of its ranks wrote is that they have lost this one.
        return False
    return writer_of(path) in (None, os.getpid()) or below is not None


def error_content(error: BaseException, callstack: str) -> dict[str, Any]:
    """Returns the content that torch's own `@record` writes, with a time in milliseconds, which identifies the
    culprit."""
    now, below = time.time(), failed_below(error)
    text = f"{type(error).__name__}: {_text_of(error)}"
    status: dict[str, int] = {}
    if below is not None and below.status is not None:
        status = {STATUS: below.status}
    if below is not None and below.error is not None:
        text, callstack = below.error, below.traceback
    return {
        "message": {
            "message": text,
            "extraInfo": {
                "py_callstack": callstack,
                "timestamp": str(int(now)),
                "perdure_time": now,
                WRITER: os.getpid(),
            },
            **status,
        }
    }


def _text_of(error: BaseException) -> str:
    """Returns the exception's text; computing it runs code of its class, which may fail."""
    try:
        return str(error)
    except Exception:
        return "<its text cannot be made>"
