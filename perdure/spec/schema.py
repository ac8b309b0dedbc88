"""The JSON Schema of the specification, with which editors complete field names and show their meaning."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, JsonSchemaValue
from pydantic_core import CoreSchema
from pydantic_core.core_schema import ModelSchema

from .base import Section
from .docstrings import field_docstrings
from .durations import format_duration
from .job import Backend, JobSpec

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a job specification, with the shorthand forms; `perdure schema` prints it."""
    schema = plain_schema(JobSpec, mode="validation")
    definitions: dict[str, Any] = schema.pop("$defs", {})
    return {
        "$schema": DIALECT,
        "title": "Perdure training job",
        "description": _description(),
        **{key: value for key, value in schema.items() if key not in {"title", "description"}},
        "examples": [
            {"name": "demo", "roles": {"worker": {"nodes": "2:4", "command": ["torchrun", "train.py"]}}},
        ],
        "$defs": definitions,
    }


def plain_schema(model: type[BaseModel], *, mode: JsonSchemaMode) -> dict[str, Any]:
    """The schema of a model, with descriptions and defaults as people write them."""
    return _unwrap(model.model_json_schema(schema_generator=_Generator, mode=mode))


class _Generator(GenerateJsonSchema):
    """Writes defaults as people write them and sections' docstrings; omits titles that only repeat a field's name."""

    def model_schema(self, schema: ModelSchema) -> JsonSchemaValue:
        written = super().model_schema(schema)
        if issubclass(model := schema["cls"], Section):
            for name, text in field_docstrings(model).items():
                cast("dict[str, JsonSchemaValue]", written["properties"])[name].setdefault("description", text)
        return written

    def encode_default(self, dft: Any) -> Any:
        return format_duration(dft) if isinstance(dft, timedelta) else super().encode_default(dft)

    def field_title_should_be_set(self, schema: CoreSchema) -> bool:  # pyrefly: ignore[bad-override]
        return False


def _unwrap(value: Any) -> Any:
    """Joins the lines of descriptions, which are wrapped in the source."""
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {
            key: " ".join(item.split()) if key == "description" and isinstance(item, str) else _unwrap(item)
            for key, item in items
        }
    if isinstance(value, list):
        return [_unwrap(item) for item in cast("list[Any]", value)]
    return value


def _description() -> str:
    return f"A distributed PyTorch training job. This release runs on: {', '.join(sorted(Backend))}."
