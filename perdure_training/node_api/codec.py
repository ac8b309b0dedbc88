"""Encodes and decodes the bodies of `protocol`, as JSON that the other side can parse.

A report must arrive regardless of the text that a rank died with, and no malformed field of an answer may fail a
launcher.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from perdure_training.node_api.bodies import Body
from perdure_training.node_api.text import well_formed

LONGEST_TEXT = 16_384
"""Maximum length of a text in characters: error texts and log tails are shorter, but a command's arguments may not
be."""
_LARGEST_INTEGER = 2**63 - 1

_Body = TypeVar("_Body", bound=Body)


class Malformed(ValueError):
    """The content is not a valid body; the message says why."""


def encode(body: Body) -> bytes:
    """Encodes a body as strict JSON."""
    return json.dumps(plain(body), allow_nan=False).encode()


def encode_essentials(body: Body) -> bytes:
    """Encodes a body without its texts: numbers and flags, and each rank's number and exit status."""
    return json.dumps(_without_texts(plain(body)), allow_nan=False).encode()


def plain(value: Any) -> Any:
    """Converts a value to strict JSON's types. Numbers that JSON cannot represent become None."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        # Python's JSON encoder rejects integers that are too long for Python to print.
        return int(value) if abs(value) <= _LARGEST_INTEGER else None
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return well_formed(value[:LONGEST_TEXT])
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [plain(content) for content in cast("Sequence[object]", value)]
    return well_formed(repr(value)[:LONGEST_TEXT])


def decode(kind: type[_Body], content: Any) -> _Body:
    """Decodes a body from parsed JSON.

    Raises:
        Malformed: if a field that has no default is missing or malformed.
    """
    if not isinstance(content, Mapping):
        raise Malformed(f"{kind.__name__}: expected a JSON object, found {type(content).__name__}")
    known = cast("Mapping[str, Any]", content)
    types = get_type_hints(kind)
    values: dict[str, Any] = {}
    for field in fields(kind):
        try:
            values[field.name] = _value(types[field.name], known[field.name])
        except (KeyError, Malformed) as error:
            if field.default is MISSING:
                found = "nothing" if isinstance(error, KeyError) else repr(known[field.name])[:200]
                raise Malformed(f"{kind.__name__}.{field.name}: expected {field.type}, found {found}") from None
    return kind(**values)


def _value(kind: Any, content: Any) -> Any:
    """Converts content to a value of this type.

    Raises:
        Malformed: if the content does not have this type.
    """
    origin: Any = get_origin(kind)
    if origin in (Union, UnionType):
        if content is None:
            return None
        [kind] = [one for one in get_args(kind) if one is not NoneType]
    if get_origin(kind) is tuple:
        if not isinstance(content, list):
            raise Malformed
        return tuple(_items(get_args(kind)[0], cast("list[Any]", content)))
    if issubclass(kind, Body):
        return decode(kind, content)
    if kind is float:
        if not isinstance(content, int | float) or not _is_finite(content):
            raise Malformed
        return float(content)
    if isinstance(content, kind) and not (kind is int and isinstance(content, bool)):
        return content
    raise Malformed


def _items(kind: Any, content: list[Any]) -> list[Any]:
    """Returns the items that have this type."""
    items: list[Any] = []
    for item in content:
        try:
            items.append(_value(kind, item))
        except Malformed:
            continue
    return items


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def _without_texts(value: Any) -> Any:
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {name: _without_texts(content) for name, content in items if not isinstance(content, str)}
    if isinstance(value, list):
        return [_without_texts(content) for content in cast("list[Any]", value) if not isinstance(content, str)]
    return value
