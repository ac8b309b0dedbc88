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

from perdure.cli.rows import Rows
from perdure.cli.terminal import SafeConsole, as_json, printable, printed_line, printed_lines
from tests.support.processor_time import ends_within

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
    assert printable("\x1b]52;c;text\nnext") == "52;c;text\nnext"
    assert printable("\x1b[31mred\x1b[0m\tand\nplain \x1b") == "red\tand\nplain "


def test_of_a_progress_bar_the_last_state_is_shown_and_line_ends_of_windows_are_none() -> None:
    assert printed_line("windows\r") == "windows"
    assert printed_line("\r 0%|\r50%|##\x1b[A\r100%|####\r") == "100%|####"
    assert printed_lines("first\r\n10%\r20%\n") == ["first", "20%"]
    assert printed_lines("") == []


@given(st.text(st.characters(max_codepoint=0x100, exclude_categories=()), max_size=50))
def test_no_control_character_is_left(text: str) -> None:
    assert not controls(printable(text))


@given(st.text(st.characters(max_codepoint=0x200), max_size=50))
def test_json_is_exact_and_holds_no_control_character(text: str) -> None:
    shown = printed(lambda console: console.out(as_json({"text": text}), highlight=False), terminal=True)
    assert json.loads(shown) == {"text": text}
    assert not controls(shown)


DECEPTIVE = "epoch \u202egnissergorp\u2066 x\u200by \u00ad \ufeff \U000e0041 \ud800 \u2028 end"
SHOWN = r"epoch \u202egnissergorp\u2066 x\u200by \u00ad \ufeff \U000e0041 \ud800 \u2028 end"


def deceptive_table(console: SafeConsole) -> None:
    rows = Rows.of("NAME", "NEXT")
    rows.add_row(f"[bold]{escape(DECEPTIVE)}[/]", "to it")
    console.print(rows)


@pytest.mark.parametrize(
    "draw",
    [
        lambda console: console.print(DECEPTIVE, markup=False),
        lambda console: console.print(f"a [bold]{escape(DECEPTIVE)}[/] b"),
        lambda console: console.print(Text.assemble(("WHY ", "bold"), DECEPTIVE)),
        lambda console: console.out(DECEPTIVE, highlight=False),
        deceptive_table,
        lambda console: console.out(printed_line(DECEPTIVE), highlight=False),
    ],
    ids=["plain", "markup", "text", "out", "table", "log"],
)
def test_characters_that_are_not_seen_are_shown_as_escapes(draw: Callable[[SafeConsole], object]) -> None:
    assert SHOWN in printed(draw)


def test_lines_are_broken_with_the_escapes_in_them() -> None:
    console = SafeConsole(file=io.StringIO(), force_terminal=True, color_system=None, width=20)
    console.print(Text("\u202e" * 8, style="bold"))
    assert isinstance(console.file, io.StringIO)
    assert max(map(len, console.file.getvalue().splitlines())) <= 20


def test_no_markup_is_made_of_what_a_removed_sequence_leaves() -> None:
    assert (
        printed(lambda console: console.print(escape("\x1b[link=http://x]y\u202e[/link]")))
        == "ink=http://x]y\\u202e[/link]\n"
    )


def test_joiners_of_words_and_emoji_are_kept() -> None:
    for word in ("\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645", "👩\u200d🚒", "❤\ufe0f\u200d🔥", "क्\u200dष"):
        assert printable(word) == word
    assert printable("lo\u200dss a\u200c \u200d\u200d") == r"lo\u200dss a\u200c \u200d\u200d"


@given(st.text(st.characters(exclude_categories=()), max_size=50))
def test_everything_printable_can_be_encoded_and_is_not_changed_again(text: str) -> None:
    once = printable(text)
    once.encode()
    assert printable(once) == once
    assert not set(once) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200b\u2028\u2029\ufeff")


@given(st.text(st.characters(exclude_categories=()), max_size=50))
def test_json_is_exact_whatever_it_holds_and_can_be_encoded(text: str) -> None:
    shown = as_json({"text": text})
    shown.encode()
    assert json.loads(shown) == {"text": text}
    assert shown == printable(shown)


@pytest.mark.parametrize("begin", ["\x90", "\x98", "\x9d", "\x9e", "\x9f", "\x9b", "\x1b]", "\x1b[", "\x1b", "\u200d"])
def test_a_text_that_is_made_to_keep_its_reader_busy_takes_linear_time(begin: str) -> None:
    """The page shows the logs of all jobs, and does nothing else meanwhile. Quadratic time would be hours."""
    assert ends_within(5, printable, begin * 200_000)


def test_a_string_ends_where_another_one_begins() -> None:
    assert printable("a\x90b\x9dc\x9cd") == "abd"
