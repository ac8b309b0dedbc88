"""The site policy's decision on every field of a pod template: one table, in the shape of Kubernetes' own types.

A field that is not in the table is refused, so that no new Kubernetes release opens a way around the policy; a test
walks the types of the API, and fails until each of their fields has a decision. Each field is one of these:

- free: it affects the job's own pod only;
- held to a rule of `pod_rules`, on its value, and has fields below it that are in the table as well;
- named: refused unless the policy's `template_fields` has the field's whole path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

from perdure.activities.nodes.kubernetes import pod_rules as rules
from perdure.activities.nodes.kubernetes.merge import key_of
from perdure.activities.nodes.kubernetes.pod_rules import Rule, granted_by, host_namespace, named_in


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What the site policy does with a field."""

    rule: Rule | None = None
    """Decides about the value; in a list, about each item."""
    below: Mapping[str, Decision] = field(default_factory=dict[str, "Decision"])
    """The fields of the value, or of each item; empty where the decision holds for all that is below."""
    named: bool = False
    """Whether the field is refused unless the site names it."""


Fields = Mapping[str, Decision]

_FREE: Final = Decision()
_NAMED: Final = Decision(named=True)


def _free(names: str) -> Fields:
    return dict.fromkeys(names.split(), _FREE)


def _named(names: str) -> Fields:
    return dict.fromkeys(names.split(), _NAMED)


def _below(fields: Fields) -> Decision:
    return Decision(below=fields)


def _held(rule: Rule, below: Fields | None = None) -> Decision:
    return Decision(rule=rule, below=below or {})


# -- Metadata

_METADATA: Fields = {
    "labels": _held(rules.pod_labels),
    "annotations": _held(rules.pod_annotations),
    # The worker sets name, namespace and owner; the server the rest. A finalizer would keep a pod from being deleted.
    **_named("name namespace generateName finalizers ownerReferences managedFields uid selfLink generation"),
    **_named("resourceVersion creationTimestamp deletionTimestamp deletionGracePeriodSeconds"),
}

# -- Where a pod runs

_LABEL_SELECTOR: Fields = {"matchLabels": _FREE, "matchExpressions": _below(_free("key operator values"))}
_NODE_TERM: Fields = dict.fromkeys(
    ("matchExpressions", "matchFields"), _held(rules.node_requirement, _free("key operator values"))
)
_POD_TERM: Fields = {
    **_free("topologyKey matchLabelKeys mismatchLabelKeys"),
    "labelSelector": _below(_LABEL_SELECTOR),
    # Pods of others: anti-affinity to them keeps them away from machines, since the scheduler holds it both ways.
    **_named("namespaces namespaceSelector"),
}
_POD_AFFINITY: Fields = {
    "requiredDuringSchedulingIgnoredDuringExecution": _below(_POD_TERM),
    "preferredDuringSchedulingIgnoredDuringExecution": _below({"weight": _FREE, "podAffinityTerm": _below(_POD_TERM)}),
}
_AFFINITY: Fields = {
    "nodeAffinity": _below(
        {
            "requiredDuringSchedulingIgnoredDuringExecution": _below({"nodeSelectorTerms": _below(_NODE_TERM)}),
            "preferredDuringSchedulingIgnoredDuringExecution": _below(
                {"weight": _FREE, "preference": _below(_NODE_TERM)}
            ),
        }
    ),
    "podAffinity": _below(_POD_AFFINITY),
    "podAntiAffinity": _below(_POD_AFFINITY),
}
_SPREAD: Fields = {
    **_free("maxSkew topologyKey whenUnsatisfiable minDomains nodeAffinityPolicy nodeTaintsPolicy matchLabelKeys"),
    "labelSelector": _below(_LABEL_SELECTOR),
}

# -- What confines a container

_SELINUX: Fields = {
    "type": _held(rules.selinux_type),
    **dict.fromkeys(("user", "role"), _held(granted_by("privileged", ""))),
    "level": _FREE,
}
_PROFILE: Fields = {
    "type": _held(granted_by("privileged", "RuntimeDefault", "Localhost")),
    "localhostProfile": _FREE,
}
_WINDOWS: Fields = {
    "hostProcess": _held(granted_by("privileged", False)),
    **_named("gmsaCredentialSpec gmsaCredentialSpecName runAsUserName"),
}
_CONFINEMENT: Fields = {
    "runAsUser": _held(rules.user),
    "runAsNonRoot": _held(rules.non_root),
    "runAsGroup": _FREE,
    "seLinuxOptions": _below(_SELINUX),
    "seccompProfile": _below(_PROFILE),
    "appArmorProfile": _below(_PROFILE),
    "windowsOptions": _below(_WINDOWS),
}
_POD_SECURITY: Fields = {
    **_CONFINEMENT,
    **_free("fsGroup fsGroupChangePolicy seLinuxChangePolicy supplementalGroups supplementalGroupsPolicy"),
    "sysctls": _below({"name": _held(named_in("sysctls")), "value": _FREE}),
}
_SECURITY: Fields = {
    **_CONFINEMENT,
    "privileged": _held(granted_by("privileged", False)),
    "allowPrivilegeEscalation": _held(granted_by("privileged", False)),
    "procMount": _held(granted_by("privileged", "Default")),
    "capabilities": _below({"add": _held(rules.capability), "drop": _FREE}),
    "readOnlyRootFilesystem": _FREE,
}

# -- Containers

_SECRET_KEY: Fields = {"name": _held(rules.secret), **_free("key optional")}
_VARIABLE: Fields = {
    **_free("name value"),
    "valueFrom": _below(
        {
            "configMapKeyRef": _below(_free("name key optional")),
            "fieldRef": _below(_free("apiVersion fieldPath")),
            "resourceFieldRef": _below(_free("containerName resource divisor")),
            "secretKeyRef": _below(_SECRET_KEY),
            "fileKeyRef": _below({"volumeName": _held(rules.mounted_volume), **_free("path key optional")}),
        }
    ),
}
_VARIABLES: Fields = {
    "prefix": _FREE,
    "configMapRef": _below(_free("name optional")),
    "secretRef": _below({"name": _held(rules.secret), "optional": _FREE}),
}
# The kubelet sends these from the machine's network: with a host, they reach what pods do not.
_HOST: Final = _held(host_namespace("network"))
_HTTP: Fields = {
    "host": _HOST,
    **_free("path port scheme protocol"),
    "httpHeaders": _below(_free("name value")),
}
_ACTIONS: Fields = {
    "exec": _below(_free("command")),
    "httpGet": _below(_HTTP),
    "tcpSocket": _below({"host": _HOST, "port": _FREE}),
}
_PROBE: Fields = {
    **_ACTIONS,
    "grpc": _below(_free("mode port service")),
    **_free("initialDelaySeconds periodSeconds timeoutSeconds successThreshold failureThreshold"),
    "terminationGracePeriodSeconds": _FREE,
}
_HOOK: Fields = {**_ACTIONS, "sleep": _below(_free("seconds"))}
_RESOURCES: Fields = {**_free("requests limits"), "claims": _below(_free("name request"))}
_MOUNT: Fields = {
    "name": _held(rules.mounted_volume),
    **_free("mountPath subPath subPathExpr readOnly recursiveReadOnly bindMountOptions"),
    "mountPropagation": _held(granted_by("privileged", "None", "HostToContainer")),
}
CONTAINER: Fields = {
    "image": _held(named_in("images")),
    **_free("name command args workingDir imagePullPolicy stdin stdinOnce tty restartPolicy"),
    **_free("terminationMessagePath terminationMessagePolicy"),
    "resizePolicy": _below(_free("resourceName restartPolicy")),
    "restartPolicyRules": _below({"action": _FREE, "exitCodes": _below(_free("operator values"))}),
    "resources": _below(_RESOURCES),
    "securityContext": _below(_SECURITY),
    "env": _below(_VARIABLE),
    "envFrom": _below(_VARIABLES),
    "ports": _below({**_free("name containerPort protocol"), "hostPort": _HOST, "hostIP": _HOST}),
    "volumeMounts": _below(_MOUNT),
    "volumeDevices": _below({"name": _held(rules.mounted_volume), "devicePath": _FREE}),
    **dict.fromkeys(("livenessProbe", "readinessProbe", "startupProbe"), _below(_PROBE)),
    "lifecycle": _below({"postStart": _below(_HOOK), "preStop": _below(_HOOK), "stopSignal": _FREE}),
}

# -- Volumes

_ITEMS: Fields = _free("key path mode user")
_POD_ITEMS: Fields = {
    **_free("path mode user"),
    "fieldRef": _below(_free("apiVersion fieldPath")),
    "resourceFieldRef": _below(_free("containerName resource divisor")),
}
_CLAIM: Fields = {
    "metadata": _below(_METADATA),
    "spec": _below(
        {
            **_free("accessModes storageClassName volumeAttributesClassName volumeMode"),
            "resources": _below(_free("requests limits")),
            # These take what others own: a certain volume, or a copy of another claim.
            **_named("volumeName selector dataSource dataSourceRef"),
        }
    ),
}
_SOURCE: Fields = {
    "configMap": _below({**_free("name optional"), "items": _below(_ITEMS)}),
    "secret": _below({**_free("name optional"), "items": _below(_ITEMS)}),
    "downwardAPI": _below({"items": _below(_POD_ITEMS)}),
    "serviceAccountToken": _below({"audience": _held(rules.token_audience), **_free("expirationSeconds path user")}),
    # Only where the policy's projected_sources has them, which is the decision on all below.
    **_free("clusterTrustBundle podCertificate"),
}
_VOLUME: Fields = {
    "name": _FREE,
    "configMap": _below({**_free("name optional defaultMode defaultUser"), "items": _below(_ITEMS)}),
    "secret": _below({**_free("secretName optional defaultMode defaultUser"), "items": _below(_ITEMS)}),
    "downwardAPI": _below({**_free("defaultMode defaultUser"), "items": _below(_POD_ITEMS)}),
    "emptyDir": _held(rules.empty_dir, _free("medium mode sizeLimit")),
    "ephemeral": _below({"volumeClaimTemplate": _below(_CLAIM)}),
    "persistentVolumeClaim": _below(_free("claimName readOnly")),
    "projected": _below({**_free("defaultMode defaultUser"), "sources": _held(rules.projection, _SOURCE)}),
    "hostPath": _below({"path": _held(rules.host_path), "type": _FREE}),
    # Only where the policy's volumes has it, and then what it mounts can be run as well.
    "image": _below({"reference": _held(named_in("images")), "pullPolicy": _FREE}),
    # Only where the policy's volumes has them, which is the decision on all below.
    **_free("awsElasticBlockStore azureDisk azureFile cephfs cinder csi fc flexVolume flocker gcePersistentDisk"),
    **_free("gitRepo glusterfs iscsi nfs photonPersistentDisk portworxVolume quobyte rbd scaleIO storageos"),
    "vsphereVolume": _FREE,
}

# -- The pod

_SPEC: Fields = {
    "containers": _below(CONTAINER),
    "initContainers": _below(CONTAINER),
    "volumes": _held(rules.volume, _VOLUME),
    "resourceClaims": _held(rules.resource_claim, _free("name resourceClaimName resourceClaimTemplateName")),
    "imagePullSecrets": _below({"name": _held(rules.secret)}),
    "affinity": _below(_AFFINITY),
    "nodeSelector": _held(rules.node_selector),
    "tolerations": _held(rules.tolerations, _free("key operator value effect tolerationSeconds")),
    "topologySpreadConstraints": _below(_SPREAD),
    "schedulerName": _FREE,
    "priorityClassName": _held(named_in("priority_classes")),
    "dnsPolicy": _FREE,
    "dnsConfig": _below({**_free("nameservers searches"), "options": _below(_free("name value"))}),
    "hostAliases": _below(_free("ip hostnames")),
    "securityContext": _below(_POD_SECURITY),
    "serviceAccountName": _held(rules.service_account),
    "automountServiceAccountToken": _held(granted_by("service_account_tokens", False)),
    "runtimeClassName": _held(named_in("runtime_classes")),
    "hostNetwork": _held(host_namespace("network")),
    "hostPID": _held(host_namespace("pid")),
    "hostIPC": _held(host_namespace("ipc")),
    "serviceAccount": Decision(rule=rules.service_account, named=True),
    # Fields that the worker sets itself, or that evade the scheduler, quotas, evictions or the agent's isolation.
    **_named("restartPolicy terminationGracePeriodSeconds activeDeadlineSeconds enableServiceLinks"),
    **_named("nodeName schedulingGates schedulingGroup readinessGates evictionResponders priority preemptionPolicy"),
    **_named("ephemeralContainers shareProcessNamespace hostUsers os overhead resources"),
    **_named("hostname hostnameOverride subdomain setHostnameAsFQDN"),
}

POD_TEMPLATE: Fields = {"metadata": _below(_METADATA), "spec": _below(_SPEC)}


@dataclass(frozen=True)
class Found:
    """A field that a manifest has."""

    path: str
    """Its place, with the names of containers and the like: `spec.containers.training.image`."""
    plain: str
    """The same without them: `spec.containers.image`."""
    item: Any
    """The value, or one item of a list."""
    decision: Decision | None
    """None for a field that is not in the table."""


def walk(content: Mapping[str, Any], fields: Fields = POD_TEMPLATE, path: str = "", plain: str = "") -> Iterator[Found]:
    """Yields the fields of a manifest, an item of a list each by itself.

    Raises:
        TypeError: if something that has fields is no mapping.
    """
    for name, value in content.items():
        decision = fields.get(name)
        general = f"{plain}.{name}" if plain else name
        for place, item in _items(name, value, f"{path}.{name}" if path else name):
            yield Found(place, general, item, decision)
            if decision and decision.below and item is not None:
                if not isinstance(item, Mapping):
                    raise TypeError(f"{place} is not a mapping")
                yield from walk(cast("Mapping[str, Any]", item), decision.below, place, general)


def _items(name: str, value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, list):
        yield path, value
        return
    key = key_of(name)
    for item in cast("list[Any]", value):
        named = key and isinstance(item, Mapping) and cast("Mapping[str, Any]", item).get(key)
        yield (f"{path}.{named}" if named else path), item
