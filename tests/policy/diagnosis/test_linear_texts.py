"""Tests that classifying a text takes linear time: a rank may write errors that are made to keep a worker busy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import pytest

from perdure.workflows.policy import diagnosis
from perdure.workflows.policy.diagnosis import error_texts
from perdure.workflows.policy.diagnosis.error_texts import Sign, signs

_PARSER: Any = import_module("re._parser")
"""The standard library's own parser of patterns: no public one tells what a pattern repeats."""

_MOST_REPEATS = 1_000


def patterns() -> Iterator[Any]:
    for module in iter_modules(diagnosis.__path__):
        for name, value in vars(import_module(f"{diagnosis.__name__}.{module.name}")).items():
            if isinstance(value, re.Pattern):
                yield pytest.param(value, id=f"{module.name}.{name}")


def repeats(parsed: Any) -> Iterator[int]:
    """Yields how often each part of a pattern may be repeated."""
    for operation, argument in parsed:
        if "REPEAT" in str(operation):
            yield int(argument[1])
        yield from _inside(argument)


def _inside(argument: Any) -> Iterator[int]:
    if isinstance(argument, _PARSER.SubPattern):
        yield from repeats(argument)
    elif isinstance(argument, list | tuple):
        for part in argument:
            yield from _inside(part)


@pytest.mark.parametrize("pattern", list(patterns()))
def test_no_pattern_repeats_without_a_bound(pattern: re.Pattern[str]):
    assert all(most <= _MOST_REPEATS for most in repeats(_PARSER.parse(pattern.pattern, pattern.flags)))


def test_an_unbounded_repeat_is_found():
    assert max(repeats(_PARSER.parse(r"gloo(a|b.*c)"))) > _MOST_REPEATS


def test_what_stands_behind_the_longest_text_does_not_count():
    text = "a" * error_texts._LONGEST
    assert Sign.OUT_OF_MEMORY in signs(f"{text[:-20]} out of memory")
    assert signs(f"{text} out of memory") == frozenset()


def test_a_text_is_classified_once():
    before = error_texts._signs.cache_info().misses
    text = "RuntimeError: nccl: remote error, once"
    assert signs(text) == signs(text) == {Sign.PEER_LOST, Sign.OF_A_DEVICE}
    assert error_texts._signs.cache_info().misses == before + 1


@pytest.mark.parametrize(
    ("text", "sign"),
    [
        ("[enforce fail at gloo/transport/tcp/pair.cc:446] op.preamble.length\n<= op.nbytes. 8 vs 4", Sign.UNEQUAL),
        ("[../third_party/gloo/x.cc:81] Timed out\nwaiting", Sign.PEER_LOST),
        ("ProcessGroupNCCL's monitor\nthread will abort", Sign.PEER_LOST),
        ("Heartbeat monitor: timed out", Sign.PEER_LOST),
    ],
)
def test_words_are_found_in_their_order_over_lines(text: str, sign: Sign):
    assert sign in signs(text)
    assert sign not in signs(" ".join(reversed(text.split())))
