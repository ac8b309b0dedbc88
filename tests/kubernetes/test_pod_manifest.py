"""Tests of a node's pod manifest: pure functions."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from perdure.activities.nodes.backend import NodeRefused
from perdure.activities.nodes.kubernetes import KubernetesSettings
from perdure.activities.nodes.kubernetes.copies import bytes_of
from perdure.activities.nodes.kubernetes.merge import merge
from perdure.activities.nodes.kubernetes.objects import Pod
from perdure.activities.nodes.kubernetes.placement import stay_alike
from perdure.activities.nodes.kubernetes.pod import pod_of
from perdure.activities.nodes.kubernetes.service import service_of
from perdure.activities.nodes.kubernetes.site_policy import SitePolicy
from perdure.contract import NodeCredentials, NodeRequest
from perdure.contract.names import host_in_cluster, node_name
from perdure.spec.job import JobSpec

SETTINGS = KubernetesSettings(
    agent_image="perdure:1",
    connection={"TEMPORAL_ADDRESS": "temporal:7233"},
    policy=SitePolicy(priority_classes=("high",), tolerations=("gpu",), annotations=("a",)),
)


STAYS = [
    {"key": f"node.kubernetes.io/{condition}", "operator": "Exists", "effect": "NoExecute"}
    for condition in ("not-ready", "unreachable")
]


def request(
    role: dict[str, Any] | None = None, *, name: str = "a", avoids: tuple[str, ...] = (), **spec: Any
) -> NodeRequest:
    role = {"nodes": 2, "command": ["torchrun", "train.py"], "image": "torch:1", **(role or {})}
    job = JobSpec.model_validate({"name": name, "backend": "kubernetes", "roles": {"worker": role}} | spec)
    node = NodeCredentials(uid="0a1b2c3d", role="worker", rank=130, incarnation=3, token="secret-token")
    return NodeRequest(
        node=node,
        name=node_name(name, node),
        spec=job,
        job_id="job/default/a",
        job_first_run_id="run",
        group_id="group",
        task_queue="queue",
        avoids=avoids,
    )


def manifest(role: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return pod_of(request(role, **fields), SETTINGS)


def container(pod: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for kind in ("containers", "initContainers") for one in pod["spec"][kind] if one["name"] == name)


def env(pod: dict[str, Any], name: str) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container(pod, name)["env"]}


def test_a_pod_is_named_and_labelled_by_its_incarnation():
    pod = manifest(name="j" * 40)
    assert pod["metadata"]["name"] == f"{'j' * 40}-worker-130-0a1b2c3d3"
    labels = {key.removeprefix("perdure.dev/"): value for key, value in pod["metadata"]["labels"].items()}
    assert (labels["uid"], labels["rank"], labels["group"], labels["incarnation"]) == ("0a1b2c3d", "130", "1", "3")


def test_a_pod_of_several_roles_keeps_its_name_in_the_service_of_its_run():
    alone = request()
    assert service_of(alone) == ()
    assert not {"hostname", "subdomain"} & set(pod_of(alone, SETTINGS)["spec"])
    server = {"nodes": 2, "command": ["serve"], "image": "torch:1", "ready": {"port": 80}}
    worker = alone.spec.roles["worker"].model_dump(mode="json", exclude_defaults=True)
    several = request(roles={"worker": worker, "ps": server}, name="j" * 63)
    pod = pod_of(several, SETTINGS)
    ((path, service, _),) = service_of(several)
    run = f"perdure-{'j' * 46}-0a1b2c3d"
    assert (pod["spec"]["hostname"], pod["spec"]["subdomain"]) == ("worker-130", run)
    assert (path, service["metadata"]["name"]) == ("/api/v1/namespaces/default/services", run)
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert service["spec"]["publishNotReadyAddresses"], "the job decides who has the name, and not the kubelet"
    assert "perdure.dev/named" not in pod_of(alone, SETTINGS)["metadata"]["labels"]
    assert host_in_cluster(several.spec, "0a1b2c3d", "worker", 130) == f"worker-130.{run}.default.svc"


def test_training_sees_neither_the_token_nor_a_service_account():
    pod = manifest()
    training = container(pod, "training")
    assert "secret-token" not in str(training)
    assert [mount["name"] for mount in training["volumeMounts"]] == ["home", "tmp", "perdure"]
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert "TEMPORAL_ADDRESS" not in env(pod, "training")
    assert env(pod, "perdure-agent")["TEMPORAL_ADDRESS"] == "temporal:7233"


def test_what_a_secret_holds_stands_in_no_manifest():
    environment = {
        "PERDURE_KUBERNETES_AGENT_IMAGE": "perdure:1",
        "PERDURE_KUBERNETES_CONNECTION_SECRET": "temporal",
        "TEMPORAL_ADDRESS": "temporal:7233",
        "TEMPORAL_TLS_SERVER_NAME": "temporal",
        "TEMPORAL_TLS_CLIENT_KEY_DATA": "-----BEGIN PRIVATE KEY-----",
        "TEMPORAL_API_KEY": "key",
        "TEMPORAL_CONFIG_FILE": "/root/temporal.toml",
    }
    settings = KubernetesSettings.from_environment(environment)
    assert settings.connection == {"TEMPORAL_ADDRESS": "temporal:7233", "TEMPORAL_TLS_SERVER_NAME": "temporal"}
    with pytest.raises(ValueError, match="TEMPORAL_TLS_CLIENT_KEY_PATH names a file that pods do not have"):
        KubernetesSettings.from_environment(
            {"PERDURE_KUBERNETES_AGENT_IMAGE": "perdure:1", "TEMPORAL_TLS_CLIENT_KEY_PATH": "/key.pem"}
        )


def test_agents_get_the_address_of_a_collector_and_no_credential_for_it():
    settings = KubernetesSettings.from_environment(
        {
            "PERDURE_KUBERNETES_AGENT_IMAGE": "perdure:1",
            "TEMPORAL_ADDRESS": "temporal:7233",
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318",
            "OTEL_EXPORTER_OTLP_HEADERS": "authorization=swordfish",
            "OTEL_EXPORTER_OTLP_LOGS_CLIENT_KEY": "/key.pem",
            "OTEL_SERVICE_NAME": "the worker",
        }
    )
    pod = pod_of(request(), settings)
    found = {name: value for name, value in env(pod, "perdure-agent").items() if name.startswith("OTEL_")}
    assert found == {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}
    assert not any(name.startswith("OTEL_") for name in env(pod, "training"))


def test_agents_open_a_port_for_metrics_only_where_the_site_and_the_network_allow_it():
    environment = {"PERDURE_KUBERNETES_AGENT_IMAGE": "perdure:1", "TEMPORAL_ADDRESS": "temporal:7233"}
    port = {"PERDURE_KUBERNETES_AGENT_METRICS_PORT": "9465"}
    closed = KubernetesSettings.from_environment(environment)
    opened = KubernetesSettings.from_environment(environment | port)
    on_host = {"pod_template": {"spec": {"hostNetwork": True}}}

    opened = replace(opened, policy=SitePolicy(host_namespaces=("network",)))

    def ports(settings: KubernetesSettings, role: dict[str, Any] | None = None) -> tuple[Any, Any]:
        pod = pod_of(request(role, labels={"team": "nlp"}), settings)
        config = json.loads(env(pod, "perdure-prepare")["PERDURE_PREPARE_AGENT_CONFIG"])
        assert config["labels"] == {"team": "nlp"}
        return container(pod, "perdure-agent").get("ports"), config["metrics_port"]

    assert ports(closed) == (None, None)
    assert ports(opened) == ([{"name": "perdure-metrics", "containerPort": 9465}], 9465)
    assert ports(opened, on_host) == (None, None)
    for wrong in ("80", "metrics", "70000"):
        with pytest.raises(ValueError, match="expected a port from 1024"):
            KubernetesSettings.from_environment(environment | {"PERDURE_KUBERNETES_AGENT_METRICS_PORT": wrong})


def test_the_site_s_annotations_are_on_every_pod_and_no_template_changes_them():
    evictable = "cluster-autoscaler.kubernetes.io/safe-to-evict"
    settings = KubernetesSettings.from_environment(
        {
            "PERDURE_KUBERNETES_AGENT_IMAGE": "perdure:1",
            "PERDURE_KUBERNETES_POD_ANNOTATIONS": json.dumps({evictable: "true"}),
        }
    )
    template = {"metadata": {"annotations": {evictable: "false"}}}
    assert pod_of(request(), settings)["metadata"]["annotations"] == {evictable: "true"}
    assert pod_of(request({"pod_template": template}), settings)["metadata"]["annotations"] == {evictable: "true"}
    with pytest.raises(ValueError, match=r"POD_ANNOTATIONS is .*expected texts by name in JSON"):
        KubernetesSettings.from_environment(
            {"PERDURE_KUBERNETES_AGENT_IMAGE": "perdure:1", "PERDURE_KUBERNETES_POD_ANNOTATIONS": "a=b"}
        )


def test_agents_read_the_endpoints_that_the_workers_environment_names(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PERDURE_MONITORS", " http://dcgm:9400/metrics#DCGM_FI_DEV_  http://node:9100/metrics ")
    settings = KubernetesSettings(agent_image="perdure:1")
    config = json.loads(env(pod_of(request(), settings), "perdure-prepare")["PERDURE_PREPARE_AGENT_CONFIG"])
    assert config["monitors"] == ["http://dcgm:9400/metrics#DCGM_FI_DEV_", "http://node:9100/metrics"]


def test_a_node_requests_the_memory_that_its_job_has_raised():
    resources = {"cpu": 8, "memory": "64Gi"}
    pod = pod_of(request({"resources": resources}).replace(memory=96 * 2**30), SETTINGS)
    assert container(pod, "training")["resources"] == {
        "requests": {"cpu": "8", "memory": "96Gi"},
        "limits": {"memory": "96Gi"},
    }


def test_fields_become_what_kubernetes_calls_them():
    pod = manifest(
        {
            "resources": {"cpu": 8, "memory": "64Gi", "gpu": 4, "gpu_type": "H100", "shm": "16Gi"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "topology": {"required": "topology.kubernetes.io/zone"},
            "ports": {"tensorboard": 6006},
            "image_pull_secrets": ["registry"],
        },
        env={"PATH": "/opt/conda/bin:/bin", "MODEL": "llama"},
        secrets={"HF_TOKEN": "hf/token"},
        volumes=[{"mount_path": "/data", "pvc": "corpus", "read_only": True}],
        queue="research",
        priority_class="high",
        limits={"termination_grace_period": "2m"},
    )
    training, spec = container(pod, "training"), pod["spec"]
    assert training["resources"] == {
        "requests": {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "4"},
        "limits": {"memory": "64Gi", "nvidia.com/gpu": "4"},
    }
    assert {mount["mountPath"] for mount in training["volumeMounts"]} == {
        *("/data", "/dev/shm", "/perdure", "/home/perdure", "/tmp"),
    }
    assert env(pod, "training")["HF_TOKEN"] == {"secretKeyRef": {"name": "hf", "key": "token"}}
    assert env(pod, "training")["PATH"] == "/opt/conda/bin:/bin", "the interpreter may be found there alone"
    assert spec["nodeSelector"] == {"nvidia.com/gpu.product": "H100"}
    assert spec["tolerations"] == [{"key": "gpu", "operator": "Exists"}, *STAYS]
    assert spec["priorityClassName"] == "high"
    assert spec["terminationGracePeriodSeconds"] == 130
    assert pod["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    [term] = spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "topology.kubernetes.io/zone"


@pytest.mark.parametrize(
    ("own", "left"),
    [
        ([], STAYS),
        ([{"key": "gpu", "operator": "Exists"}], [{"key": "gpu", "operator": "Exists"}, *STAYS]),
        ([STAYS[0] | {"tolerationSeconds": 60}], [STAYS[0] | {"tolerationSeconds": 60}, STAYS[1]]),
        ([STAYS[0] | {"effect": "NoSchedule"}], [STAYS[0] | {"effect": "NoSchedule"}, *STAYS]),
        ([{"operator": "Exists"}], [{"operator": "Exists"}]),
    ],
)
def test_kubernetes_deletes_no_pod_because_its_machine_is_silent(own: list[Any], left: list[Any]):
    # Whatever the site's policy allows a job to tolerate by its template.
    policy = replace(SETTINGS, policy=SitePolicy(tolerations=("*",)))
    made = pod_of(request({"pod_template": {"spec": {"tolerations": own}}}), policy)
    assert made["spec"]["tolerations"] == left
    assert manifest()["spec"]["tolerations"] == STAYS


@pytest.mark.parametrize(
    ("earlier", "now"),
    [
        ([], STAYS),
        ([one | {"tolerationSeconds": 300} for one in STAYS], []),
        (STAYS, STAYS),
        ([STAYS[0], STAYS[1] | {"tolerationSeconds": 60}], [STAYS[0]]),
    ],
    ids=["none", "of the release before", "of this release", "of this release, with a time of the template's own"],
)
def test_a_pod_of_a_group_is_like_those_that_an_earlier_release_has_made(earlier: list[Any], now: list[Any]):
    pod = manifest()
    metadata = {"name": "a", "labels": {"perdure.dev/rank": "0", "perdure.dev/incarnation": "1"}}
    stay_alike(pod["spec"], [Pod.model_validate({"metadata": metadata, "spec": {"tolerations": earlier}})])
    assert pod["spec"]["tolerations"] == now


@pytest.mark.parametrize(
    ("spec", "policy"),
    [
        ({}, None),
        ({"hostNetwork": True}, "ClusterFirstWithHostNet"),
        ({"hostNetwork": True, "dnsPolicy": "Default"}, "Default"),
    ],
)
def test_a_pod_on_the_network_of_its_machine_resolves_the_names_of_the_cluster(spec: Any, policy: str | None):
    settings = replace(SETTINGS, policy=SitePolicy(host_namespaces=("network",)))
    made = pod_of(request({"pod_template": {"spec": spec}}), settings)
    assert made["spec"].get("dnsPolicy") == policy


def test_no_pod_is_placed_near_one_that_is_being_deleted():
    spec = manifest({"topology": {"required": "rack"}})["spec"]
    [term] = spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["labelSelector"]["matchExpressions"] == [{"key": "perdure.dev/leaving", "operator": "DoesNotExist"}]


def test_a_template_has_the_last_word_but_for_what_makes_it_a_node():
    template = {
        "metadata": {"annotations": {"a": "b"}, "labels": {"perdure.dev/rank": "0"}},
        "spec": {
            "priorityClassName": "high",
            "initContainers": [{"name": "fetch", "image": "curl"}],
            "containers": [
                {
                    "name": "training",
                    "image": "torch:2",
                    "securityContext": {"runAsUser": 1000},
                    "env": [{"name": "A", "value": "1"}, {"name": "PERDURE_NODE", "value": "x"}],
                },
                {"name": "tensorboard", "image": "tb"},
            ],
        },
    }
    pod = manifest({"pod_template": template})
    assert pod["metadata"]["annotations"] == {"a": "b"}
    assert pod["metadata"]["labels"]["perdure.dev/rank"] == "130"
    assert pod["spec"]["restartPolicy"] == "Never"
    assert pod["spec"]["priorityClassName"] == "high"
    assert [one["name"] for one in pod["spec"]["initContainers"]] == ["fetch", "perdure-prepare", "perdure-agent"]
    assert container(pod, "perdure-agent")["image"] == "perdure:1"
    training = container(pod, "training")
    assert training["image"] == "torch:2"
    assert training["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert training["securityContext"]["runAsUser"] == 1000
    assert (env(pod, "training")["A"], env(pod, "training")["PERDURE_NODE"]) == ("1", "0a1b2c3d/worker-130/3")
    assert container(pod, "tensorboard")


@pytest.mark.parametrize(
    ("role", "text"),
    [
        ({"image": None}, "roles.worker.image is missing"),
        ({"pod_template": {"spec": {"containers": [{"name": "training", "args": ["x"]}]}}}, "sets args"),
        ({"pod_template": {"spec": {"containers": {"name": "training"}}}}, "is not a PodTemplateSpec"),
        ({"pod_template": {"spec": {"containers": [{"image": "x"}]}}}, "is not a PodTemplateSpec"),
    ],
)
def test_what_is_no_pod_is_refused_by_name(role: dict[str, Any], text: str):
    with pytest.raises(NodeRefused, match=text):
        manifest(role)


def test_a_suspect_machine_is_kept_away_from_beside_what_the_user_prefers():
    preferred = "preferredDuringSchedulingIgnoredDuringExecution"
    ssd = {"weight": 1, "preference": {"matchExpressions": [{"key": "ssd", "operator": "Exists"}]}}
    zone = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]}
    affinity = {"nodeAffinity": {preferred: [ssd], "requiredDuringSchedulingIgnoredDuringExecution": zone}}
    role = {"topology": {"preferred": "rack"}, "pod_template": {"spec": {"affinity": affinity}}}
    before, after = (manifest(role, avoids=avoids)["spec"]["affinity"] for avoids in ((), ("gpu-17", "gpu-18")))
    others = [{"key": "metadata.name", "operator": "NotIn", "values": [machine]} for machine in ("gpu-17", "gpu-18")]
    away = {"weight": 100, "preference": {"matchFields": others}}
    assert after == before | {"nodeAffinity": {**affinity["nodeAffinity"], preferred: [ssd, away]}}


def test_the_agent_that_keeps_copies_of_others_learns_the_same_rack():
    other = {"valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['acme.example/rack']"}}}
    variable = {"name": "PERDURE_RACK", **other}
    template = {"spec": {"containers": [{"name": "training", "env": [variable]}]}}
    pod = manifest({"pod_template": template}, checkpoint={"watch": "/out"})
    assert env(pod, "perdure-agent")["PERDURE_RACK"] == other["valueFrom"]
    assert "PERDURE_RACK" not in env(manifest({"pod_template": template}), "perdure-agent")


def test_a_node_learns_its_rack_from_a_label_of_its_pod_unless_the_template_tells_it():
    def rack(**variable: Any) -> Any:
        template = {"spec": {"containers": [{"name": "training", "env": [{"name": "PERDURE_RACK", **variable}]}]}}
        return env(manifest({"pod_template": template} if variable else {}), "training")["PERDURE_RACK"]

    assert rack() == {"fieldRef": {"fieldPath": "metadata.labels['topology.kubernetes.io/zone']"}}
    other = {"fieldRef": {"fieldPath": "metadata.labels['acme.example/rack']"}}
    assert rack(valueFrom=other) == other
    assert rack(value="") == ""
    # A variable with both would be refused.
    assert merge({"env": [{"name": "A", "valueFrom": other}]}, {"env": [{"name": "A", "value": "b"}]}) == {
        "env": [{"name": "A", "value": "b"}]
    }


def test_merging_takes_away_what_is_null_and_replaces_lists_without_names():
    under = {"a": {"b": 1, "c": 2}, "command": ["x"], "env": [{"name": "A", "value": "1"}]}
    over = {"a": {"b": None}, "command": ["y"], "env": [{"name": "B", "value": "2"}]}
    assert merge(under, over) == {
        "a": {"c": 2},
        "command": ["y"],
        "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
    }


@pytest.mark.parametrize(("role", "size"), [({}, "64Mi"), ({"resources": {"shm": "16Gi"}}, "16Gi")])
def test_only_an_agent_reaches_what_it_keeps_of_other_nodes_saves(role: dict[str, Any], size: str):
    pod = manifest(role, checkpoint={"watch": "/tmp/saves"}, network={"store_ports": "29500-29599"})
    [volume] = [one for one in pod["spec"]["volumes"] if one["name"] == "perdure-copies"]
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": size}
    mounts = {
        one["name"]: [mount["mountPath"] for mount in one["volumeMounts"] if mount["name"] == "perdure-copies"]
        for kind in ("containers", "initContainers")
        for one in pod["spec"][kind]
    }
    assert mounts == {"training": [], "perdure-prepare": [], "perdure-agent": ["/perdure-copies"]}
    limit = (512 << 20) + ((16 << 30) if role else (64 << 20))
    assert container(pod, "perdure-agent")["resources"]["limits"]["memory"] == str(limit)
    config = json.loads(env(pod, "perdure-prepare")["PERDURE_PREPARE_AGENT_CONFIG"])
    assert (config["copies_dir"], config["store_ports"]) == ("/perdure-copies", "29500-29599")
    mount = {"name": "training", "volumeMounts": [{"name": "perdure-copies", "mountPath": "/copies"}]}
    with pytest.raises(NodeRefused, match="perdure-copies"):
        manifest({"pod_template": {"spec": {"containers": [mount]}}}, checkpoint={"watch": "/tmp/saves"})


def test_a_job_with_a_storage_keeps_no_copies_in_memory():
    pod = manifest(checkpoint={"watch": "/tmp/saves", "storage": "s3://a/b"})
    assert "perdure-copies" not in json.dumps(pod["spec"]["volumes"])
    config = json.loads(env(pod, "perdure-prepare")["PERDURE_PREPARE_AGENT_CONFIG"])
    assert config["copies_dir"] is None


@pytest.mark.parametrize(
    ("quantity", "number"),
    [("64Mi", 64 << 20), ("1.5Gi", 3 << 29), ("16G", 16 * 10**9), ("1000", 1000), ("500m", 0), ("2Ei", 2 << 60)],
)
def test_quantities_are_read_as_kubernetes_does(quantity: str, number: int):
    assert bytes_of(quantity) == number


def test_every_container_of_ours_states_all_that_a_quota_may_count():
    pod = pod_of(request(), SETTINGS)
    for name in ("perdure-prepare", "perdure-agent"):
        resources = container(pod, name)["resources"]
        assert set(resources["requests"]) == set(resources["limits"]) == {"cpu", "memory"}


def test_a_job_changes_the_resources_of_our_containers_and_nothing_else_of_the_first():
    changed = [
        {"name": "perdure-prepare", "resources": {"limits": {"cpu": "3"}}},
        {"name": "perdure-agent", "resources": {"requests": {"cpu": "1"}, "limits": {"cpu": None, "memory": "2Gi"}}},
    ]
    pod = pod_of(request(role={"pod_template": {"spec": {"initContainers": changed}}}), SETTINGS)
    assert container(pod, "perdure-prepare")["resources"]["limits"] == {"cpu": "3", "memory": "512Mi"}
    assert container(pod, "perdure-agent")["resources"] == {
        "requests": {"cpu": "1", "memory": "128Mi"},
        "limits": {"memory": "2Gi"},
    }
    wrong = [{"name": "perdure-prepare", "env": [{"name": "A", "value": "b"}]}]
    with pytest.raises(NodeRefused, match="Perdure's own parts"):
        pod_of(request(role={"pod_template": {"spec": {"initContainers": wrong}}}), SETTINGS)


def test_a_site_sets_the_resources_of_our_containers():
    given = {
        "PERDURE_KUBERNETES_AGENT_IMAGE": "perdure:1",
        "PERDURE_KUBERNETES_AGENT_RESOURCES": '{"limits": {"cpu": "4", "memory": "1Gi"}}',
    }
    settings = KubernetesSettings.from_environment(given)
    assert settings.agent_resources == {"requests": {}, "limits": {"cpu": "4", "memory": "1Gi"}}
    assert settings.prepare_resources == KubernetesSettings(agent_image="a").prepare_resources
    with pytest.raises(ValueError, match="PERDURE_KUBERNETES_PREPARE_RESOURCES is 'small'; expected resources"):
        KubernetesSettings.from_environment(given | {"PERDURE_KUBERNETES_PREPARE_RESOURCES": "small"})
