"""Tests that fields which name objects are known by their types, wherever they stand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin

import pytest
from pydantic import BaseModel, Field

from perdure.spec.base import SecretReference, Section
from perdure.spec.job import JobSpec
from perdure.spec.object_references import ClaimName, NamedKind, NamedObject, Names, SecretName, named_objects

SUSPICIOUS = re.compile(r"secret|token|(^|_)key$|pvc|claim|config_?map|service_account")
"""Names of fields that sound as if they named an object with content of others."""

HARMLESS = {"roles.tolerations.key": "the key of a taint"}
"""Fields that only sound so, and what they are."""


def fields(model: type[BaseModel], place: str = "", seen: frozenset[type] = frozenset()) -> Iterator[tuple[str, Any]]:
    """Yields the path and the whole type of each field, through every model below."""
    for name, field in model.model_fields.items():
        path = f"{place}.{name}" if place else name
        kind: Any = field.annotation
        annotation = Annotated[kind, *field.metadata] if field.metadata else kind
        yield path, annotation
        for inner in models(annotation):
            if inner not in seen:
                yield from fields(inner, path, seen | {inner})


def models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from models(argument)


def marks(annotation: Any) -> Iterator[Names]:
    if get_origin(annotation) is Annotated:
        yield from (mark for mark in annotation.__metadata__ if isinstance(mark, Names))
    for argument in get_args(annotation):
        yield from marks(argument)


def holds_text(annotation: Any) -> bool:
    return annotation is str or any(holds_text(argument) for argument in get_args(annotation))


def test_each_field_that_names_an_object_has_the_type_of_a_reference():
    found = dict(fields(JobSpec))
    named = {path for path, annotation in found.items() if any(marks(annotation))}
    sounds_so = {
        path
        for path, annotation in found.items()
        if SUSPICIOUS.search(path.rsplit(".", 1)[-1]) and holds_text(annotation) and not any(models(annotation))
    }
    assert sounds_so - named - HARMLESS.keys() == set(), "give it a type of perdure/spec/object_references.py"
    assert {"secrets", "volumes.pvc", "notifications.webhook.token", "roles.image_pull_secrets"} <= named


class Inner(Section):
    key: SecretReference | None = None
    claims: tuple[ClaimName, ...] = ()


class Outer(Section):
    by_name: dict[str, Inner] = Field(default={})
    either: Inner | SecretName | None = None
    pair: tuple[SecretName, ...] = ()
    plain: str = "a/b"


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Outer(), []),
        (Outer(by_name={"x": Inner(key="a/b")}), [("by_name.x.key", NamedKind.SECRET, "a")]),
        (Outer(by_name={"x": Inner(claims=("c",))}), [("by_name.x.claims", NamedKind.CLAIM, "c")]),
        (Outer(either="s"), [("either", NamedKind.SECRET, "s")]),
        (Outer(either=Inner(key="a/b")), [("either.key", NamedKind.SECRET, "a")]),
        (Outer(pair=("s", "t")), [("pair", NamedKind.SECRET, "s"), ("pair", NamedKind.SECRET, "t")]),
    ],
)
def test_references_are_found_in_every_form(model: Outer, expected: list[tuple[str, NamedKind, str]]):
    assert list(named_objects(model)) == [
        NamedObject(field=field, kind=kind, name=name) for field, kind, name in expected
    ]
