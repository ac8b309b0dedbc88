"""The fields of the specification, derived from its models: for error messages, editors and the reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from types import UnionType
from typing import Annotated, Any, TypeGuard, Union, cast, get_args, get_origin

from .base import Matching, Section
from .docstrings import field_docstrings
from .job import JobSpec

Location = tuple[str | int, ...]
"""The keys and indexes that lead to a value."""


def places(model: type[Section] = JobSpec, prefix: Location = ()) -> Iterator[Location]:
    """Yields every field of the specification, those nearest to the top first."""
    deeper: list[tuple[type[Section], Location]] = []
    for name, field in model.model_fields.items():
        yield (*prefix, name)
        for inner, step in inner_models(field.annotation):
            deeper.append((inner, (*prefix, name, *step)))
    for inner, place in deeper:
        yield from places(inner, place)


def inner_models(annotation: Any) -> Iterator[tuple[type[Section], Location]]:
    """Yields the section that a field holds, if it holds one, with the path from the field to it."""
    kind = strip(annotation)
    if is_model(kind):
        yield kind, ()
    elif get_origin(kind) is dict and is_model(inner := strip(get_args(kind)[1])):
        yield inner, ("<name>",)
    elif get_origin(kind) is list and is_model(inner := strip(get_args(kind)[0])):
        yield inner, (0,)


def field_at(location: Location) -> tuple[Any, str]:
    """The type that belongs at a location, and its description; None where the location leads out of the models."""
    annotation: Any = JobSpec
    description = ""
    for part in location:
        kind = strip(annotation)
        if is_model(kind):
            field = kind.model_fields.get(str(part))
            if field is None:
                return None, ""
            metadata = tuple(field.metadata)
            described: Any = field.annotation
            annotation = Annotated[(described, *metadata)] if metadata else described
            description = field_docstrings(kind).get(str(part), "")
        elif _origin(kind) in {dict, list}:
            annotation, description = get_args(kind)[-1], ""
        else:
            return None, ""
    return annotation, description


def strip(annotation: Any) -> Any:
    """Strips `Annotated` and `| None` from a type."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        elif _origin(annotation) in {Union, UnionType}:
            present = [item for item in get_args(annotation) if item is not type(None)]
            if len(present) != 1:
                return annotation
            annotation = present[0]
        else:
            return annotation


def _origin(annotation: Any) -> Any:
    return get_origin(annotation)


def is_model(kind: Any) -> TypeGuard[type[Section]]:
    """Whether a type is a section of the specification."""
    return isinstance(kind, type) and issubclass(kind, Section)


def choices_of(annotation: Any) -> list[str]:
    """The values of an enumeration."""
    kind = strip(annotation)
    return [str(cast("Any", item).value) for item in kind] if isinstance(kind, type) and issubclass(kind, Enum) else []


def one_of(choices: Sequence[str]) -> str:
    """Joins choices with commas and `or`."""
    return f"{', '.join(choices[:-1])} or {choices[-1]}" if len(choices) > 1 else "".join(choices)


def expected_of(annotation: Any) -> str:
    """Describes a value of this type in words."""
    for item in get_args(annotation) if get_origin(annotation) is Annotated else ():
        if isinstance(item, Matching):
            return item.expected
    kind = strip(annotation)
    if choices := choices_of(kind):
        return one_of(choices)
    if get_origin(kind) is list:
        return "a list"
    if is_model(kind):
        return kind.written_as
    if get_origin(kind) is dict:
        return "a mapping"
    return {str: "a text", int: "an integer", bool: "true or false"}.get(kind, "")
