"""Markdown as the Temporal UI shows it: its tables have no space between columns, and two hyphens become a dash."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_GAP = "\N{NO-BREAK SPACE}" * 3
_MARKUP = re.compile(r"([\\`*_\[\]<>|~])")
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]+")


def plain(text: str, *, limit: int = 300) -> str:
    """Returns text that is shown as it is, in one line: it may come from training.

    Args:
        text: The text.
        limit: The most characters of it.
    """
    line = _CONTROLS.sub(" ", text).strip()
    return _MARKUP.sub(r"\\\1", line if len(line) <= limit else f"{line[: limit - 1]}…")


def code(text: str) -> str:
    """Returns a command or a name as code, in which nothing is markup."""
    line = _CONTROLS.sub(" ", text).strip()
    longest = max((len(ticks) for ticks in re.findall("`+", line)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {line} {fence}" if longest else f"{fence}{line}{fence}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a table, whose cells are Markdown."""
    shown = [f"| {f'{_GAP} | '.join(cells)} |" for cells in (head, *rows)]
    return [shown[0], "|" + ":-|" * len(head), *shown[1:]]
