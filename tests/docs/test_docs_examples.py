"""Tests that the YAML in README and docs is accepted by the program that reads it."""

from __future__ import annotations

from itertools import product
from typing import Any

import yaml

from perdure.activities.nodes.kubernetes.presets import Preset, with_preset
from perdure.activities.nodes.kubernetes.site_policy import SitePolicy
from perdure.client.scale_plans import KnownRole, requests_of
from perdure.operator.references import Kind
from perdure.operator.resource import GROUP, KIND, VERSION
from perdure.spec.importers.scaleplan import read_scale_plan
from perdure.spec.load import SpecDocument
from perdure.spec.validate import validate_spec
from tests.docs.pages import PAGES, ROOT

BLOCKS = [block for page in PAGES for block in page.blocks if block.language == "yaml"]
BASE: dict[str, Any] = {
    "name": "x",
    "backend": "kubernetes",
    "roles": {"worker": {"nodes": 1, "image": "x", "command": ["torchrun", "train.py"]}},
}
EXAMPLES = {
    data["name"]: path
    for path in (ROOT / "examples").glob("[0-9]*/*.yaml")
    if "name" in (data := yaml.safe_load(path.read_text()))
}
"""The jobs of the examples, by their names."""
NOT_OURS = {
    "server": "values of Temporal's own chart, which is not here",
    "jobs": "a workflow of GitHub's: tests/cli/test_cli_ci.py does the steps of the action that it uses",
    "include": "a configuration of GitLab's: tests/cli/test_cli_ci.py does the steps of the template that it includes",
}
"""Blocks that begin with these keys are not checked, and why."""


def test_each_example_is_valid():
    wrong: list[str] = []
    for block in BLOCKS:
        try:
            for data in yaml.safe_load_all(block.text):
                _check(data)
        except (AssertionError, ValueError) as error:
            wrong.append(f"{block.page}:{block.line}: {error}")
    assert not wrong, "\n".join(wrong)


def _is_example(data: Any) -> bool:
    return isinstance(data, dict) and data.get("name") in EXAMPLES and "roles" in data


def test_a_job_of_the_examples_is_printed_as_it_is():
    for block in BLOCKS:
        for data in filter(_is_example, yaml.safe_load_all(block.text)):
            assert data == yaml.safe_load(EXAMPLES[data["name"]].read_text()), f"{block.page}:{block.line}"


def _check(data: Any) -> None:
    match data:
        case {"roles": _, "workdir": {"path": path}} if _is_example(data):
            validate_spec({**data, "workdir": {"path": str((EXAMPLES[data["name"]].parent / path).resolve())}})
        case {"roles": _}:
            validate_spec(data)
        case {"kind": "TrainingJob", "metadata": {"name": name, "namespace": namespace}, "spec": spec}:
            validate_spec({"name": name, "namespace": namespace, "backend": "kubernetes", **spec})
        case {"kind": "ConfigMap", "data": {"preset.yaml": text}, "metadata": {"name": name}}:
            preset = Preset(name=name, place="the docs", text=text)
            validate_spec(with_preset({**BASE, "runtime": name}, {name: preset}))
        case {"pod_template": template}:
            validate_spec({**BASE, "roles": {"worker": {**BASE["roles"]["worker"], "pod_template": template}}})
        case {"sitePolicy": policy}:
            SitePolicy.model_validate(policy)
        case {"kind": "Role", "rules": rules}:
            rights = {(one.group, one.resource, one.verb) for one in Kind}
            rights |= {("perdure.dev", "trainingjobs", "*"), ("", "configmaps", "use")}
            for rule in rules:
                granted = product(rule["apiGroups"], rule["resources"], rule["verbs"])
                assert set(granted) <= rights
        case {"kind": "RoleBinding", "roleRef": {"kind": "Role"}, "subjects": [{"kind": "Group"}]}:
            pass
        case {"kind": "HorizontalPodAutoscaler", "spec": {"scaleTargetRef": target}}:
            assert (target["apiVersion"], target["kind"]) == (f"{GROUP}/{VERSION}", KIND)
        case {"spec": {"healthCheckExprs": [{"apiVersion": version, "kind": kind}]}}:
            assert (version, kind) == (f"{GROUP}/{VERSION}", KIND)
        case {"data": {**checks}} if list(checks) == [f"resource.customizations.health.{GROUP}_{KIND}"]:
            pass
        case {"kind": "ScalePlan"}:
            plan = read_scale_plan(SpecDocument(data=data, lines={}, folder=None))
            roles = {role: KnownRole(nodes=4) for role in ("worker", "ps")}
            assert requests_of(plan, roles)
            assert not plan.warnings
        case {"notifications": notifications}:
            validate_spec({**BASE, "notifications": notifications})
        case {"workdir": workdir}:
            validate_spec({**BASE, "workdir": {**workdir, "path": "/"}})
        case _:
            assert data.keys() & NOT_OURS.keys(), "nothing here reads this"


def test_blocks_are_found():
    assert len(BLOCKS) >= 7
