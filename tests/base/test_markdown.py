"""Tests of the Markdown that the Temporal UI shows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from perdure.base.markdown import code, plain, table

HOSTILE = "<img src=x onerror=alert(1)> **x** [a](javascript:1) ![b](http://c) `d` e_f_g | h ~~i~~ \\"


def rendered(text: str) -> str:
    return MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(text)


def test_what_training_says_is_no_markup() -> None:
    shown = rendered(f"**FAILED**: {plain(HOSTILE)}")
    assert "<img" not in shown
    assert "<a" not in shown
    assert shown.count("<strong>") == 1
    assert "e_f_g | h ~~i~~ \\" in shown


def test_text_is_one_line_without_control_characters() -> None:
    assert plain("a\r\n\x1b[2Jb\tc") == "a \\[2Jb c"
    assert len(plain("x" * 10_000)) == 300


@given(st.text(alphabet="`a -\n", min_size=1).filter(str.strip))
def test_a_command_is_code_whatever_it_contains(command: str) -> None:
    shown = rendered(code(command))
    assert shown.startswith("<p><code>")
    assert shown.endswith("</code></p>\n")


def test_cells_of_a_table_are_apart_and_stay_in_their_column() -> None:
    lines = table(("Node", "State"), [("0.1", plain("a|b"))])
    assert lines[0] == "| Node\N{NO-BREAK SPACE}\N{NO-BREAK SPACE}\N{NO-BREAK SPACE} | State |"
    assert rendered("\n".join(lines)).count("<td") == 2
