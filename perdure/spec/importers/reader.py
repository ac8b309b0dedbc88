"""Reads another system's document, and accounts for every field.

An adapter accounts for each field that it reads: the field was carried into the specification, it means what Perdure
does anyway, or a warning names it. Fields that no adapter reads are left over at the end and become warnings
automatically, so a field that an adapter forgets is reported instead of dropped.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, cast

from ..errors import SpecProblem, format_path, format_value, in_quotes, line_of
from ..fields import Location


class Fate(StrEnum):
    """Why a warning names a field."""

    DROPPED = "dropped"
    """Perdure has no counterpart: the field is left out."""
    CHANGED = "changed"
    """The field was carried over, and its meaning differs slightly."""
    IGNORED = "ignored"
    """The system that it was written for accepts it and ignores it: the field is left out here, too."""
    UNKNOWN = "unknown"
    """The importer does not know the field: it is left out."""


@dataclass(frozen=True, kw_only=True)
class SourceWarning:
    """A field of the source that was not simply carried over to the specification."""

    location: Location
    """The location in the source."""
    part: str = ""
    """The part of the value that the warning is about, such as an option of a command."""
    value: str = ""
    """The value."""
    fate: Fate
    message: str
    """The outcome for the field."""
    line: int | None = None
    """The line of the file, counted from 1; None without a file."""

    @property
    def path(self) -> str:
        """The location as one text, such as `spec.runPolicy.backoffLimit`."""
        place = format_path(self.location) if self.location else ""
        return " ".join(part for part in (place, self.part) if part) or "document"

    def __str__(self) -> str:
        value = f" ({self.value})" if self.value else ""
        return f"{self.path}{value}: {self.message}" + (f" (line {self.line})" if self.line else "")


class Source:
    """One document, with the outcome for each of its fields."""

    def __init__(self, data: Any, *, lines: Mapping[Location, int] | None = None, prefix: Location = ()) -> None:
        """Wraps a document.

        Args:
            data: Mappings, lists and scalars.
            lines: The line of each location of `data`, if it was read from a file.
            prefix: The beginning of paths, if there are several documents.
        """
        self.data = data
        self.carried: dict[Location, list[Location]] = {}
        self.problems: list[SpecProblem] = []
        self.inner: list[Source] = []
        """Documents inside texts of this one."""
        self._prefix = prefix
        self._lines = {(*self._prefix, *place): line for place, line in (lines or {}).items()}
        self._known_problems: set[SpecProblem] = set()
        self._settled: dict[Location, None] = {}
        self._above_settled: set[Location] = set()
        """The locations with something below them that was accounted for."""
        self._requested: dict[Location, list[str]] = {}
        self._warnings: dict[SourceWarning, None] = {}

    @property
    def root(self) -> Field:
        """The whole document."""
        return Field(self, self._prefix, self.data)

    @property
    def touched(self) -> bool:
        """Whether any field was accounted for yet."""
        return bool(self._settled)

    def warnings(self) -> list[SourceWarning]:
        """The warnings about fields, including those for fields that no adapter read, in the document's order."""
        left = self._unread_fields(self._prefix, self.data)
        said = [replace(warning, line=self.line(warning.location)) for warning in [*self._warnings, *left]]
        return sorted(said, key=lambda warning: warning.line or 0)

    def understood(self) -> list[Location]:
        """The fields without a warning that were not carried over: they request what Perdure does anyway."""
        said = {warning.location for warning in self._warnings}
        return [place for place in self._settled if not self.carried.get(place) and place not in said]

    def problem(self, location: Location, **words: str) -> None:
        """Notes an error that makes the document impossible to import; the words are those of `SpecProblem`."""
        line = self.line(location)
        problem = SpecProblem(location=location, line=line, **words).at(line, self._lines.get(location))
        if problem not in self._known_problems:
            self._known_problems.add(problem)
            self.problems.append(problem)

    def line(self, location: Location) -> int | None:
        """The line of a location, or of the nearest enclosing location, counted from 1; None without a file."""
        return line_of(location, self._lines)

    def ask(self, location: Location, name: str) -> None:
        """Notes that an adapter knows a field, so that others can be compared with it."""
        self._requested.setdefault(location, []).append(name)

    def settle(self, location: Location) -> None:
        """Notes that a field and all below it are accounted for."""
        self._settled[location] = None
        self._above_settled.update(location[:end] for end in range(len(location)))

    def is_settled(self, location: Location) -> bool:
        """Whether a field was accounted for as a whole."""
        return location in self._settled

    def warn(self, warning: SourceWarning) -> None:
        """Keeps a warning; a field gets at most one of them."""
        self._warnings[warning] = None

    def _unread_fields(self, location: Location, value: Any) -> list[SourceWarning]:
        if location in self._settled:
            return []
        if location in self._above_settled or location == self._prefix:
            return [
                warning for key, item in _children(value) for warning in self._unread_fields((*location, key), item)
            ]
        return [
            SourceWarning(
                location=location, value=show_value(value), fate=Fate.UNKNOWN, message=self._unknown(location)
            )
        ]

    def _unknown(self, location: Location) -> str:
        known = sorted(set(self._requested.get(location[:-1], ())))
        nearest = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.8)
        meant = f'; did you mean "{nearest[0]}"?' if nearest and nearest[0] != location[-1] else ""
        return f"unknown to the importer; left out{meant}"


class Field:
    """A place in a document, with or without a value."""

    def __init__(self, source: Source, location: Location, value: Any, *, exists: bool = True) -> None:
        self.source = source
        self.location = location
        self.value = value
        self._exists = exists

    @property
    def present(self) -> bool:
        """Whether there is a value; a missing field and `null` are the same."""
        return self.value is not None

    @property
    def path(self) -> str:
        """The location as one text."""
        return format_path(self.location)

    @property
    def settled(self) -> bool:
        """Whether the field was accounted for as a whole."""
        return self.source.is_settled(self.location)

    def __getitem__(self, name: str) -> Field:
        """The field of a mapping, whether or not it exists."""
        self.source.ask(self.location, name)
        mapping = self._mapping()
        child = Field(self.source, (*self.location, name), mapping.get(name), exists=name in mapping)
        if child.value in (None, {}, []):
            child.settle()
        return child

    def entries(self) -> dict[str, Field]:
        """All fields of a mapping whose names the user chose."""
        return {name: Field(self.source, (*self.location, name), value) for name, value in self._mapping().items()}

    def items(self) -> list[Field]:
        """The items of a list."""
        if self.value is None:
            return []
        items = as_list(self.value)
        if items is None:
            self.wrong("a list")
            return []
        if not items:
            self.settle()
        return [Field(self.source, (*self.location, index), item) for index, item in enumerate(items)]

    def text(self) -> str | None:
        """The value as a text."""
        if isinstance(self.value, bool | int | float):
            self.wrong("a text", hint=in_quotes(self.value))
            return None
        return self._value_of_type(str, "a text")

    def integer(self, *, least: int = 0) -> int | None:
        """The value as an integer, of at least `least`."""
        number = None if isinstance(self.value, bool) else self._value_of_type(int, "an integer")
        if isinstance(self.value, bool) or (number is not None and number < least):
            self.wrong(f"an integer of at least {least}")
            return None
        return number

    def boolean(self) -> bool | None:
        """The value as a truth value."""
        return self._value_of_type(bool, "true or false")

    def texts(self) -> list[str] | None:
        """The value as a list of texts."""
        if self.value is None:
            return None
        found = [item.text() for item in self.items()]
        return [text for text in found if text is not None]

    def wrong(self, expected: str, *, hint: str = "", message: str = "") -> None:
        """Refuses the document because of this value."""
        self.settle()
        value = format_value(self.value) if self.present else ""
        self.source.problem(self.location, value=value, expected=expected, hint=hint, message=message)

    def refuse(self, message: str) -> None:
        """Refuses the document because of an error here that the value alone does not show."""
        self.settle()
        self.source.problem(self.location, message=message)

    def read_contained(self, data: Any) -> Field:
        """Reads the document inside this text, and accounts for the text."""
        self.settle()
        line = self.source.line(self.location)
        inner = Source(data, lines={(): line} if line else {}, prefix=self.location)
        self.source.inner.append(inner)
        return inner.root

    def settle(self) -> None:
        """Accounts for the field and all below it: it requests what Perdure does anyway, or was used."""
        if self._exists:
            self.source.settle(self.location)

    def carry(self, field: Location) -> None:
        """Accounts for the field: it became this field of the specification."""
        self.settle()
        self.source.carried.setdefault(self.location, []).append(field)

    def drop(self, message: str) -> None:
        """Leaves the field out, with a warning."""
        self._warn(Fate.DROPPED, f"left out: {message}")

    def ignore(self, system: str, message: str = "") -> None:
        """Leaves out a field that the system that it was written for accepts and ignores, with a warning."""
        self._warn(Fate.IGNORED, f"left out: {system} accepts it and ignores it" + (f"; {message}" if message else ""))

    def warn_changed(self, message: str, *, part: str = "", value: str | None = None) -> None:
        """Warns about a difference of a field that was, or will be, carried over."""
        self._warn(Fate.CHANGED, message, settle=False, part=part, value=value)

    def warn_part_dropped(self, part: str, message: str, *, value: str = "") -> None:
        """Warns that a part of the value, such as an option of a command, is left out."""
        self._warn(Fate.DROPPED, f"left out: {message}", settle=False, part=part, value=value)

    def _warn(self, fate: Fate, message: str, *, settle: bool = True, part: str = "", value: str | None = None) -> None:
        if not self.present:
            return
        if settle:
            self.settle()
        shown = show_value(self.value) if value is None else value
        self.source.warn(SourceWarning(location=self.location, part=part, value=shown, fate=fate, message=message))

    def _mapping(self) -> dict[str, Any]:
        if self.value is None:
            return {}
        mapping = as_mapping(self.value)
        if mapping is None:
            self.wrong("a mapping")
            return {}
        if not mapping:
            self.settle()
        return mapping

    def _value_of_type(self, kind: type[Any], expected: str) -> Any:
        if self.value is None or isinstance(self.value, kind):
            return self.value
        self.wrong(expected)
        return None


def show_value(value: Any) -> str:
    """Formats a value on one line, shortened; in contrast to messages about a specification, with the content of
    mappings and lists."""
    if isinstance(value, (dict, list)) and value:
        text = json.dumps(value, ensure_ascii=False, default=str)
        return text if len(text) <= 80 else text[:76] + "…" + text[-1]
    return format_value(value)


def as_mapping(value: Any) -> dict[str, Any] | None:
    """The value as a mapping, with texts as keys; None if it is not one."""
    if not isinstance(value, dict):
        return None
    return {str(name): item for name, item in cast("dict[Any, Any]", value).items()}


def as_list(value: Any) -> list[Any] | None:
    """The value as a list; None if it is not one."""
    return cast("list[Any]", value) if isinstance(value, list) else None


def _children(value: Any) -> list[tuple[str | int, Any]]:
    if (mapping := as_mapping(value)) is not None:
        return list(mapping.items())
    return list(enumerate(as_list(value) or []))
