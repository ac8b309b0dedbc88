"""Finds the objects of its namespace whose content or rights a job's pods would have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

from perdure.activities.nodes.kubernetes.workdir import archive_of, config_maps_of
from perdure.spec.job import JobSpec
from perdure.spec.object_references import NamedKind, named_objects


class Kind(Enum):
    """A kind of objects, and the right that lets a user who may create no pods have a job use one."""

    SECRET = ("Secret", "", "secrets", "get")
    CONFIG_MAP = ("ConfigMap", "", "configmaps", "get")
    SERVICE_ACCOUNT = ("ServiceAccount", "", "serviceaccounts", "impersonate")
    CLAIM = ("PersistentVolumeClaim", "", "persistentvolumeclaims", "use")
    DEVICES = ("ResourceClaim", "resource.k8s.io", "resourceclaims", "use")
    DEVICES_TEMPLATE = ("ResourceClaimTemplate", "resource.k8s.io", "resourceclaimtemplates", "use")
    SNAPSHOT = ("VolumeSnapshot", "snapshot.storage.k8s.io", "volumesnapshots", "use")
    OTHER_SOURCE = ("data source", "", "pods", "create")
    """A source of a volume's content that only those may use who may create pods."""

    def __init__(self, kind: str, group: str, resource: str, verb: str) -> None:
        self.kind = kind
        self.group = group
        self.resource = resource
        self.verb = verb
        """What reading the object's content would take; `use` where the API server has no verb for that."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A field of a job that names an object."""

    field: str
    kind: Kind
    name: str


def references(job: JobSpec) -> tuple[Reference, ...]:
    """Returns everything that a job names in its namespace, in the order of its fields; each object once."""
    found: dict[tuple[Kind, str], Reference] = {}
    for one in _references(job):
        found.setdefault((one.kind, one.name), one)
    return tuple(found.values())


def _references(job: JobSpec) -> Iterator[Reference]:
    for named in named_objects(job):
        yield Reference(field=named.field, kind=_BY_NAME[named.kind], name=named.name)
    if archive := archive_of(job):
        for name in config_maps_of(archive):
            yield Reference(field="workdir.archive", kind=Kind.CONFIG_MAP, name=name)
    for role_name, role in job.roles.items():
        place = f"roles.{role_name}.pod_template.spec"
        spec = _mapping(role.pod_template.get("spec"))
        for field in ("serviceAccountName", "serviceAccount"):
            # Every pod of the namespace has the account `default`.
            if isinstance(name := spec.get(field), str) and name not in ("", "default"):
                yield Reference(field=f"{place}.{field}", kind=Kind.SERVICE_ACCOUNT, name=name)
        yield from _references_in(spec, place)


_BY_NAME = {NamedKind.SECRET: Kind.SECRET, NamedKind.CLAIM: Kind.CLAIM}
"""The kinds that fields of a job name by their types; pod templates have fields of Kubernetes' own."""

_BY_FIELD: Mapping[str, tuple[Kind, str]] = {
    "configMap": (Kind.CONFIG_MAP, "name"),
    "configMapKeyRef": (Kind.CONFIG_MAP, "name"),
    "configMapRef": (Kind.CONFIG_MAP, "name"),
    "imagePullSecrets": (Kind.SECRET, "name"),
    "azureFile": (Kind.SECRET, "secretName"),
    "persistentVolumeClaim": (Kind.CLAIM, "claimName"),
}
"""Fields of a pod whose values name an object, and the key that holds the name."""

_SOURCES = {kind.kind: kind for kind in (Kind.CLAIM, Kind.SNAPSHOT)}
"""Objects whose content becomes that of a new volume."""


def _references_in(value: Any, place: str) -> Iterator[Reference]:
    """Yields what a value of a pod names, however deep; a form that the API server does not know names nothing."""
    if isinstance(value, list):
        for item in cast("list[Any]", value):
            label = _mapping(item).get("name")
            yield from _references_in(item, f"{place}.{label}" if isinstance(label, str) else place)
        return
    for field, inner in _mapping(value).items():
        inside = f"{place}.{field}"
        for one in cast("list[Any]", inner) if isinstance(inner, list) else [inner]:
            for kind, name in _names_in_field(field, _mapping(one)):
                if isinstance(name, str) and name:
                    yield Reference(field=inside, kind=kind, name=name)
        yield from _references_in(inner, inside)


def _names_in_field(field: str, value: Mapping[str, Any]) -> Iterator[tuple[Kind, Any]]:
    if field in ("dataSource", "dataSourceRef"):
        yield _SOURCES.get(str(value.get("kind")), Kind.OTHER_SOURCE), value.get("name")
    elif field == "secret":
        # A volume has the one, a projected volume's source the other; the API server drops the key that it ignores.
        yield Kind.SECRET, value.get("secretName")
        yield Kind.SECRET, value.get("name")
    elif field.endswith(("secretRef", "SecretRef", "secretKeyRef")):
        yield Kind.SECRET, value.get("name")
    elif field == "resourceClaims":
        yield Kind.DEVICES, value.get("resourceClaimName")
        yield Kind.DEVICES_TEMPLATE, value.get("resourceClaimTemplateName")
    elif field in _BY_FIELD:
        kind, key = _BY_FIELD[field]
        yield kind, value.get(key)


def _mapping(value: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}
