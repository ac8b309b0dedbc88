"""Encodes reports to the agent as JSON that it can parse: a report must arrive, whatever text a rank has died of."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

LONGEST_TEXT = 16_384
"""Characters of one text: error texts and log tails are shorter, and a command's words may be anything."""
_LARGEST_INTEGER = 2**63 - 1


def well_formed(text: str) -> str:
    """The text with what UTF-8 cannot encode written as an escape sequence, as Python's own tracebacks show it.

    Bytes that are no UTF-8, such as in file names, reach Python as lone surrogates, which no JSON parser has to accept.
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def encode(body: Mapping[str, Any]) -> bytes:
    """Any report as strict JSON."""
    return json.dumps(_plain(body), allow_nan=False).encode()


def essentials(body: Mapping[str, Any]) -> dict[str, Any]:
    """The report without its texts: numbers and flags, and of each rank its place and how it ended."""
    return {name: _without_texts(value) for name, value in body.items() if not isinstance(value, str)}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        # Python's JSON encoder refuses longer ones than Python is willing to print.
        return int(value) if abs(value) <= _LARGEST_INTEGER else None
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return well_formed(value[:LONGEST_TEXT])
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value).items()
        return {well_formed(str(name)): _plain(content) for name, content in items}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [_plain(content) for content in cast("Sequence[object]", value)]
    return well_formed(repr(value)[:LONGEST_TEXT])


def _without_texts(value: Any) -> Any:
    if isinstance(value, Mapping):
        return essentials(cast("Mapping[str, Any]", value))
    if isinstance(value, (list, tuple)):
        items = cast("Sequence[object]", value)
        return [_without_texts(content) for content in items if not isinstance(content, str)]
    return value
