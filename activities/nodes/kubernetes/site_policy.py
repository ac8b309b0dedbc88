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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from ipaddress import ip_network
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, Field, ValidationError, field_validator

from perdure.spec.base import Quantity, Section
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
"""Fields of a pod template that a job may set. `pod_fields` has the rules on what is below them. Among those left out
are `nodeName`, which evades the scheduler, and `shareProcessNamespace`, which shows training code the agent's
processes."""

CONTROL_PLANE = ("app.kubernetes.io/name", "perdure")
"""A label of the control plane's own pods, by which the chart's Services and network policies select them."""

NEVER_OF_AGENTS = (
    *("*_FILE", "*_DIR", "*_CONFIG", "*PATH", "*_PRELOAD", "HOME", "XDG_*", "PYTHON*", "PERDURE_*", "TEMPORAL_*"),
    *("AWS_CONTAINER_*", "AWS_ENDPOINT_URL_STS", "AWS_ENDPOINT_URL_SSO*", "AZURE_AUTHORITY_HOST", "FSSPEC_*"),
)
"""Variables with which a job could have its agent read a file of the agent's own and send it away, or run code. The
site's own admission webhooks set some of them, such as `AWS_WEB_IDENTITY_TOKEN_FILE`; no policy lets jobs do so."""

AGENT_MOUNTS = "/mnt"
"""The folder of the agent's container beneath which a job may mount volumes: nothing runs from there."""

ORDINARY_VOLUMES = ("configMap", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret")
"""Volumes of the job's own namespace. PodSecurity's level `restricted` allows the same, and `csi`, which may carry
credentials of its own."""


ORDINARY_LABELS = ("project", "team", "owner", "cost-center", "environment", "experiment", "model")
"""Labels by which sites count and find their jobs. Services, network policies, meshes and cloud identities select pods
by others: a job with the label `app: shop` would receive what clients send to the shop."""

ORDINARY_ANNOTATIONS = (
    "cluster-autoscaler.kubernetes.io/safe-to-evict",
    "karpenter.sh/do-not-disrupt",
    "kubectl.kubernetes.io/default-container",
    "kubectl.kubernetes.io/default-logs-container",
)
"""Annotations that keep a pod where it is, or choose what is shown of it. Others attach networks, grant cloud roles, or
choose a container runtime's settings."""

ORDINARY_TOLERATIONS = (
    *(
        "nvidia.com/gpu",
        "amd.com/gpu",
        "gpu.intel.com/*",
        "habana.ai/gaudi",
        "google.com/tpu",
        "aws.amazon.com/neuron*",
    ),
    *("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"),
)
"""Taints of machines with accelerators, and those for which Kubernetes gives each pod a toleration of its own."""

COUNTED_RESOURCES = ("*", "!rdma/*", "!*/rdma*", "!*/hca*", "!vpc.amazonaws.com/*", "!*/efa*", "!*/vf*", "!*/sriov*")
"""Devices that are networks. Whatever else a device plugin names counts: a vendor's new name opens no hole."""


class PolicyAddition(Section):
    """What a preset allows beyond the site's policy, in the policy's own fields; namespaces and numbers stay."""

    images: _Patterns = ()
    template_fields: tuple[str, ...] = ()
    service_accounts: _Patterns = ()
    service_account_tokens: bool = False
    secrets: _Patterns = ()
    labels: _Patterns = ()
    annotations: _Patterns = ()
    priority_classes: _Patterns = ()
    tolerations: _Patterns = ()
    node_selectors: _Patterns = ()
    volumes: _Patterns = ()
    projected_sources: _Patterns = ()
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


def _is_network(text: str) -> str:
    ip_network(text)
    return text


Cidr = Annotated[str, AfterValidator(_is_network)]
"""A network, in the form of CIDR."""


class SitePolicy(Section):
    """The limits on the pods of jobs.

    Names are glob patterns, such as `team-*`; a pattern that begins with `!` excludes what others include.
    """

    namespaces: _Patterns = ("*", "!kube-*")
    """Namespaces that jobs may use."""
    images: _Patterns = ("*",)
    """Images of all containers and of volumes of the type `image`, such as `images.example/ml/*`."""
    template_fields: tuple[str, ...] = ORDINARY_FIELDS
    """Fields of `pod_template` that a job may set, with all below them: `spec.nodeSelector`,
    `spec.containers.training.env`. Fields that give power, such as `spec.nodeName`, count only by their whole path."""
    service_accounts: _Patterns = ("default",)
    """Service accounts of pods."""
    service_account_tokens: bool = False
    """Pods may mount tokens for the API server."""
    secrets: _Patterns = ("*",)
    """Secrets of the job's namespace that a pod may use, in variables, volumes, or to pull images. Perdure's own
    Secrets are never among them."""
    labels: _Patterns = ORDINARY_LABELS
    """Labels of pods, by their keys, in the job's `labels` and in `pod_template`. Perdure's own and those of the site's
    gang system are set by the worker alone."""
    annotations: _Patterns = ORDINARY_ANNOTATIONS
    """Annotations of pods, by their keys."""
    priority_classes: _Patterns = ()
    """Priority classes of pods, which let them preempt others."""
    tolerations: _Patterns = ORDINARY_TOLERATIONS
    """Taints that pods may tolerate, by their keys. A toleration of every taint needs `*`, and no exclusions."""
    node_selectors: _Patterns = ("*", "!node-role.kubernetes.io/*")
    """Labels of machines by which a pod may choose its machine."""
    volumes: _Patterns = ORDINARY_VOLUMES
    """Types of volumes, besides `hostPath`."""
    projected_sources: _Patterns = ("configMap", "downwardAPI", "secret")
    """Sources of projected volumes, besides `serviceAccountToken`."""
    max_scratch: Quantity = "50Gi"
    """Size of each `emptyDir` on the machine's disk. Those without `sizeLimit` get this one."""
    host_paths: _Patterns = ()
    """Folders and files of the machine that a pod may mount. Each allows all below it."""
    host_namespaces: tuple[Literal["network", "pid", "ipc"], ...] = ()
    """The machine's namespaces that a pod may share. `network` includes its ports, and probes and hooks that the
    kubelet sends to other hosts."""
    privileged: bool = False
    """Containers may be privileged, gain privileges, choose their SELinux type, and run without seccomp and
    AppArmor."""
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
        *("AWS_ENDPOINT_URL_S3", "AZURE_STORAGE_*", "GOOGLE_APPLICATION_CREDENTIALS"),
    )
    """Variables that a job may give its agents, which copy logs and checkpoints to its storage. Those that name a
    configuration, a file with a token or code are never among them, such as `AWS_CONFIG_FILE` and `PYTHONPATH`."""
    max_nodes: int | None = Field(default=None, ge=1)
    """Nodes in one namespace at the same time; unset: no limit."""
    max_gpus: int | None = Field(default=None, ge=0)
    """Accelerators of all nodes in one namespace at the same time; unset: no limit. A MIG slice counts as one. Pods
    with claims of dynamic resource allocation are refused then: a ResourceQuota counts their devices."""
    gpu_resources: _Patterns = COUNTED_RESOURCES
    """Resources of device plugins that `max_gpus` counts."""

    webhook_networks: tuple[Cidr, ...] = ()
    """Networks inside the site, such as `10.20.0.0/16`, whose addresses webhooks of jobs' `notifications` may have.
    Others than these and public ones are refused."""
    archive_places: tuple[str, ...] = ()
    """URLs, such as `s3://archive/jobs`, below which the worker may write archives of jobs, by their `outputs.archive`;
    it needs the credentials for them."""

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
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    """Labels that the worker itself has given the pod."""
    annotations: Mapping[str, str] = field(default_factory=dict[str, str])
    """Annotations that the worker itself has given the pod."""


def violation_of_namespace(policy: SitePolicy, namespace: str) -> Violation | None:
    """Returns why no job may use a namespace; None if jobs may."""
    if matches(policy.namespaces, namespace):
        return None
    return Violation(field="namespace", value=format_value(namespace), rule=rule_of("namespaces", policy.namespaces))


def matches(patterns: Sequence[str], name: str) -> bool:
    """Returns whether glob patterns include a name: one matches, and no pattern that begins with `!` excludes it."""
    refused = any(fnmatchcase(name, one[1:]) for one in patterns if one.startswith("!"))
    return not refused and any(fnmatchcase(name, one) for one in patterns if not one.startswith("!"))


def rule_of(name: str, allowed: Sequence[str]) -> str:
    """Returns what a field of the policy allows, for messages."""
    return f"{', '.join(allowed) if allowed else 'none'} ({name})"
