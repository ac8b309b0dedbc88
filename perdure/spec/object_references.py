"""Objects of a namespace that a job names: a field is known by its type, to everything that checks or shows references.

A field that names a secret, a claim or another object has one of these types. The check of an owner's rights walks the
specification with `named_objects`, so a new field is covered once it is declared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import UnionType
from typing import Annotated, Any, Union, cast, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo


class NamedKind(StrEnum):
    """A kind of objects, by its name in Kubernetes."""

    SECRET = "Secret"
    CLAIM = "PersistentVolumeClaim"


@dataclass(frozen=True)
class Names:
    """Marks the type of a field whose value names an object, up to the first slash."""

    kind: NamedKind


@dataclass(frozen=True, kw_only=True)
class NamedObject:
    """An object that a job names."""

    field: str
    """The field's path, such as `roles.worker.image_pull_secrets`."""
    kind: NamedKind
    name: str


ClaimName = Annotated[str, Names(NamedKind.CLAIM)]
SecretName = Annotated[str, Names(NamedKind.SECRET)]


def named_objects(model: BaseModel) -> Iterator[NamedObject]:
    """Yields every object that a model names in any of its fields, in their order."""
    return _in_model(model, "")


def _in_model(model: BaseModel, place: str) -> Iterator[NamedObject]:
    for name, field in type(model).model_fields.items():
        yield from _in_value(getattr(model, name), _annotated(field), _below(place, name))


def _annotated(field: FieldInfo) -> Any:
    """Returns a field's type with its metadata, which pydantic keeps beside the type."""
    kind: Any = field.annotation
    return Annotated[kind, *field.metadata] if field.metadata else kind


def _in_value(value: Any, annotation: Any, place: str) -> Iterator[NamedObject]:
    if value is None:
        return
    origin: Any = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Annotated:
        annotation, *metadata = arguments
        for mark in metadata:
            if isinstance(mark, Names) and isinstance(value, str):
                yield NamedObject(field=place, kind=mark.kind, name=value.partition("/")[0])
        yield from _in_value(value, annotation, place)
    elif isinstance(value, BaseModel):
        yield from _in_model(value, place)
    elif origin in (Union, UnionType):
        seen: set[NamedObject] = set()
        for argument in arguments:
            for found in _in_value(value, argument, place):
                if found not in seen:
                    seen.add(found)
                    yield found
    elif isinstance(value, Mapping):
        inner = arguments[1] if len(arguments) == 2 else Any
        for key, item in cast("Mapping[Any, Any]", value).items():
            yield from _in_value(item, inner, _below(place, str(key)))
    elif isinstance(value, (list, tuple)):
        inner = arguments[0] if arguments else Any
        for index, item in enumerate(cast("Iterable[Any]", value)):
            yield from _in_value(item, inner, _below(place, str(index)) if isinstance(item, BaseModel) else place)


def _below(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name
