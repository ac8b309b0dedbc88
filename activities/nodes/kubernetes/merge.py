"""Lays one PodTemplateSpec over another as Kubernetes' strategic merge does: what has a name is merged by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "ports": "containerPort",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
"""By the field that holds a list, what tells its items apart."""

_JOINED = {"tolerations", "envFrom"}
"""Lists whose items have no name, and of which more is meant as more."""


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Both as one; where they disagree, `over` has it. None takes a field away."""
    result = dict(under)
    for field, value in over.items():
        if value is None:
            result.pop(field, None)
        else:
            result[field] = _merge_value(field, result.get(field), value)
    return result


def key_of(field: str) -> str | None:
    """What tells the items of a list apart, by the field that holds it; None where nothing does."""
    return _KEYS.get(field)


def _merge_value(field: str, under: Any, over: Any) -> Any:
    if isinstance(under, Mapping) and isinstance(over, Mapping):
        return merge(cast("Mapping[str, Any]", under), cast("Mapping[str, Any]", over))
    if isinstance(under, list) and isinstance(over, list):
        old, new = cast("list[Any]", under), cast("list[Any]", over)
        if field in _JOINED:
            return [*old, *(item for item in new if item not in old)]
        if key := key_of(field):
            return _merge_items(key, old, new)
    return cast("Any", over)


def _merge_items(key: str, under: Sequence[Any], over: Sequence[Any]) -> list[Any]:
    """In the order of `under`; what only `over` has comes after it."""
    items = {item[key]: item for item in under}
    for item in over:
        name = item.get(key)
        items[name] = merge(items[name], item) if name in items else item
    return list(items.values())
