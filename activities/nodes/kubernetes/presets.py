"""Presets of administrators, which are merged under a job's specification.

The administrator of a cluster knows the interfaces, tolerations, limits and timeouts that its machines need; users
should not have to. A preset contains parts of a job, and limits what users may change in the pod:

    job: {env: {NCCL_NET: ofi}, timing: {lease: {timeout: 10s}}}        # any of `JOB_FIELDS`
    role: {resources: {gpu: 8}, pod_template: {spec: {…}}}              # any of `ROLE_FIELDS`, for the job's one role
    allow: [spec.nodeSelector, spec.containers.training.env]            # of the user's pod_template; all if left out
    policy: {host_paths: [/dev/infiniband]}                             # beyond the site's policy, see `Additions`

The user's own values win. The two are merged once, when the job starts, and the result is recorded in the job's
history: a later change of the preset affects later jobs only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import Field, JsonValue, ValidationError, field_validator

from perdure.activities.nodes.kubernetes.merge import merge, paths
from perdure.activities.nodes.kubernetes.site_policy import PolicyAddition
from perdure.activities.runtime import PresetRefused
from perdure.base.kubernetes import KubernetesApi, core_path
from perdure.spec.base import Section
from perdure.spec.errors import format_path, format_value, unknown_name
from perdure.spec.fields import Location

JOB_FIELDS = (
    *("labels", "queue", "priority_class", "env", "secrets", "network"),
    *("recovery", "retry", "limits", "outputs", "checkpoint", "timing"),
)
ROLE_FIELDS = (
    *("nproc_per_node", "image", "image_pull_policy", "image_pull_secrets", "python", "resources"),
    *("ports", "tolerations", "topology", "pod_template"),
)


class PresetContent(Section):
    """The content of a preset, as an administrator writes it."""

    job: dict[str, JsonValue] = Field(default={})
    role: dict[str, JsonValue] = Field(default={})
    allow: list[str] | None = None
    policy: PolicyAddition | None = None

    @field_validator("job", "role")
    @classmethod
    def _has_known_fields(cls, fields: dict[str, JsonValue], info: Any) -> dict[str, JsonValue]:
        known = JOB_FIELDS if info.field_name == "job" else ROLE_FIELDS
        for name in fields:
            if name not in known:
                raise ValueError(f"{name}: {unknown_name(name, known, what='field of a preset')}")
        return fields


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A preset as it was found in the cluster."""

    name: str
    place: str
    """The object in which its administrators change it, for messages."""
    text: str
    """The content as YAML."""
    object_name: str = ""
    """The name of that object."""


RUNTIME = "perdure.dev/runtime"
"""The label that marks a ConfigMap as a preset; its value is the preset's name."""
_KEY = "preset.yaml"


async def find_presets(api: KubernetesApi, namespace: str) -> dict[str, Preset]:
    """Returns the presets of a site, by name.

    Raises:
        PresetRefused: if two have the same name.
        KubernetesError: if the API server does not answer, or does not permit the worker to read them.
    """
    found = await api.list(core_path(namespace, "configmaps"), labels=RUNTIME)
    presets: dict[str, Preset] = {}
    for one in found:
        metadata = one["metadata"]
        name, place = metadata["labels"][RUNTIME], f"the ConfigMap {namespace}/{metadata['name']}"
        if name in presets:
            raise PresetRefused(f"runtime: {presets[name].place} and {place} are both labelled {RUNTIME}={name}")
        presets[name] = Preset(
            name=name, place=place, text=one.get("data", {}).get(_KEY, ""), object_name=metadata["name"]
        )
    return presets


def with_preset(data: Mapping[str, Any], presets: Mapping[str, Preset]) -> dict[str, Any]:
    """Merges a specification over the preset that it names.

    Args:
        data: the specification as plain data; it is valid except for the fields that the preset adds.
        presets: the presets of the site, by name.

    Returns:
        The whole specification, which still has to be validated.

    Raises:
        PresetRefused: if there is no such preset, if it is invalid, or if it does not allow what the specification
            sets.
    """
    name = str(data["runtime"])
    preset = presets.get(name)
    if preset is None:
        known = sorted(presets)
        what = unknown_name(name, known, what="preset") if known else "there are no presets here"
        raise PresetRefused(f"runtime: got {format_value(name)}; {what}")
    content = _read(preset)
    ((role_name, role),) = data["roles"].items()
    try:
        _check_allowed(preset, content, ("roles", role_name, "pod_template"), role.get("pod_template") or {})
        whole = _over(content.job, {key: value for key, value in data.items() if key != "roles"})
        return {**whole, "roles": {role_name: _over(content.role, role)}}
    except (AttributeError, KeyError, TypeError) as error:
        raise PresetRefused(
            f"runtime: the specification does not fit the preset {format_value(name)}, {preset.place}: {error}"
        ) from error


def _over(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merges field by field; a topology replaces the preset's topology as a whole."""
    under = {key: value for key, value in under.items() if not (key == "topology" and over.get(key))}
    return merge(under, over)


def _read(preset: Preset) -> PresetContent:
    try:
        return PresetContent.model_validate(yaml.safe_load(preset.text) or {})
    except ValidationError as error:
        why = "; ".join(f"{format_path(one['loc'])}: {one['msg']}" for one in error.errors(include_url=False))
    except yaml.YAMLError as error:
        why = " ".join(str(error).split())
    raise PresetRefused(
        f"runtime: the preset {format_value(preset.name)} is wrong: {why}; ask the administrator of {preset.place}"
    )


def _check_allowed(preset: Preset, content: PresetContent, place: Location, template: Mapping[str, Any]) -> None:
    allowed = content.allow
    if allowed is None:
        return
    refused = [path for path in paths(template) if not any(f"{path}.".startswith(f"{one}.") for one in allowed)]
    if refused:
        raise PresetRefused(
            f"{format_path(place)}: {', '.join(refused)} may not be set with the preset {format_value(preset.name)}, "
            f"which allows {', '.join(allowed) or 'nothing'}; remove it, or ask the administrator of {preset.place}"
        )


_REMEMBERED = 10.0
"""Seconds for which an answer about a preset is remembered: a thousand nodes are created at once."""


@dataclass(frozen=True, kw_only=True)
class Granted:
    """What a preset adds to the site's policy for the jobs of one namespace."""

    addition: PolicyAddition | None = None
    withheld: str = ""
    """Why the preset's addition does not count there; empty if it does, or if there is none."""


class Additions:
    """The additions of presets to the site's policy, for namespaces that may use them.

    Anyone may name a preset, so the name alone gives no right. As with PodSecurityPolicies, RBAC does: the namespace's
    service account `default` must have the right to `use` the preset's ConfigMap, which administrators grant to that
    account or to the group of the namespace's accounts, `system:serviceaccounts:NAMESPACE`.
    """

    def __init__(self, api: KubernetesApi, namespace: str) -> None:
        """Reads nothing yet.

        Args:
            api: the API server.
            namespace: the namespace of the presets.
        """
        self._api = api
        self._namespace = namespace
        self._answers: dict[tuple[str, str], tuple[float, asyncio.Task[Granted]]] = {}

    async def additions_for(self, name: str, namespace: str) -> Granted:
        """Returns what the preset of this name adds for jobs of a namespace.

        Raises:
            KubernetesError: if the API server does not answer, or does not permit the worker to ask.
            PresetRefused: if the preset is wrong.
        """
        key, now = (name, namespace), asyncio.get_running_loop().time()
        asked_at, asking = self._answers.get(key, (0.0, None))
        if asking is None or now - asked_at > _REMEMBERED or (asking.done() and asking.exception()):
            asking = asyncio.create_task(self._ask(name, namespace))
            self._answers[key] = (now, asking)
        return await asyncio.shield(asking)

    async def _ask(self, name: str, namespace: str) -> Granted:
        preset = (await find_presets(self._api, self._namespace)).get(name)
        addition = _read(preset).policy if preset else None
        if preset is None or addition is None:
            return Granted()
        group = "system:serviceaccounts"
        attributes = {
            "namespace": self._namespace,
            "verb": "use",
            "resource": "configmaps",
            "name": preset.object_name,
        }
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "LocalSubjectAccessReview",
            "metadata": {"namespace": self._namespace},
            "spec": {
                "user": f"system:serviceaccount:{namespace}:default",
                "groups": [group, f"{group}:{namespace}", "system:authenticated"],
                "resourceAttributes": attributes,
            },
        }
        path = f"/apis/authorization.k8s.io/v1/namespaces/{self._namespace}/localsubjectaccessreviews"
        if (await self._api.create(path, review))["status"]["allowed"]:
            return Granted(addition=addition)
        return Granted(
            withheld=f"what the preset {format_value(name)} adds to that policy does not hold in the namespace "
            f"{namespace}, whose service accounts may not use {preset.place}"
        )
