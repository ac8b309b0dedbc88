"""Tests of the site policy with pods of jobs: each power over the cluster is refused by name, unless it is allowed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from activities.nodes.backend import NodeRefused
from activities.nodes.kubernetes import KubernetesSettings
from activities.nodes.kubernetes.pod import pod_of
from activities.nodes.kubernetes.site_policy import SitePolicy
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


HOST = {"path": "/"}

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
    assert made(labels=labels | {"app.kubernetes.io/name": "mine"})


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


def test_limits_count_nodes_and_gpus() -> None:
    policy = SitePolicy(max_nodes=2, max_gpus=12)
    pod = made(role={"resources": {"gpu": 8}})
    assert policy.shortage([pod]) == ""
    assert policy.shortage([pod, pod]) == "16 GPUs, and the site's policy allows 12 (max_gpus)"
    assert policy.shortage([pod] * 3) == "3 nodes, and the site's policy allows 2 (max_nodes)"
    assert SitePolicy().shortage([pod] * 1000) == ""


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
