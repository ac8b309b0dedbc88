"""Tests of reading JSON that is nested deeper than readers of JSON follow."""

from __future__ import annotations

import json
import threading

import pytest

from perdure.base import nested_json
from perdure.base.nested_json import DEEPEST, read_json, read_json_aside


def nested(depth: int, innermost: str = '"end"') -> str:
    return '{"a": [' * (depth // 2) + innermost + "]}" * (depth // 2)


@pytest.mark.parametrize("depth", [2, DEEPEST, 200])
def test_what_a_reader_follows_is_read_as_it_is(depth: int):
    text = nested(depth)
    assert read_json(text.encode()) == json.loads(text)


@pytest.mark.parametrize("depth", [202, 5_000, 200_000])
def test_what_is_too_deep_is_left_out_and_everything_else_is_read(depth: int):
    before, after = '{"b": "]}\\"{[", "c": [1, {}]}', '{"d": "\\\\", "e": "ü"}'
    found = read_json(f"[{before}, {nested(depth)}, {nested(depth, '1')}, {after}]".encode())
    assert [found[0], found[3]] == [json.loads(before), json.loads(after)]
    assert found[1] == found[2]
    levels, inner = 1, found[1]
    while inner is not None:
        levels, inner = levels + 1, inner["a"] if isinstance(inner, dict) else inner[0]
    assert levels == DEEPEST


@pytest.mark.parametrize("text", ["", "<html>", nested(400)[:-1], nested(400) + "]", '{"a": "' + "[" * 400])
def test_what_is_no_json_is_refused(text: str):
    with pytest.raises(ValueError, match="line 1 column"):
        read_json(text.encode())


async def test_what_is_too_deep_does_not_hold_up_an_event_loop(monkeypatch: pytest.MonkeyPatch):
    threads: list[int] = []
    cut = nested_json._cut

    def noted(content: bytes) -> bytes:
        threads.append(threading.get_ident())
        return cut(content)

    monkeypatch.setattr(nested_json, "_cut", noted)
    text = nested(5_000).encode()
    assert await read_json_aside(text) == read_json(text)
    assert await read_json_aside(b"[1]") == [1]
    assert len(threads) == 2
    assert threads[0] != threading.get_ident() == threads[1]
