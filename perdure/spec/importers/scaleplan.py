"""Reads DLRover's ScalePlan: numbers of nodes, their resources, and pods to add, remove and replace.

Its definition changed several times before DLRover removed it, so all of its spellings are read: `replicaResourceSpec`
and `replicaResourceSpecs`, `randIndex` and `rankIndex`, pods by their name alone or as a mapping, resources as numbers
or as texts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ..errors import SpecError, SpecProblem
from ..load import SpecDocument, read_documents
from ..quantities import is_quantity
from ..validate import refuse_large
from .reader import Field, Source, SourceWarning, as_mapping

GROUP: Final = "elastic.iml.github.io"
VERSION: Final = "v1alpha1"
KIND: Final = "ScalePlan"
PLURAL: Final = "scaleplans"

_JOB_LABELS: Final = ("elasticjob.dlrover/name", "elasticjob-name")
_RESOURCES: Final = ("cpu", "memory", "gpu")
_GPUS: Final = "nvidia.com/gpu"
_POD_NAME: Final = re.compile(r"-(?P<role>[a-z][a-z0-9]*)-(?P<rank>[0-9]{1,9})$")
"""The end of the names that DLRover gives to pods: `JOB-edljob-TYPE-ID`, and in its examples `JOB-TYPE-ID`."""
_OWN_POD_NAME: Final = re.compile(r"-(?P<role>[a-z][a-z0-9]*)-(?P<rank>[0-9]{1,9})-[0-9a-f]{8}\d+$")
"""The end of the names of Perdure's pods: `JOB-ROLE-RANK-UID`, with the incarnation after the uid's 8 digits."""


@dataclass(frozen=True, kw_only=True)
class PlannedRole:
    """What a plan states of one role."""

    place: Field
    nodes: int | None = None
    """The number of nodes; None where only resources are stated."""
    resources: Mapping[str, str] = field(default_factory=dict[str, str])
    """What each node requests of `cpu`, `memory` and `gpu`."""


@dataclass(frozen=True, kw_only=True)
class PlannedPod:
    """A pod that a plan adds, removes or replaces."""

    place: Field
    role: str
    rank: int | None
    """Its node in the role; None for a new one without a number."""
    resources: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, kw_only=True)
class ScalePlan:
    """A plan for one job."""

    source: Source
    name: str
    job: str
    roles: Mapping[str, PlannedRole]
    created: tuple[PlannedPod, ...]
    removed: tuple[PlannedPod, ...]
    migrated: tuple[PlannedPod, ...]

    @property
    def warnings(self) -> tuple[SourceWarning, ...]:
        """The fields that have no effect, with the reason."""
        return tuple(self.source.warnings())


def read_scale_plan_file(source: str | Path) -> ScalePlan:
    """Reads the one plan of a file, or of its text.

    Raises:
        SpecError: if there is not exactly one plan, or a field has no meaning.
        OSError: if the file cannot be read.
    """
    documents = read_documents(source)
    if len(documents) != 1:
        problem = SpecProblem(location=("document",), value=f"{len(documents)} documents", expected="one ScalePlan")
        raise SpecError([problem])
    return read_scale_plan(documents[0])


def read_scale_plan(document: SpecDocument) -> ScalePlan:
    """Reads a plan.

    Raises:
        SpecError: if it is none, or a field has no meaning.
    """
    source = Source(document.data, lines=document.lines)
    plan = _read(source)
    if source.problems:
        raise SpecError(source.problems)
    return plan


def _read(source: Source) -> ScalePlan:
    root = source.root
    if (content := as_mapping(root.value)) is not None:
        # The API server and operators write the other two parts.
        refuse_large({name: value for name, value in content.items() if name not in ("metadata", "status")})
    if as_mapping(root.value) is None or root["kind"].value != KIND:
        root["kind"].wrong(KIND)
    elif root["apiVersion"].value != f"{GROUP}/{VERSION}":
        root["apiVersion"].wrong(f"{GROUP}/{VERSION}")
    if source.problems:
        raise SpecError(source.problems)
    for name in ("apiVersion", "kind", "metadata", "status"):
        root[name].settle()
    spec = root["spec"]
    spec["manualScaling"].boolean()
    spec["manualScaling"].settle()
    spec["psHosts"].drop("a job itself gives its roles the addresses of its nodes")
    return ScalePlan(
        source=source,
        name=str(root["metadata"]["name"].value or ""),
        job=_job_of(root),
        roles=_roles_of(spec),
        created=_pods_of(spec["createPods"], are_new=True),
        removed=_pods_of(spec["removePods"]),
        migrated=_pods_of(spec["migratePods"]),
    )


def _job_of(root: Field) -> str:
    """Returns the job that the plan is for; empty where it names none."""
    owner = root["spec"]["ownerJob"]
    stated = owner.text() or ""
    owner.settle()
    labels = root["metadata"]["labels"]
    for name in _JOB_LABELS:
        label = labels[name]
        if stated and label.present and label.value != stated:
            label.wrong(f'"{stated}", as spec.ownerJob states')
        stated = stated or str(label.value or "")
    return stated


def _roles_of(spec: Field) -> dict[str, PlannedRole]:
    found: dict[str, PlannedRole] = {}
    for spelling in ("replicaResourceSpecs", "replicaResourceSpec"):
        for name, stated in spec[spelling].entries().items():
            role = name.lower()
            if role in found:
                stated.refuse(f"the role {role} is stated twice")
                continue
            replicas = stated["replicas"]
            nodes = replicas.integer(least=1)
            replicas.settle()
            found[role] = PlannedRole(place=stated, nodes=nodes, resources=_resources_of(stated["resource"]))
    return found


def _pods_of(pods: Field, *, are_new: bool = False) -> tuple[PlannedPod, ...]:
    return tuple(pod for item in pods.items() if (pod := _pod_of(item, is_new=are_new)) is not None)


def _pod_of(item: Field, *, is_new: bool) -> PlannedPod | None:
    if isinstance(item.value, str):
        item.settle()
        role, rank = _role_and_rank(item.value)
        return _planned(item, role, rank, {}, is_new=is_new)
    if as_mapping(item.value) is None:
        item.wrong("the name of a pod, or a mapping with its name")
        return None
    item["service"].drop("a job itself gives its roles the addresses of its nodes")
    name = item["name"].text() or ""
    of_name, rank_of_name = _role_and_rank(name)
    kind, number = item["type"].text(), item["id"].integer()
    ranks = [item[spelling].integer() for spelling in ("rankIndex", "randIndex")]
    for known in ("name", "type", "id", "rankIndex", "randIndex"):
        item[known].settle()
    rank = next((one for one in (*ranks, number, rank_of_name) if one is not None), None)
    role = kind.lower() if kind else of_name
    return _planned(item, role, rank, _resources_of(item["resource"]), is_new=is_new)


def _planned(
    item: Field, role: str, rank: int | None, resources: Mapping[str, str], *, is_new: bool
) -> PlannedPod | None:
    if not role:
        item.wrong("the name of a pod that ends with its type and number, such as job-edljob-worker-0, or its type")
        return None
    if rank is None and not is_new:
        item.wrong("the number of the node: rankIndex, id, or a name that ends with it, such as job-edljob-worker-0")
        return None
    return PlannedPod(place=item, role=role, rank=rank, resources=resources)


def _role_and_rank(name: str) -> tuple[str, int | None]:
    for pattern in (_POD_NAME, _OWN_POD_NAME):
        if found := pattern.search(name):
            return found["role"], int(found["rank"])
    return "", None


def _resources_of(stated: Field) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in stated.entries().items():
        resource = "gpu" if name == _GPUS else name
        if resource not in _RESOURCES:
            value.refuse("of the resources of a job that runs, only cpu and memory can change")
            continue
        text = str(value.value)
        if not is_quantity(text):
            value.wrong('an amount such as "4", 500m or 64Gi')
            continue
        if resource == "memory" and text.isdecimal():
            value.wrong("a unit, such as Mi", hint="DLRover's releases read such a number as bytes or as megabytes")
            continue
        value.settle()
        found[resource] = text
    return found
