"""Tests of merging an administrator's preset and a user's specification."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from perdure.activities.nodes.kubernetes.presets import Preset, with_preset
from perdure.activities.runtime import PresetRefused
from perdure.spec.validate import parse_spec, to_mapping, validate_spec


def preset(**content: Any) -> dict[str, Preset]:
    return {"efa": Preset(name="efa", place="the ConfigMap perdure/efa", text=yaml.safe_dump(content))}


def job(role: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """Returns the data of a job that a client sends."""
    role = {"nodes": 2, "command": ["torchrun", "train.py"], **(role or {})}
    spec, _ = validate_spec({"name": "a", "backend": "kubernetes", "runtime": "efa", "roles": {"w": role}, **fields})
    return to_mapping(spec)


def test_the_user_s_words_lie_over_the_preset_s():
    whole = with_preset(
        job(
            {
                "resources": {"memory": "1Ti"},
                "tolerations": [{"key": "own"}],
                "topology": {"preferred": "rack"},
                "pod_template": {
                    "spec": {"containers": [{"name": "training", "env": [{"name": "A", "value": "user"}]}]}
                },
            },
            env={"NCCL_DEBUG": "INFO"},
            recovery={"warm_starts": True},
        ),
        preset(
            job={
                "env": {"NCCL_DEBUG": "WARN", "NCCL_NET": "ofi"},
                "labels": {"fabric": "efa"},
                "timing": {"lease": {"timeout": "30s"}},
                "recovery": {"warm_starts": False},
                "outputs": {"logs": "s3://logs/${job.name}"},
            },
            role={
                "image": "site:1",
                "resources": {"gpu": 8, "memory": "2Ti"},
                "tolerations": [{"key": "gpu"}],
                "topology": {"required": "zone"},
                "pod_template": {
                    "spec": {
                        "nodeSelector": {"pool": "a3"},
                        "containers": [
                            {
                                "name": "training",
                                "env": [{"name": "A", "value": "site"}, {"name": "B", "value": "site"}],
                            }
                        ],
                    }
                },
            },
        ),
    )
    spec, _ = validate_spec(whole)
    (role,) = spec.roles.values()
    assert spec.env == {"NCCL_DEBUG": "INFO", "NCCL_NET": "ofi"}
    assert (spec.labels, spec.runtime, spec.outputs.logs) == ({"fabric": "efa"}, "efa", "s3://logs/a")
    assert spec.timing.lease.timeout.total_seconds() == 30
    # Said, though it is the default.
    assert spec.recovery.warm_starts is True
    assert (role.image, role.resources.gpu, role.resources.memory) == ("site:1", 8, "1Ti")
    assert [one.key for one in role.tolerations] == ["gpu", "own"]
    assert role.topology
    assert (role.topology.required, role.topology.preferred) == (None, "rack")
    pod: Any = role.pod_template["spec"]
    assert pod["nodeSelector"] == {"pool": "a3"}
    assert pod["containers"][0]["env"] == [{"name": "A", "value": "user"}, {"name": "B", "value": "site"}]


@pytest.mark.parametrize(
    ("presets", "template", "words"),
    [
        ({}, {}, 'runtime: got "efa"; there are no presets here'),
        ({"eva": preset()["efa"]}, {}, 'did you mean "eva"?'),
        ({"h100": preset()["efa"], "a3": preset()["efa"]}, {}, "unknown preset; expected one of a3, h100"),
        (preset(job={"nodes": 2}), {}, 'the preset "efa" is wrong: job: Value error, nodes: unknown field of a preset'),
        (
            preset(roles={}),
            {},
            "roles: Extra inputs are not permitted; ask the administrator of the ConfigMap perdure/efa",
        ),
        (
            preset(allow=["spec.nodeSelector"]),
            {"spec": {"hostIPC": True}},
            'roles.w.pod_template: spec.hostIPC may not be set with the preset "efa", which allows spec.nodeSelector',
        ),
        (
            preset(allow=["spec.nodeSelector", "spec.containers.training.env"]),
            {
                "spec": {
                    "nodeSelector": {"a": "b"},
                    "hostNetwork": True,
                    "containers": [
                        {
                            "name": "training",
                            "env": [{"name": "A", "value": "1"}],
                            "envFrom": [],
                            "securityContext": {"privileged": True},
                        }
                    ],
                }
            },
            "spec.hostNetwork, spec.containers.training.envFrom, spec.containers.training.securityContext.privileged",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(presets: dict[str, Preset], template: dict[str, Any], words: str):
    with pytest.raises(PresetRefused) as refused:
        with_preset(job({"pod_template": template}), presets)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "template",
    [
        {"spec": {"containers": {}}},
        {"spec": {"tolerations": {}}},
        {"spec": {"containers": [{"name": "training", "env": {}}]}},
        {"spec": {"containers": ["training"]}},
    ],
)
def test_nothing_takes_a_list_of_the_preset_away(template: dict[str, Any]):
    container = {"name": "training", "env": [{"name": "A", "value": "site"}]}
    site = {"spec": {"containers": [container], "tolerations": [{"key": "site"}]}}
    with pytest.raises(PresetRefused, match="does not fit the preset"):
        with_preset(job({"pod_template": template}), preset(role={"pod_template": site}, allow=[]))


LEAVES = st.recursive(
    st.booleans() | st.sampled_from("xyz"),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3),
    max_leaves=6,
)
TEMPLATES = st.dictionaries(st.sampled_from("abc"), LEAVES, max_size=3).map(lambda spec: {"spec": spec} if spec else {})


@given(TEMPLATES, TEMPLATES)
def test_what_the_user_says_of_the_pod_stands_or_is_refused(site: dict[str, Any], user: dict[str, Any]):
    data = job({"pod_template": user})
    [role] = with_preset(data, preset(role={"pod_template": site}))["roles"].values()
    assert _contains(role.get("pod_template", {}), user)
    [unchanged] = with_preset(job(), preset(role={"pod_template": site}, allow=[]))["roles"].values()
    assert unchanged.get("pod_template", {}) == site
    if user:
        with pytest.raises(PresetRefused):
            with_preset(data, preset(role={"pod_template": site}, allow=[]))


def _contains(whole: Any, part: Any) -> bool:
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(key in whole and _contains(whole[key], value) for key, value in part.items())
    return whole == part


def test_a_job_with_a_preset_may_leave_out_what_that_says():
    assert "image" not in job()["roles"]["w"]
    assert parse_spec(job()).runtime == "efa"
