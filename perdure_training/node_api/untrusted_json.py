"""Reads JSON that any program may have written: whatever it holds, a reader gets a value or a `ValueError`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from perdure_training.node_api.untrusted_files import read_below

LARGEST: int = 2**53
"""The largest whole number that all readers of JSON take for the same one."""


def read_json_below(beneath: Path | None, path: Path, *, limit: int) -> Any:
    """Reads a file.

    Args:
        beneath: The folder below which nothing is followed; None for the file's own.
        path: The file.
        limit: The maximum number of bytes.

    Raises:
        ValueError: if it is not JSON, is longer, or is nested deeper than Python reads.
        OSError: if there is none, or something else is in its place.
    """
    content = read_below(beneath, path, limit=limit)
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError(f"{path.name} is nested too deep") from None


def is_whole(value: object) -> bool:
    """Returns whether a value is a whole number from 0 on, which all parts of a job can handle."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST


def finite(value: Any) -> float:
    """Returns a number.

    Raises:
        ValueError: if it is none, or none that is finite: JSON bounds no number.
        TypeError: if it is something else.
    """
    try:
        number = float(value)
    except OverflowError:
        raise ValueError("the number is too large") from None
    if not math.isfinite(number):
        raise ValueError(f"expected a finite number, found {number}")
    return number
