"""Checks the pod of a job against the site's policy, before the worker creates it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from perdure.activities.nodes.kubernetes.merge import paths
from perdure.activities.nodes.kubernetes.pod_fields import CONTAINER, Found, walk
from perdure.activities.nodes.kubernetes.pod_rules import Scope, is_beneath, own_mount
from perdure.activities.nodes.kubernetes.site_policy import (
    AGENT_MOUNTS,
    NEVER_OF_AGENTS,
    Reserved,
    SitePolicy,
    Violation,
    matches,
    violation_of_namespace,
)

_FIELDS_OF_OWN_MOUNTS = {"name", "mountPath", "readOnly", "subPath"}
"""What a job may set of a volume that it mounts into Perdure's own containers."""

_CONTAINER_LISTS = ("initContainers", "containers", "ephemeralContainers")


def violations(
    policy: SitePolicy, pod: Mapping[str, Any], *, template: Mapping[str, Any], reserved: Reserved
) -> tuple[Violation, ...]:
    """Checks the pod of a job against the policy.

    Args:
        policy: The site's policy.
        pod: The whole manifest, with everything that the template added to it.
        template: The job's `pod_template`.
        reserved: Perdure's own parts of the pod.
    """
    namespace = violation_of_namespace(policy, pod["metadata"]["namespace"])
    return (
        *([namespace] if namespace else []),
        *_of_template(policy, template, reserved),
        *_of_own_mounts(policy, template, reserved),
        *_of_values(policy, pod, reserved),
    )


def _of_template(policy: SitePolicy, template: Mapping[str, Any], reserved: Reserved) -> Iterator[Violation]:
    """Which fields the template sets."""
    own = [
        *(f"spec.{kind}.{name}" for kind in _CONTAINER_LISTS for name in reserved.containers),
        *(f"spec.volumes.{name}" for name in (*reserved.volumes, reserved.run_volume)),
    ]
    # Quotas and limits of a namespace are the job's to meet with its whole pod.
    resources = [f"spec.initContainers.{name}.resources" for name in reserved.containers]
    for path in paths(template):
        field = f"pod_template.{path}"
        if _is_within(path, own):
            suits = _suits_agent(policy, path.removeprefix(f"spec.initContainers.{reserved.agent}."))
            if not suits and not _is_within(path, resources):
                rule = (
                    f"only resources, and of the agent mounts beneath {AGENT_MOUNTS} and variables of agent_variables"
                )
                yield Violation(field=field, value="a change of Perdure's own parts", rule=rule)
        elif not _is_within(path, policy.template_fields):
            yield Violation(field=field, value="a value", rule="only the fields of template_fields")
    for found in walk(template):
        field = f"pod_template.{found.path}"
        if found.decision is None:
            rule = "no field that this release of Perdure does not know"
            yield Violation(field=field, value="a value", rule=rule)
        elif found.decision.named and _is_within(found.path, policy.template_fields) and not _is_named(policy, found):
            rule = f"only the fields of template_fields, in which {found.plain} must stand itself"
            yield Violation(field=field, value="a value", rule=rule)


def _is_within(path: str, places: Sequence[str]) -> bool:
    return any(f"{path}.".startswith(f"{one}.") for one in places)


def _is_named(policy: SitePolicy, found: Found) -> bool:
    return found.path in policy.template_fields or found.plain in policy.template_fields


def _suits_agent(policy: SitePolicy, path: str) -> bool:
    """Returns whether a job may add this to its agents: the settings that they need to copy logs to the job's
    storage."""
    kind, _, rest = path.partition(".")
    match kind:
        case "env":
            name = rest.partition(".")[0]
            return matches(policy.agent_variables, name) and not matches(NEVER_OF_AGENTS, name)
        case "volumeMounts":
            return is_beneath(rest.removesuffix(".name").removesuffix(".readOnly"), (AGENT_MOUNTS,))
        case _:
            return False


def _of_own_mounts(policy: SitePolicy, template: Mapping[str, Any], reserved: Reserved) -> Iterator[Violation]:
    """Which volumes a job mounts into Perdure's own containers: none of those with Perdure's credentials."""
    scope = Scope(policy, reserved)
    for container in _list(template.get("spec") or {}, "initContainers"):
        if container.get("name") not in reserved.containers:
            continue
        place = f"spec.initContainers.{container['name']}"
        for mount in _list(container, "volumeMounts"):
            for field in sorted(mount.keys() - _FIELDS_OF_OWN_MOUNTS):
                rule = f"only {', '.join(sorted(_FIELDS_OF_OWN_MOUNTS))} of a volume in Perdure's own containers"
                yield Violation(
                    field=f"{place}.volumeMounts.{mount.get('mountPath')}.{field}", value="a value", rule=rule
                )
        yield from _held(scope, walk({"volumeMounts": container.get("volumeMounts") or []}, CONTAINER, place))


def _of_values(policy: SitePolicy, pod: Mapping[str, Any], reserved: Reserved) -> Iterator[Violation]:
    """Which values the pod has in the end, whether the template or other fields of the job gave them."""
    spec: Mapping[str, Any] = pod["spec"]
    scope, early = Scope(policy, reserved), Scope(policy, reserved, early=True)
    first = [one for one in _list(spec, "initContainers") if one["name"] not in reserved.containers]
    volumes = [one for one in _list(spec, "volumes") if one["name"] not in (*reserved.volumes, reserved.run_volume)]
    rest = {name: value for name, value in spec.items() if name != "initContainers"} | {"volumes": volumes}
    yield from _held(scope, walk({"metadata": pod["metadata"], "spec": rest}))
    yield from _held(early, walk({"spec": {"initContainers": first}}))
    for one in _list(spec, "initContainers"):
        if one["name"] in reserved.containers:
            # Perdure's own container, with what the job may add to it.
            place = f"spec.initContainers.{one['name']}"
            yield from _held(scope, walk({"env": one.get("env") or []}, CONTAINER, place))
            for mount in _list(one, "volumeMounts"):
                if mount["name"] not in (*reserved.volumes, reserved.run_volume):
                    for _, value, rule in own_mount(scope, mount["mountPath"]):
                        yield Violation(field=f"{place}.volumeMounts.{mount['name']}.mountPath", value=value, rule=rule)


def _list(spec: Mapping[str, Any], field: str) -> Sequence[Mapping[str, Any]]:
    return cast("Sequence[Mapping[str, Any]]", spec.get(field) or ())


def _held(scope: Scope, fields: Iterator[Found]) -> Iterator[Violation]:
    for found in fields:
        if found.decision and found.decision.rule and found.item is not None:
            for place, value, rule in found.decision.rule(scope, found.item):
                yield Violation(field=f"{found.path}.{place}" if place else found.path, value=value, rule=rule)
