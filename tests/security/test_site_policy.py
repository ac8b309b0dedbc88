"""Tests of the site policy with pods of jobs: each power over the cluster is refused by name, unless it is allowed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from perdure.activities.nodes.backend import NodeRefused
from perdure.activities.nodes.kubernetes import KubernetesSettings
from perdure.activities.nodes.kubernetes.gangs import adapter_of
from perdure.activities.nodes.kubernetes.pod import pod_of
from perdure.activities.nodes.kubernetes.room import gpus_of, shortage_of
from perdure.activities.nodes.kubernetes.site_policy import SitePolicy
from tests.kubernetes.test_pod_manifest import container, request


def made(
    template: dict[str, Any] | None = None,
    *,
    policy: dict[str, Any] | None = None,
    secret: str | None = None,
    role: dict[str, Any] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    settings = KubernetesSettings(
        agent_image="perdure:1", policy=SitePolicy.model_validate(policy or {}), connection_secret=secret
    )
    return pod_of(request({**(role or {}), "pod_template": template or {}}, **spec), settings)


def training(**fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "training", **fields}]}}


def security(**fields: Any) -> dict[str, Any]:
    return training(securityContext=fields)


def volume(**source: Any) -> dict[str, Any]:
    return {"spec": {"volumes": [{"name": "v", **source}]}}


def agent(**fields: Any) -> dict[str, Any]:
    return {"spec": {"initContainers": [{"name": "perdure-agent", **fields}]}}


def annotated(name: str) -> dict[str, Any]:
    return {"metadata": {"annotations": {name: "x"}}}


def on_machines(label: str) -> dict[str, Any]:
    terms = [{"matchExpressions": [{"key": label, "operator": "Exists"}]}]
    kind = "requiredDuringSchedulingIgnoredDuringExecution"
    return {"spec": {"affinity": {"nodeAffinity": {kind: {"nodeSelectorTerms": terms}}}}}


AWAY = "spec.affinity.podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution"


def away_from(pods: dict[str, Any]) -> dict[str, Any]:
    term = {"topologyKey": "topology.kubernetes.io/zone", "labelSelector": {}, **pods}
    return {"spec": {"affinity": {"podAntiAffinity": {AWAY.rpartition(".")[2]: [term]}}}}


def projected(**source: Any) -> dict[str, Any]:
    return volume(projected={"sources": [source]})


HOST = {"path": "/"}
NETWORK: dict[str, Any] = {"host_namespaces": ["network"]}
POWER: dict[str, Any] = {"privileged": True}

ATTACKS: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    (security(privileged=True), "spec.containers.training.securityContext.privileged", {"privileged": True}),
    (security(allowPrivilegeEscalation=True), "allowPrivilegeEscalation", {"privileged": True}),
    (security(procMount="Unmasked"), "procMount", {"privileged": True}),
    (security(capabilities={"add": ["SYS_ADMIN"]}), 'capabilities.add: got "SYS_ADMIN"', {"capabilities": ["SYS_*"]}),
    (security(capabilities={"add": ["CAP_IPC_LOCK"]}), "capabilities.add", {"capabilities": ["IPC_LOCK"]}),
    (security(seccompProfile={"type": "Unconfined"}), "seccompProfile.type", {"privileged": True}),
    (security(appArmorProfile={"type": "Unconfined"}), "appArmorProfile.type", {"privileged": True}),
    ({"spec": {"securityContext": {"seccompProfile": {"type": "Unconfined"}}}}, "seccomp", {"privileged": True}),
    (
        {"spec": {"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}}},
        "sysctls",
        {"sysctls": ["*"]},
    ),
    ({"spec": {"hostNetwork": True}}, "spec.hostNetwork: got true", {"host_namespaces": ["network"]}),
    ({"spec": {"hostPID": True}}, "spec.hostPID", {"host_namespaces": ["pid"]}),
    ({"spec": {"hostIPC": True}}, "spec.hostIPC", {"host_namespaces": ["ipc"]}),
    (training(ports=[{"containerPort": 1, "hostPort": 1}]), "hostPort", {"host_namespaces": ["network"]}),
    (volume(hostPath=HOST), 'volumes.v.hostPath.path: got "/"', {"host_paths": ["/"]}),
    (volume(hostPath={"path": "/data/sets/.."}), "hostPath.path", {"host_paths": ["/"]}),
    (volume(csi={"driver": "x"}), 'volumes.v: got "csi"', {"volumes": ["csi", "emptyDir"]}),
    (volume(nfs={"server": "x", "path": "/"}), 'volumes.v: got "nfs"', {"volumes": ["nfs", "emptyDir"]}),
    (
        volume(projected={"sources": [{"serviceAccountToken": {"path": "t"}}]}),
        "Token",
        {"service_account_tokens": True},
    ),
    ({"spec": {"serviceAccountName": "admin"}}, 'got "admin"', {"service_accounts": ["admin"]}),
    ({"spec": {"automountServiceAccountToken": True}}, "automount", {"service_account_tokens": True}),
    ({"spec": {"runtimeClassName": "runc-debug"}}, "runtimeClassName", {"runtime_classes": ["runc-*"]}),
    ({"spec": {"nodeName": "control-plane"}}, "pod_template.spec.nodeName", {"template_fields": ["spec.nodeName"]}),
    ({"spec": {"shareProcessNamespace": True}}, "shareProcess", {"template_fields": ["spec.shareProcessNamespace"]}),
    *(
        (training(**{probe: {kind: {"host": "10.0.0.1", "port": 1}}}), f"{probe}.{kind}.host", NETWORK)
        for probe in ("livenessProbe", "readinessProbe", "startupProbe")
        for kind in ("httpGet", "tcpSocket")
    ),
    *(
        (training(lifecycle={hook: {kind: {"host": "10.0.0.1", "port": 1}}}), f"{hook}.{kind}.host", NETWORK)
        for hook in ("postStart", "preStop")
        for kind in ("httpGet", "tcpSocket")
    ),
    (training(ports=[{"containerPort": 1, "hostIP": "127.0.0.1"}]), "hostIP", NETWORK),
    (security(seLinuxOptions={"type": "spc_t"}), 'seLinuxOptions.type: got "spc_t"', {"privileged": True}),
    (security(seLinuxOptions={"user": "system_u"}), "seLinuxOptions.user", {"privileged": True}),
    (security(seLinuxOptions={"role": "system_r"}), "seLinuxOptions.role", {"privileged": True}),
    ({"spec": {"securityContext": {"seLinuxOptions": {"type": "spc_t"}}}}, "spc_t", {"privileged": True}),
    (training(volumeMounts=[{"name": "tmp", "mountPath": "/x", "mountPropagation": "Bidirectional"}]), "Bidi", POWER),
    ({"spec": {"priorityClassName": "system-node-critical"}}, "system-node", {"priority_classes": ["system-*"]}),
    ({"spec": {"priorityClassName": "urgent"}}, 'priorityClassName: got "urgent"', {"priority_classes": ["urgent"]}),
    (annotated("k8s.v1.cni.cncf.io/networks"), "cncf.io/networks", {"annotations": ["k8s.v1.cni.cncf.io/*"]}),
    (annotated("iam.amazonaws.com/role"), "iam.amazonaws.com/role", {"annotations": ["iam.amazonaws.com/role"]}),
    (annotated("container.apparmor.security.beta.kubernetes.io/training"), "apparmor", {"annotations": ["*apparmor*"]}),
    (annotated("io.katacontainers.config.hypervisor.kernel"), "io.katacontainers", {"annotations": ["io.kata*"]}),
    ({"metadata": {"labels": {"app": "shop"}}}, 'metadata.labels.app: got "shop"', {"labels": ["app"]}),
    ({"metadata": {"labels": {"azure.workload.identity/use": "true"}}}, "azure", {"labels": ["azure.*"]}),
    ({"spec": {"tolerations": [{"operator": "Exists"}]}}, 'tolerations: got "every taint"', {"tolerations": ["*"]}),
    (
        {"spec": {"tolerations": [{"key": "node-role.kubernetes.io/control-plane", "operator": "Exists"}]}},
        "tolerations: got",
        {"tolerations": ["node-role.kubernetes.io/*"]},
    ),
    (
        {"spec": {"nodeSelector": {"node-role.kubernetes.io/control-plane": ""}}},
        "nodeSelector: got",
        {"node_selectors": ["*"]},
    ),
    (on_machines("node-role.kubernetes.io/control-plane"), "matchExpressions: got", {"node_selectors": ["*"]}),
    (
        away_from({"namespaceSelector": {}}),
        "namespaceSelector",
        {"template_fields": ["spec", f"{AWAY}.namespaceSelector"]},
    ),
    (away_from({"namespaces": ["other"]}), "namespaces", {"template_fields": ["spec", f"{AWAY}.namespaces"]}),
    (projected(podCertificate={"signerName": "x.y/z", "keyType": "ED25519"}), "podCert", {"projected_sources": ["*"]}),
    (projected(clusterTrustBundle={"name": "x", "path": "y"}), "clusterTrust", {"projected_sources": ["cluster*"]}),
    (volume(emptyDir={"sizeLimit": "100Ti"}), 'emptyDir.sizeLimit: got "100Ti"', {"max_scratch": "200Ti"}),
    (
        volume(ephemeral={"volumeClaimTemplate": {"spec": {"volumeName": "theirs"}}}),
        "volumeClaimTemplate.spec.volumeName",
        {"template_fields": ["spec", "spec.volumes.ephemeral.volumeClaimTemplate.spec.volumeName"]},
    ),
    (
        {"spec": {"evictionResponders": [{"name": "never.example/x"}]}},
        "evictionResponders",
        {"template_fields": ["spec.evictionResponders"]},
    ),
]


def is_refused(text: str, **arguments: Any) -> None:
    with pytest.raises(NodeRefused) as refused:
        made(**arguments)
    assert text in str(refused.value)
    assert "the site's policy allows" in str(refused.value)


@pytest.mark.parametrize(("template", "text", "policy"), ATTACKS, ids=[text for _, text, _ in ATTACKS])
def test_a_power_is_refused_by_name_and_allowed_by_name(
    template: dict[str, Any], text: str, policy: dict[str, Any]
) -> None:
    is_refused(text, template=template)
    if ".." not in str(template):
        assert made(template, policy=policy)


@pytest.mark.parametrize("kind", ["containers", "initContainers"])
def test_a_container_that_the_job_adds_is_held_to_the_same(kind: str) -> None:
    is_refused(
        "spec.", template={"spec": {kind: [{"name": "x", "image": "i", "securityContext": {"privileged": True}}]}}
    )
    added = container(made({"spec": {kind: [{"name": "x", "image": "i"}]}}), "x")
    assert added["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_capabilities_are_dropped_whatever_a_template_keeps() -> None:
    pod = made(security(capabilities={"drop": [], "add": ["IPC_LOCK"]}), policy={"capabilities": ["IPC_LOCK"]})
    assert container(pod, "training")["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}


def test_what_a_template_takes_away_is_put_back() -> None:
    pod = made({"spec": {"securityContext": None, "containers": [{"name": "training", "securityContext": None}]}})
    assert container(pod, "training")["securityContext"]["allowPrivilegeEscalation"] is False
    assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    pod = made({"spec": {"automountServiceAccountToken": None}})
    assert pod["spec"]["automountServiceAccountToken"] is False


@pytest.mark.parametrize("namespace", ["kube-system", "kube-public"])
def test_namespaces_of_the_cluster_itself_are_refused(namespace: str) -> None:
    is_refused(f'namespace: got "{namespace}"', namespace=namespace)


def test_a_pattern_with_an_exclamation_mark_takes_out_again() -> None:
    policy = {"namespaces": ["team-*", "!team-finance"]}
    assert made(policy=policy, namespace="team-vision")
    is_refused("namespace", policy=policy, namespace="team-finance")
    is_refused("namespace", policy=policy, namespace="other")


def test_images_and_secrets_are_those_of_the_site() -> None:
    policy = {"images": ["images.test/ml/*"], "secrets": ["job-*"]}
    mine = {"image": "images.test/ml/torch:1"}
    assert made(policy=policy, role=mine, secrets={"TOKEN": "job-a/key"})
    is_refused("training.image", policy=policy, role={"image": "images.test/other:1"})
    mounts_images = policy | {"volumes": ["emptyDir", "image"]}
    assert made(volume(image={"reference": "images.test/ml/data:1"}), policy=mounts_images, role=mine)
    foreign = volume(image={"reference": "images.test/other:1", "pullPolicy": "Always"})
    is_refused("volumes.v.image.reference", policy=mounts_images, role=mine, template=foreign)
    is_refused("training.env.TOKEN", policy=policy, role=mine, secrets={"TOKEN": "team/key"})
    is_refused("volumes.v.secret", policy=policy, role=mine, template=volume(secret={"secretName": "team"}))
    projected = volume(projected={"sources": [{"secret": {"name": "team"}}]})
    is_refused("projected.sources.secret", policy=policy, role=mine, template=projected)
    is_refused("envFrom", policy=policy, role=mine, template=training(envFrom=[{"secretRef": {"name": "team"}}]))
    is_refused("imagePullSecrets", policy=policy, role={**mine, "image_pull_secrets": ["team"]})


def test_no_policy_gives_the_workers_connection_to_a_job() -> None:
    everything = {"secrets": ["*"]}
    for template in (
        training(env=[{"name": "A", "valueFrom": {"secretKeyRef": {"name": "temporal", "key": "TEMPORAL_API_KEY"}}}]),
        training(envFrom=[{"secretRef": {"name": "temporal"}}]),
        volume(secret={"secretName": "temporal"}),
        volume(projected={"sources": [{"secret": {"name": "temporal"}}]}),
    ):
        is_refused("Perdure's own Secrets", template=template, policy=everything, secret="temporal")
    for policy in (everything, {"secrets": ["job-*"]}):
        agents = container(made(secret="temporal", policy=policy), "perdure-agent")
        assert agents["envFrom"] == [{"secretRef": {"name": "temporal"}}]


def key(name: str) -> dict[str, Any]:
    return {"name": "AWS_SESSION_TOKEN", "valueFrom": {"secretKeyRef": {"name": name, "key": "k"}}}


@pytest.mark.parametrize("secret", ["perdure-gateway", "perdure-payload-keys", "sh.helm.release.v1.p.v1", "ours"])
def test_no_policy_gives_the_control_planes_secrets_to_a_job(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_KUBERNETES_AGENT_IMAGE", "perdure:1")
    monkeypatch.setenv("PERDURE_KUBERNETES_RESERVED_SECRETS", "ours, others")
    everything = SitePolicy(secrets=("*",), volumes=("*",), template_fields=("metadata", "spec"))
    settings = replace(KubernetesSettings.from_environment(), policy=everything, namespace="ours")

    def tried(namespace: str, template: dict[str, Any], **fields: Any) -> None:
        pod_of(request({"pod_template": template, **fields.pop("role", {})}, namespace=namespace, **fields), settings)

    attacks: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("training.env.A", {}, {"secrets": {"A": f"{secret}/k"}}),
        ("imagePullSecrets", {}, {"role": {"image_pull_secrets": [secret]}}),
        ("imagePullSecrets", {"spec": {"imagePullSecrets": [{"name": secret}]}}, {}),
        ("training.env", training(env=[key(secret)]), {}),
        ("training.envFrom", training(envFrom=[{"secretRef": {"name": secret}}]), {}),
        ("x.env", {"spec": {"initContainers": [{"name": "x", "image": "i", "env": [key(secret)]}]}}, {}),
        # The agent sends a session token to the storage that the job names.
        ("perdure-agent.env", agent(env=[key(secret)]), {}),
        ("v.secret.secretName", volume(secret={"secretName": secret}), {}),
        ("v.projected.sources.secret", volume(projected={"sources": [{"secret": {"name": secret}}]}), {}),
        ("v.csi.nodePublishSecretRef", volume(csi={"driver": "d", "nodePublishSecretRef": {"name": secret}}), {}),
        ("v.csi.volumeAttributes", volume(csi={"driver": "d", "volumeAttributes": {"secretName": secret}}), {}),
        ("v.cephfs.secretRef", volume(cephfs={"monitors": ["m"], "secretRef": {"name": secret}}), {}),
        ("v.azureFile.secretName", volume(azureFile={"secretName": secret, "shareName": "s"}), {}),
    ]
    for field, template, fields in attacks:
        with pytest.raises(NodeRefused) as refused:
            tried("ours", template, **fields)
        assert f"{secret}\"; the site's policy allows no use of Perdure's own Secrets" in str(refused.value)
        assert field in str(refused.value)
        tried("theirs", template, **fields)


def test_no_policy_gives_the_control_planes_service_accounts_to_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_KUBERNETES_AGENT_IMAGE", "perdure:1")
    monkeypatch.setenv("PERDURE_KUBERNETES_RESERVED_ACCOUNTS", "site-worker")
    settings = replace(KubernetesSettings.from_environment(), policy=SitePolicy(service_accounts=("*",)))
    for account in ("perdure-worker", "perdure-gateway", "perdure-operator", "site-worker"):
        asked = request({"pod_template": {"spec": {"serviceAccountName": account}}})
        with pytest.raises(NodeRefused, match=f'serviceAccountName: got "{account}".* own service accounts'):
            pod_of(asked, settings)
        assert pod_of(asked, replace(settings, namespace="elsewhere"))


def test_no_pod_of_a_job_is_an_endpoint_of_the_gateways_service() -> None:
    labels = {"app.kubernetes.io/name": "perdure", "app.kubernetes.io/component": "gateway"}
    everything = {"template_fields": ["metadata", "spec"]}
    is_refused('metadata.labels.app.kubernetes.io/name: got "perdure"', labels=labels)
    is_refused("no label of Perdure's own pods", template={"metadata": {"labels": labels}}, policy=everything)
    assert made(labels=labels | {"app.kubernetes.io/name": "mine"}, policy={"labels": ["app.kubernetes.io/*"]})


@pytest.mark.parametrize(
    "template",
    [
        agent(image="evil"),
        agent(command=["sh"]),
        agent(securityContext={"privileged": True}),
        agent(envFrom=[{"secretRef": {"name": "mine"}}]),
        agent(env=[{"name": "PYTHONPATH", "value": "/perdure/run"}]),
        agent(env=[{"name": "LD_PRELOAD", "value": "/perdure/run/x.so"}]),
        agent(env=[{"name": "TEMPORAL_ADDRESS", "value": "evil:7233"}]),
        agent(env=[{"name": "AWS_CONFIG_FILE", "value": "/perdure/run/credential_process"}]),
        agent(env=[{"name": "GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES", "value": "1"}]),
        agent(env=[{"name": "HTTPS_PROXY", "value": "http://evil:1"}]),
        agent(volumeMounts=[{"name": "perdure", "mountPath": "/usr/lib/python3"}]),
        agent(volumeMounts=[{"name": "perdure", "mountPath": "/mnt/../usr"}]),
        agent(volumeMounts=[{"name": "perdure-token", "mountPath": "/mnt/s/step-1/a.distcp", "subPath": "token"}]),
        agent(volumeMounts=[{"name": "perdure-agent", "mountPath": "/mnt/s/step-1/b.distcp", "subPath": "agent.json"}]),
        agent(volumeMounts=[{"name": "perdure", "mountPath": "/mnt/s", "subPathExpr": "$(PERDURE_PREPARE_ADDRESS)"}]),
        agent(volumeMounts=[{"name": "perdure", "mountPath": "/mnt/s", "mountPropagation": "HostToContainer"}]),
        {"spec": {"initContainers": [{"name": "perdure-prepare", "env": [{"name": "AWS_X", "value": "1"}]}]}},
        volume(name="perdure-agent", hostPath=HOST),
        training(volumeMounts=[{"name": "perdure-agent", "mountPath": "/stolen"}]),
        {"spec": {"containers": [{"name": "x", "volumeMounts": [{"name": "perdure-agent", "mountPath": "/x"}]}]}},
        {"spec": {"initContainers": [{"name": "x", "volumeMounts": [{"name": "perdure", "mountPath": "/x"}]}]}},
    ],
)
def test_perdures_own_parts_of_a_pod_are_out_of_reach(template: dict[str, Any]) -> None:
    permissive = {"privileged": True, "host_paths": ["/"], "template_fields": ["metadata", "spec"]}
    is_refused("Perdure's own", template=template, policy=permissive)


def test_agents_get_what_they_need_for_the_jobs_storage() -> None:
    template = agent(
        env=[{"name": "AWS_ACCESS_KEY_ID", "valueFrom": {"secretKeyRef": {"name": "s3", "key": "id"}}}],
        volumeMounts=[{"name": "perdure", "mountPath": "/mnt/logs"}],
        resources={"limits": {"memory": "1Gi"}},
    )
    assert "AWS_ACCESS_KEY_ID" in str(container(made(template), "perdure-agent")["env"])
    is_refused("perdure-agent.env.AWS_ACCESS_KEY_ID", template=template, policy={"secrets": ["job-*"]})


@pytest.mark.parametrize("selector", [{}, {"matchLabels": {"app": "theirs"}}])
def test_a_required_anti_affinity_holds_for_the_jobs_own_pods(selector: dict[str, Any]) -> None:
    pod = made(away_from({"labelSelector": selector}))
    [term] = pod["spec"]["affinity"]["podAntiAffinity"][AWAY.rpartition(".")[2]]
    labels = pod["metadata"]["labels"]
    own = {name: value for name, value in term["labelSelector"]["matchLabels"].items() if labels.get(name) == value}
    assert own, "it keeps away pods of others"
    assert term["labelSelector"]["matchLabels"] == {**selector.get("matchLabels", {}), **own}


def test_a_scratch_volume_without_a_limit_gets_the_sites() -> None:
    pod = made(volume(emptyDir={}), policy={"max_scratch": "10Gi"})
    limits = {one["name"]: one["emptyDir"]["sizeLimit"] for one in pod["spec"]["volumes"] if "emptyDir" in one}
    assert {name: limits[name] for name in ("v", "home", "tmp")} == dict.fromkeys(("v", "home", "tmp"), "10Gi")


def test_no_policy_gives_training_code_its_agents_token_or_files() -> None:
    everything = {"service_account_tokens": True, "projected_sources": ["*"]}
    token = projected(serviceAccountToken={"audience": "perdure-gateway", "path": "t"})
    is_refused("no token for Perdure's gateway", template=token, policy=everything)
    private = {"fileKeyRef": {"volumeName": "perdure-agent", "path": "agent.json", "key": "grant"}}
    is_refused("Perdure's own volumes", template=training(env=[{"name": "A", "valueFrom": private}]), policy=everything)
    for volume_name in ("perdure", "perdure-agent", "perdure-archive"):
        is_refused("Perdure's own parts", template=volume(name=volume_name, configMap={"name": "x"}), policy=everything)


def test_what_the_worker_sets_itself_needs_no_permission() -> None:
    pod = made(role={"topology": {"preferred": "rack"}}, policy={"labels": [], "annotations": [], "node_selectors": []})
    assert pod["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "perdure"
    settings = KubernetesSettings(agent_image="perdure:1", policy=SitePolicy(labels=()), gangs=adapter_of("kueue"))
    assert "kueue.x-k8s.io/queue-name" in pod_of(request(queue="research"), settings)["metadata"]["labels"]
    theirs = {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "theirs"}}}
    with pytest.raises(NodeRefused, match='queue-name: got "theirs"; the site\'s policy allows none'):
        pod_of(request({"pod_template": theirs}, queue="research"), settings)


def test_limits_count_nodes_and_gpus() -> None:
    policy = SitePolicy(max_nodes=2, max_gpus=12)
    assert shortage_of(policy, [8]) == ""
    assert shortage_of(policy, [8, 8]) == "16 GPUs, and the site's policy allows 12 (max_gpus)"
    assert shortage_of(policy, [0] * 3) == "3 nodes, and the site's policy allows 2 (max_nodes)"
    assert shortage_of(SitePolicy(), [8] * 1000) == ""


def devices(kind: str = "containers", **limits: str) -> dict[str, Any]:
    named = {
        f"{domain.replace('_', '.')}/{rest.replace('_', '-')}": count
        for name, count in limits.items()
        for domain, _, rest in [name.partition("__")]
    }
    return {"spec": {kind: [{"name": "x", "image": "i", "resources": {"limits": named}}]}}


@pytest.mark.parametrize(
    ("template", "gpus"),
    [
        ({}, 2),
        (devices(nvidia_com__gpu="4"), 6),
        (devices("initContainers", nvidia_com__gpu="4"), 4),
        (devices("initContainers", nvidia_com__gpu="1"), 2),
        (devices(nvidia_com__mig_1g_5gb="7"), 9),
        (devices(amd_com__gpu="1"), 3),
        (devices(google_com__tpu="4"), 6),
        (devices(unheard_com__accelerator="4"), 6),
        (devices(deviceclass_resource_kubernetes_io__gpu="4"), 6),
        (devices(rdma__hca="4", vpc_amazonaws_com__efa="4"), 2),
    ],
)
def test_every_accelerator_of_every_container_counts(template: dict[str, Any], gpus: int) -> None:
    pod = made(template, role={"resources": {"gpu": 2}})
    assert gpus_of(SitePolicy(), pod) == gpus


def test_a_sidecars_gpus_count_beside_those_of_the_training() -> None:
    resources = {"limits": {"nvidia.com/gpu": "4"}}
    sidecar = {"name": "x", "image": "i", "restartPolicy": "Always", "resources": resources}
    assert gpus_of(SitePolicy(), made({"spec": {"initContainers": [sidecar]}}, role={"resources": {"gpu": 2}})) == 6


def test_claims_whose_devices_cannot_be_counted_are_refused_where_gpus_are_limited() -> None:
    claim = {"spec": {"resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "eight"}]}}
    assert made(claim)
    is_refused('spec.resourceClaims: got "gpus"', template=claim, policy={"max_gpus": 8})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("privilegd: true", "privilegd"),
        ("privileged: maybe", "privileged"),
        ("host_namespaces: [user]", "host_namespaces"),
        ("max_nodes: 0", "max_nodes"),
        ("[", "while parsing"),
    ],
)
def test_a_wrong_policy_is_refused_by_field(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match="the site policy is wrong") as refused:
        SitePolicy.parse(text)
    assert complaint in str(refused.value)


def test_an_empty_policy_is_the_default() -> None:
    assert SitePolicy.parse("") == SitePolicy()
