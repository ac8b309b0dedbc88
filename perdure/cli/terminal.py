"""Consoles that remove control characters: text of user code and of other machines must not control the terminal.

An exception's text or a log line may hold escape sequences, which write to the clipboard, set the title, clear the
screen or overwrite its content. The consoles of this module remove them from everything that they print, except for
their own styles.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

_CONTROL = re.compile(
    # Strings up to their end (DCS, SOS, OSC, PM, APC); sequences with parameters (CSI); others.
    r"(?:\x1b[PX\]^_]|[\x90\x98\x9d\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|\x1b[ -/]*[0-~]"
    # All that is left of C0 and C1, but for tabs and line breaks.
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)
_NOT_ESCAPED = re.compile(r"[\x7f-\x9f]")
"""Control characters that JSON strings may contain unescaped."""


def without_controls(text: str) -> str:
    """The text without escape sequences and control characters; tabs and line breaks are kept."""
    return _CONTROL.sub("", text)


def printed_line(text: str) -> str:
    """A line of output as a terminal shows it in the end: of a progress bar, which returns to the line's begin for each
    of its states, the last one."""
    return without_controls(text.rstrip("\r").rpartition("\r")[2])


def printed_lines(text: str) -> list[str]:
    """The lines of output, as a terminal shows them in the end."""
    return [printed_line(line) for line in text.removesuffix("\n").split("\n")] if text else []


def as_json(value: Any, *, indent: int | None = None) -> str:
    """JSON of exactly this value, with every control character escaped."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return _NOT_ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def link(url: str, console: Console, room: int) -> Text:
    """An address: whole, so that it can be copied; on a terminal that takes links and has no room for it, its host and
    its end, which lead to it."""
    # A terminal without styles takes no links, either.
    if not console.is_terminal or console.color_system is None:
        return Text(url)
    short = url
    if len(url) > room:
        host, _, path = url.partition("://")[2].partition("/")
        begin = f"{host}/…" if len(host) + 12 <= room else "…"
        short = begin + unquote(path)[-max(room - len(begin), 1) :]
    return Text(without_controls(short), style=Style(link=url))


class SafeConsole(Console):
    """Prints text without the control characters in it."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Renders everything that is printed or drawn."""
        for segment in super().render(renderable, options):
            # Rich's own control sequences, such as for moving the cursor, are in segments of their own.
            yield segment if segment.control else segment._replace(text=without_controls(segment.text))

    def on_broken_pipe(self) -> None:
        """Ends quietly if the reader closes the pipe, as `head` does; rich would exit with 1."""
        raise BrokenPipeError
