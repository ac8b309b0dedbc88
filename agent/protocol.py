"""Parses the bodies that the node's processes post: the dataclasses of `perdure_launcher.protocol`, with pydantic.

A report is accepted even if one of its fields is malformed: the field then has its default. Only a body that lacks a
required field, or is no JSON, is refused.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from perdure_launcher.protocol import POSTS, Body

logger = logging.getLogger(__name__)

LONGEST_WAIT = 60.0
"""Maximum seconds of a long poll."""

_ROUNDS = 4
"""Maximum number of rounds: removing a field may make the object around it incomplete, and so on outwards."""

_ADAPTERS: dict[type[Body], TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in set(POSTS.values())}

_Body = TypeVar("_Body", bound=Body)
_Location = tuple[int | str, ...]


class Malformed(Exception):
    """The content is no valid body; the message says why."""


def read_body(kind: type[_Body], content: bytes) -> _Body:
    """Parses one body; malformed fields are left out.

    Raises:
        Malformed: if a field that has no default is missing or malformed, or the content is no JSON.
    """
    adapter: TypeAdapter[_Body] = _ADAPTERS[kind]
    try:
        return adapter.validate_json(content)
    except ValidationError as error:
        problem = error
    try:
        fields = from_json(content)
    except ValueError as error:
        raise Malformed(f"{kind.__name__}: no JSON: {error}") from None
    for _ in range(_ROUNDS):
        left_out = [_leave_out(fields, location) for location in _locations(problem)]
        if not all(left_out):
            break
        try:
            body = adapter.validate_python(fields)
        except ValidationError as error:
            problem = error
        else:
            logger.warning("a %s has malformed fields, which are left out: %s", kind.__name__, problem)
            return body
    raise Malformed(str(problem))


def time_of(seconds: float | None) -> datetime | None:
    """Converts seconds since the epoch; returns None for invalid values."""
    try:
        return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def time_or_arrival(seconds: float | None) -> datetime:
    """Converts seconds since the epoch; returns the current time for invalid values."""
    return time_of(seconds) or datetime.now(UTC)


def _locations(error: ValidationError) -> list[_Location]:
    """Returns the locations to leave out, innermost and last first: for an object with a missing field, the whole
    object."""
    problems = error.errors(include_url=False, include_context=False)
    found = {one["loc"][:-1] if one["type"] == "missing" else one["loc"] for one in problems}
    return sorted(found, reverse=True)


def _leave_out(content: Any, location: _Location) -> bool:
    """Removes the value at a location; returns False if there is none, as for the whole body."""
    if not location:
        return False
    *way, last = location
    for step in way:
        content = content[step]
    if not isinstance(content, dict | list):
        return False
    del cast("dict[int | str, Any]", content)[last]
    return True
