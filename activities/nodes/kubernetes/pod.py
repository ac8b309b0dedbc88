"""Builds the pod of one node: the user's container, Perdure's agent beside it, and the launcher inside the user's
image.

    init container  perdure-prepare   copies launcher and configurations into shared folders
    native sidecar  perdure-agent     the agent; ends after the training container
    container       training          the user's image, unmodified: its Python starts the launcher

The manifest has four layers, each merged over the one before: Perdure's defaults, the site's gang adapter, the user's
`pod_template`, and the fields that cannot be changed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from perdure.activities.nodes.backend import NodeRefused
from perdure.activities.nodes.configurations import agent_configuration, launcher_configuration
from perdure.activities.nodes.containers import SHARED, TRAINING
from perdure.activities.nodes.kubernetes import collocation, copies, placement, workdir
from perdure.activities.nodes.kubernetes.facts import NO_PYTHON
from perdure.activities.nodes.kubernetes.gateway import TOKEN_MOUNT, TOKEN_VOLUME, connection_of, token_volume
from perdure.activities.nodes.kubernetes.merge import merge
from perdure.activities.nodes.kubernetes.naming import GROUP, INCARNATION, JOB, NAMED, OURS, RANK, ROLE, UID
from perdure.activities.nodes.kubernetes.pod_policy import violations
from perdure.activities.nodes.kubernetes.settings import KubernetesSettings
from perdure.activities.nodes.kubernetes.site_policy import Reserved, SitePolicy
from perdure.activities.nodes.kubernetes.workdir import UNPACKED, archive_of, carry
from perdure.contract import NodeRequest
from perdure.contract.names import group_index, host_name, run_name
from perdure.spec.roles import Role
from perdure_training.snapshots.copies import RACK_VARIABLE

AGENT = "perdure-agent"
METRICS_PORT = "perdure-metrics"
"""The name of the port at which agents serve metrics; users' containers may have one called `metrics`."""
PREPARE = "perdure-prepare"

PRIVATE = "/perdure-agent"
"""The agent's private folder: its configuration contains the incarnation's token."""
RUN_DIRECTORY = f"{SHARED}/run"

_PRIVATE_VOLUMES = ("perdure-agent", TOKEN_VOLUME, copies.VOLUME, workdir.VOLUME)
_RUN_VOLUME = "perdure"

BEYOND_GRACE = 10
"""Seconds after the command's grace period in which the launcher sends its shutdown report."""

_OWN_PYTHON = ("python3", "-P", "-s", "-m")
"""Runs a module of Perdure's image. Without -P the working directory is searched first, mostly `/`, in which the folder
that training code writes to has the name of our package; without -s, a folder below the home is searched, too."""

_UNPRIVILEGED_USER = 65532
"""The user ID of Perdure's own containers; the training container keeps its image's user."""

TRAINING_USER = 1000
"""The user and group ID of training containers, whose images mostly say root. `pod_template` may set another one."""

HOME = "/home/perdure"
"""The home folder of training containers: a user without an entry in the image's passwd file has none."""

_SHARED_LIMIT = "8Gi"
"""Size limit of the folder that agent and training share: the log's rotated files, and the job's code."""
_PRIVATE_LIMIT = "256Mi"
"""Size limit of the agent's private folder: its configuration, and what it has not delivered yet."""

_ADDRESS_LATER = "0.0.0.0"
"""Placeholder in the configurations until the pod has an address; `perdure.agent.prepare` replaces it."""

_RACK_LABEL = "topology.kubernetes.io/zone"
"""The label of pods that `PERDURE_RACK` has by default. Kubernetes copies it from the pod's machine, from 1.35 on."""

_START = (
    f'for python in python3 python; do command -v "$python" >/dev/null 2>&1 && exec "$python" {SHARED}/lib; done;'
    f" message='{NO_PYTHON.text}; choose one with Python and PyTorch, or set"
    f' roles.ROLE.python\'; echo "perdure: $message" >&2; exit {NO_PYTHON.exit_code}'
)


def pod_of(request: NodeRequest, settings: KubernetesSettings) -> dict[str, Any]:
    """Returns the manifest of a node's pod.

    Args:
        request: the node.
        settings: the site's settings.

    Raises:
        NodeRefused: if no pod can be built from the specification.
    """
    role = request.role
    template = role.pod_template
    try:
        _refuse_command(template)
        of_gang, required = settings.gangs.template(request), _required_fields(request, role, settings)
        pod = merge(merge(merge(_default_fields(request, role), of_gang), template), required)
        _set_resources_of_ours(pod["spec"], required["spec"])
        if request.avoids and settings.gangs.may_differ(request):
            pod["spec"]["affinity"] = placement.avoiding(pod["spec"].get("affinity") or {}, request.avoids)
        placement.keep_from_own_pods_only(pod["spec"], request)
        if copies.keeps_copies(request):
            copies.tell_rack(pod["spec"], agent=AGENT, training=TRAINING)
        _confine(pod["spec"], settings.policy)
        reserved = Reserved(
            containers=(PREPARE, AGENT),
            agent=AGENT,
            volumes=_PRIVATE_VOLUMES,
            run_volume=_RUN_VOLUME,
            secrets=settings.secrets_reserved_in(request.spec.namespace),
            service_accounts=settings.accounts_reserved_in(request.spec.namespace),
            labels={**_metadata(of_gang, "labels"), **_metadata(required, "labels")},
            annotations={**_metadata(of_gang, "annotations"), **_metadata(required, "annotations")},
        )
        refused = violations(settings.policy, pod, template=template, reserved=reserved)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise NodeRefused(f"roles.{request.node.role}.pod_template is not a PodTemplateSpec: {error!r}") from error
    if refused:
        raise NodeRefused("; ".join(map(str, refused)))
    if not next(one for one in pod["spec"]["containers"] if one["name"] == TRAINING).get("image"):
        raise NodeRefused(f"roles.{request.node.role}.image is missing; name an image with Python and PyTorch")
    # After the policy's checks: these are the job's own decisions, and no powers over others.
    placement.stay_on_silent_machine(pod["spec"])
    _resolve_names_of_cluster(pod["spec"])
    pod |= {"apiVersion": "v1", "kind": "Pod"}
    # The user's own init containers run first: they may prepare volumes, and none of them needs Perdure's.
    first = {one["name"]: one for one in pod["spec"]["initContainers"]}
    ours = [first.pop(name) for name in (PREPARE, AGENT)]
    pod["spec"]["initContainers"] = [*first.values(), *ours]
    return pod


def _resolve_names_of_cluster(spec: dict[str, Any]) -> None:
    """Has a pod on its machine's network resolve the names of the cluster, as that of the gateway. By default it would
    have the machine's name servers only."""
    if spec.get("hostNetwork"):
        spec.setdefault("dnsPolicy", "ClusterFirstWithHostNet")


def _metadata(template: Mapping[str, Any], field: str) -> Mapping[str, str]:
    metadata: Mapping[str, Any] = template.get("metadata") or {}
    return metadata.get(field) or {}


def _confine(spec: dict[str, Any], policy: SitePolicy) -> None:
    """Completes the security contexts and scratch volumes of a pod, where its template removed or left out what
    Kubernetes leaves open."""
    of_pod = spec["securityContext"] = dict(spec.get("securityContext") or {})
    of_pod.setdefault("seccompProfile", {"type": "RuntimeDefault"})
    of_pod.setdefault("runAsNonRoot", of_pod.get("runAsUser") != 0)
    if of_pod.get("runAsUser") == 0:
        # For a site whose policy allows it, as that of a template that names root.
        of_pod["runAsNonRoot"] = False
    spec.setdefault("automountServiceAccountToken", False)
    for container in (*spec["containers"], *spec["initContainers"]):
        security = container["securityContext"] = dict(container.get("securityContext") or {})
        if security.get("runAsUser") == 0:
            security["runAsNonRoot"] = False
        if not security.get("privileged"):
            security.setdefault("allowPrivilegeEscalation", False)
            security["capabilities"] = {**(security.get("capabilities") or {}), "drop": ["ALL"]}
    for volume in spec.get("volumes") or ():
        # A pod that exceeds its limit is evicted before it fills the machine's disk. Memory is its container's.
        folder = volume.get("emptyDir")
        if folder is not None and folder.get("medium") != "Memory":
            volume["emptyDir"] = {"sizeLimit": policy.max_scratch, **folder}


def _refuse_command(template: Mapping[str, Any]) -> None:
    for container in template.get("spec", {}).get("containers", ()):
        for field in ("command", "args"):
            if container.get("name") == TRAINING and field in container:
                raise NodeRefused(
                    f"pod_template sets {field} of the container {TRAINING}, which runs Perdure's launcher; "
                    "put the command into the role's `command`"
                )


def _default_fields(request: NodeRequest, role: Role) -> dict[str, Any]:
    """Returns the default fields, which `pod_template` may change."""
    spec = request.spec
    training: dict[str, Any] = {
        "name": TRAINING,
        "resources": _resources(role),
        "env": [
            # The launcher passes on all variables; PATH is set here because the shell finds the launcher's Python by
            # it.
            *(
                {"name": name, "value": value}
                for name, value in spec.env_of(request.node.role).items()
                if name == "PATH"
            ),
            *(_from_secret(name, reference) for name, reference in spec.secrets.items()),
            {"name": "HOME", "value": HOME},
            # Python asks for the user's name, torch's compiler among others, and finds it nowhere else.
            *({"name": name, "value": "perdure"} for name in ("USER", "LOGNAME")),
            # Empty if the pod has no such label.
            {"name": RACK_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{_RACK_LABEL}']"}}},
        ],
        "ports": [{"name": name, "containerPort": port} for name, port in role.ports.items()],
        "volumeMounts": [
            {"name": f"volume-{index}", "mountPath": volume.mount_path, "readOnly": volume.read_only}
            for index, volume in enumerate(spec.volumes)
        ]
        + [{"name": "home", "mountPath": HOME}, {"name": "tmp", "mountPath": "/tmp"}],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        # Without a better termination message, Kubernetes reports the log's last lines.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if role.image:
        training["image"] = role.image
    if role.image_pull_policy:
        training["imagePullPolicy"] = role.image_pull_policy
    pod: dict[str, Any] = {
        "containers": [training],
        "volumes": [
            {
                "name": f"volume-{index}",
                "persistentVolumeClaim": {"claimName": volume.pvc, "readOnly": volume.read_only},
            }
            for index, volume in enumerate(spec.volumes)
        ]
        # Caches of compilers, downloaded models.
        + [{"name": name, "emptyDir": {}} for name in ("home", "tmp")],
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "seccompProfile": {"type": "RuntimeDefault"},
            "runAsNonRoot": True,
            "runAsUser": TRAINING_USER,
            "runAsGroup": TRAINING_USER,
            "fsGroup": TRAINING_USER,
            # Otherwise each start changes the owner of every file on the job's volumes.
            "fsGroupChangePolicy": "OnRootMismatch",
        },
        "tolerations": [one.model_dump(mode="json", exclude_none=True) for one in role.tolerations],
        "imagePullSecrets": [{"name": name} for name in role.image_pull_secrets],
    }
    if role.resources.shm:
        training["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})
        pod["volumes"].append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": role.resources.shm}})
    if role.resources.gpu_type:
        pod["nodeSelector"] = {"nvidia.com/gpu.product": role.resources.gpu_type}
    if spec.priority_class:
        pod["priorityClassName"] = spec.priority_class
    if role.topology:
        pod["affinity"] = placement.to_other_nodes(request, role)
    return {"metadata": {"labels": dict(spec.labels)}, "spec": pod}


def _from_secret(variable: str, reference: str) -> dict[str, Any]:
    name, key = reference.split("/")
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}}


def _resources(role: Role) -> dict[str, Any]:
    """Returns the container's resources, without a CPU limit: the scheduler counts requests, and a CPU limit would only
    slow training down."""
    resources = role.resources
    devices = {"nvidia.com/gpu": str(resources.gpu)} if resources.gpu else {}
    memory = {"memory": resources.memory} if resources.memory else {}
    cpu = {"cpu": resources.cpu} if resources.cpu else {}
    return {"requests": {**cpu, **memory, **devices}, "limits": {**memory, **devices}}


def _resources_of_ours(container: str, role: Role, of_site: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the resources of one of Perdure's containers: those of the site, and over them those of the template."""
    spec = cast("Mapping[str, Any]", role.pod_template.get("spec") or {})
    containers: Sequence[Mapping[str, Any]] = spec.get("initContainers") or ()
    of_job: Mapping[str, Any] = {}
    for one in containers:
        if one["name"] == container:
            of_job = one.get("resources") or {}
    return merge(of_site, of_job)


def _set_resources_of_ours(spec: dict[str, Any], required: Mapping[str, Any]) -> None:
    """Takes the resources of Perdure's containers as they are required: those have been merged with the template's, of
    which a removed field would otherwise stay."""
    ours = {one["name"]: one["resources"] for one in required["initContainers"]}
    spec["initContainers"] = [
        one | {"resources": ours[one["name"]]} if one["name"] in ours else one for one in spec["initContainers"]
    ]


def _required_fields(request: NodeRequest, role: Role, settings: KubernetesSettings) -> dict[str, Any]:
    """Returns the required fields, which `pod_template` cannot change."""
    spec, node = request.spec, request.node
    mark = [
        {"name": "PERDURE_RUN_DIR", "value": RUN_DIRECTORY},
        {"name": "PERDURE_NODE", "value": f"{node.uid}/{node.role}-{node.rank}/{node.incarnation}"},
    ]
    shared = {"name": _RUN_VOLUME, "mountPath": SHARED}
    private = {"name": "perdure-agent", "mountPath": PRIVATE}
    ours: dict[str, Any] = {
        "image": settings.agent_image,
        "imagePullPolicy": settings.agent_pull_policy,
        "securityContext": {
            "runAsUser": _UNPRIVILEGED_USER,
            "runAsGroup": _UNPRIVILEGED_USER,
            "runAsNonRoot": True,
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [shared, private],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    prepare: dict[str, Any] = ours | {
        "name": PREPARE,
        "command": [*_OWN_PYTHON, "perdure.agent.prepare"],
        "env": [
            {"name": "PERDURE_PREPARE_SHARED", "value": SHARED},
            {"name": "PERDURE_PREPARE_AGENT", "value": PRIVATE},
            {"name": "PERDURE_PREPARE_AGENT_CONFIG", "value": _agent_configuration(request, settings)},
            {"name": "PERDURE_PREPARE_LAUNCHER_CONFIG", "value": _launcher_configuration(request)},
            {"name": "PERDURE_PREPARE_ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "PERDURE_PREPARE_HOST", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        ],
        "resources": _resources_of_ours(PREPARE, role, settings.prepare_resources),
    }
    volumes: list[dict[str, Any]] = [
        {"name": _RUN_VOLUME, "emptyDir": {"sizeLimit": _SHARED_LIMIT}},
        {"name": "perdure-agent", "emptyDir": {"sizeLimit": _PRIVATE_LIMIT}},
    ]
    if archive := archive_of(spec):
        carry(archive, prepare=prepare, volumes=volumes)
    agent: dict[str, Any] = ours | {
        "name": AGENT,
        "restartPolicy": "Always",
        "command": [*_OWN_PYTHON, "perdure.agent"],
        # Without PERDURE_NODE: the launcher's PID names another process in this container.
        "env": [
            {"name": "PERDURE_AGENT_CONFIG", "value": f"{PRIVATE}/agent.json"},
            *(
                {"name": name, "value": value}
                for name, value in sorted({**settings.reporting, **settings.connection}.items())
            ),
        ],
        "resources": _resources_of_ours(AGENT, role, settings.agent_resources),
    }
    if (port := _metrics_port(request, settings)) is not None:
        agent["ports"] = [{"name": METRICS_PORT, "containerPort": port}]
    agent["volumeMounts"] = [*agent["volumeMounts"], *_storage_mounts(request)]
    if copies.keeps_copies(request):
        copies.add_to(role, agent=agent, volumes=volumes)
    if settings.gateway:
        agent["volumeMounts"] = [*agent["volumeMounts"], dict(TOKEN_MOUNT)]
        volumes.append(token_volume())
    elif settings.connection_secret:
        agent["envFrom"] = [{"secretRef": {"name": settings.connection_secret}}]
    training = {
        "name": TRAINING,
        "command": [role.python, f"{SHARED}/lib"]
        if role.python
        else ["/bin/sh", "-c", _START.replace("ROLE", node.role)],
        "env": [
            *mark,
            {"name": "PERDURE_LAUNCHER_CONFIG", "value": f"{SHARED}/launcher.json"},
            # `perdure shell` finds the interpreter by this variable.
            *([{"name": "PERDURE_PYTHON", "value": role.python}] if role.python else []),
        ],
        "volumeMounts": [shared],
    }
    labels = {
        **OURS,
        JOB: spec.name,
        UID: node.uid,
        ROLE: node.role,
        GROUP: str(group_index(node.rank)),
        RANK: str(node.rank),
        INCARNATION: str(node.incarnation),
        **collocation.name_label(request),
        **({NAMED: "true"} if spec.tells_addresses else {}),
    }
    grace = math.ceil(spec.limits.termination_grace_period.total_seconds())
    return {
        "metadata": {
            "name": request.name,
            "namespace": spec.namespace,
            "labels": labels,
            **({"annotations": dict(settings.pod_annotations)} if settings.pod_annotations else {}),
        },
        "spec": {
            "initContainers": [prepare, agent],
            "containers": [training],
            "volumes": volumes,
            # An ended incarnation is replaced by a new one and never restarted.
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": grace + BEYOND_GRACE,
            **_name_in_cluster(request),
        },
    }


def _name_in_cluster(request: NodeRequest) -> dict[str, str]:
    """Returns the fields that give the pod its name in the Service of its job."""
    spec, node = request.spec, request.node
    if not spec.tells_addresses:
        return {}
    return {"hostname": host_name(node.role, node.rank), "subdomain": run_name(spec.name, node.uid)}


def _metrics_port(request: NodeRequest, settings: KubernetesSettings) -> int | None:
    """Returns the port of the agent's metrics.

    A pod on its machine's network has none: no network policy protects it, and a second pod with a port of the same
    number would never be scheduled.
    """
    spec = request.spec.roles[request.node.role].pod_template.get("spec")
    on_host = isinstance(spec, dict) and bool(spec.get("hostNetwork"))
    return None if on_host else settings.agent_metrics_port


def _storage_mounts(request: NodeRequest) -> list[dict[str, Any]]:
    """Returns the mount of the volume that checkpoints are stored in, if it is one of the job's."""
    spec = request.spec
    storage = urlsplit((spec.stored.storage or "") if spec.stored else "")
    path, local = storage.path, spec.stored is not None and storage.scheme in ("", "file", "local")
    return [
        {"name": f"volume-{index}", "mountPath": volume.mount_path}
        for index, volume in enumerate(spec.volumes)
        if local and f"{path}/".startswith(f"{volume.mount_path.rstrip('/')}/")
    ]


def _agent_configuration(request: NodeRequest, settings: KubernetesSettings) -> str:
    config = agent_configuration(
        request,
        address=_ADDRESS_LATER,
        run_dir=Path(RUN_DIRECTORY),
        state_dir=Path(PRIVATE),
        gateway=connection_of(request, settings.gateway) if settings.gateway else None,
        metrics_port=_metrics_port(request, settings),
        copies_dir=Path(copies.MOUNT) if copies.keeps_copies(request) else None,
    )
    return config.model_dump_json()


def _launcher_configuration(request: NodeRequest) -> str:
    place = UNPACKED if archive_of(request.spec) else None
    # The command's output also goes to `kubectl logs`.
    return json.dumps(launcher_configuration(request, address=_ADDRESS_LATER, workdir=place) | {"stdout": True})
