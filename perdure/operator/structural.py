"""Turns pydantic's JSON Schema into a structural schema, the only kind that an API server accepts.

It has no references and no unions except that of integer and text, and every field has a type. Unknown fields are kept
rather than pruned, so that the operator can refuse them by name: a misspelled `max_restart` that vanishes on its way
costs a night of training. The operator checks what a structural schema cannot express.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Schema = dict[str, Any]

_KEEP_UNKNOWN = "x-kubernetes-preserve-unknown-fields"
_LIMITS = ("pattern", "minimum", "maximum", "maxLength", "minItems", "format")


def structural(schema: Mapping[str, Any], definitions: Mapping[str, Any], *, by_users: bool = True) -> Schema:
    """Converts a JSON Schema to a structural schema.

    Args:
        schema: A schema that pydantic made.
        definitions: The targets of its `$ref`s.
        by_users: Whether people write the value: unknown fields are then kept, to be refused, and defaults are
            described.
    """
    forms = list(_forms(schema, definitions))
    present = [form for form in forms if form.get("type") != "null"]
    made = _single(present[0], definitions, by_users=by_users) if len(present) == 1 else _union(present)
    description: str = " ".join((schema.get("description") or present[0].get("description", "")).split())
    if by_users:
        description += _default(schema)
    nullable = {"nullable": True} if len(present) < len(forms) else {}
    return {**({"description": description} if description else {}), **made, **nullable}


def _forms(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The alternatives of a schema, without references."""
    if reference := schema.get("$ref"):
        yield from _forms(definitions[reference.removeprefix("#/$defs/")], definitions)
    elif alternatives := schema.get("anyOf"):
        for alternative in alternatives:
            yield from _forms(alternative, definitions)
    elif None in schema.get("enum", ()):
        yield {**schema, "enum": [choice for choice in schema["enum"] if choice is not None]}
        yield {"type": "null"}
    else:
        yield schema


def _single(form: Mapping[str, Any], definitions: Mapping[str, Any], *, by_users: bool) -> Schema:
    limits = {name: form[name] for name in _LIMITS if name in form}
    match form.get("type"):
        case "object" if "properties" in form:
            properties = {
                name: structural(field, definitions, by_users=by_users) for name, field in form["properties"].items()
            }
            required = {"required": form["required"]} if form.get("required") else {}
            return {
                "type": "object",
                "properties": properties,
                **required,
                **({_KEEP_UNKNOWN: True} if by_users else {}),
            }
        case "object":
            # The operator refuses a key that does not match: the API server supports no patterns for keys.
            (value,) = form.get("patternProperties", {"": form.get("additionalProperties", True)}).values()
            if value is True or next(_forms(value, definitions)) == {}:
                return {"type": "object", _KEEP_UNKNOWN: True}
            return {"type": "object", "additionalProperties": structural(value, definitions, by_users=by_users)}
        case "array":
            return {"type": "array", "items": structural(form["items"], definitions, by_users=by_users), **limits}
        case kind:
            choices = {"enum": form["enum"]} if "enum" in form else {}
            return {"type": kind or "string", **choices, **limits}


def _union(forms: list[Mapping[str, Any]]) -> Schema:
    """Merges several schemas into one: each limit applies to one type of value only."""
    kinds = {form.get("type", "string") for form in forms}
    limits = {name: form[name] for form in forms for name in _LIMITS if name in form}
    if choices := [choice for form in forms for choice in form.get("enum", ())]:
        limits["pattern"] = f"^({'|'.join(choices)})$"
    if "object" in kinds:
        return {**limits, _KEEP_UNKNOWN: True}
    if "integer" in kinds:
        return {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True, **limits}
    return {"type": "string", "pattern": limits["pattern"]}


def _default(schema: Mapping[str, Any]) -> str:
    """Describes the default instead of setting it: a value that is written into an object would outlive the release's
    default."""
    match schema.get("default"):
        case bool(value):
            return f" Default: {str(value).lower()}."
        case str(value) | int(value) | float(value):
            return f" Default: {value}."
        case _:
            return ""
