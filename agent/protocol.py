"""Reads the bodies that the node's processes post: the dataclasses of `perdure_launcher.protocol`, by pydantic.

A report counts even where a field of it is malformed: the field then has its default. Only a body that lacks what it is
about, or is no JSON, is refused.
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
"""Seconds that a long poll may ask for."""

_ROUNDS = 4
"""Leaving a field out may show that the object that holds it lacks something, and so on outwards."""

_ADAPTERS: dict[type[Body], TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in set(POSTS.values())}

_Body = TypeVar("_Body", bound=Body)
_Location = tuple[int | str, ...]


class Malformed(Exception):
    """This is no such body; the message says what is wrong."""


def read_body(kind: type[_Body], content: bytes) -> _Body:
    """Reads one body; fields that are malformed are left out.

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
    """The moment; None for what is none."""
    try:
        return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def time_or_arrival(seconds: float | None) -> datetime:
    """The moment; now for what is none."""
    return time_of(seconds) or datetime.now(UTC)


def _locations(error: ValidationError) -> list[_Location]:
    """What to leave out, the innermost and last first: of an object that lacks something, all of it."""
    problems = error.errors(include_url=False, include_context=False)
    found = {one["loc"][:-1] if one["type"] == "missing" else one["loc"] for one in problems}
    return sorted(found, reverse=True)


def _leave_out(content: Any, location: _Location) -> bool:
    """Whether there was such a place; the whole body is none."""
    if not location:
        return False
    *way, last = location
    for step in way:
        content = content[step]
    if not isinstance(content, dict | list):
        return False
    del cast("dict[int | str, Any]", content)[last]
    return True
