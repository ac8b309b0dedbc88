"""The resources that schedulers count for a pod."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, cast

from kubernetes.utils import quantity


def requests_of(spec: Mapping[str, Any]) -> dict[str, Decimal]:
    """Returns the resources that schedulers count for a pod: those of its containers and sidecars together, or more if
    an init container that runs before them needs more, or what the pod requests as a whole, and the overhead of its
    runtime class."""
    running: dict[str, Decimal] = {}
    most: dict[str, Decimal] = {}
    for container in spec.get("initContainers") or ():
        requests = _sum(running, dict(_quantities(container)))
        if container.get("restartPolicy") == "Always":
            running = requests
        most = _most(most, requests)
    for container in spec["containers"]:
        running = _sum(running, dict(_quantities(container)))
    overhead = {name: amount(text) for name, text in (spec.get("overhead") or {}).items()}
    return _sum(_most(most, running) | _of_pod(spec, most | running), overhead)


def _of_pod(spec: Mapping[str, Any], of_containers: Mapping[str, Decimal]) -> dict[str, Decimal]:
    """Returns what a pod requests as a whole (pod-level resources, Kubernetes 1.34), in place of its containers."""
    resources: Mapping[str, Any] = spec.get("resources") or {}
    limits = {name: text for name, text in (resources.get("limits") or {}).items() if name not in of_containers}
    counted = {**limits, **(resources.get("requests") or {})}
    return {name: amount(text) for name, text in counted.items() if _is_of_pods(name)}


def _is_of_pods(resource: str) -> bool:
    return resource in ("cpu", "memory") or resource.startswith("hugepages-")


def amount(text: Any) -> Decimal:
    """Returns the number of a quantity, as Kubernetes writes it.

    Raises:
        ValueError: if it is none.
    """
    return cast("Any", quantity).parse_quantity(text)


def _quantities(container: Mapping[str, Any]) -> Iterator[tuple[str, Decimal]]:
    resources: Mapping[str, Any] = container.get("resources") or {}
    # A resource with a limit only is requested with the same amount.
    limits: Mapping[str, Any] = resources.get("limits") or {}
    requests: Mapping[str, Any] = resources.get("requests") or {}
    for name, text in {**limits, **requests}.items():
        yield name, amount(text)


def _sum(one: Mapping[str, Decimal], other: Mapping[str, Decimal]) -> dict[str, Decimal]:
    return {name: one.get(name, Decimal(0)) + other.get(name, Decimal(0)) for name in {**one, **other}}


def _most(one: Mapping[str, Decimal], other: Mapping[str, Decimal]) -> dict[str, Decimal]:
    return {name: max(one.get(name, Decimal(0)), other.get(name, Decimal(0))) for name in {**one, **other}}
