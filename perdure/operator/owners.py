"""Checks that a job uses nothing that its object's owner may not use.

A pod may use every Secret, claim and service account of its namespace. So a user who may create pods has these rights
already, and nothing is checked for such a user; for all others each object that the job names is. The API server
answers with its own authorizers, as if the owner had asked.

The owner is recorded in the object by the cluster's admission policies (`owners.yaml` of the chart). Before the record
is believed, the operator asks the API server to forge it, without effect: where no policy prevents that, the record
proves nothing.
"""

from __future__ import annotations

import asyncio
from typing import Any

from perdure.base.kubernetes import KubernetesApi
from perdure.base.kubernetes_errors import KubernetesError
from perdure.operator.ownership import Ownership
from perdure.operator.references import Kind, Reference, references
from perdure.operator.resource import Owner, TrainingJobResource
from perdure.spec.errors import format_value
from perdure.spec.job import JobSpec

_FORGED = Owner(username="perdure:forged-by-the-operator")


class Owners:
    """The owners of objects, and their rights."""

    def __init__(self, api: KubernetesApi, ownership: Ownership = Ownership.REQUIRE) -> None:
        self._api = api
        self._ownership = ownership

    def name_of(self, resource: TrainingJobResource) -> str:
        """The name of the object's owner; empty if the cluster records none."""
        return resource.owner.username if resource.owner and self._ownership is not Ownership.IGNORE else ""

    async def refusal(self, resource: TrainingJobResource, job: JobSpec) -> str:
        """Returns why the owner may not run this job; empty if the owner may.

        Raises:
            KubernetesError: if the API server does not permit the operator to ask.
        """
        if self._ownership is Ownership.IGNORE:
            return ""
        owner = resource.owner
        if owner is None:
            return "" if self._ownership is Ownership.ACCEPT_UNKNOWN else _UNKNOWN_OWNER
        if not await self._is_protected(resource):
            return _UNPROTECTED
        namespace = resource.metadata.namespace
        named = references(job)
        if not named or await self._may(owner, namespace, verb="create", resource="pods"):
            return ""
        allowed = await asyncio.gather(*(self._may_use(owner, namespace, one) for one in named))
        lacking = [one for one, is_allowed in zip(named, allowed, strict=True) if not is_allowed]
        return "\n".join(_lacks(owner, namespace, one) for one in lacking)

    async def _may_use(self, owner: Owner, namespace: str, one: Reference) -> bool:
        kind = one.kind
        return await self._may(
            owner, namespace, verb=kind.verb, group=kind.group, resource=kind.resource, name=one.name
        )

    async def _may(self, owner: Owner, namespace: str, **attributes: str) -> bool:
        review: dict[str, Any] = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "LocalSubjectAccessReview",
            "metadata": {"namespace": namespace},
            "spec": {
                "user": owner.username,
                "uid": owner.uid,
                "groups": list(owner.groups),
                "resourceAttributes": {"namespace": namespace, **attributes},
            },
        }
        path = f"/apis/authorization.k8s.io/v1/namespaces/{namespace}/localsubjectaccessreviews"
        return bool((await self._api.create(path, review))["status"]["allowed"])

    async def _is_protected(self, resource: TrainingJobResource) -> bool:
        """Returns whether the API server prevents the operator from changing the recorded owner."""
        forged = {"metadata": {"uid": resource.metadata.uid}, "owner": _FORGED.model_dump(by_alias=True, mode="json")}
        try:
            answer = await self._api.patch(resource.path, forged, dry_run=True)
        except KubernetesError as error:
            if error.status == 422:
                return True
            raise
        return answer is None or TrainingJobResource.model_validate(answer).owner != _FORGED


_UNKNOWN_OWNER = (
    "owner: none is recorded, so nothing is known about the rights of the user who wrote the specification. "
    "The cluster's admission policies record the owner when an object is created: delete the object and apply it again"
)
_UNPROTECTED = (
    "owner: the API server lets users write this field, so it proves nothing. Install the admission policies of the "
    "chart (operator.owners), which record the owner"
)


def _lacks(owner: Owner, namespace: str, one: Reference) -> str:
    kind: Kind = one.kind
    resource = f"{kind.resource}.{kind.group}" if kind.group else kind.resource
    return (
        f"{one.field}: got {format_value(one.name)}; the object's owner {format_value(owner.username)} may not use the "
        f"{kind.kind}, which takes the right to {kind.verb} {resource}/{one.name}, or to create pods, in the namespace "
        f"{namespace}"
    )
