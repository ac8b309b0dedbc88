"""Durations as people write them: `90s`, `10m`, `1h30m`, `2d`, `250ms`, or a number of seconds.

One type for every duration of the spec and of the messages, so that a bare number never means minutes in one
place and seconds in another.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, PlainSerializer, WithJsonSchema

_UNITS = {
    "ms": timedelta(milliseconds=1),
    "s": timedelta(seconds=1),
    "m": timedelta(minutes=1),
    "h": timedelta(hours=1),
    "d": timedelta(days=1),
}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_WHOLE = re.compile(rf"(?:{_PART.pattern})+")


def parse_duration(value: Any) -> timedelta:
    """Reads a duration, to the millisecond.

    Raises:
        ValueError: if the text is not a duration, or the duration is negative or beyond what a `timedelta` holds.
    """
    try:
        duration = _read(value)
    except (OverflowError, ValueError):
        duration = None
    if duration is None:
        raise ValueError("expected a duration such as 30s, 10m, 1h30m or 2d")
    if duration < timedelta():
        raise ValueError("expected a duration that is not negative")
    return duration


def _read(value: Any) -> timedelta | None:
    if isinstance(value, timedelta):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        duration = timedelta(seconds=value)
    elif isinstance(value, str) and _WHOLE.fullmatch(text := value.replace(" ", "")):
        duration = sum((float(number) * _UNITS[unit] for number, unit in _PART.findall(text)), timedelta())
    else:
        return None
    return timedelta(milliseconds=round(duration / timedelta(milliseconds=1)))


def format_duration(duration: timedelta) -> str:
    """Writes a duration so that `parse_duration` reads the same one back (to the millisecond)."""
    milliseconds = round(duration / timedelta(milliseconds=1))
    parts: list[str] = []
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        count, milliseconds = divmod(milliseconds, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


def _longer_than_zero(duration: timedelta) -> timedelta:
    if not duration:
        raise ValueError("expected a duration longer than 0")
    return duration


_SCHEMA = WithJsonSchema(
    {
        "anyOf": [
            {"type": "string", "pattern": r"^(\d+(\.\d+)?(ms|s|m|h|d) *)+$"},
            {"type": "number", "minimum": 0, "description": "seconds"},
        ],
        "examples": ["30s", "10m", "1h30m"],
    }
)

Duration = Annotated[
    timedelta, BeforeValidator(parse_duration), PlainSerializer(format_duration, return_type=str), _SCHEMA
]
"""A non-negative `timedelta`; in YAML and JSON a text such as `1h30m`, or a number of seconds."""

PositiveDuration = Annotated[
    timedelta,
    BeforeValidator(parse_duration),
    AfterValidator(_longer_than_zero),
    PlainSerializer(format_duration, return_type=str),
    _SCHEMA,
]
"""A `Duration` longer than 0."""
