from __future__ import annotations

import contextlib
import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perdure.spec.errors import SpecError
from perdure.spec.job import JobSpec
from perdure.spec.load import load_spec, read_document
from perdure.spec.roles import MAX_NODES, NodeCount
from perdure.spec.validate import parse_spec, to_mapping, validate_spec

FULL_EXAMPLE = Path(__file__).with_name("full_example.yaml")

labels = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,15}[a-z0-9])?", fullmatch=True)
variables = st.from_regex(r"[A-Z_][A-Z0-9_]{0,15}", fullmatch=True).map(lambda name: f"X{name}")
texts = st.text(st.characters(exclude_characters="\0$", exclude_categories=["Cs"]), max_size=30)
durations = st.one_of(
    st.integers(1, 10**7),
    st.floats(0.001, 10**6, allow_nan=False),
    st.builds("{}h{}m".format, st.integers(0, 1000), st.integers(1, 59)),
    st.builds("{}ms".format, st.integers(1, 10**9)),
)
node_counts = st.one_of(
    st.integers(1, MAX_NODES),
    st.tuples(st.integers(1, 100), st.integers(0, 100)).map(lambda pair: f"{pair[0]}:{sum(pair)}"),
    st.tuples(st.integers(1, 8), st.integers(1, 9), st.integers(0, 9)).map(
        lambda t: {"unit": t[0], "min": t[0] * t[1], "max": t[0] * (t[1] + t[2])}
    ),
)
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=10)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=8,
)


def mapping(required: dict[str, Any], optional: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(required, optional=optional)


roles = mapping(
    {"nodes": node_counts, "command": st.lists(texts, min_size=1, max_size=4)},
    {
        "nproc_per_node": st.one_of(st.integers(1, 64), st.sampled_from(["gpu", "auto", None])),
        "rendezvous": st.sampled_from(["auto", "torchrun", "env"]),
        "resources": mapping({}, {"cpu": st.one_of(st.integers(0, 99), st.just("500m")), "gpu": st.integers(0, 8)}),
        "image": texts,
        "ports": st.dictionaries(labels, st.integers(1, 65535), max_size=2),
        "pod_template": st.just({"spec": {"hostIPC": True, "containers": [{"name": "x", "args": None}]}}),
    },
)
specs = mapping(
    {"name": labels, "roles": st.dictionaries(labels, roles, min_size=1, max_size=1)},
    {
        "namespace": labels,
        "labels": st.dictionaries(labels, labels, max_size=3),
        "env": st.dictionaries(variables, texts, max_size=3),
        "workdir": st.just({"path": "/code", "exclude": ["*.pt"]}),
        "recovery": mapping(
            {},
            {
                "on_capacity_loss": st.sampled_from(["shrink", "wait", "fail"]),
                "replace_timeout": durations,
                "on_nan": st.sampled_from(["report", "rollback", "stop"]),
                "report_spikes": st.booleans(),
            },
        ),
        "retry": mapping(
            {},
            {
                "max_restarts": st.integers(0, 99),
                "window": durations,
                "fatal_exit_codes": st.lists(st.integers(1, 255)),
                "rules": st.lists(
                    st.fixed_dictionaries(
                        {
                            "match": st.sampled_from(
                                [
                                    {"log": "NET/IB.*error"},
                                    {"exit_codes": [7], "signals": ["SIGBUS"]},
                                    {"failures": ["CRASH"]},
                                ]
                            ),
                            "action": st.sampled_from(["restart", "replace", "stop"]),
                        }
                    ),
                    max_size=2,
                ),
            },
        ),
        "limits": mapping({}, {"active_deadline": durations, "termination_grace_period": durations}),
        "hold_on_failure": durations,
    },
)


def is_possible(data: dict[str, Any]) -> bool:
    """Whether no rule replaces a node of a job that stops where it loses one."""
    replaces = any(rule["action"] == "replace" for rule in data.get("retry", {}).get("rules", ()))
    return not replaces or data.get("recovery", {}).get("on_capacity_loss") != "fail"


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(specs.filter(is_possible))
def test_a_specification_survives_json(data: dict[str, Any]):
    spec = parse_spec(data)
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    assert parse_spec(json.loads(spec.model_dump_json())) == spec
    assert parse_spec(to_mapping(spec)) == spec
    assert load_spec(json.dumps(to_mapping(spec))) == spec


FULL: Any = read_document(FULL_EXAMPLE).data


def places(value: Any, location: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [location, *(place for key, child in children for place in places(child, (*location, key)))]


@given(st.data())
def test_whatever_stands_anywhere_there_is_a_specification_or_a_list_of_problems(data: st.DataObject):
    changed = copy.deepcopy(FULL)
    *way, last = data.draw(st.sampled_from(places(changed)[1:]))
    parent = changed
    for key in way:
        parent = parent[key]
    parent[last] = data.draw(json_values)
    with contextlib.suppress(SpecError):
        assert validate_spec(changed)[0].name


@given(st.text(st.sampled_from("ab:1 -[]{},\n\t\"'#&*!|>%@$0x.~<"), max_size=40))
def test_whatever_a_text_says_there_is_a_specification_or_a_list_of_problems(text: str):
    with contextlib.suppress(SpecError):
        assert load_spec(text + "\n")


def test_the_full_example_is_read_whole():
    spec = load_spec(FULL_EXAMPLE)
    ((name, role),) = spec.roles.items()
    assert name == "worker"
    assert role.nodes == NodeCount(min=8, max=16, unit=2)
    assert role.nodes.elastic
    assert str(role.nodes) == "8:16"
    assert role.resources.cpu == "96"
    assert spec.outputs.logs == "s3://nlp/llama-8b-sft/logs"
    assert spec.network.store_ports == "29500-29599"
    assert spec.limits.termination_grace_period.total_seconds() == 120
    assert spec.retry.window.total_seconds() == 3600
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec


def test_templates_are_filled_in_once():
    spec = parse_spec(
        {
            "name": "a",
            "namespace": "b",
            "env": {"OUT": "${job.namespace}/${ job.name }", "HOME_OUT": "${HOME}/$job"},
            "roles": {"worker": {"nodes": 1, "command": ["run", "--out=${job.name}"]}},
        }
    )
    assert spec.env == {"OUT": "b/a", "HOME_OUT": "${HOME}/$job"}
    assert next(iter(spec.roles.values())).command == ["run", "--out=a"]
    assert parse_spec(to_mapping(spec)) == spec


def test_workflows_can_read_specifications_without_yaml_or_temporal():
    code = (
        "import sys, perdure.spec.validate, perdure.spec.timing\n"
        "print(sorted({'yaml', 'temporalio', 'asyncio', 'typer', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
