"""Tests of the resource's definition; tests/kubernetes verifies that an API server accepts it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from perdure.operator.crd import custom_resource_definition


def mappings(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "properties" in schema:
        yield schema
    for inner in (*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")):
        if isinstance(inner, dict):
            yield from mappings(inner)


def test_no_field_of_a_user_is_pruned_and_none_is_filled_in():
    (version,) = custom_resource_definition()["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert all(one["x-kubernetes-preserve-unknown-fields"] for one in mappings(spec))
    assert all("default" not in field for one in mappings(spec) for field in one["properties"].values())
    assert spec["properties"]["retry"]["properties"]["max_restarts"]["description"].endswith("Default: 10.")
