"""Tests of the docstrings of fields."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from perdure.spec import docstrings
from perdure.spec.base import Section
from perdure.spec.docstrings import field_docstrings


class Described(Section):
    first: int = 1
    """What stands
    on two lines."""
    silent: int = 2


class Further(Described):
    second: int = 3
    """Its own."""
    silent: int = 4
    """Described here."""


def test_fields_are_described_with_those_of_base_classes():
    assert field_docstrings(Described) == {"first": "What stands\non two lines."}
    assert field_docstrings(Further) == {
        "first": "What stands\non two lines.",
        "silent": "Described here.",
        "second": "Its own.",
    }


@pytest.mark.parametrize("module", [__name__, "builtins", "of_no_file"])
def test_a_class_without_source_has_no_docstrings(module: str):
    names: dict[str, Any] = {"Section": Section, "__name__": module}
    exec('class Made(Section):\n    number: int = 1\n    """Lost."""\n', names)
    assert field_docstrings(names["Made"]) == {}


def test_another_thread_that_parses_at_the_same_time_costs_no_docstring(monkeypatch: pytest.MonkeyPatch):
    disturbed = [SystemError("AST constructor recursion depth mismatch")]

    def source_of(kind: type) -> str:
        if disturbed:
            raise disturbed.pop()
        return inspect.getsource(kind)

    played = SimpleNamespace(getsource=source_of, cleandoc=inspect.cleandoc)
    monkeypatch.setattr(docstrings, "inspect", played)
    assert docstrings._own(Described) == {"first": "What stands\non two lines."}
    assert not disturbed
