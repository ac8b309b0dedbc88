"""Converts attributes to values that JSON has. What can change is converted when an event is emitted.

Objects of unknown classes are only named: a `repr` of a tensor would make the program wait for a GPU.
"""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import date, timedelta
from enum import Enum
from itertools import islice
from typing import Any, cast

LONGEST_TEXT = 16_384
"""Characters of one text; the rest is cut off."""
MOST_ITEMS = 256
"""Items of one attribute, however they are nested; the rest is left out."""
_DEEPEST = 8
_LARGEST = 2**63
"""Larger integers are written as strings: parsers of JSON round or reject them."""


IMMUTABLE = frozenset({int, float, bool, type(None)})
"""Classes of values that cannot change, so that `bounded` may convert them later."""


def bounded(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns attributes that are texts, numbers or `plain` with the numbers that JSON has."""
    return {name: _number(value) if type(value) in _NUMBERS else value for name, value in attributes.items()}


def plain(value: Any) -> Any:
    """Returns a value that JSON has, for any object."""
    return _Conversion().value(value, 0)


def describe_error(error: BaseException) -> str:
    """Returns an exception's type and text; computing the text runs code of its class, which may fail."""
    try:
        text = str(error)
    except Exception:
        text = "<its text cannot be made>"
    return shorten(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def shorten(text: str) -> str:
    """Returns the text with at most `LONGEST_TEXT` characters."""
    return str(text) if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 1]}…"


class _Conversion:
    """The conversion of one attribute, with the number of items that it may still have."""

    def __init__(self) -> None:
        self._room = MOST_ITEMS

    def value(self, value: Any, depth: int) -> Any:
        match value:
            case None | bool():
                return value
            case Enum():
                return self.value(value.value, depth)  # pyrefly: ignore[unknown-attribute-access, unknown-argument-type]
            case str():
                return shorten(value)
            case int():
                return _number(int(value))
            case float():
                return _number(float(value))
            case BaseException():
                return describe_error(value)
            case timedelta():
                return value.total_seconds()
            case date():
                return value.isoformat()
            case os.PathLike():
                return shorten(os.fsdecode(cast("os.PathLike[str]", value)))
            case bytes() | bytearray() | memoryview():
                return f"<{len(cast('bytes', value))} bytes>"
            case Mapping() | Sequence() | AbstractSet():
                return self._items(cast("Any", value), depth + 1)
            case _:
                return self._other(value, depth)

    def _items(self, value: Mapping[Any, Any] | Sequence[Any] | AbstractSet[Any], depth: int) -> Any:
        if depth > _DEEPEST:
            return "<nested too deeply>"
        taken = min(self._room, len(value))
        self._room -= taken
        missing = f"{len(value) - taken:,} more" if taken < len(value) else None
        if isinstance(value, Mapping):
            pairs = {self._key(key): self.value(item, depth) for key, item in islice(value.items(), taken)}
            return {**pairs, "…": missing} if missing else pairs
        items = [self.value(item, depth) for item in islice(value, taken)]
        return [*items, f"… {missing}"] if missing else items

    def _key(self, key: Any) -> str:
        return shorten(key) if isinstance(key, str) else str(self.value(key, _DEEPEST - 1))

    def _other(self, value: Any, depth: int) -> Any:
        device = getattr(getattr(value, "device", None), "type", "cpu")
        if device == "cpu" and getattr(value, "shape", None) == () and hasattr(value, "item"):
            # A scalar of numpy or torch that is in this process's memory.
            return self.value(value.item(), depth + 1) if depth < _DEEPEST else "<nested too deeply>"
        if isinstance(value, numbers.Real):
            return self.value(float(value), depth)
        return f"<{type(value).__name__}>"


_NUMBERS = frozenset({int, float})


def _number(value: float) -> Any:
    if isinstance(value, int):
        return value if -_LARGEST <= value < _LARGEST else _large(value)
    return value if math.isfinite(value) else str(value)


def _large(value: int) -> str:
    # Python refuses to write integers of thousands of digits.
    return str(value) if value.bit_length() <= 1024 else f"<an integer of {value.bit_length():,} bits>"
