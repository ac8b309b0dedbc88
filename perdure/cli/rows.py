"""Tables that read well on terminals of any width: nothing in them is cut.

A terminal that is too narrow gets fewer columns, as those without content are left out; then a last column of several
lines; and then each row as a paragraph of its own, with the names of the columns before their values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_GAP = 2
"""Columns of the terminal between two of a table."""
_LEAST = 24
"""The narrowest last column that is broken into lines; narrower ones are harder to read than paragraphs."""
_INDENT = 2


@dataclass
class Rows:
    """A table whose cells are texts in rich's markup."""

    columns: list[str]
    rows: list[list[str]] = field(default_factory=list[list[str]])

    @classmethod
    def of(cls, *columns: str) -> Rows:
        """A table without rows."""
        return cls(list(columns))

    def add_row(self, *cells: str) -> None:
        self.rows.append(list(cells))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        if self._width() <= width:
            yield self._table(breaks_last=False)
            return
        slim = self._without_empty()
        if slim._width() <= width:
            yield slim._table(breaks_last=False)
        elif slim._width(last=_LEAST) <= width:
            yield slim._table(breaks_last=True)
        else:
            for row in slim.rows:
                yield from _paragraph(slim.columns, row, width)

    def _width(self, *, last: int | None = None) -> int:
        """The width of the table, or of one whose last column has so many of the terminal's."""
        widths = [
            max(Text(name).cell_len, *(Text.from_markup(row[number]).cell_len for row in self.rows), 0)
            for number, name in enumerate(self.columns)
        ]
        if last is not None and widths:
            widths[-1] = min(widths[-1], last)
        return sum(widths) + _GAP * len(widths)

    def _without_empty(self) -> Rows:
        """The table without columns that have no content, as the first one always has."""
        kept = [number for number in range(len(self.columns)) if number == 0 or any(row[number] for row in self.rows)]
        return Rows([self.columns[number] for number in kept], [[row[number] for number in kept] for row in self.rows])

    def _table(self, *, breaks_last: bool) -> Table:
        table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
        for number, name in enumerate(self.columns):
            is_last = number == len(self.columns) - 1
            table.add_column(name, no_wrap=not (breaks_last and is_last), overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        return table


def _paragraph(columns: list[str], row: list[str], width: int) -> list[Text]:
    """A row as lines: pairs of names and values, as many as fit beside each other."""
    lines = [Text.assemble((f"{columns[0]} ", "bold"), Text.from_markup(row[0]))]
    for name, cell in zip(columns[1:], row[1:], strict=True):
        if not cell:
            continue
        pair = Text.assemble((f"{name} ", "dim") if name else "", Text.from_markup(cell))
        if lines[-1].cell_len + _GAP + pair.cell_len <= width:
            lines[-1].append(" " * _GAP).append_text(pair)
        else:
            lines.append(Text(" " * _INDENT).append_text(pair))
    return lines
