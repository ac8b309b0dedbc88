"""The site policy's rules on the values of a pod's fields.

A rule gets one value and yields what is wrong with it: the place below the value (empty for the value itself), the
value as people write it, and what the policy allows. `pod_fields` says which rule decides which field. PodSecurity's
level `restricted` is the floor: each field that it names has a rule that is as strict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final, NamedTuple, cast

from perdure.activities.nodes.kubernetes.resources import amount
from perdure.activities.nodes.kubernetes.site_policy import CONTROL_PLANE, Reserved, SitePolicy, matches, rule_of
from perdure.base.credentials.names import AUDIENCE
from perdure.spec.errors import format_value


@dataclass(frozen=True)
class Scope:
    """What rules decide by."""

    policy: SitePolicy
    reserved: Reserved
    early: bool = False
    """Whether the value is in an init container of the job, which runs before Perdure's."""


class Fault(NamedTuple):
    """A value that the policy does not allow."""

    place: str
    value: str
    rule: str


Rule = Callable[[Scope, Any], Iterator[Fault]]


def _fault(value: Any, rule: str, place: str = "") -> Fault:
    return Fault(place, format_value(value), rule)


def named_in(field: str) -> Rule:
    """Returns the rule on a name that must match the patterns in this field of the policy."""

    def rule(scope: Scope, value: Any) -> Iterator[Fault]:
        patterns: Sequence[str] = getattr(scope.policy, field)
        if value and not matches(patterns, str(value)):
            yield _fault(value, rule_of(field, patterns))

    return rule


def granted_by(field: str, *harmless: Any) -> Rule:
    """Returns the rule on a value that needs a switch of the policy, unless it is one of the harmless ones."""

    def rule(scope: Scope, value: Any) -> Iterator[Fault]:
        if value not in (None, *harmless) and not getattr(scope.policy, field):
            allowed = ", ".join(str(one) for one in harmless if one and one is not True)
            yield _fault(value, f"{allowed or 'none'} ({field})")

    return rule


def host_namespace(kind: str) -> Rule:
    """Returns the rule on a use of one of the machine's namespaces."""

    def rule(scope: Scope, value: Any) -> Iterator[Fault]:
        if value and kind not in scope.policy.host_namespaces:
            yield _fault(value, rule_of("host_namespaces", scope.policy.host_namespaces))

    return rule


def user(scope: Scope, value: Any) -> Iterator[Fault]:
    """Containers do not run as root."""
    if value == 0 and not scope.policy.run_as_root:
        yield _fault(value, "no root (run_as_root)")


def non_root(scope: Scope, value: Any) -> Iterator[Fault]:
    """Containers are verified not to run as root."""
    if value is False and not scope.policy.run_as_root:
        yield _fault(value, "no root (run_as_root)")


def capability(scope: Scope, value: Any) -> Iterator[Fault]:
    """A capability is one of the policy's, whatever form its name has."""
    policy = scope.policy
    if not policy.privileged and not matches(policy.capabilities, str(value).removeprefix("CAP_")):
        yield _fault(value, rule_of("capabilities", policy.capabilities))


def pod_labels(scope: Scope, value: Mapping[str, Any]) -> Iterator[Fault]:
    """Labels are the worker's own, or among the policy's. No policy allows those of the control plane: with them a pod
    would receive what others send to the gateway's Service."""
    name, ours = CONTROL_PLANE
    if value.get(name) == ours:
        yield _fault(ours, "no label of Perdure's own pods", name)
    yield from _entries(value, scope.reserved.labels, scope.policy.labels, "labels")


def pod_annotations(scope: Scope, value: Mapping[str, Any]) -> Iterator[Fault]:
    """Annotations are the worker's own, or among the policy's."""
    yield from _entries(value, scope.reserved.annotations, scope.policy.annotations, "annotations")


def _entries(value: Mapping[str, Any], own: Mapping[str, str], allowed: Sequence[str], field: str) -> Iterator[Fault]:
    for key, content in value.items():
        if own.get(key) != content and not matches(allowed, key):
            yield _fault(content, rule_of(field, allowed), key)


def service_account(scope: Scope, value: Any) -> Iterator[Fault]:
    """A service account is one of the policy's, and none of the control plane."""
    if matches(scope.reserved.service_accounts, str(value)):
        yield _fault(value, "no use of Perdure's own service accounts")
    else:
        yield from named_in("service_accounts")(scope, value)


def secret(scope: Scope, value: Any) -> Iterator[Fault]:
    """A Secret is one of the policy's, and none of the control plane."""
    if value and matches(scope.reserved.secrets, str(value)):
        yield _fault(value, "no use of Perdure's own Secrets")
    else:
        yield from named_in("secrets")(scope, value)


def tolerations(scope: Scope, value: Mapping[str, Any]) -> Iterator[Fault]:
    """The taint's key is one of the policy's; without a key, a toleration matches every taint."""
    allowed = scope.policy.tolerations
    key = value.get("key")
    every = "*" in allowed and not any(one.startswith("!") for one in allowed)
    if not (matches(allowed, str(key)) if key else every):
        yield _fault(key or "every taint", rule_of("tolerations", allowed))


def node_selector(scope: Scope, value: Mapping[str, Any]) -> Iterator[Fault]:
    """Machines are chosen by labels of the policy."""
    for key in value:
        if not matches(scope.policy.node_selectors, key):
            yield _fault(key, rule_of("node_selectors", scope.policy.node_selectors))


def node_requirement(scope: Scope, value: Mapping[str, Any]) -> Iterator[Fault]:
    """Machines are chosen by labels of the policy, and may be avoided by any: Perdure avoids suspects by name."""
    if value.get("operator") not in ("NotIn", "DoesNotExist"):
        yield from node_selector(scope, {str(value.get("key")): None})


def selinux_type(scope: Scope, value: Any) -> Iterator[Fault]:
    """The types of PodSecurity, which confine a container: `spc_t` does not."""
    confined = ("", "container_t", "container_init_t", "container_kvm_t", "container_engine_t")
    yield from granted_by("privileged", *confined)(scope, value)


def resource_claim(scope: Scope, value: Mapping[str, Any]) -> Iterator[Fault]:
    """The devices of a claim stand in other objects, and can be changed there: where GPUs are limited, none is used."""
    if scope.policy.max_gpus is not None:
        yield _fault(value.get("name"), "no claims, whose devices max_gpus cannot count; a ResourceQuota can")


def volume(scope: Scope, value: Mapping[str, Any]) -> Iterator[Fault]:
    """The volume's type is one of the policy's, and the Secrets that it names are, too: each type has another field for
    them."""
    for kind in value.keys() - {"name", "hostPath"}:
        yield from named_in("volumes")(scope, kind)
    for place, name in _secrets_in(value, ""):
        yield from (fault._replace(place=place) for fault in secret(scope, name))


def _secrets_in(content: Any, place: str) -> Iterator[tuple[str, str]]:
    """Finds the Secrets that a volume of any type names, with the place of each: as `secretName`, or as the `name` in
    `secret`, `secretRef`, `nodePublishSecretRef` and the like."""
    if isinstance(content, list):
        for item in cast("list[Any]", content):
            yield from _secrets_in(item, place)
    elif isinstance(content, Mapping):
        for key, value in cast("Mapping[str, Any]", content).items():
            inside = f"{place}.{key}" if place else key
            if key == "secretName":
                yield inside, str(value)
            is_reference = key == "secret" or key.lower().endswith("secretref")
            fields: Mapping[str, Any] = cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}
            if is_reference and (name := fields.get("name")):
                yield inside, str(name)
            yield from _secrets_in(value, inside)


def host_path(scope: Scope, value: Any) -> Iterator[Fault]:
    """A path of the machine is beneath one of the policy's."""
    if not is_beneath(str(value), scope.policy.host_paths):
        yield _fault(value, rule_of("host_paths", scope.policy.host_paths))


def is_beneath(path: str, allowed: Sequence[str]) -> bool:
    """Returns whether a path is one of these or below one; paths with `..` are not."""
    place = PurePosixPath(path)
    if ".." in place.parts or not place.is_absolute():
        return False
    return any(place.is_relative_to(one) for one in allowed)


_FOLDERS_OF_OURS: Final = (
    *(("bin",), ("boot",), ("dev",), ("etc",), ("lib",), ("lib32",), ("lib64",), ("libx32",), ("opt", "perdure")),
    *(("proc",), ("root",), ("run",), ("sbin",), ("sys",), ("usr",), ("var", "run")),
)
"""The folders of Perdure's image from which something is run or read, by the parts of their paths; those of its volumes
begin with `perdure`."""


def own_mount(_: Scope, value: Any) -> Iterator[Fault]:
    """No volume of a job takes the place of files that Perdure's own containers run or read."""
    parts = tuple(part for part in str(value).split("/") if part not in ("", "."))
    hides = any(all(one == other for one, other in zip(parts, folder, strict=False)) for folder in _FOLDERS_OF_OURS)
    if ".." in parts or hides or parts[0].startswith((".", "perdure")):
        yield _fault(value, "no folder of Perdure's own containers: mount the volume of the storage elsewhere")


def empty_dir(scope: Scope, value: Mapping[str, Any]) -> Iterator[Fault]:
    """A folder on the machine's disk has a limit. One in memory counts as its container's memory."""
    limit, most = value.get("sizeLimit"), scope.policy.max_scratch
    if value.get("medium") != "Memory" and (limit is None or amount(limit) > amount(most)):
        yield _fault(limit or "no limit", f"{most} (max_scratch)", "sizeLimit")


def projection(scope: Scope, value: Mapping[str, Any]) -> Iterator[Fault]:
    """A source of a projected volume is one of the policy's."""
    for kind in value:
        if kind != "serviceAccountToken":
            yield from named_in("projected_sources")(scope, kind)
        elif not scope.policy.service_account_tokens:
            yield Fault(kind, "a token", "none (service_account_tokens)")


def token_audience(_: Scope, value: Any) -> Iterator[Fault]:
    """No policy gives training code the token by which its agent proves itself to the gateway."""
    if value == AUDIENCE:
        yield _fault(value, "no token for Perdure's gateway")


def mounted_volume(scope: Scope, value: Any) -> Iterator[Fault]:
    """A container of a job uses none of the volumes in which the agent keeps its own files."""
    if value in scope.reserved.volumes or (scope.early and value == scope.reserved.run_volume):
        yield _fault(value, "no use of Perdure's own volumes")
