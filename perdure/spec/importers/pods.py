"""Reads Kubernetes' pod templates: the training container's fields become fields of the role, and everything else goes
into `pod_template` unchanged."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..base import OWN_VARIABLES
from .draft import Draft
from .launchers import LauncherError, read_launch
from .reader import Field, as_list, as_mapping, show_value

TRAINING_CONTAINER = "training"
"""The name of the container that runs the command, by which `pod_template` reaches it."""


_GPU = "nvidia.com/gpu"
_SHARED_MEMORY = "/dev/shm"
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")

_POD_FIELDS = (
    *("activeDeadlineSeconds", "affinity", "automountServiceAccountToken", "dnsConfig", "dnsPolicy"),
    *("enableServiceLinks", "ephemeralContainers", "hostAliases", "hostIPC", "hostNetwork", "hostPID", "hostUsers"),
    *("initContainers", "nodeSelector", "os", "overhead", "preemptionPolicy", "priority", "readinessGates"),
    *("resourceClaims", "resources", "runtimeClassName", "schedulerName", "schedulingGates", "securityContext"),
    *("serviceAccount", "serviceAccountName", "setHostnameAsFQDN", "shareProcessNamespace"),
    "topologySpreadConstraints",
)
"""Fields of a pod that have no field of their own."""

_CONTAINER_FIELDS = (
    *("envFrom", "lifecycle", "livenessProbe", "readinessProbe", "resizePolicy", "securityContext", "startupProbe"),
    *("stdin", "stdinOnce", "terminationMessagePath", "terminationMessagePolicy", "tty", "volumeDevices", "workingDir"),
)
"""Fields of a container that have no field of their own."""

_METADATA_PATH = re.compile(
    r"metadata\.(?:labels|annotations)\['(?P<key>(?:"
    r"[\w.-]*(?:jobset|leaderworkerset)\.(?:x-k8s|sigs\.k8s)\.io|batch\.kubernetes\.io"
    r"|[\w.-]*kubeflow\.org|ray\.io|elasticjob\.dlrover|elastic\.iml\.github\.io"
    r")/.+|job-name|controller-uid)'\]"
)
"""Paths of labels and annotations that the controllers of the imported systems write on their pods."""

_PER_POD = {
    "hostname": "Perdure names the pods",
    "subdomain": "nodes find each other by address",
    "nodeName": "it would put every node of the job on one machine",
}


@dataclass(kw_only=True)
class Overrides:
    """A job's overrides of the container of a template that it uses."""

    image: Field | None = None
    command: Field | None = None
    args: Field | None = None
    env: Field | None = None
    resources: Field | None = None


@dataclass(kw_only=True)
class Pod:
    """The content of a template that its adapter needs."""

    command: list[str] | None = None
    """The program and its arguments; None if the image's own ENTRYPOINT would run."""
    command_fields: tuple[Field, ...] = ()
    variables: dict[str, str] = field(default_factory=dict[str, str])
    """Environment variables with a plain value."""
    hidden: set[str] = field(default_factory=set[str])
    """Environment variables whose value only the cluster knows."""
    options: dict[str, Field] = field(default_factory=dict[str, Field])
    """Environment variables that are options of torchrun, such as PET_NNODES."""
    places: dict[str, Field] = field(default_factory=dict[str, Field])
    """Environment variables that tell a process its place in the world, such as RANK; Perdure sets them itself."""
    gpus: int = 0
    cpus: int | None = None
    """Whole CPU cores, if the template sets them."""
    metadata: set[str] = field(default_factory=set[str])
    """The names of the template's own labels and annotations."""

    def is_foreign(self, path: str) -> bool:
        """Returns whether the path of a downward reference names a label or an annotation that another system's
        controller writes."""
        found = _METADATA_PATH.fullmatch(path)
        return found is not None and found["key"] not in self.metadata


def read_pod(template: Field, draft: Draft, *, containers: Sequence[str], overrides: Overrides | None = None) -> Pod:
    """Reads a PodTemplateSpec into the role.

    Args:
        template: The PodTemplateSpec.
        draft: The specification.
        containers: Names that the source's system gives to the training container; a sole container may have any.
        overrides: Fields elsewhere that replace the container's.

    Returns:
        The parts that the adapter decides on: the command, and its resources.
    """
    pod = Pod()
    metadata, spec = template["metadata"], template["spec"]
    pod.metadata = {*metadata["labels"].entries(), *metadata["annotations"].entries()}
    _pass_on(metadata, ("labels", "annotations"), draft, (*draft.pod_template, "metadata"))
    metadata["creationTimestamp"].drop("written by the cluster, and not a part of the job")
    metadata["name"].drop("Perdure names the pods")
    metadata["namespace"].drop("pods run in the job's namespace")
    container, others = _training_container(spec["containers"], containers)
    if container is None:
        return pod
    _read_container(container, draft, pod, overrides or Overrides())
    shared = {
        str(mount["name"].value)
        for other in (*others, *spec["initContainers"].items())
        for mount in other["volumeMounts"].items()
    }
    _read_volumes(spec["volumes"], container["volumeMounts"], shared, draft)
    for other in others:
        draft.append((*draft.pod, "containers"), other.value, other)
    for item in (*others, *spec["initContainers"].items(), *spec["volumes"].items()):
        for path in filter(pod.is_foreign, _field_paths(item.value)):
            item.warn_changed("the job's system writes it on its pods, and Perdure does not", part=path, value="")
    _read_scheduling(spec, draft)
    _pass_on(spec, _POD_FIELDS, draft, draft.pod)
    for name, message in _PER_POD.items():
        spec[name].drop(message)
    return pod


def _training_container(containers: Field, names: Sequence[str]) -> tuple[Field | None, list[Field]]:
    found = containers.items()
    if not found:
        containers.source.problem(containers.location, message="missing", expected="a list with the training container")
        return None, []
    chosen = found
    if len(found) > 1:
        chosen = [item for item in found if (item["name"].value in names if names else starts_torchrun(item))]
    if len(chosen) != 1:
        called = " and ".join(show_value(item["name"].value) for item in found)
        wanted = " or ".join(f'"{name}"' for name in names)
        containers.source.problem(
            containers.location,
            message=f"the containers {called} could each be the one that trains, and a node trains in one",
            expected=f"one container called {wanted}" if names else "one container, or one that starts torchrun",
            hint="import the file once for each container that trains, with the others left out, as jobs of their own; "
            "write a container that only helps into roles.worker.pod_template",
        )
        return None, []
    training = chosen[0]
    return training, [item for item in found if item.location != training.location]


def starts_torchrun(container: Field) -> bool:
    """Returns whether the command of a container starts torchrun, as far as it can be seen."""
    return words_start_torchrun([*(container["command"].texts() or []), *(container["args"].texts() or [])])


def words_start_torchrun(words: Sequence[str]) -> bool:
    """Returns whether a command starts torchrun, as far as it can be seen."""
    try:
        return read_launch(words) is not None
    except LauncherError:
        return True


def _read_container(container: Field, draft: Draft, pod: Pod, overrides: Overrides) -> None:
    container["name"].settle()
    image = _either(overrides.image, container["image"])
    draft.put((*draft.role, "image"), image.text(), image)
    policy = container["imagePullPolicy"]
    draft.put((*draft.role, "image_pull_policy"), policy.text(), policy)
    _read_environment(container["env"], overrides.env, draft, pod)
    command, arguments = _either(overrides.command, container["command"]), _either(overrides.args, container["args"])
    program = expand_words(command, pod)
    words = [*(program or []), *(expand_words(arguments, pod) or [])]
    pod.command_fields = (command, arguments)
    pod.command = words if program else None
    _read_resources(_either(overrides.resources, container["resources"]), draft, pod)
    _read_ports(container["ports"], draft)
    _pass_on(container, _CONTAINER_FIELDS, draft, draft.container, name=True)


def _either(override: Field | None, own: Field) -> Field:
    """Returns the override if there is one, else the container's own field."""
    if override is None or not override.present:
        return own
    own.drop(f"{override.path} counts instead")
    return override


_VARIABLE_NAME = re.compile(r"[A-Z][A-Z0-9_]*")
_REFERENCE = re.compile(r"\$(\$|\((?P<name>[-._A-Za-z0-9]+)\))")


def expand_words(words: Field, pod: Pod) -> list[str] | None:
    """The words of a command, with Kubernetes' `$(NAME)` expanded as Kubernetes does."""
    texts = words.texts()
    if texts is None:
        return None
    return [_expand_references(text, pod, words) for text in texts]


def _expand_references(text: str, pod: Pod, field: Field) -> str:
    """Expands Kubernetes' `$(NAME)`; references to variables without a plain value are kept, with a warning.

    Kubernetes leaves a name alone that is no variable, and then a shell runs it as a command. What no field defines may
    still be a variable, of `envFrom` or of a Service, if it is written like one.
    """

    def fill(match: re.Match[str]) -> str:
        name = match["name"]
        if name is None:
            return "$"
        if name in pod.variables:
            return pod.variables[name]
        if name in pod.hidden or _VARIABLE_NAME.fullmatch(name):
            field.warn_changed(
                "Perdure expands no references; use a shell and ${" + name + "}", part=match[0], value=""
            )
        return match[0]

    return _REFERENCE.sub(fill, text)


def _read_environment(own: Field, override: Field | None, draft: Draft, pod: Pod) -> None:
    entries: dict[str, Field] = {}
    for item in [*own.items(), *(override.items() if override else [])]:
        name = str(item["name"].value)
        if name in entries:
            entries[name].drop("another value of the same variable counts")
        entries[name] = item
    for name, item in entries.items():
        if item["name"].text() is None:
            item["name"].wrong("the variable's name")
            continue
        _read_variable(name, item, draft, pod)


def _read_variable(name: str, item: Field, draft: Draft, pod: Pod) -> None:
    value, reference = item["value"], item["valueFrom"]
    secret = reference["secretKeyRef"]
    item["name"].settle()
    if not value.present and reference.present:
        pod.hidden.add(name)
    if len(found := [one for one, source in reference.entries().items() if source.present]) > 1:
        # The API server refuses such a pod, and only one of them could become a field of the specification.
        reference.refuse(f"a variable has one source, not {' and '.join(sorted(found))}")
    elif name.startswith("PET_"):
        text = value.text()
        pod.options[name] = value
        if text is None:
            item.drop("Perdure sets torchrun's options")
        else:
            pod.variables[name] = text
            value.settle()
    elif name in OWN_VARIABLES:
        if (text := value.text()) is not None:
            pod.variables[name] = text
        pod.places[name] = item
    elif name.startswith("PERDURE_"):
        item.drop("names that begin with PERDURE_ are Perdure's own")
    elif secret.present:
        key = secret["key"].text()
        draft.put_shared(("secrets", name), f"{secret['name'].text()}/{key}", secret["name"], secret["key"])
        secret["optional"].drop("a node waits for the secret")
    elif foreign := next((one for one in _field_paths(reference.value) if pod.is_foreign(one)), None):
        item.drop(f"the job's system writes {foreign} on its pods, and Perdure does not: ${name} is unset")
    elif reference.present:
        draft.put((*draft.container, "name"), TRAINING_CONTAINER)
        draft.append((*draft.container, "env"), item.value, item)
    else:
        text = _expand_references(value.text() or "", pod, value)
        pod.variables[name] = text
        draft.put((*draft.env, name), text, value)


def _read_resources(resources: Field, draft: Draft, pod: Pod) -> None:
    requests, limits = resources["requests"].entries(), resources["limits"].entries()
    for name in dict.fromkeys((*requests, *limits)):
        fields = [entries[name] for entries in (requests, limits) if name in entries]
        amounts = [_quantity(item) for item in fields]
        if name == _GPU:
            if not (amounts[0] or "").isdecimal():
                fields[0].wrong("a whole number of GPUs")
                continue
            pod.gpus = int(amounts[0] or 0)
            draft.put((*draft.role, "resources", "gpu"), pod.gpus, *fields)
        elif name in ("cpu", "memory"):
            draft.put((*draft.role, "resources", name), amounts[0], fields[0])
            if name == "cpu" and (amounts[0] or "").isdecimal():
                pod.cpus = int(amounts[0] or 0)
            if name == "memory" and amounts[0] == amounts[-1]:
                fields[-1].carry((*draft.role, "resources", name))
            elif name in limits:
                # Perdure sets no limit of CPU time by itself, and a memory limit that equals the request.
                draft.put((*draft.container, "name"), TRAINING_CONTAINER)
                draft.put((*draft.container, "resources", "limits", name), amounts[-1], limits[name])
        else:
            draft.put((*draft.container, "name"), TRAINING_CONTAINER)
            for entries, kind in ((requests, "requests"), (limits, "limits")):
                if name in entries:
                    draft.put((*draft.container, "resources", kind, name), entries[name].value, entries[name])
    _pass_on(resources, ("claims",), draft, (*draft.container, "resources"), name=True)


def _quantity(amount: Field) -> str | None:
    if isinstance(amount.value, int | float) and not isinstance(amount.value, bool):
        return f"{amount.value:.15g}"
    text = amount.text()
    if text is None or _QUANTITY.fullmatch(text):
        return text
    if re.fullmatch(r"\d+(\.\d+)?[eE]\+?\d+", text):
        return str(int(float(text)))
    amount.wrong("a quantity as Kubernetes writes it, such as 8, 500m, 64Gi or 1Ti")
    return None


_RENDEZVOUS_PORTS = ("pytorchjob-port", "tfjob-port", "torchrun", "rdzv", "rendezvous", "master-port")
_RENDEZVOUS_NUMBERS = (23456, 29400, 29500)


def _read_ports(ports: Field, draft: Draft) -> None:
    for item in ports.items():
        name, number = item["name"], item["containerPort"]
        port = number.integer(least=1)
        if name.value in _RENDEZVOUS_PORTS or (port in _RENDEZVOUS_NUMBERS and not name.present):
            item.drop("Perdure's rendezvous takes free ports")
            continue
        draft.put((*draft.role, "ports", name.text() or f"port-{port}"), port, name, number)
        protocol = item["protocol"]
        if protocol.value == "TCP":
            protocol.settle()
        else:
            protocol.drop("ports are TCP")
        item["hostPort"].drop("nodes do not take ports of their machines")
        item["hostIP"].drop("nodes do not take ports of their machines")


def _read_volumes(volumes: Field, mounts: Field, shared: set[str], draft: Draft) -> None:
    """Reads volumes; volumes that other containers mount as well are kept unchanged."""
    found = mounts.items()
    for volume in volumes.items():
        name = volume["name"].text()
        own = [mount for mount in found if mount["name"].value == name]
        if name in shared or not (_is_claim(volume, own, draft) or _is_shared_memory(volume, own, draft)):
            draft.append((*draft.pod, "volumes"), volume.value, volume)
            for mount in own:
                draft.put((*draft.container, "name"), TRAINING_CONTAINER)
                draft.append((*draft.container, "volumeMounts"), mount.value, mount)
    names = [volume["name"].value for volume in volumes.items()]
    for mount in found:
        if mount["name"].value not in names:
            draft.put((*draft.container, "name"), TRAINING_CONTAINER)
            draft.append((*draft.container, "volumeMounts"), mount.value, mount)


def _is_claim(volume: Field, mounts: Sequence[Field], draft: Draft) -> bool:
    """Writes a persistent volume claim that is simply mounted."""
    claim = volume["persistentVolumeClaim"]
    simple = all(set(mount.entries()) <= {"name", "mountPath", "readOnly"} for mount in mounts)
    known = set(claim.entries()) <= {"claimName", "readOnly"} and set(volume.entries()) == {
        "name",
        "persistentVolumeClaim",
    }
    if not claim.present or not mounts or not simple or not known:
        return False
    for mount in mounts:
        path, name = mount["mountPath"].text(), claim["claimName"].text()
        read_only = bool(mount["readOnly"].boolean() or claim["readOnly"].boolean())
        # Another role may have mounted it in the same way.
        volumes: list[dict[str, Any]] = draft.get(("volumes",)) or []
        same = {"mount_path": path, "pvc": name} | ({"read_only": True} if read_only else {})
        place = ("volumes", volumes.index(same) if same in volumes else len(volumes))
        draft.put((*place, "mount_path"), path, mount["mountPath"])
        draft.put((*place, "pvc"), name, claim["claimName"], volume["name"], mount["name"])
        if read_only:
            draft.put((*place, "read_only"), True, mount["readOnly"], claim["readOnly"])
        mount["readOnly"].settle()
        claim["readOnly"].settle()
    return True


def _is_shared_memory(volume: Field, mounts: Sequence[Field], draft: Draft) -> bool:
    """Writes an emptyDir in memory that is mounted as /dev/shm."""
    directory = volume["emptyDir"]
    if directory["medium"].value != "Memory" or [mount["mountPath"].value for mount in mounts] != [_SHARED_MEMORY]:
        return False
    size = directory["sizeLimit"]
    if not size.present or not set(directory.entries()) <= {"medium", "sizeLimit"}:
        return False
    draft.put((*draft.role, "resources", "shm"), _quantity(size), size)
    for part in (volume["name"], directory["medium"], mounts[0]["name"], mounts[0]["mountPath"]):
        part.carry((*draft.role, "resources", "shm"))
    return True


def _read_scheduling(spec: Field, draft: Draft) -> None:
    priority = spec["priorityClassName"]
    draft.put_shared(("priority_class",), priority.text(), priority)
    grace = spec["terminationGracePeriodSeconds"]
    if (seconds := grace.integer()) is not None:
        draft.put_shared(("limits", "termination_grace_period"), f"{seconds}s", grace)
    policy = spec["restartPolicy"]
    if policy.value == "Never":
        policy.settle()
    else:
        policy.drop("Perdure restarts ranks in place, and replaces lost pods")
    for item in spec["imagePullSecrets"].items():
        draft.append((*draft.role, "image_pull_secrets"), item["name"].text(), item["name"])
    for item in spec["tolerations"].items():
        place = (*draft.role, "tolerations", len(draft.get((*draft.role, "tolerations")) or []))
        for name in ("key", "operator", "value", "effect"):
            draft.put((*place, name), item[name].text(), item[name])
        item["tolerationSeconds"].drop("the node stays on its machine for as long as the taint is tolerated")


def _field_paths(value: Any) -> Iterator[str]:
    """The paths of all downward references in a part of a template."""
    for name, item in (as_mapping(value) or {}).items():
        if name == "fieldPath" and isinstance(item, str):
            yield item
        else:
            yield from _field_paths(item)
    for item in as_list(value) or []:
        yield from _field_paths(item)


def _pass_on(
    mapping: Field, names: Sequence[str], draft: Draft, location: tuple[str | int, ...], *, name: bool = False
) -> None:
    """Writes fields unchanged into `pod_template`; `name` is set if they belong to the training container."""
    for key in names:
        if (item := mapping[key]).present:
            if name:
                draft.put((*draft.container, "name"), TRAINING_CONTAINER)
            draft.put((*location, key), item.value, item)
