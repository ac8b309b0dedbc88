"""Tests of the Helm chart: the values that it refuses, the rights that it grants, and a release that runs real jobs."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import yaml

from perdure.activities.nodes.kubernetes.merge import merge
from perdure.activities.nodes.kubernetes.pod import METRICS_PORT
from perdure.activities.nodes.kubernetes.settings import VARIABLES, KubernetesSettings
from perdure.activities.nodes.kubernetes.site_policy import CONTROL_PLANE, SitePolicy
from perdure.activities.notifications import SECRETS_VARIABLE
from perdure.base.kubernetes import KubernetesApi, Removed
from perdure.client.client import Client
from perdure.client.connection import Endpoint
from perdure.contract import JobPhase
from scripts.cluster.certificates import Certificates
from scripts.cluster.cluster import Cluster
from scripts.cluster.host_programs import SITE_POLICY
from scripts.cluster.images import BARE_IMAGE
from scripts.cluster.machine import API_ADDRESS
from tests.kubernetes.chart import CHART, HelmFailed, Release, gateway_front, helm_says, rendered
from tests.kubernetes.install_guide import connection_secret
from tests.kubernetes.pods import PodJob, TestCluster, job_in_a_namespace, with_host_programs
from tests.support.allocation import REPOSITORY
from tests.support.fronts import tls_front
from tests.support.temporal_server import dev_server
from tests.system.site import SCRIPT, Job

TASK_QUEUE = "chart"
SHORT = ["torchrun", "/code/train.py", "--steps", "20", "--out", "/tmp/first"]
QUICK = {"env": {"OMP_NUM_THREADS": "1"}, "recovery": {"warm_starts": False}}
"""For jobs that start once: nothing is prepared for a second time."""


async def test_it_is_without_fault_to_the_linter(helm: Path) -> None:
    assert "0 chart(s) failed" in await helm_says(helm, "lint", "--strict", CHART)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"replcas": 3}, "'replcas' not allowed"),
        ({"temporal": {"adress": "temporal:7233"}}, "'/temporal': additional properties 'adress' not allowed"),
        ({"temporal": {"address": "temporal"}}, "'/temporal/address': 'temporal' does not match pattern"),
        ({"jobNamespaces": "nlp"}, "'/jobNamespaces': got string, want array"),
        ({"page": {"url": "http://gate.example"}}, "'/page/url': 'http://gate.example' does not match pattern"),
        ({"agentMetrics": {"port": 9465}}, "set networkPolicy.metricsFrom"),
        ({"agentMetrics": {"port": 80}}, "'/agentMetrics/port'"),
        ({"jobNamespaces": ["nlp"], "allNamespaces": True}, "leave jobNamespaces empty, or allNamespaces false"),
    ],
)
async def test_a_wrong_value_is_refused_by_name(helm: Path, values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(HelmFailed, match=re.escape(complaint)):
        await rendered(helm, **values)


async def test_prometheus_finds_all_parts_and_reaches_agents_where_the_values_say(helm: Path) -> None:
    prometheus = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    values = {
        "jobNamespaces": ["nlp"],
        "agentMetrics": {"port": 9465},
        "networkPolicy": {"metricsFrom": prometheus},
        "podMonitors": {"enabled": True, "labels": {"release": "kps"}},
        "operator": {"enabled": True},
    }
    objects = await rendered(helm, **values)
    monitors = {one["metadata"]["name"]: one for one in objects if one["kind"] == "PodMonitor"}
    assert monitors.keys() == {"perdure-worker", "perdure-gateway", "perdure-operator", "perdure-agents"}
    assert {one["metadata"]["labels"]["release"] for one in monitors.values()} == {"kps"}
    assert monitors["perdure-agents"]["spec"]["namespaceSelector"] == {"matchNames": ["nlp"]}
    assert [one["port"] for one in monitors["perdure-agents"]["spec"]["podMetricsEndpoints"]] == [METRICS_PORT]
    [policy] = [one for one in objects if one["kind"] == "NetworkPolicy" and one["metadata"].get("namespace") == "nlp"]
    assert {"ports": [{"port": 9465}], "from": prometheus} in policy["spec"]["ingress"]
    [worker] = [one for one in objects if one["kind"] == "Deployment" and is_of(one, "worker")]
    [container] = worker["spec"]["template"]["spec"]["containers"]
    assert {"name": "PERDURE_KUBERNETES_AGENT_METRICS_PORT", "value": "9465"} in container["env"]
    assert "--events=-" in container["command"]
    assert not any(one["kind"] == "PodMonitor" for one in await rendered(helm))


async def test_a_worker_may_list_machines_only_where_it_is_to_watch_them(helm: Path) -> None:
    def roles(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [one for one in objects if one["kind"] == "ClusterRole" and one["metadata"]["name"].endswith("-cluster")]

    assert not roles(await rendered(helm))
    objects = await rendered(helm, cluster={"watch": True, "sharing": "fair"})
    [role] = roles(objects)
    assert role["rules"] == [{"apiGroups": [""], "resources": ["nodes", "pods"], "verbs": ["list", "watch"]}]
    [worker] = [one for one in objects if one["kind"] == "Deployment" and one["metadata"]["name"].endswith("worker")]
    variables = {one["name"]: one.get("value") for one in worker["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert (variables["PERDURE_CLUSTER"], variables["PERDURE_SHARING"]) == ("on", "fair")
    with pytest.raises(HelmFailed, match="sharing"):
        await rendered(helm, cluster={"sharing": "maybe"})


async def test_rules_and_dashboards_are_those_of_the_repository(helm: Path) -> None:
    switched_on = {"prometheusRules": {"enabled": True, "labels": {"release": "kps"}}, "dashboards": {"enabled": True}}
    objects = await rendered(helm, **switched_on)
    [rules] = [one for one in objects if one["kind"] == "PrometheusRule"]
    assert rules["metadata"]["labels"]["release"] == "kps"
    assert rules["spec"] == yaml.safe_load((REPOSITORY / "deploy" / "prometheus" / "rules.yaml").read_text())
    found = [one for one in objects if one["metadata"].get("labels", {}).get("grafana_dashboard") == "1"]
    content = {name: text for one in found for name, text in one["data"].items()}
    files = (REPOSITORY / "deploy" / "grafana").glob("*.json")
    assert content == {f"perdure-{path.name}": path.read_text() for path in files}
    assert not {"PrometheusRule"} & {one["kind"] for one in await rendered(helm)}


async def test_names_labels_images_and_pods_are_as_the_values_say(helm: Path) -> None:
    digest = f"sha256:{'a' * 64}"
    extra = {
        "env": [{"name": "A", "value": "1"}],
        "volumes": [{"name": "extra", "emptyDir": {}}],
        "volumeMounts": [{"name": "extra", "mountPath": "/extra"}],
        "podAnnotations": {"a.example/b": "c"},
    }
    objects = await rendered(
        helm,
        nameOverride="training",
        commonLabels={"team": "nlp"},
        image={"digest": digest},
        podSecurityContext={"runAsUser": None, "runAsGroup": None, "fsGroup": None},
        jobs={"podAnnotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "true"}},
        gateway=extra,
        operator={"enabled": True, **extra},
        page={"enabled": True, **extra},
        **extra,
    )
    assert {one["metadata"]["labels"].get("team") for one in objects} == {"nlp"}
    deployments = {one["metadata"]["name"]: one["spec"]["template"] for one in objects if one["kind"] == "Deployment"}
    assert deployments.keys() == {"training-worker", "training-gateway", "training-operator", "training-page"}
    for template in deployments.values():
        spec = template["spec"]
        (container,) = spec["containers"]
        assert template["metadata"]["labels"]["team"] == "nlp"
        assert template["metadata"]["annotations"]["a.example/b"] == "c"
        assert container["image"] == f"perdure@{digest}"
        assert extra["env"][0] in container["env"]
        assert extra["volumes"][0] in spec["volumes"]
        assert extra["volumeMounts"][0] in container["volumeMounts"]
        assert spec["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    (worker,) = deployments["training-worker"]["spec"]["containers"]
    (annotations,) = [one for one in worker["env"] if one["name"] == "PERDURE_KUBERNETES_POD_ANNOTATIONS"]
    settings = KubernetesSettings.from_environment(
        {"PERDURE_KUBERNETES_AGENT_IMAGE": "perdure", annotations["name"]: annotations["value"]}
    )
    assert settings.pod_annotations == {"cluster-autoscaler.kubernetes.io/safe-to-evict": "true"}


async def test_the_operator_has_probes_and_a_disruption_budget_and_users_have_aggregated_roles(helm: Path) -> None:
    objects = [one for one in await rendered(helm, operator={"enabled": True}) if is_of(one, "operator")]
    (deployment,) = [one for one in objects if one["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "health"}
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "health"}
    starting = container["startupProbe"]
    assert starting["httpGet"] == container["livenessProbe"]["httpGet"]
    assert starting["periodSeconds"] * starting["failureThreshold"] == 300
    (budget,) = [one for one in objects if one["kind"] == "PodDisruptionBudget"]
    assert budget["spec"]["selector"] == deployment["spec"]["selector"]
    roles = {one["metadata"]["name"]: one for one in objects if one["kind"] == "ClusterRole"}
    verbs = {
        label.rpartition("-")[2]: {verb for rule in role["rules"] for verb in rule["verbs"]}
        for role in roles.values()
        for label in role["metadata"]["labels"]
        if "aggregate-to" in label
    }
    assert verbs.keys() == {"view", "edit", "admin"}
    assert verbs["view"] == {"get", "list", "watch"}
    assert {"create", "patch", "delete"} < verbs["edit"] == verbs["admin"]
    of_namespace = await rendered(helm, operator={"enabled": True, "clusterObjects": False, "owners": "ignore"})
    assert {one["kind"] for one in of_namespace if is_of(one, "operator")} == {
        *("Deployment", "NetworkPolicy", "PodDisruptionBudget", "Role", "RoleBinding", "ServiceAccount")
    }


async def test_the_page_asks_about_its_namespaces_only_and_is_reached_by_those_whom_the_values_name(
    helm: Path,
) -> None:
    ingress = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress"}}}]
    page = {"enabled": True, "url": "https://gate.example/perdure", "audience": "", "readOnly": True}
    values: dict[str, Any] = {"page": page, "networkPolicy": {"pageFrom": ingress}}
    objects = await rendered(helm, jobNamespaces=["nlp", "vision"], **values)
    assert not [one for one in await rendered(helm) if is_of(one, "page")], "only where it is enabled"
    own = [one for one in objects if is_of(one, "page")]
    rights = {
        (one["kind"], one["metadata"].get("namespace", "")): one["rules"]
        for one in own
        if one["kind"] in ("Role", "ClusterRole")
    }
    assert rights.keys() == {("ClusterRole", ""), ("Role", "nlp"), ("Role", "vision")}
    resources = {kind: [resource for rule in rules for resource in rule["resources"]] for kind, rules in rights.items()}
    assert resources["ClusterRole", ""] == ["tokenreviews"]
    assert resources["Role", "nlp"] == resources["Role", "vision"] == ["localsubjectaccessreviews"]
    [deployment] = [one for one in own if one["kind"] == "Deployment"]
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    assert container["command"][:2] == ["perdure", "page"]
    assert {"--audience=", "--read-only", "--namespace=nlp", "--namespace=vision"} < {*container["command"]}
    assert "--url=https://gate.example/perdure" in container["command"]
    [policy] = [one for one in own if one["kind"] == "NetworkPolicy"]
    assert policy["spec"]["ingress"] == [{"ports": [{"port": "page"}], "from": ingress}]
    [closed] = [one for one in await rendered(helm, page={"enabled": True}) if is_network(one)]
    assert "ingress" not in closed["spec"], "kubectl port-forward alone leads to it"
    users = [
        one["metadata"]["name"].rpartition("-")[2] for one in objects if "-trainingjob-" in one["metadata"]["name"]
    ]
    assert users == ["editor", "viewer"]
    everywhere = [(one["kind"], one["metadata"]["name"]) for one in await rendered(helm, allNamespaces=True, **values)]
    assert len(everywhere) == len(set(everywhere))


def is_network(one: dict[str, Any]) -> bool:
    return one["kind"] == "NetworkPolicy" and is_of(one, "page")


async def test_its_site_policy_is_the_models_and_reaches_the_worker(helm: Path) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]["sitePolicy"]
    assert schema["properties"].keys() == SitePolicy.model_fields.keys()
    policy = {"host_paths": ["/dev/infiniband"], "max_gpus": 64}
    [content] = [
        one["data"]["site-policy.yaml"]
        for one in await rendered(helm, sitePolicy=policy)
        if one["kind"] == "ConfigMap" and one["metadata"]["name"] == "perdure-worker-site-policy"
    ]
    assert SitePolicy.parse(content) == SitePolicy.model_validate(policy)


async def test_the_resources_of_our_containers_reach_the_worker_and_are_its_own_by_default(helm: Path) -> None:
    async def told(**values: Any) -> KubernetesSettings:
        [worker] = [
            one for one in await rendered(helm, **values) if one["kind"] == "Deployment" and is_of(one, "worker")
        ]
        [container] = worker["spec"]["template"]["spec"]["containers"]
        names = ("AGENT_RESOURCES", "PREPARE_RESOURCES")
        given = {one["name"]: one.get("value", "") for one in container["env"]}
        return KubernetesSettings.from_environment(
            {"PERDURE_KUBERNETES_AGENT_IMAGE": "p"}
            | {f"{VARIABLES}{name}": given[f"{VARIABLES}{name}"] for name in names}
        )

    usual, default = await told(), KubernetesSettings(agent_image="p")
    assert usual.agent_resources == default.agent_resources
    assert usual.prepare_resources == default.prepare_resources
    larger = await told(agents={"resources": {"limits": {"cpu": "8"}}, "prepareResources": {"limits": {"cpu": None}}})
    assert larger.agent_resources["limits"] == {"cpu": "8", "memory": "512Mi"}
    assert larger.prepare_resources["limits"] == {"memory": "512Mi"}


async def test_secrets_of_notifications_lie_where_the_worker_reads_them(helm: Path) -> None:
    given = [
        {"namespace": namespace, "name": "slack", "secret": f"slack-of-{namespace}"} for namespace in ("nlp", "vision")
    ]
    [worker] = [
        one
        for one in await rendered(helm, notificationSecrets=given)
        if one["kind"] == "Deployment" and is_of(one, "worker")
    ]
    pod = worker["spec"]["template"]["spec"]
    [container] = pod["containers"]
    [folder] = [one["value"] for one in container["env"] if one["name"] == SECRETS_VARIABLE]
    secrets_of = {one["name"]: one["secret"]["secretName"] for one in pod["volumes"] if "secret" in one}
    mounted = {one["mountPath"]: secrets_of.get(one["name"]) for one in container["volumeMounts"]}
    for namespace in ("nlp", "vision"):
        assert mounted[f"{folder}/{namespace}/slack"] == f"slack-of-{namespace}"


async def test_the_worker_knows_what_is_the_control_planes_own(helm: Path) -> None:
    """Each Secret and service account that the release's pods use is reserved, but those that pull images."""
    key = {"secretKeyRef": {"name": "vault", "key": "token"}}
    values = {
        "temporal": {"secret": "temporal", "payloadKeysSecret": "keys"},
        "history": {"secret": "history"},
        "notificationSecrets": [{"namespace": "nlp", "name": "slack", "secret": "slack-of-nlp"}],
        "gateway": {"tls": {"secret": "certificate", "serverName": "gateway.test"}},
        "operator": {"enabled": True},
        "page": {"enabled": True, "tls": {"secret": "of-the-page"}},
        "env": [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": key}],
        "volumes": [{"name": "v", "secret": {"secretName": "mounted"}}],
    }
    objects = await rendered(helm, **values)
    [worker] = [one for one in objects if one["kind"] == "Deployment" and is_of(one, "worker")]
    [container] = worker["spec"]["template"]["spec"]["containers"]
    told = {one["name"]: one.get("value", "").split(",") for one in container["env"]}
    selectors = [one["spec"]["selector"] for one in objects if one["kind"] == "Service"]
    assert selectors
    assert all(CONTROL_PLANE in selector.items() for selector in selectors)
    assert sorted(told["PERDURE_KUBERNETES_RESERVED_ACCOUNTS"]) == sorted(
        one["metadata"]["name"] for one in objects if one["kind"] == "ServiceAccount"
    )
    deployments = yaml.safe_dump([one for one in objects if one["kind"] == "Deployment"])
    named = set(re.findall(r"secretName: (\S+)|secret(?:Key)?Ref:\n(?: +key: .*\n)? +name: (\S+)", deployments))
    assert set(told["PERDURE_KUBERNETES_RESERVED_SECRETS"]) == {one or other for one, other in named}


async def test_it_grants_what_the_documentation_says_and_where_the_values_say(helm: Path) -> None:
    table = (REPOSITORY / "docs" / "kubernetes.md").read_text().partition("| resource | verbs |")[2]
    documented = {
        resource.strip(): set(verbs.strip().split(", "))
        for resource, verbs in re.findall(r"^\|([^|]+)\|([^|]+)\|$", table.partition("\n## ")[0], flags=re.MULTILINE)
        if resource.strip() != "-"
    }

    of_presets = {"configmaps": {"list"}, "localsubjectaccessreviews": {"create"}}
    others = {"-presets": of_presets, "-namespaces": {"namespaces": {"get"}}}

    def granted(role: dict[str, Any]) -> dict[str, set[str]]:
        return {resource: set(rule["verbs"]) for rule in role["rules"] for resource in rule["resources"]}

    def rights(objects: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
        """Returns kind, name and namespace of the worker's rights."""
        found = [one for one in objects if one["kind"].startswith(("Role", "ClusterRole")) and is_of(one, "worker")]
        for one in found:
            # Presets are read beside the worker, also where it may run no job; namespaces are in none.
            own = [rights for end, rights in others.items() if one["metadata"]["name"].endswith(end)]
            assert "rules" not in one or granted(one) == (own[0] if own else documented)
        named = [(one["kind"], one["metadata"]["name"], one["metadata"].get("namespace", "")) for one in found]
        return sorted(one for one in named if not one[1].endswith(tuple(others)))

    name = "perdure-jobs-worker"
    assert rights(await rendered(helm)) == [("Role", name, "perdure"), ("RoleBinding", name, "perdure")]
    assert rights(await rendered(helm, jobNamespaces=["nlp", "vision"])) == [
        (kind, name, namespace) for kind in ("Role", "RoleBinding") for namespace in ("nlp", "vision")
    ]
    everywhere = await rendered(helm, allNamespaces=True)
    name = "perdure-perdure-worker"
    assert rights(everywhere) == [("ClusterRole", name, ""), ("ClusterRoleBinding", name, "")]


@pytest.mark.long("cluster-faults")
async def test_the_first_installation_waits_for_no_secret(
    own_cluster: Cluster, cluster: TestCluster, helm: Path
) -> None:
    """The key ring exists before the first worker mounts it. The hook that made it leaves nothing else behind."""
    async with (
        job_in_a_namespace(cluster) as site,
        dev_server(options=("--ip", "0.0.0.0")) as server,
        gateway_front(site.api, site.namespace) as gateway,
        Release(helm, cluster.kubeconfig, site.namespace) as release,
    ):
        values = release_values(cluster, f"{API_ADDRESS}:{server.port}", gateway)
        values["temporal"] = {"address": f"{API_ADDRESS}:{server.port}", "taskQueue": TASK_QUEUE}
        await release.apply(values)
        namespace = f"/api/v1/namespaces/{site.namespace}"
        events = await site.api.list(f"{namespace}/events")
        assert [one["message"] for one in events if one["reason"] in ("FailedMount", "BackOff")] == []
        before = await site.api.get(f"{namespace}/secrets/perdure-gateway")
        assert before is not None
        assert await site.api.get(f"{namespace}/serviceaccounts/perdure-keyring") is None

        await release.apply(values | {"podAnnotations": {"upgrade": "1"}})
        after = await site.api.get(f"{namespace}/secrets/perdure-gateway")
        assert after is not None
        assert after["data"] == before["data"]


@pytest.mark.long("cluster-faults")
async def test_a_job_outlives_the_worker_that_started_it(
    own_cluster: Cluster, cluster: TestCluster, helm: Path, job: PodJob, results: Path, tmp_path: Path
) -> None:
    """A release and its upgrade: Temporal behind mutual TLS, rights in one namespace and then in all."""
    certificates = Certificates(tmp_path / "pki")
    certificates.create()
    async with (
        job_in_a_namespace(cluster) as site,
        job_in_a_namespace(cluster) as elsewhere,
        dev_server() as server,
        tls_front(server.port, address=API_ADDRESS, name="temporal.test", certificates=certificates) as port,
        gateway_front(job.api, site.namespace) as gateway,
    ):
        # Temporal's credentials are nowhere but with the release.
        await job.api.create(f"/api/v1/namespaces/{site.namespace}/secrets", connection_secret(certificates))
        values = release_values(cluster, f"{API_ADDRESS}:{port}", gateway) | {"jobNamespaces": [job.namespace]}
        async with Release(helm, cluster.kubeconfig, site.namespace) as release:
            await release.apply(values)
            endpoint = Endpoint(address=server.address, task_queue=TASK_QUEUE)
            client = Client(endpoint=endpoint, namespace=job.namespace)
            name = f"c-{secrets.token_hex(4)}"
            await client.submit(endless_job(name, job.namespace, results))
            training = Job(client, name, (await client.status(name)).uid, results)

            other = Client(endpoint=endpoint, namespace=elsewhere.namespace)
            await job.api.create(f"/api/v1/namespaces/{elsewhere.namespace}/configmaps", training_script())
            await other.submit(job_of_the_guide(elsewhere.namespace, command=SHORT))
            waiting = Job(other, "first", (await other.status("first")).uid, results)
            right = f'cannot create resource "configmaps" in API group "" in the namespace "{elsewhere.namespace}"'
            refused = await waiting.until(lambda status: right in status.reason)
            assert refused.phase in (JobPhase.STARTING, JobPhase.WAITING)
            assert "grant the worker this right" in refused.reason

            status = await training.running(nodes=1)
            await training.stepping(generation=status.generation, ranks=1)
            leaving = asyncio.create_task(departures(job.api, site, 2))
            await release.apply(
                values | {"jobNamespaces": [], "allNamespaces": True, "podAnnotations": {"upgrade": "1"}}
            )
            async with asyncio.timeout(60):
                ends = [container_end(pod) for pod in await leaving]
            assert [end["exitCode"] for end in ends] == [0, 0], ends

            # The new workers may do more, and have taken over what the old ones had begun, also what they were refused.
            assert (await other.wait("first")).phase is JobPhase.SUCCEEDED
            await training.undisturbed(ranks=1, seconds=1)
            assert (await training.status()).generation == status.generation
            assert await training.incidents() == []
            await client.cancel(name)
            assert (await client.wait(name)).phase is JobPhase.CANCELLED


def is_of(one: dict[str, Any], component: str) -> bool:
    return one["metadata"]["labels"]["app.kubernetes.io/component"] == component


def release_values(cluster: TestCluster, address: str, gateway: str) -> dict[str, Any]:
    small = {"resources": {"requests": {"cpu": "50m", "memory": "128Mi"}}}
    repository, _, tag = cluster.agent_image.rpartition(":")
    return {
        "image": {"repository": repository, "tag": tag, "pullPolicy": "Never"},
        "temporal": {
            "address": address,
            "taskQueue": TASK_QUEUE,
            "tls": {"serverName": "temporal.test"},
            "secret": "temporal",
        },
        "gateway": {"address": gateway, **small},
        **small,
        "sitePolicy": yaml.safe_load(SITE_POLICY),
    }


def endless_job(name: str, namespace: str, out: Path) -> dict[str, Any]:
    return QUICK | {
        "name": name,
        "namespace": namespace,
        "backend": "kubernetes",
        "limits": {"termination_grace_period": "5s"},
        "roles": {
            "worker": {
                "nodes": 1,
                "image": BARE_IMAGE,
                "command": ["torchrun", str(SCRIPT), str(out)],
                "pod_template": with_host_programs(out),
            }
        },
    }


def job_of_the_guide(namespace: str, **changed: Any) -> dict[str, Any]:
    """As docs/install-kubernetes.md has it, but for the image: this machine's programs stand in for it."""
    text = (REPOSITORY / "docs" / "install-kubernetes.md").read_text()
    block = re.search(r"```yaml\n(# first.yaml\n.*?)```", text, flags=re.DOTALL)
    assert block
    job = yaml.safe_load(block[1]) | QUICK | {"namespace": namespace}
    role = job["roles"]["worker"] | changed
    job["roles"] = {"worker": role}
    role |= {"image": BARE_IMAGE, "pod_template": merge(with_host_programs(), role["pod_template"])}
    return job


def training_script() -> dict[str, Any]:
    data = {"train.py": (REPOSITORY / "examples" / "04-checkpoints" / "plain.py").read_text()}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "first"}, "data": data}


async def departures(api: KubernetesApi, site: PodJob, count: int) -> list[dict[str, Any]]:
    """The workers that go next, as they were last."""
    async with aclosing(api.follow(site.pods_path, labels="app.kubernetes.io/component=worker")) as changes:
        gone = (change.object async for change in changes if isinstance(change, Removed))
        return [await anext(gone) for _ in range(count)]


def container_end(pod: dict[str, Any]) -> dict[str, Any]:
    (status,) = pod["status"]["containerStatuses"]
    return status["state"]["terminated"]
