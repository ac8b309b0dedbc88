"""Values as HTML, which notebooks show in place of their `repr`.

Texts of trainings, such as names of hosts and lines of logs, are escaped: a notebook runs what it shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from enum import Enum
from html import escape
from typing import Any, TypeVar, cast, overload

from pydantic import BaseModel

ModelT = TypeVar("ModelT", bound=BaseModel)

_DEEPEST = 3
"""Tables within each other."""
_MOST_ROWS = 100
"""Rows of a table, and members of a list; the rest is counted."""
_LEFT = "style='text-align: left'"
_LONGEST = 1_000
"""Characters of a text."""


class Shown:
    """A model that notebooks show as a table of the fields that say something."""

    def _repr_html_(self) -> str:
        assert isinstance(self, BaseModel)
        return _fields(self, depth=1)


class Table(Sequence[ModelT]):
    """Several values of one kind, such as jobs or nodes, as one table with a row each.

    perdure.Table(client.list())
    """

    def __init__(self, values: Iterable[ModelT]) -> None:
        self._values = tuple(values)

    @overload
    def __getitem__(self, index: int) -> ModelT: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[ModelT]: ...

    def __getitem__(self, index: int | slice) -> ModelT | Sequence[ModelT]:
        return self._values[index]

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Table({list(self._values)!r})"

    def _repr_html_(self) -> str:
        return _rows(self._values, depth=1)


def _fields(model: BaseModel, *, depth: int) -> str:
    rows = (
        f"<tr><th {_LEFT}>{name}</th><td {_LEFT}>{_html(value, depth=depth)}</td></tr>"
        for name, value in _said(model).items()
    )
    return f"<table>{''.join(rows)}</table>"


def _rows(models: Sequence[BaseModel], *, depth: int) -> str:
    said = [_said(model) for model in models[:_MOST_ROWS]]
    names = list(dict.fromkeys(name for one in said for name in one))
    head = "".join(f"<th>{name}</th>" for name in names)
    body = "".join(
        f"<tr>{''.join(f'<td>{_html(one.get(name), depth=depth)}</td>' for name in names)}</tr>" for one in said
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{_more(len(models))}"


def _said(model: BaseModel) -> Mapping[str, Any]:
    """The fields that differ from their defaults."""
    fields = type(model).model_fields
    values = {name: getattr(model, name) for name in fields}
    return {
        name: value for name, value in values.items() if fields[name].is_required() or value != fields[name].default
    }


def _html(value: Any, *, depth: int) -> str:
    match value:
        case None:
            return ""
        case BaseModel():
            return _fields(value, depth=depth + 1) if depth < _DEEPEST else escape(str(value)[:_LONGEST])
        case Enum():
            return escape(str(value.value))  # pyrefly: ignore[unknown-attribute-access, unknown-argument-type]
        case datetime():
            return f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
        case timedelta():
            return str(value)
        case list() | tuple():
            return _members(cast("Sequence[Any]", value), depth=depth)
        case _:
            text = str(value)
            return escape(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…")


def _members(values: Sequence[Any], *, depth: int) -> str:
    models = [value for value in values if isinstance(value, BaseModel)]
    if models and len(models) == len(values):
        return _rows(models, depth=depth + 1) if depth < _DEEPEST else f"{len(values)}"
    return ", ".join(_html(value, depth=depth + 1) for value in values[:_MOST_ROWS]) + _more(len(values))


def _more(count: int) -> str:
    return f" and {count - _MOST_ROWS} more" if count > _MOST_ROWS else ""
