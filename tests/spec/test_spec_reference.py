from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from perdure.operator.crd import document
from perdure.spec.fields import field_at, places
from perdure.spec.load import validate_file
from perdure.spec.schema import json_schema
from scripts.docs.specification import reference

ROOT = Path(__file__).parents[2]


def test_the_resource_s_definition_is_current_and_the_chart_has_the_same():
    definition = ROOT / "deploy" / "crds" / "trainingjobs.yaml"
    command = "python -m perdure.operator.crd deploy/crds/trainingjobs.yaml"
    assert definition.read_text() == document(), f"run: {command}"
    assert (ROOT / "deploy" / "helm" / "perdure" / "crds" / definition.name).resolve() == definition


def test_every_field_says_what_it_means():
    silent = [place for place in places() if not field_at(place)[1]]
    assert silent == []


def walk(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, dict):
        return [value, *(inner for child in value.values() for inner in walk(child))]
    return [inner for child in value for inner in walk(child)] if isinstance(value, list) else []


def test_the_schema_describes_every_property_and_its_patterns_compile():
    schema = json_schema()
    for part in walk(schema):
        for name, field in part.get("properties", {}).items() if isinstance(part.get("properties"), dict) else ():
            referred = schema["$defs"].get(str(field.get("$ref")).removeprefix("#/$defs/"), {})
            assert field.get("description") or referred.get("description"), name
        if isinstance(pattern := part.get("pattern"), str):
            re.compile(pattern)
        if isinstance(reference := part.get("$ref"), str):
            assert reference.removeprefix("#/$defs/") in schema["$defs"]


def test_the_schema_writes_defaults_as_people_do():
    definitions = json_schema()["$defs"]
    assert definitions["Retry"]["properties"]["window"]["default"] == "1h"
    assert definitions["Recovery"]["properties"]["on_capacity_loss"]["default"] == "shrink"


def test_the_schema_takes_shorthand():
    definitions = json_schema()["$defs"]
    assert [form.get("type") for form in definitions["NodeCount"]["anyOf"]] == ["integer", "string", "object"]
    amounts = str(definitions["Resources"]["anyOf"][-1]["properties"]["cpu"])
    assert "'number'" in amounts
    assert "Ki|Mi" in amounts


JOB_FILES = [path for path in sorted((ROOT / "examples").glob("*/*.yaml")) if "apiVersion" not in path.read_text()]


@pytest.mark.parametrize("path", JOB_FILES, ids=lambda path: path.name)
def test_examples_can_run(path: Path):
    spec, _ = validate_file(path)
    workdir = spec.workdir
    assert workdir is not None
    assert workdir.path is not None
    scripts = [word for word in next(iter(spec.roles.values())).command if word.endswith(".py")]
    assert scripts
    assert all((Path(workdir.path) / script).is_file() for script in scripts)


def test_the_reference_s_own_example_is_valid():
    block = re.search(r"```yaml\n(.*?)```", reference(), re.DOTALL)
    assert block is not None
    spec, _ = validate_file(block[1])
    assert str(next(iter(spec.roles.values())).nodes) == "2:4"
