"""Fills in what jobs of one kind have in common, so that their users write only what is theirs."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, cast


class Preset(StrEnum):
    """Kinds of jobs whose roles and relations are known."""

    PARAMETER_SERVER = "parameter-server"
    """TensorFlow's chief, workers, parameter servers and evaluator."""


_REQUIRED = ("worker", "ps")
_ROLES: Mapping[str, Mapping[str, Any]] = {
    "chief": {"nodes": 1, "ready": {"port": 24_000}, "ends_job": True},
    "worker": {"ready": {"port": 22_000}, "restart_on_scale": ["chief"]},
    "ps": {"ready": {"port": 20_000}, "restart_with": ["chief"]},
    "evaluator": {"nodes": 1, "nproc_per_node": 1, "on_failure": "ignore"},
}
"""Where nodes share a machine, each role has as many ports of its own as a role can have nodes."""


def with_preset(data: Any) -> Any:
    """Returns a specification with the fields that it leaves to its preset; fields that it states stay as they are.

    Raises:
        ValueError: if the preset does not fit its roles.
    """
    if not isinstance(data, Mapping):
        return data
    spec = cast("Mapping[str, Any]", data)
    given: Any = spec.get("roles")
    if spec.get("preset") != Preset.PARAMETER_SERVER or not isinstance(given, Mapping):
        return spec
    roles = dict(cast("Mapping[str, Any]", given))
    if missing := [name for name in _REQUIRED if name not in roles]:
        raise ValueError(f"preset is {spec['preset']}, and roles has no {' and no '.join(missing)}; add it, with nodes")
    roles.setdefault("chief", {})
    command = next((role["command"] for role in map(_fields, roles.values()) if role.get("command")), None)
    shared = {"command": command} if command else {}
    for name in roles.keys() & _ROLES.keys():
        if roles[name] is None or isinstance(roles[name], Mapping):
            roles[name] = {**shared, **_ROLES[name], **_fields(roles[name])}
    return {**spec, "roles": roles}


def _fields(role: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", role) if isinstance(role, Mapping) else {}
