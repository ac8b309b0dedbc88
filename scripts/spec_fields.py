"""Generates the types of `perdure.JobBuilder`'s options from the specification's JSON Schema.

Type checkers and editors read source text only, so the types are in a file; `make docs` writes it with the pages.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perdure.spec.schema import json_schema

FILE = Path(__file__).resolve().parents[1] / "perdure" / "client" / "spec_fields.py"

_HEAD = '''\
"""The options of `perdure.JobBuilder`, for type checkers and editors.

Generated from the models in `perdure.spec` by `make docs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal, Required, TypedDict
'''

_BY_BUILDER = ("name", "roles")
"""The fields of a job that are no options, because the builder has calls for them."""

_NAMED = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}


def spec_fields() -> str:
    """Returns the file's text."""
    schema = json_schema()
    definitions: dict[str, Any] = schema["$defs"]
    job = {**schema, "properties": {k: v for k, v in schema["properties"].items() if k not in _BY_BUILDER}}
    parts = [_HEAD]
    for name, definition in {**definitions, "Job": {**job, "required": []}}.items():
        mapping = next((part for part in _alternatives(definition) if "properties" in part), None)
        if mapping is not None:
            parts.append(_typed_dict(name, mapping, definitions))
    formatter = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(FILE), "-"]
    return subprocess.run(formatter, input="\n".join(parts), capture_output=True, text=True, check=True).stdout


def _typed_dict(name: str, mapping: dict[str, Any], definitions: dict[str, Any]) -> str:
    required = mapping.get("required", ())
    lines = [f"class {name}Fields(TypedDict, total=False):"]
    for field, schema in mapping["properties"].items():
        kind = _union(schema, definitions)
        lines.append(f"    {field}: {f'Required[{kind}]' if field in required else kind}")
    return "\n".join(lines) + "\n"


def _union(schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    return " | ".join(dict.fromkeys(kind for part in _alternatives(schema) for kind in _types(part, definitions)))


def _alternatives(schema: dict[str, Any]) -> list[dict[str, Any]]:
    if "anyOf" not in schema:
        return [schema]
    return [inner for part in schema["anyOf"] for inner in _alternatives(part)]


def _types(schema: dict[str, Any], definitions: dict[str, Any]) -> Iterator[str]:
    """Yields the types that one alternative of a schema allows."""
    match schema:
        case {"$ref": reference}:
            name = str(reference).rpartition("/")[2]
            for part in _alternatives(definitions[name]):
                yield from [f"{name}Fields"] if "properties" in part else _types(part, definitions)
        case {"enum": choices}:
            yield f"Literal[{', '.join(repr(choice) for choice in choices if choice is not None)}]"
        case {"pattern": str(pattern)} if "(ms|s|m|h|d)" in pattern:
            yield "timedelta"
            if words := re.findall(r"[a-z]{3,}", pattern):
                yield f"Literal[{', '.join(map(repr, words))}]"
        case {"description": "seconds"}:
            pass
        case {"type": "array", "items": items}:
            yield f"list[{_union(items, definitions)}]"
        case {"type": "object"}:
            values = [*schema.get("patternProperties", {}).values(), schema.get("additionalProperties")]
            found = next((value for value in values if isinstance(value, dict)), {})
            yield f"Mapping[str, {_union(found, definitions)}]"
        case {"type": kind}:
            yield _NAMED[kind]
        case _:
            yield "Any"
