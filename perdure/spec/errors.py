"""Errors in a specification, in texts that name the field, the value and the remedy.

The same texts appear on the command line, in `perdure.Client` and as the failure of a workflow that was started by
plain JSON, so they are made in one place.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from perdure.base.errors import PerdureError
from perdure_training.secret_texts import without_secrets

from .fields import Location, choices_of, expected_of, field_at, is_model, one_of, places, strip

MOST_PROBLEMS = 50
"""Problems that the text of an error has: operators write it into objects."""


@dataclass(frozen=True, kw_only=True)
class SpecProblem:
    """One error in a specification."""

    location: Location
    """The place of the error."""
    value: str = ""
    """The value as people write it; empty where it explains nothing."""
    message: str = ""
    """The error, unless the value alone shows it."""
    expected: str = ""
    """A description of a right value."""
    hint: str = ""
    """The advice to the user."""
    line: int | None = None
    """The line of the file, counted from 1; None without a file."""

    @property
    def path(self) -> str:
        """The location as one text, such as `roles.worker.nodes.min`."""
        return format_path(self.location)

    @property
    def detail(self) -> str:
        """What is wrong, without the place."""
        parts = [
            self.message,
            f"got {self.value}" if self.value else "",
            f"expected {self.expected}" if self.expected else "",
            self.hint,
        ]
        return "; ".join(part for part in parts if part)

    def at(self, line: int | None, own: int | None) -> SpecProblem:
        """Returns the same problem, with its line.

        Args:
            line: The line of the value, or of what it is in.
            own: The line of the value itself, if it has one.
        """
        if isinstance(own, Line) and self.hint.startswith(in_quotes("")[:-2]):
            return replace(self, line=line, value=own.written, hint=in_quotes(own.written))
        return replace(self, line=line)

    def __str__(self) -> str:
        # Errors of syntax name line and column themselves.
        place = f" (line {self.line})" if self.line and self.location else ""
        return f"{self.path}: {self.detail}{place}"


class Line(int):
    """A line of a file, counted from 1, with the number or truth value on it as it is written: 1.10 is no 1.1."""

    written: str

    def __new__(cls, number: int, written: str = "") -> Line:
        """Creates the line."""
        line = super().__new__(cls, number)
        line.written = written
        return line


def in_quotes(value: Any) -> str:
    """Advises to write a value as a text."""
    return f"in quotes: {json.dumps(value if isinstance(value, str) else json.dumps(value), ensure_ascii=False)}"


class SpecError(PerdureError, ValueError):
    """A specification that cannot run; its text has a line for each problem, up to a number of them."""

    def __init__(self, problems: Iterable[SpecProblem], *, file: str = "") -> None:
        """Creates the error.

        Args:
            problems: The problems.
            file: The file that they are in, which each line of the text then begins with.
        """
        self.problems: tuple[SpecProblem, ...] = tuple(problems)
        self.file = file
        lines = [f"{file}: {problem}" if file else str(problem) for problem in self.problems[:MOST_PROBLEMS]]
        if more := len(self.problems) - len(lines):
            lines.append(f"and {more:,} more problems")
        super().__init__(
            "\n".join(lines),
            remedy="`perdure schema` describes every field; `perdure validate FILE` checks without starting.",
        )

    def with_lines(self, lines: Mapping[Location, int]) -> SpecError:
        """Returns the same error, with the lines of the file that its problems are on, in the file's order."""
        placed = [
            problem.at(line_of(problem.location, lines), lines.get(problem.location)) for problem in self.problems
        ]
        return SpecError(sorted(placed, key=lambda problem: problem.line or 0), file=self.file)

    def in_file(self, file: str) -> SpecError:
        """Returns the same error, with the name of the file."""
        return SpecError(self.problems, file=file)


def line_of(location: Location, lines: Mapping[Location, int]) -> int | None:
    """The line of a location, or of the nearest enclosing location that the file has."""
    return next((lines[location[:end]] for end in range(len(location), -1, -1) if location[:end] in lines), None)


def format_path(location: Location) -> str:
    """Writes a location as people do: `volumes[0].mount_path`."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += ("." if path else "") + (json.dumps(part) if "." in part or not part else part)
    return path or "specification"


def format_value(value: Any) -> str:
    """Writes a value as it appears in a file; long texts and whole mappings are shortened."""
    match value:
        case None:
            return "nothing"
        case {} if not value:
            return "an empty mapping"
        case Mapping():
            return "a mapping"
        case [] | ():
            return "an empty list"
        case list() | tuple():
            return "a list"
        case Enum():
            return format_value(value.value)  # pyrefly: ignore[unknown-attribute-access, unknown-argument-type]
        case str() | int() | float():
            shown = without_secrets(value) if isinstance(value, str) else value
            text = json.dumps(shown, ensure_ascii=False)
            return text if len(text) <= 80 else text[:76] + "…" + text[-1]
        case _:
            return str(value)


def unknown_name(name: str, known: Sequence[str], *, what: str) -> str:
    """Describes an unknown name, and suggests a similar one."""
    nearest = difflib.get_close_matches(name.lower(), [item.lower() for item in known], n=1, cutoff=0.6)
    if nearest:
        meant = next(item for item in known if item.lower() == nearest[0])
        return f'unknown {what}; did you mean "{meant}"?'
    return f"unknown {what}; expected one of {', '.join(known)}"


def problem_report(error: ValidationError) -> SpecError:
    """Describes pydantic's errors about a `JobSpec` in this module's form.

    Those beyond the text's limit are named by their places alone: to look for what was meant takes milliseconds each.
    """
    found = error.errors(include_url=False)
    described = [_problem(details) for details in found[:MOST_PROBLEMS]]
    others = [SpecProblem(location=details["loc"], message=details["msg"]) for details in found[MOST_PROBLEMS:]]
    return SpecError([*described, *others])


def _problem(details: ErrorDetails) -> SpecProblem:
    location: Location = details["loc"]
    if location and location[-1] == "[key]":
        location = location[:-1]
    context = details.get("ctx", {})
    value = format_value(details["input"])
    match details["type"]:
        case "extra_forbidden":
            return SpecProblem(location=location, hint=_unknown_field(location))
        case "missing":
            annotation, description = field_at(location)
            summary = description.split(". ")[0].split("; ")[0].split(": ")[0].rstrip(".")
            return SpecProblem(
                location=location,
                message=f"missing ({summary[:1].lower()}{summary[1:]})" if summary else "missing",
                expected=expected_of(annotation),
            )
        case "enum" | "literal_error":
            choices = choices_of(field_at(location)[0])
            nearest = difflib.get_close_matches(str(details["input"]), choices, n=1)
            hint = f'did you mean "{nearest[0]}"?' if nearest else ""
            return SpecProblem(location=location, value=value, expected=one_of(choices), hint=hint)
        case "value_error":
            text, location = str(context["error"]), (*location, *getattr(context["error"], "location", ()))
            if text.startswith("expected "):
                text, _, hint = text.removeprefix("expected ").partition("; ")
                return SpecProblem(location=location, value=value, expected=text, hint=hint)
            return SpecProblem(location=location, message=text)
        case "string_type" if isinstance(details["input"], bool | int | float):
            return SpecProblem(location=location, value=value, expected="a text", hint=in_quotes(details["input"]))
        case "greater_than_equal":
            expected = f"an integer of at least {context['ge']}"
        case "less_than_equal":
            expected = f"an integer of at most {context['le']}"
        case "too_short":
            expected = "a list that is not empty"
        case "too_long":
            expected = f"a list of at most {context['max_length']}"
        case other:
            expected = _EXPECTED_TYPE.get(other, "")
            if not expected:
                return SpecProblem(location=location, value=value, message=details["msg"])
    return SpecProblem(location=location, value=value, expected=expected)


_EXPECTED_TYPE = {
    "string_type": "a text",
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "list_type": "a list",
    "string_unicode": "a text of valid Unicode",
}


def _unknown_field(location: Location) -> str:
    name = str(location[-1])
    model = strip(field_at(location[:-1])[0])
    known = list(model.model_fields) if is_model(model) else []
    elsewhere = next((place for place in places() if place[-1] == name), None)
    if elsewhere and not difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.8):
        return f"unknown field here; it belongs to {format_path(elsewhere[:-1])}"
    return unknown_name(name, known, what="field")
