"""Tests of specifications that people read: secrets are replaced, and nothing else."""

from __future__ import annotations

from typing import Any

from perdure.spec.without_secrets import spec_without_secrets


def test_secrets_are_replaced_wherever_a_specification_may_have_them():
    spec: dict[str, Any] = {
        "name": "a",
        "env": {"HF_TOKEN": "hunter2", "OMP_NUM_THREADS": "1"},
        "secrets": {"WANDB_API_KEY": "wandb/key"},
        "ray": {"runtime_env": {"env_vars": {"API_KEY": "hunter2"}}},
        "notifications": {"ops": {"webhook": {"url": "https://me:hunter2@hook/x", "signing_key": "hook/key"}}},
        "roles": {
            "worker": {
                "nodes": 1,
                "command": ["python", "t.py", "--token", "hunter2", "--lr", "1"],
                "env": {"PASSWORD": "hunter2"},
                "pod_template": {
                    "spec": {
                        "containers": [{"args": ["--token=hunter2"], "env": [{"name": "T_TOKEN", "value": "hunter2"}]}]
                    }
                },
            }
        },
    }
    shown = spec_without_secrets(spec)
    assert "hunter2" in str(spec), "the specification itself stays as it is"
    assert "hunter2" not in str(shown)
    assert str(shown).count("[redacted]") == 7
    assert shown["secrets"] == spec["secrets"]
    assert shown["env"]["OMP_NUM_THREADS"] == "1"
    assert shown["notifications"]["ops"]["webhook"]["signing_key"] == "hook/key"
    assert shown["roles"]["worker"]["command"] == ["python", "t.py", "--token", "[redacted]", "--lr", "1"]
