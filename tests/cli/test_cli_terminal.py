"""Tests that user code's text reaches the terminal as plain text, and JSON exactly."""

from __future__ import annotations

import io
import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from perdure.cli.terminal import SafeConsole, as_json, printed_line, printed_lines, without_controls

HOSTILE = (
    "before \x1b]52;c;aGk=\x07\x1b]0;title\x1b\\\x1b[2J\x1b[1;1H\x1bc\x1bP+q\x1b\\"
    "\x9b2J\x9d0;t\x9c\x90x\x9c\x08\r\x00 after"
)


def printed(draw: Callable[[SafeConsole], object], *, terminal: bool = False) -> str:
    console = SafeConsole(file=io.StringIO(), force_terminal=terminal, highlight=False, width=200)
    draw(console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def controls(text: str) -> set[str]:
    return {letter for letter in text if letter not in "\t\n" and (letter < " " or "\x7f" <= letter < "\xa0")}


def table(console: SafeConsole) -> None:
    grid = Table()
    grid.add_column(HOSTILE)
    grid.add_row(escape(HOSTILE))
    console.print(grid)


def live(console: SafeConsole) -> None:
    with Live(Text(HOSTILE), console=console, auto_refresh=False) as drawn:
        drawn.refresh()


@pytest.mark.parametrize(
    "draw",
    [
        lambda console: console.print(HOSTILE, markup=False),
        lambda console: console.print(f"[bold]{escape(HOSTILE)}[/]"),
        lambda console: console.print(Text(HOSTILE, style="dim")),
        lambda console: console.out(HOSTILE, highlight=False),
        table,
        live,
    ],
    ids=["plain", "markup", "text", "out", "table", "live"],
)
def test_nothing_printed_can_steer_a_terminal(draw: Callable[[SafeConsole], object]) -> None:
    shown = printed(draw)
    assert "before" in shown
    assert "after" in shown
    assert not controls(shown)
    on_terminal = printed(draw, terminal=True)
    assert "after" in on_terminal
    for sequence in ("\x1b]", "\x1b[2J", "\x1b[1;1H", "\x1bc", "\x1bP", "\x9b", "\x9d", "\x90", "\x08", "\x00"):
        assert sequence not in on_terminal


def test_a_sequence_without_an_end_loses_only_what_makes_it_one() -> None:
    assert without_controls("\x1b]52;c;text\nnext") == "52;c;text\nnext"
    assert without_controls("\x1b[31mred\x1b[0m\tand\nplain \x1b") == "red\tand\nplain "


def test_of_a_progress_bar_the_last_state_is_shown_and_line_ends_of_windows_are_none() -> None:
    assert printed_line("windows\r") == "windows"
    assert printed_line("\r 0%|\r50%|##\x1b[A\r100%|####\r") == "100%|####"
    assert printed_lines("first\r\n10%\r20%\n") == ["first", "20%"]
    assert printed_lines("") == []


@given(st.text(st.characters(max_codepoint=0x100, exclude_categories=()), max_size=50))
def test_no_control_character_is_left(text: str) -> None:
    assert not controls(without_controls(text))


@given(st.text(st.characters(max_codepoint=0x200), max_size=50))
def test_json_is_exact_and_holds_no_control_character(text: str) -> None:
    shown = printed(lambda console: console.out(as_json({"text": text}), highlight=False), terminal=True)
    assert json.loads(shown) == {"text": text}
    assert not controls(shown)
