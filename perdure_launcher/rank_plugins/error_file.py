"""Writes the error file of a rank, in the format of torch's own `@record`."""

from __future__ import annotations

import time
from typing import Any


def error_content(error: BaseException, callstack: str) -> dict[str, Any]:
    """Returns the content that torch's own `@record` writes, with a time in milliseconds, which identifies the
    culprit."""
    now = time.time()
    return {
        "message": {
            "message": f"{type(error).__name__}: {_text_of(error)}",
            "extraInfo": {"py_callstack": callstack, "timestamp": str(int(now)), "perdure_time": now},
        }
    }


def _text_of(error: BaseException) -> str:
    """Returns the exception's text; computing it runs code of its class, which may fail."""
    try:
        return str(error)
    except Exception:
        return "<its text cannot be made>"
