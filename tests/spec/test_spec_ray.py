"""Tests of Ray's runtime environment in a specification: what has no meaning for nodes is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.spec.errors import SpecError
from perdure.spec.validate import validate_spec


def spec(environment: Any) -> dict[str, Any]:
    worker = {"nodes": 1, "command": ["torchrun", "train.py"]}
    return {"name": "a", "backend": "ray", "ray": {"runtime_env": environment}, "roles": {"worker": worker}}


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"env_vars": {"A": "b"}}, "env_vars has no meaning for Perdure's nodes: set env"),
        ({"container": {"image": "x"}}, "container has no meaning for Perdure's nodes: Perdure starts agent"),
        ({"image_uri": "x"}, "image_uri has no meaning for Perdure's nodes: Perdure starts agent"),
        ({"worker_process_setup_hook": "x.y"}, "worker_process_setup_hook has no meaning"),
        ({"py_executable": "uv run"}, "py_executable has no meaning for Perdure's nodes: .* roles.<name>.python"),
        ({"excludes": ["x"]}, "excludes has no meaning for Perdure's nodes: .*; workdir.exclude leaves"),
        ({"java_jars": ["x.jar"]}, "java_jars has no meaning for Perdure's nodes"),
        ({"nsight": "default"}, "nsight has no meaning for Perdure's nodes: .* let the role's command begin"),
        ({"working_dir": "code"}, "working_dir is 'code', a folder of the submitting machine; expected the URL"),
        ({"working_dir": "/srv/x://../../etc"}, "a folder of the submitting machine; expected the URL of a package"),
        ({"working_dir": {"x": "://"}}, "a folder of the submitting machine; expected the URL of a package"),
        ({"conda": "/etc/rancher/k3s/k3s.yaml/"}, "a file of the submitting machine; write its content as a mapping"),
        ({"conda": "/etc/temporal.yml//."}, "a file of the submitting machine; write its content as a mapping"),
        ({"py_modules": ["lib"]}, "py_modules is 'lib', a folder of the submitting machine; expected the URL"),
        ({"py_modules": "file:///a.zip"}, "py_modules is 'file:///a.zip'; expected a list of the URLs"),
        ({"pip": ["a"], "uv": ["b"]}, "pip and uv exclude each other in Ray; keep one, with all packages"),
        ({"pip": "requirements.txt"}, "pip is 'requirements.txt', a file of the submitting machine; write its lines"),
        ({"uv": {"packages": "r.txt"}}, "uv is 'r.txt', a file of the submitting machine; write its lines as a list"),
        ({"uv": {"packages": ["a"], "pip_check": True}}, "uv.pip_check is no field of Ray's; expected packages, uv_"),
        ({"pip": 3}, "pip is 3; expected a list of packages"),
        (
            {"conda": "env.yaml"},
            "conda is 'env.yaml', a file of the submitting machine; write its content as a mapping",
        ),
        ({"conda": ["x"]}, r"conda is \['x'\]; expected the name of an environment, or a mapping"),
        ({"config": {"eager_install": True}}, "config.eager_install has no meaning for Perdure's nodes"),
        ({"config": {"setup_timeout_seconds": 0}}, "config.setup_timeout_seconds is 0; expected whole seconds, or -1"),
        ({"config": 3}, "config is 3; expected {setup_timeout_seconds: SECONDS}"),
    ],
)
def test_what_has_no_meaning_in_a_runtime_environment_is_refused_with_a_remedy(environment: Any, text: str):
    with pytest.raises(SpecError, match=f"ray.runtime_env: .*{text}"):
        validate_spec(spec(environment))


@pytest.mark.parametrize(
    "environment",
    [
        {"pip": {"packages": ["a"], "pip_check": True}, "config": {"setup_timeout_seconds": 60}},
        {"uv": ["a"], "working_dir": "s3://bucket/code.zip", "py_modules": ["file:///shared/lib.whl"]},
        {"conda": "training"},
        {"conda": {"dependencies": ["python=3.11"]}},
    ],
)
def test_what_ray_prepares_for_nodes_is_accepted(environment: dict[str, Any]):
    assert validate_spec(spec(environment))[1] == ()


def test_a_field_that_only_a_plugin_of_the_cluster_has_is_named():
    _, [warning, typing_error] = validate_spec(spec({"datasets": ["x"], "pipp": ["x"]}))
    assert warning.path == "ray.runtime_env.datasets"
    assert warning.message.endswith("which ignores it unless the cluster has a plugin of this name")
    assert typing_error.message.endswith("a plugin of this name; did you mean pip?")
