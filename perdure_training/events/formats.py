"""Events as lines: JSON for programs, text for people. A line never contains another line, nor terminal escapes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from json.encoder import encode_basestring
from typing import Any

from perdure_training.events.event import Event

LONGEST_LINE = 65_536
"""Bytes of a line; of an event that needs more, the attributes are left out."""

_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\u202a-\u202e\u2066-\u2069]")
"""Control characters, which terminals interpret; halves of characters; and marks that change the direction of text."""
_BARE = re.compile(r"[^\s\"'=]+")

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
"""Made once: threads of exporters take their time from the training."""

Format = Callable[[Event], bytes]
"""Makes a line, with its end."""


def json_line(event: Event) -> bytes:
    """Returns the event as a JSON object in one line."""
    line = _json(event, event.attributes)
    return line if len(line) <= LONGEST_LINE else _json(event, {"left_out": f"{len(line):,} bytes"})


def text_line(event: Event) -> bytes:
    """Returns the event as a line for people: time, target, rank and generation, name, type, attributes."""
    moment = datetime.fromtimestamp(event.time, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    places = {"rank": event.rank, "generation": event.generation}
    place = [f"{name}={value}" for name, value in places.items() if value is not None]
    attributes = [f"{_printable(name)}={_text(value)}" for name, value in event.attributes.items()]
    words = [moment, _printable(event.target), *place, _printable(event.name), event.type.value, *attributes]
    line = " ".join(words).encode(errors="replace")
    if len(line) >= LONGEST_LINE:
        line = line[: LONGEST_LINE - 4].decode(errors="ignore").encode() + "…".encode()
    return line + b"\n"


def _json(event: Event, attributes: Any) -> bytes:
    # The object is written as a text, in half the time that an encoder of JSON takes for a mapping of the same content.
    return (
        f'{{"id":{encode_basestring(event.id)},"time":{round(event.time, 6)!r},'
        f'"target":{encode_basestring(event.target)},"name":{encode_basestring(event.name)},'
        f'"type":"{event.type.value}","attributes":{_encode(attributes)},"pid":{event.pid},'
        f'"rank":{_number(event.rank)},"generation":{_number(event.generation)}}}\n'
    ).encode(errors="replace")


def _number(value: int | None) -> str:
    return "null" if value is None else str(value)


def _text(value: Any) -> str:
    if isinstance(value, str):
        text = _printable(value)
        return text if _BARE.fullmatch(text) else f'"{text.replace(chr(34), chr(92) + chr(34))}"'
    return _printable(json.dumps(value, ensure_ascii=False, default=str))


def _printable(text: str) -> str:
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
