"""A `TrainingJob` object of the API server, and the job that it describes."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from pydantic import Field, JsonValue, TypeAdapter, ValidationError

from perdure.base.words import count
from perdure.contract.names import job_workflow_id
from perdure.operator.status import Part, ResourceStatus
from perdure.spec.backends import SpecWarning
from perdure.spec.durations import parse_duration
from perdure.spec.errors import SpecError, SpecProblem, format_value
from perdure.spec.job import Backend, JobSpec
from perdure.spec.role_relations import roles_that_end
from perdure.spec.roles import NodeCount, Role
from perdure.spec.validate import refuse_large, validate_spec

GROUP = "perdure.dev"
VERSION = "v1alpha1"
KIND = "TrainingJob"
PLURAL = "trainingjobs"

FINALIZER = f"{GROUP}/job"
"""The finalizer that keeps an object until its job has ended and the job's nodes are gone."""


OWN_FIELDS = ("suspend", "replicas")
"""Fields of an object's `spec` that no job has, and `suspend` no role of one. `replicas` is what `kubectl scale` and
autoscalers set."""

_ROLES = TypeAdapter(dict[str, Role])


SCALED_ROLES = f"{GROUP}/scaled-roles"
"""The annotation with the numbers of nodes of roles that ScalePlans have set. It is no part of `spec`, which the
operator does not write for others: that would make it the object's owner."""

AUTOSCALERS = ("kube-controller-manager", "keda")
"""The names under which autoscalers write: those of HorizontalPodAutoscalers, with which KEDA scales, too, and KEDA."""


class ManagedFields(Part):
    """The fields of an object that one writer has set."""

    manager: str = ""
    """The program that wrote them."""
    fields_v1: dict[str, JsonValue] = Field(default={}, alias="fieldsV1")

    @property
    def has_replicas(self) -> bool:
        """Whether `spec.replicas` is one of them."""
        spec = self.fields_v1.get("f:spec")
        return isinstance(spec, dict) and "f:replicas" in spec


class ScaledRole(Part):
    """The number of nodes of a role that a ScalePlan has set."""

    stated: str
    """The number that the object stated then: once it states another one, that counts."""
    nodes: int = Field(ge=1)
    plan: str
    """The name of the plan."""


_SCALED = TypeAdapter(dict[str, ScaledRole])


class Metadata(Part):
    """The fields of an object's metadata that the operator reads."""

    name: str
    namespace: str
    uid: str
    """The object's UID: an object that is deleted and created again gets another one."""
    resource_version: str = ""
    generation: int = 0
    """Counts the changes of `spec`."""
    deletion_timestamp: datetime | None = None
    finalizers: tuple[str, ...] = ()
    managed_fields: tuple[ManagedFields, ...] = ()
    annotations: dict[str, str] = Field(default={})

    @property
    def version(self) -> int:
        """Grows with each change of the object; Kubernetes' own clients compare it in the same way."""
        return int(self.resource_version)


class Owner(Part):
    """The user whose rights a job has, as the API server knows them."""

    username: str
    """The name that the API server authenticated."""
    uid: str = ""
    """The user's uid, if the API server knows one."""
    groups: tuple[str, ...] = ()
    """The user's groups at that time."""


class TrainingJobResource(Part):
    """One `TrainingJob` object."""

    metadata: Metadata
    owner: Owner | None = None
    """The user who wrote `spec`, recorded by the cluster's admission policy; None if no policy has recorded one."""
    spec: dict[str, JsonValue] = Field(default={})
    status: ResourceStatus = ResourceStatus()

    @property
    def path(self) -> str:
        """The object's path in the API."""
        return f"{collection(self.metadata.namespace)}/{self.metadata.name}"

    @property
    def workflow_id(self) -> str:
        """The workflow ID of its job in Temporal."""
        return job_workflow_id(self.metadata.namespace, self.metadata.name)

    @property
    def deleting(self) -> bool:
        """Whether its deletion has been requested."""
        return self.metadata.deletion_timestamp is not None

    @property
    def suspended(self) -> bool:
        """Whether the job should have no nodes."""
        of_roles = self.spec.get("roles")
        only_role = isinstance(of_roles, dict) and len(of_roles) == 1 and True in self.suspensions.values()
        return self.spec.get("suspend") is True or self.spec.get("replicas") == 0 or only_role

    @property
    def suspensions(self) -> Mapping[str, bool]:
        """The roles that state whether they should have no nodes."""
        roles = self.spec.get("roles")
        stated = {name: role.get("suspend") for name, role in _mappings(roles)}
        return {name: value for name, value in stated.items() if isinstance(value, bool)}

    @property
    def time_to_live(self) -> timedelta | None:
        """The time for which the object is kept after its job has ended; None where it is kept indefinitely."""
        try:
            return parse_duration(self.spec.get("ttl_after_finished"))
        except ValueError:
            # It is unset, or its value is wrong and refused elsewhere.
            return None

    @property
    def leading_role(self) -> str | None:
        """The role whose nodes `replicas` sets, and whose world the status shows: the first one that ends the job; None
        where the roles have a wrong form."""
        try:
            roles = _ROLES.validate_python(_of_job(self.spec.get("roles")))
        except ValidationError:
            return None
        return next(iter(roles_that_end(roles)), None)

    @property
    def scaled_roles(self) -> Mapping[str, ScaledRole]:
        """The roles whose numbers of nodes ScalePlans have set, apart from the leading one's."""
        try:
            return _SCALED.validate_json(self.metadata.annotations.get(SCALED_ROLES, "{}"))
        except ValidationError:
            # Another program has written it.
            return {}

    def stated_nodes(self, role: str) -> str:
        """The number of nodes that the object states for a role; empty where it has a wrong form."""
        roles = dict(_mappings(self.spec.get("roles")))
        try:
            return str(NodeCount.model_validate(roles[role].get("nodes"))) if role in roles else ""
        except ValidationError:
            return ""

    @property
    def autoscaler(self) -> str:
        """The autoscaler that alone has set `replicas`; empty where a user has, or its writer is not known."""
        writers = {one.manager for one in self.metadata.managed_fields if one.has_replicas}
        return min(writers) if writers and writers <= set(AUTOSCALERS) else ""

    def job(self) -> tuple[JobSpec, tuple[SpecWarning, ...]]:
        """The job that the object describes, and warnings about it.

        Raises:
            SpecError: if it cannot run, with the text of `perdure validate`.
        """
        refuse_large([self.spec, self.metadata.annotations.get(SCALED_ROLES, "")])
        fields = {name: value for name, value in self.spec.items() if name not in OWN_FIELDS}
        fields["roles"] = _of_job(fields.get("roles"))
        for name, scaled in self.scaled_roles.items():
            if scaled.stated and scaled.stated == self.stated_nodes(name):
                fields["roles"] = _scaled(fields["roles"], name, scaled.nodes)
        roles = fields["roles"]
        replicas = self.spec.get("replicas")
        advice: tuple[SpecWarning, ...] = ()
        if isinstance(replicas, int) and replicas > 0:
            if autoscaler := self.autoscaler:
                replicas, advice = _within(fields["roles"], self.leading_role, replicas, autoscaler)
            if replicas is not None:
                fields["roles"] = _scaled(roles, self.leading_role, replicas)
        own = {name: f"the object's metadata sets it: {value}" for name, value in self._identity().items()}
        if doubled := [
            SpecProblem(location=(name,), value=format_value(fields[name]), message=text, hint="remove it")
            for name, text in own.items()
            if name in fields
        ]:
            raise SpecError(doubled)
        described = {"backend": Backend.KUBERNETES.value, **fields, **self._identity()}
        if _leaves_no_choice(roles, fields["roles"], self.leading_role):
            # A policy that chooses within the object's range is none that is wrong: it has no choice for now.
            job, warnings = validate_spec({**described, "roles": roles})
            return _with_nodes(job, self.leading_role, fields["roles"]), (*warnings, *advice)
        job, warnings = validate_spec(described)
        return job, (*warnings, *advice)

    def _identity(self) -> Mapping[str, Any]:
        return {"name": self.metadata.name, "namespace": self.metadata.namespace}


def _mappings(roles: JsonValue) -> list[tuple[str, dict[str, JsonValue]]]:
    """The roles whose form is right."""
    named = roles.items() if isinstance(roles, dict) else ()
    return [(name, role) for name, role in named if isinstance(role, dict)]


def _of_job(roles: JsonValue) -> JsonValue:
    """The roles as a job has them. A form that is wrong is left for validation to refuse."""
    if not isinstance(roles, dict):
        return roles
    known = dict(_mappings(roles))
    return {
        name: {field: value for field, value in known[name].items() if field != "suspend"} if name in known else role
        for name, role in roles.items()
    }


def _scaled(roles: JsonValue, name: str | None, replicas: int) -> JsonValue:
    """The roles with another number of nodes of one of them: of a range, `replicas` is the upper limit. A form that is
    wrong is left for validation to refuse."""
    role = roles.get(name) if isinstance(roles, dict) and name else None
    if not isinstance(roles, dict) or not isinstance(role, dict) or not name:
        return roles
    nodes = NodeCount.model_validate(role.get("nodes"))
    least = min(nodes.min, replicas) if nodes.elastic else replicas
    return {**roles, name: {**role, "nodes": {"min": least, "max": replicas, "unit": nodes.unit}}}


def _nodes_of(roles: JsonValue, name: str | None) -> NodeCount | None:
    """The number of nodes of a role; None where it states none, or a wrong one."""
    role = roles.get(name) if isinstance(roles, dict) and name else None
    try:
        return NodeCount.model_validate(role.get("nodes")) if isinstance(role, dict) else None
    except ValidationError:
        return None


def _leaves_no_choice(before: JsonValue, scaled: JsonValue, name: str | None) -> bool:
    """Whether `replicas` makes a fixed number of a range."""
    if before is scaled:
        return False
    stated, now = _nodes_of(before, name), _nodes_of(scaled, name)
    return stated is not None and now is not None and stated.elastic and not now.elastic


def _with_nodes(job: JobSpec, name: str | None, scaled: JsonValue) -> JobSpec:
    nodes = _nodes_of(scaled, name)
    if name not in job.roles or nodes is None:
        return job
    role = job.roles[name].model_copy(update={"nodes": nodes})
    return job.model_copy(update={"roles": {**job.roles, name: role}})


def _within(
    roles: JsonValue, name: str | None, replicas: int, autoscaler: str
) -> tuple[int | None, tuple[SpecWarning, ...]]:
    """The number of nodes nearest to what an autoscaler asks for, of those that the role allows, None where the job
    chooses it itself; a warning where it is another one."""
    role = roles.get(name) if isinstance(roles, dict) and name else None
    if not isinstance(role, dict):
        return replicas, ()
    nodes = NodeCount.model_validate(role.get("nodes"))
    if nodes.auto:
        message = (
            f"{autoscaler} asks for {count(replicas, 'node')}, and nodes of role {name} is auto: the job keeps the "
            "number that it has chosen"
        )
        return None, (SpecWarning(location=("replicas",), message=message),)
    nearest = min(max(replicas - replicas % nodes.unit, nodes.min), nodes.max)
    if nearest == replicas:
        return replicas, ()
    message = (
        f"{autoscaler} asks for {count(replicas, 'node')}, and nodes of role {name} is {nodes}: the job has {nearest}"
    )
    return nearest, (SpecWarning(location=("replicas",), message=message),)


def collection(namespace: str | None = None) -> str:
    """The path of all objects of a namespace, or of all namespaces."""
    within = f"namespaces/{namespace}/" if namespace else ""
    return f"/apis/{GROUP}/{VERSION}/{within}{PLURAL}"
