"""The site's policy: limits on the pods of jobs, regardless of who started the workflow.

Anyone who can reach Temporal can write a job, and the worker has rights that its users lack. So the policy is checked
where the pod is created. Everything that gives power over a machine, the cluster or other users is denied unless the
policy allows it; its defaults run ordinary training jobs.

    namespaces: ["team-*"]
    service_accounts: [default, training]
    capabilities: [IPC_LOCK]              # RDMA
    host_paths: [/dev/infiniband]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any, Literal, cast

import yaml
from pydantic import Field, ValidationError, field_validator

from activities.nodes.kubernetes.merge import paths
from perdure.spec.base import Section
from perdure.spec.errors import format_path, format_value

_Patterns = tuple[str, ...]

ORDINARY_FIELDS = (
    *("metadata.labels", "metadata.annotations"),
    *("spec.containers", "spec.initContainers", "spec.volumes", "spec.resourceClaims", "spec.imagePullSecrets"),
    *("spec.affinity", "spec.nodeSelector", "spec.tolerations", "spec.topologySpreadConstraints"),
    *("spec.schedulerName", "spec.priorityClassName", "spec.dnsConfig", "spec.dnsPolicy", "spec.hostAliases"),
    *("spec.securityContext", "spec.serviceAccountName", "spec.automountServiceAccountToken"),
    *("spec.runtimeClassName", "spec.hostNetwork", "spec.hostPID", "spec.hostIPC"),
)
"""Fields of a pod template that a job may set. Rules on values restrict some of them further. Among those left out are
`nodeName`, which evades the scheduler, and `shareProcessNamespace`, which shows training code the agent's processes."""

CONTROL_PLANE = ("app.kubernetes.io/name", "perdure")
"""A label of the control plane's own pods, by which the chart's Services and network policies select them."""

AGENT_MOUNTS = "/mnt"
"""The folder of the agent's container beneath which a job may mount volumes: nothing runs from there."""

ORDINARY_VOLUMES = ("configMap", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret")
"""Volumes of the job's own namespace. PodSecurity's level `restricted` allows the same, and `csi`, which may carry
credentials of its own."""


class PolicyAddition(Section):
    """What a preset allows beyond the site's policy, in the policy's own fields; namespaces and numbers stay."""

    images: _Patterns = ()
    template_fields: tuple[str, ...] = ()
    service_accounts: _Patterns = ()
    service_account_tokens: bool = False
    secrets: _Patterns = ()
    volumes: _Patterns = ()
    host_paths: _Patterns = ()
    host_namespaces: tuple[Literal["network", "pid", "ipc"], ...] = ()
    privileged: bool = False
    run_as_root: bool = False
    capabilities: _Patterns = ()
    sysctls: _Patterns = ()
    runtime_classes: _Patterns = ()
    agent_variables: _Patterns = ()

    @field_validator("*")
    @classmethod
    def _only_adds(cls, value: _Patterns | bool) -> _Patterns | bool:
        if isinstance(value, tuple) and (excluding := [one for one in value if one.startswith("!")]):
            raise ValueError(f"{excluding[0]} excludes names, and an addition only includes more")
        return value


class SitePolicy(Section):
    """The limits on the pods of jobs.

    Names are glob patterns, such as `team-*`; a pattern that begins with `!` excludes what others include.
    """

    namespaces: _Patterns = ("*", "!kube-*")
    """Namespaces that jobs may use."""
    images: _Patterns = ("*",)
    """Images of all containers, such as `images.example/ml/*`."""
    template_fields: tuple[str, ...] = ORDINARY_FIELDS
    """Fields of `pod_template` that a job may set, with all below them: `spec.nodeSelector`,
    `spec.containers.training.env`."""
    service_accounts: _Patterns = ("default",)
    """Service accounts of pods."""
    service_account_tokens: bool = False
    """Pods may mount tokens for the API server."""
    secrets: _Patterns = ("*",)
    """Secrets of the job's namespace that a pod may use, in variables, volumes, or to pull images. Perdure's own
    Secrets are never among them."""
    volumes: _Patterns = ORDINARY_VOLUMES
    """Types of volumes, besides `hostPath`."""
    host_paths: _Patterns = ()
    """Folders and files of the machine that a pod may mount. Each allows all below it."""
    host_namespaces: tuple[Literal["network", "pid", "ipc"], ...] = ()
    """The machine's namespaces that a pod may share. `network` includes its ports."""
    privileged: bool = False
    """Containers may be privileged, gain privileges, and run without seccomp and AppArmor."""
    run_as_root: bool = False
    """Containers may run as root. Those that say nothing run as the user 1000."""
    capabilities: _Patterns = ()
    """Capabilities that a container may add, such as `IPC_LOCK`."""
    sysctls: _Patterns = ()
    """Kernel parameters that a pod may set."""
    runtime_classes: _Patterns = ()
    """Runtime classes that a pod may name."""
    agent_variables: _Patterns = (
        *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION"),
        *("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AZURE_STORAGE_*", "GOOGLE_APPLICATION_CREDENTIALS"),
    )
    """Variables that a job may give its agents, which copy logs to its storage. A variable that names a configuration
    file, such as `AWS_CONFIG_FILE`, or makes Python load other code lets the job run commands as its agent."""
    max_nodes: int | None = Field(default=None, ge=1)
    """Nodes in one namespace at the same time; unset: no limit."""
    max_gpus: int | None = Field(default=None, ge=0)
    """GPUs of all nodes in one namespace at the same time; unset: no limit."""

    @classmethod
    def parse(cls, text: str) -> SitePolicy:
        """Reads a policy from YAML.

        Raises:
            ValueError: if it is not a policy; the message names each field and what is wrong with it.
        """
        try:
            return cls.model_validate(yaml.safe_load(text) or {})
        except ValidationError as error:
            why = "; ".join(f"{format_path(one['loc'])}: {one['msg']}" for one in error.errors(include_url=False))
        except yaml.YAMLError as error:
            why = " ".join(str(error).split())
        raise ValueError(f"the site policy is wrong: {why}")

    def with_addition(self, addition: PolicyAddition) -> SitePolicy:
        """Returns the policy with an addition. What the policy excludes by `!` stays excluded."""
        added: dict[str, Any] = {}
        for name, more in addition:
            own = getattr(self, name)
            added[name] = (*own, *more) if isinstance(own, tuple) else own or more
        return self.model_copy(update=added)

    def shortage(self, pods: Sequence[Mapping[str, Any]]) -> str:
        """Returns the first limit that these pods of one namespace exceed together; empty if they exceed none."""
        if self.max_nodes is not None and len(pods) > self.max_nodes:
            return f"{len(pods)} nodes, and the site's policy allows {self.max_nodes} (max_nodes)"
        gpus = sum(map(_gpus, pods))
        if self.max_gpus is not None and gpus > self.max_gpus:
            return f"{gpus} GPUs, and the site's policy allows {self.max_gpus} (max_gpus)"
        return ""


def is_over(pod: Mapping[str, Any]) -> bool:
    """Returns whether a pod has ended and uses no resources any more."""
    return _section(pod, "status").get("phase") in ("Succeeded", "Failed")


def _gpus(pod: Mapping[str, Any]) -> int:
    """Counts the GPUs of all vendors that name them `VENDOR/gpu`."""
    containers = cast("Sequence[Mapping[str, Any]]", pod["spec"]["containers"])
    limits = (_section(_section(container, "resources"), "limits") for container in containers)
    return sum(int(count) for one in limits for name, count in one.items() if name.endswith("/gpu"))


@dataclass(frozen=True, kw_only=True)
class Violation:
    """A field of a job or of its pod that the policy does not allow."""

    field: str
    value: str
    rule: str
    """The policy's field that decides, and what it allows."""

    def __str__(self) -> str:
        return f"{self.field}: got {self.value}; the site's policy allows {self.rule}"


@dataclass(frozen=True, kw_only=True)
class Reserved:
    """Parts of each pod that are Perdure's own: no job may change or use them."""

    containers: tuple[str, ...] = ()
    agent: str = ""
    """The one among them that a job may give the credentials of its storage."""
    volumes: tuple[str, ...] = ()
    """Volumes that only reserved containers mount."""
    run_volume: str = ""
    """The volume that reserved containers prepare for the training: no init container of a job mounts it before."""
    secrets: _Patterns = ()
    """Secrets of the pod's namespace that are the control plane's own."""
    service_accounts: _Patterns = ()
    """Service accounts of the pod's namespace that are the control plane's own."""


def violations(
    policy: SitePolicy, pod: Mapping[str, Any], *, template: Mapping[str, Any], reserved: Reserved = Reserved()
) -> tuple[Violation, ...]:
    """Checks the pod of a job against the policy.

    Args:
        policy: The site's policy.
        pod: The whole manifest, with everything that the template added to it.
        template: The job's `pod_template`.
        reserved: Perdure's own parts of the pod.
    """
    found = [
        *_of_template(policy, template, reserved),
        *_of_labels(pod),
        *_of_pod(policy, pod, reserved),
        *_of_volumes(policy, pod["spec"], reserved),
    ]
    for field, container in _containers(pod["spec"]):
        is_own = container["name"] in reserved.containers
        found += _of_variables(policy, field, container, reserved)
        if not is_own:
            found += _of_container(policy, field, container, reserved)
            found += _of_sources(policy, field, container, reserved)
    return tuple(found)


def violation_of_namespace(policy: SitePolicy, namespace: str) -> Violation | None:
    """Returns why no job may use a namespace; None if jobs may."""
    if matches(policy.namespaces, namespace):
        return None
    return Violation(field="namespace", value=format_value(namespace), rule=_rule("namespaces", policy.namespaces))


def matches(patterns: Sequence[str], name: str) -> bool:
    """Returns whether glob patterns include a name: one matches, and no pattern that begins with `!` excludes it."""
    refused = any(fnmatchcase(name, one[1:]) for one in patterns if one.startswith("!"))
    return not refused and any(fnmatchcase(name, one) for one in patterns if not one.startswith("!"))


def _rule(name: str, allowed: Sequence[str]) -> str:
    return f"{', '.join(allowed) if allowed else 'none'} ({name})"


def _of_template(policy: SitePolicy, template: Mapping[str, Any], reserved: Reserved) -> Iterator[Violation]:
    own = [
        *(f"spec.{kind}.{name}" for kind in _CONTAINER_LISTS for name in reserved.containers),
        *(f"spec.volumes.{name}" for name in reserved.volumes),
    ]
    for path in paths(template):
        field = f"pod_template.{path}"
        if any(f"{path}.".startswith(f"{one}.") for one in own):
            if not _suits_agent(policy, path.removeprefix(f"spec.initContainers.{reserved.agent}.")):
                rule = f"only resources, mounts beneath {AGENT_MOUNTS} and variables of agent_variables"
                yield Violation(field=field, value="a change of Perdure's own parts", rule=rule)
        elif not any(f"{path}.".startswith(f"{one}.") for one in policy.template_fields):
            yield Violation(field=field, value="a value", rule="only the fields of template_fields")


def _suits_agent(policy: SitePolicy, path: str) -> bool:
    """Returns whether a job may add this to its agents: the settings that they need to copy logs to the job's
    storage."""
    kind, _, rest = path.partition(".")
    match kind:
        case "resources":
            return True
        case "env":
            return matches(policy.agent_variables, rest.partition(".")[0])
        case "volumeMounts":
            return _is_beneath(rest.removesuffix(".name").removesuffix(".readOnly"), (AGENT_MOUNTS,))
        case _:
            return False


def _of_labels(pod: Mapping[str, Any]) -> Iterator[Violation]:
    """With the labels of the control plane, a pod would receive what others send to the gateway's Service."""
    name, ours = CONTROL_PLANE
    if pod["metadata"]["labels"].get(name) == ours:
        yield Violation(
            field=f"metadata.labels.{name}", value=format_value(ours), rule="no label of Perdure's own pods"
        )


def _of_pod(policy: SitePolicy, pod: Mapping[str, Any], reserved: Reserved) -> Iterator[Violation]:
    spec: Mapping[str, Any] = pod["spec"]
    namespace = pod["metadata"]["namespace"]
    if refused := violation_of_namespace(policy, namespace):
        yield refused
    account = spec.get("serviceAccountName") or spec.get("serviceAccount") or "default"
    if matches(reserved.service_accounts, account):
        rule = "no use of Perdure's own service accounts"
        yield Violation(field="spec.serviceAccountName", value=format_value(account), rule=rule)
    elif not matches(policy.service_accounts, account):
        rule = _rule("service_accounts", policy.service_accounts)
        yield Violation(field="spec.serviceAccountName", value=format_value(account), rule=rule)
    if spec.get("automountServiceAccountToken", True) and not policy.service_account_tokens:
        yield Violation(field="spec.automountServiceAccountToken", value="true", rule="none (service_account_tokens)")
    for field, kind in (("hostNetwork", "network"), ("hostPID", "pid"), ("hostIPC", "ipc")):
        if spec.get(field) and kind not in policy.host_namespaces:
            rule = _rule("host_namespaces", policy.host_namespaces)
            yield Violation(field=f"spec.{field}", value=format_value(spec[field]), rule=rule)
    runtime = spec.get("runtimeClassName")
    if runtime and not matches(policy.runtime_classes, runtime):
        rule = _rule("runtime_classes", policy.runtime_classes)
        yield Violation(field="spec.runtimeClassName", value=format_value(runtime), rule=rule)
    security: Mapping[str, Any] = spec.get("securityContext") or {}
    for sysctl in security.get("sysctls") or ():
        if not matches(policy.sysctls, sysctl["name"]):
            rule = _rule("sysctls", policy.sysctls)
            yield Violation(field="spec.securityContext.sysctls", value=format_value(sysctl["name"]), rule=rule)
    yield from _of_confinement(policy, "spec.securityContext", security)


_CONTAINER_LISTS = ("initContainers", "containers", "ephemeralContainers")


def _containers(spec: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for kind in _CONTAINER_LISTS:
        for container in cast("Sequence[Mapping[str, Any]]", spec.get(kind) or ()):
            yield f"spec.{kind}.{container['name']}", container


def _of_container(
    policy: SitePolicy, field: str, container: Mapping[str, Any], reserved: Reserved
) -> Iterator[Violation]:
    image = container.get("image") or ""
    if not matches(policy.images, image):
        yield Violation(field=f"{field}.image", value=format_value(image), rule=_rule("images", policy.images))
    security: Mapping[str, Any] = container.get("securityContext") or {}
    if not policy.privileged:
        for name in ("privileged", "allowPrivilegeEscalation"):
            if security.get(name):
                yield Violation(field=f"{field}.securityContext.{name}", value="true", rule="none (privileged)")
        if (kind := security.get("procMount")) not in (None, "Default"):
            rule = "Default alone (privileged)"
            yield Violation(field=f"{field}.securityContext.procMount", value=format_value(kind), rule=rule)
    capabilities: Mapping[str, Any] = security.get("capabilities") or {}
    for name in capabilities.get("add") or ():
        if not policy.privileged and not matches(policy.capabilities, str(name).removeprefix("CAP_")):
            rule = _rule("capabilities", policy.capabilities)
            yield Violation(field=f"{field}.securityContext.capabilities.add", value=format_value(name), rule=rule)
    yield from _of_confinement(policy, f"{field}.securityContext", security)
    for port in cast("Sequence[Mapping[str, Any]]", container.get("ports") or ()):
        if port.get("hostPort") and "network" not in policy.host_namespaces:
            rule = _rule("host_namespaces", policy.host_namespaces)
            yield Violation(field=f"{field}.ports.hostPort", value=format_value(port["hostPort"]), rule=rule)
    for mount in cast("Sequence[Mapping[str, Any]]", container.get("volumeMounts") or ()):
        is_early = field.startswith("spec.initContainers.") and mount.get("name") == reserved.run_volume
        if is_early or mount.get("name") in reserved.volumes:
            rule = "no use of Perdure's own volumes"
            yield Violation(field=f"{field}.volumeMounts", value=format_value(mount["name"]), rule=rule)


def _of_variables(
    policy: SitePolicy, field: str, container: Mapping[str, Any], reserved: Reserved
) -> Iterator[Violation]:
    for variable in cast("Sequence[Mapping[str, Any]]", container.get("env") or ()):
        if name := _name_in(variable, "valueFrom", "secretKeyRef"):
            yield from _of_secret(policy, f"{field}.env.{variable['name']}", name, reserved)


def _of_sources(
    policy: SitePolicy, field: str, container: Mapping[str, Any], reserved: Reserved
) -> Iterator[Violation]:
    for source in cast("Sequence[Mapping[str, Any]]", container.get("envFrom") or ()):
        if name := _name_in(source, "secretRef"):
            yield from _of_secret(policy, f"{field}.envFrom", name, reserved)


def _of_confinement(policy: SitePolicy, field: str, security: Mapping[str, Any]) -> Iterator[Violation]:
    if not policy.run_as_root:
        for name, root in (("runAsUser", 0), ("runAsNonRoot", False)):
            if name in security and security[name] == root:
                yield Violation(field=f"{field}.{name}", value=format_value(root), rule="no root (run_as_root)")
    if policy.privileged:
        return
    for name in ("seccompProfile", "appArmorProfile"):
        if _section(security, name).get("type") == "Unconfined":
            yield Violation(field=f"{field}.{name}.type", value='"Unconfined"', rule="no such type (privileged)")
    if _section(security, "windowsOptions").get("hostProcess"):
        yield Violation(field=f"{field}.windowsOptions.hostProcess", value="true", rule="none (privileged)")


def _of_volumes(policy: SitePolicy, spec: Mapping[str, Any], reserved: Reserved) -> Iterator[Violation]:
    for volume in cast("Sequence[Mapping[str, Any]]", spec.get("volumes") or ()):
        field = f"spec.volumes.{volume['name']}"
        for kind in volume.keys() - {"name"}:
            if kind == "hostPath":
                path = str(volume[kind].get("path"))
                if not _is_beneath(path, policy.host_paths):
                    rule = _rule("host_paths", policy.host_paths)
                    yield Violation(field=f"{field}.hostPath.path", value=format_value(path), rule=rule)
            elif not matches(policy.volumes, kind):
                yield Violation(field=field, value=format_value(kind), rule=_rule("volumes", policy.volumes))
        for place, name in _secrets_in(volume, field):
            yield from _of_secret(policy, place, name, reserved)
        for source in cast("Sequence[Mapping[str, Any]]", _section(volume, "projected").get("sources") or ()):
            # Perdure's own volume, which no template can change, has a token for the gateway only.
            own = volume["name"] in reserved.volumes
            if "serviceAccountToken" in source and not (own or policy.service_account_tokens):
                place = f"{field}.projected.sources.serviceAccountToken"
                yield Violation(field=place, value="a token", rule="none (service_account_tokens)")
    for reference in cast("Sequence[Mapping[str, Any]]", spec.get("imagePullSecrets") or ()):
        yield from _of_secret(policy, "spec.imagePullSecrets", str(reference.get("name")), reserved)


def _secrets_in(content: Any, field: str) -> Iterator[tuple[str, str]]:
    """Finds the Secrets that a volume of any type names, with the place of each: as `secretName`, or as the `name` in
    `secret`, `secretRef`, `nodePublishSecretRef` and the like."""
    if isinstance(content, list):
        for item in cast("list[Any]", content):
            yield from _secrets_in(item, field)
    elif isinstance(content, Mapping):
        for key, value in cast("Mapping[str, Any]", content).items():
            inside = f"{field}.{key}"
            if key == "secretName":
                yield inside, str(value)
            is_reference = key == "secret" or key.lower().endswith("secretref")
            fields: Mapping[str, Any] = cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}
            if is_reference and (name := fields.get("name")):
                yield inside, str(name)
            yield from _secrets_in(value, inside)


def _of_secret(policy: SitePolicy, field: str, name: str, reserved: Reserved) -> Iterator[Violation]:
    if matches(reserved.secrets, name):
        yield Violation(field=field, value=format_value(name), rule="no use of Perdure's own Secrets")
    elif not matches(policy.secrets, name):
        yield Violation(field=field, value=format_value(name), rule=_rule("secrets", policy.secrets))


def _section(content: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    return content.get(field) or {}


def _name_in(content: Mapping[str, Any], *fields: str) -> str:
    for field in fields:
        content = _section(content, field)
    return str(content.get("name") or "")


def _is_beneath(path: str, allowed: Sequence[str]) -> bool:
    """Returns whether a path of the machine is one of these or below one; paths with `..` are not."""
    place = PurePosixPath(path)
    if ".." in place.parts or not place.is_absolute():
        return False
    return any(place.is_relative_to(one) for one in allowed)
