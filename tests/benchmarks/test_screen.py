"""Tests of what a terminal shows of a program's output."""

from __future__ import annotations

from tests.support.terminal import Screen


def test_a_live_view_overwrites_its_lines_whatever_parts_arrive() -> None:
    output = "before\n\x1b[?25l\x1b[1mone\x1b[0m\ntwo\r\x1b[2K\x1b[1A\x1b[2Knew\nlonger\n\x1b[?25hafter"
    for size in (1, 3, len(output)):
        screen = Screen()
        for begin in range(0, len(output), size):
            screen.feed(output[begin : begin + size])
        assert screen.text == "before\nnew\nlonger\nafter"
