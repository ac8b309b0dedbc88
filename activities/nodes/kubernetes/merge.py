"""Merges one PodTemplateSpec over another like Kubernetes' strategic merge: list items with a name are merged by
name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
"""The key that identifies the items of a list, by the field that holds the list."""

_REPLACED = {"env"}
"""Lists whose items are replaced as a whole: a variable has either a value or a reference to one."""

_JOINED = {"tolerations", "envFrom"}
"""Lists whose items have no key, and that are concatenated."""


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merges two mappings. On conflict `over` wins; None removes a field.

    Raises:
        TypeError: if a mapping stands where the other one has a list: an empty one says nothing that `paths` names, and
            would remove the whole list.
    """
    result = dict(under)
    for field, value in over.items():
        if value is None:
            result.pop(field, None)
        else:
            result[field] = _merge_value(field, result.get(field), value)
    return result


def key_of(field: str) -> str | None:
    """Returns the key that identifies the items of the list in this field; None if there is none."""
    return _KEYS.get(field)


def _merge_value(field: str, under: Any, over: Any) -> Any:
    if isinstance(under, Mapping) and isinstance(over, Mapping):
        return merge(cast("Mapping[str, Any]", under), cast("Mapping[str, Any]", over))
    if isinstance(under, list) and isinstance(over, Mapping):
        raise TypeError(f"{field}: expected a list, found a mapping")
    if isinstance(under, list) and isinstance(over, list):
        old, new = cast("list[Any]", under), cast("list[Any]", over)
        if field in _JOINED:
            return [*old, *(item for item in new if item not in old)]
        if key := key_of(field):
            return _merge_items(key, old, new, whole=field in _REPLACED)
    return cast("Any", over)


def _merge_items(key: str, under: Sequence[Any], over: Sequence[Any], *, whole: bool) -> list[Any]:
    """Keeps the order of `under`; appends items that only `over` has. Items of both are merged, or those of `over`
    taken whole."""
    items = {item[key]: item for item in under}
    for item in over:
        name = item.get(key)
        items[name] = merge(items[name], item) if name in items and not whole else item
    return list(items.values())


def paths(value: Any, path: str = "", field: str = "") -> Iterator[str]:
    """The paths of all that a template says; what has a name is called by it: spec.containers.training.image."""
    if isinstance(value, Mapping):
        for key, item in cast("Mapping[str, Any]", value).items():
            yield from paths(item, f"{path}.{key}" if path else key, key)
    elif isinstance(value, list) and (key := key_of(field)):
        for item in cast("list[Mapping[str, Any]]", value):
            rest = {name: inner for name, inner in item.items() if name != key}
            yield from paths(rest, f"{path}.{item.get(key)}") if rest else [f"{path}.{item.get(key)}"]
    else:
        yield path
