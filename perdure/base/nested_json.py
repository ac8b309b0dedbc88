"""Reads JSON in which anybody may have written values that are nested deeper than readers of JSON follow.

An API server takes objects whose values are nested thousands of levels deep, where their definition leaves that open. A
list of such objects has to be read for the sake of the others.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from pydantic_core import from_json

DEEPEST = 150
"""Levels that are read; what is below them is null. The JSON reader takes 200, and specifications have 40 at most."""

_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)


def read_json(content: bytes) -> Any:
    """Reads JSON; what is nested deeper than `DEEPEST` levels is null where the whole cannot be read.

    Raises:
        ValueError: if it is no JSON.
    """
    try:
        return from_json(content)
    except ValueError:
        return from_json(_cut(content))


async def read_json_aside(content: bytes) -> Any:
    """Does the same in an event loop, which what is nested too deep does not hold up: to cut it takes a second for each
    ten megabytes, and a user may change such an object as often as the API server lets them."""
    try:
        return from_json(content)
    except ValueError:
        return from_json(await asyncio.to_thread(_cut, content))


def _cut(content: bytes) -> bytes:
    """The text without what is too deep; it is read once from the beginning to the end."""
    kept, start, depth = list[bytes](), 0, 0
    for token in _TOKEN.finditer(content):
        match content[token.start()]:
            case 0x5B | 0x7B:  # [ and {
                depth += 1
                if depth == DEEPEST + 1:
                    kept += content[start : token.start()], b"null"
            case 0x5D | 0x7D:  # ] and }
                if depth == DEEPEST + 1:
                    start = token.end()
                depth -= 1
            case _:
                pass  # A string, which may hold any of them.
    kept.append(content[start:])
    return b"".join(kept)
