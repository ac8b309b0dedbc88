r"""Text of user code and of other machines as people see it: it neither controls the terminal nor deceives a reader.

An exception's text or a log line may hold escape sequences, which write to the clipboard, set the title, clear the
screen or overwrite its content. The consoles of this module remove them from everything that they print, except for
their own styles. Characters that show nothing but reorder or hide other ones are printed as their escapes: `\u202e`.
The page and reports show text by the same function.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

_CONTROL = re.compile(
    # Strings up to their end (DCS, SOS, OSC, PM, APC); sequences with parameters (CSI); others. Where another string
    # begins the one before has ended: otherwise many that never end would take quadratic time.
    r"(?:\x1b[PX\]^_]|[\x90\x98\x9d\x9e\x9f])[^\x07\x1b\x90\x98\x9c-\x9f]*(?:\x07|\x1b\\|\x9c)"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|\x1b[ -/]*[0-~]"
    # All that is left of C0 and C1, but for tabs and line breaks.
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)
_UNSEEN = (
    # Soft hyphen, joiners, marks and overrides of direction, separators, invisible operators, tags, and letters without
    # a form.
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
    # Halves of characters, which no output can encode.
    "\ud800-\udfff"
)
_FORMED = "[\u00c0-\u1fff\u2190-\ud7ff\ue000-\U0001faff]"
_DECEPTIVE = re.compile(
    # Joiners within words and emoji belong to them.
    f"(?<={_FORMED})[\u200c\u200d](?={_FORMED})|([{_UNSEEN}])"
)
_NOT_ESCAPED = re.compile(f"[\x7f-\x9f{_UNSEEN}]")
"""Characters that JSON strings may contain unescaped, and that are not printed as they are."""


def printable(text: str) -> str:
    """The text without escape sequences and control characters, and with escapes for characters that are not seen; tabs
    and line breaks are kept."""
    return _DECEPTIVE.sub(lambda match: _escape(match[1]) if match[1] else match[0], _CONTROL.sub("", text))


def _escape(letter: str) -> str:
    return f"\\u{ord(letter):04x}" if letter <= "\uffff" else f"\\U{ord(letter):08x}"


def printed_line(text: str) -> str:
    """A line of output as a terminal shows it in the end: of a progress bar, which returns to the line's begin for each
    of its states, the last one."""
    return printable(text.rstrip("\r").rpartition("\r")[2])


def printed_lines(text: str) -> list[str]:
    """The lines of output, as a terminal shows them in the end."""
    return [printed_line(line) for line in text.removesuffix("\n").split("\n")] if text else []


def as_json(value: Any, *, indent: int | None = None) -> str:
    """JSON of exactly this value, with every character escaped that controls a terminal or is not seen."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return _NOT_ESCAPED.sub(lambda match: json.dumps(match[0])[1:-1], text)


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
    return Text(printable(short), style=Style(link=url))


class SafeConsole(Console):
    """Prints only text that is `printable`."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Makes a text of a string, before its place in a table is measured."""
        return _with_escapes(super().render_str(text, **options))

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Renders everything that is printed or drawn."""
        if isinstance(renderable, Text):
            renderable = _with_escapes(renderable)
        for segment in super().render(renderable, options):
            # Rich's own control sequences, such as for moving the cursor, are in segments of their own.
            yield segment if segment.control else segment._replace(text=printable(segment.text))

    continues = False
    """Whether the command goes on without its reader."""

    def on_broken_pipe(self) -> None:
        """Ends quietly if the reader closes the pipe, as `head` does; rich would exit with 1.

        Raises:
            ReaderGone: if the command does not go on.
        """
        # What is still in a buffer would fail again when it is flushed.
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), self.file.fileno())
        if not self.continues:
            raise ReaderGone


class ReaderGone(Exception):
    """The reader of a command's output has closed the pipe."""


def _with_escapes(text: Text) -> Text:
    """The text with its styles, and with escapes for what is not seen, before its lines are broken."""
    found = [match.span(1) for match in _DECEPTIVE.finditer(text.plain) if match[1]]
    if not found:
        return text
    parts = text.divide([place for span in found for place in span])
    shown = (Text(printable(one.plain)) if _DECEPTIVE.fullmatch(one.plain) else one for one in parts)
    return text.blank_copy().append_text(Text().join(shown))
