"""Tests of what public jobs promise and contradict: containers, variables, references, ranges of nodes."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from perdure.spec.errors import SpecError
from perdure.spec.importers.documents import Imported, import_documents
from perdure.spec.job import Backend
from perdure.spec.load import SpecDocument

TORCHRUN = ["torchrun", "--nnodes=3", "--nproc_per_node=2", "train.py"]


def run(document: dict[str, Any]) -> Imported:
    return import_documents([SpecDocument(data=document, lines={}, folder=None)], backend=Backend.KUBERNETES)


def container(command: list[str], *, name: str = "trainer", **fields: Any) -> dict[str, Any]:
    return {"name": name, "image": "example.org/t:1", "command": command, **fields}


def job_set(*containers: dict[str, Any], **pod: Any) -> dict[str, Any]:
    template = {"spec": {"restartPolicy": "Never", "containers": list(containers), **pod}}
    job = {"template": {"spec": {"parallelism": 1, "completions": 1, "template": template}}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "heredoc"},
        "spec": {"replicatedJobs": [{"name": "workers", "replicas": 3, **job}]},
    }


def pytorch_job(worker: list[str], master: list[str] | None = None, **spec: Any) -> dict[str, Any]:
    def replicas(count: int, command: list[str]) -> dict[str, Any]:
        return {"replicas": count, "template": {"spec": {"containers": [container(command, name="pytorch")]}}}

    roles = {"Worker": replicas(2, worker)} | ({"Master": replicas(1, master)} if master else {})
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "job"},
        "spec": {"pytorchReplicaSpecs": roles, **spec},
    }


def messages(result: Imported, path: str) -> list[str]:
    return [str(warning) for warning in result.warnings if path in str(warning)]


@pytest.mark.parametrize("command", [TORCHRUN, ["python3", "train.py"]], ids=["torchrun", "python"])
def test_two_trainers_in_a_pod_are_refused_by_their_names_and_with_the_way_out(command: list[str]):
    with pytest.raises(SpecError) as error:
        run(job_set(container(command, name="left"), container(command, name="right")))
    assert 'the containers "left" and "right" could each be the one that trains' in str(error.value)
    assert "import the file once for each container that trains" in str(error.value)


def test_of_several_containers_the_one_that_starts_torchrun_trains():
    result = run(job_set(container(["sleep", "inf"], name="syncer"), container(TORCHRUN)))
    worker = result.spec["roles"]["worker"]
    assert worker["command"] == ["torchrun", "train.py"]
    assert "syncer" in [one["name"] for one in worker["pod_template"]["spec"]["containers"]]


SHELL = """find_master() { getent hosts "$HOST"; }
IP="$(find_master)"
torchrun --nnodes 3 train.py "$IP" $(HIDDEN) $(PLAIN)"""


def test_a_shell_s_substitution_is_no_reference_of_kubernetes():
    variables = [
        {"name": "PLAIN", "value": "seen"},
        {"name": "HIDDEN", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]
    result = run(job_set(container(["bash", "-c", SHELL], env=variables)))
    text = result.spec["roles"]["worker"]["command"][-1]
    assert text.endswith('IP="$(find_master)"\ntorchrun train.py "$IP" $(HIDDEN) seen')
    assert messages(result, "find_master") == []
    [hidden] = messages(result, "command $(HIDDEN)")
    assert "use a shell and ${HIDDEN}" in hidden


def test_what_only_envfrom_can_define_is_named_as_a_reference():
    result = run(job_set(container(["sh", "-c", "torchrun $(SCRIPT)"], envFrom=[{"configMapRef": {"name": "c"}}])))
    assert messages(result, "command $(SCRIPT)")


@pytest.mark.parametrize(
    "path",
    [
        "metadata.annotations['jobset.sigs.k8s.io/coordinator']",
        "metadata.labels['jobset.sigs.k8s.io/job-index']",
        "metadata.labels['batch.kubernetes.io/job-completion-index']",
        "metadata.labels['training.kubeflow.org/replica-index']",
        "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']",
        "metadata.labels['job-name']",
    ],
)
def test_what_another_system_writes_on_its_pods_is_not_carried_over_as_if_it_were_there(path: str):
    reference = {"name": "PLACE", "valueFrom": {"fieldRef": {"fieldPath": path}}}
    info = {"name": "info", "downwardAPI": {"items": [{"path": "place", "fieldRef": {"fieldPath": path}}]}}
    document = job_set(container(TORCHRUN, env=[reference]), volumes=[info])
    result = run(document)
    [warning] = messages(result, "env[0]")
    assert f"writes {path} on its pods, and Perdure does not: $PLACE is unset" in warning
    assert "PLACE" not in str(result.spec["roles"]["worker"]["pod_template"])
    assert messages(result, f"volumes[0] {path}")


@pytest.mark.parametrize("path", ["status.podIP", "metadata.labels['team']", "metadata.labels['job-name']"])
def test_references_to_what_a_pod_has_are_carried_over(path: str):
    reference = {"name": "PLACE", "valueFrom": {"fieldRef": {"fieldPath": path}}}
    document = job_set(container(TORCHRUN, env=[reference]))
    template = document["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    template["metadata"] = {"labels": {"team": "nlp", "job-name": "mine"}}
    result = run(document)
    assert result.spec["roles"]["worker"]["pod_template"]["spec"]["containers"][0]["env"] == [reference]
    assert messages(result, "env[0]") == []


PLACES = [{"name": "MASTER_PORT", "value": "29500"}, {"name": "NODE_RANK", "value": "0"}]


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (TORCHRUN, "Perdure sets this variable for each process"),
        (["python", "train.py"], "Perdure sets this variable for each process"),
        (["bash", "run.sh"], "if the command starts torchrun, only its ranks see it"),
        (["sh", "-c", "cd /src && torchrun train.py"], "the shell around torchrun does not read it"),
        (
            ["sh", "-c", "echo $NODE_RANK ${MASTER_PORT} && torchrun --node_rank=$NODE_RANK train.py"],
            "in the ranks only, and the shell around torchrun reads $",
        ),
    ],
)
def test_a_variable_of_the_rendezvous_is_named_with_where_it_can_be_read(command: list[str], told: str):
    result = run(job_set(container(command, env=copy.deepcopy(PLACES))))
    assert "MASTER_PORT" not in result.spec.get("env", {})
    for index in range(len(PLACES)):
        [warning] = messages(result, f"env[{index}]")
        assert told in warning


@pytest.mark.parametrize(
    ("nnodes", "nodes", "told"),
    [
        ("4", 4, "counts instead of the replicas' range 1:64: every world had 4 nodes; for an elastic job"),
        ("2:8", "2:8", "no world had fewer than 2 nodes or more than 8; for an elastic job set nodes to 1:64"),
    ],
)
def test_a_fixed_number_in_an_elastic_job_is_told_with_the_elasticity_that_is_lost(nnodes: str, nodes: Any, told: str):
    policy = {"minReplicas": 1, "maxReplicas": 64}
    result = run(pytorch_job(["torchrun", f"--nnodes={nnodes}", "train.py"], elasticPolicy=policy))
    assert result.spec["roles"]["worker"]["nodes"] == nodes
    about_nodes = [str(one) for one in result.warnings if "node" in one.message]
    expected = ["--nnodes"] if nnodes == "4" else ["maxReplicas", "--nnodes"]
    assert len(about_nodes) == len(expected), about_nodes
    assert any(told in warning for warning in about_nodes)


def test_an_elastic_job_that_grows_is_told_to_ask_for_all_nodes_at_once():
    result = run(pytorch_job(["torchrun", "train.py"], elasticPolicy={"minReplicas": 1, "maxReplicas": 64}))
    assert result.spec["roles"]["worker"]["nodes"] == "1:64"
    [warning] = messages(result, "maxReplicas")
    assert "requests all 64 nodes at once" in warning


SCRIPT = "cd /s && torchrun --nnodes=3 {} train.py"


@pytest.mark.parametrize(
    ("master", "worker"),
    [
        (["torchrun", "--nnodes=3", "--node_rank=0", "train.py"], ["torchrun", "--nnodes=3", "train.py"]),
        (
            ["torchrun", "--nnodes=3", "--node_rank=0", "--master_port", "1234", "train.py"],
            ["torchrun", "--node-rank=$RANK", "--nnodes=3", "--rdzv-backend=c10d", "train.py"],
        ),
        (["sh", "-c", SCRIPT.format("--node_rank=0")], ["sh", "-c", SCRIPT.format("--node_rank=$RANK")]),
    ],
)
def test_master_and_workers_may_differ_in_options_that_the_rendezvous_replaces(master: list[str], worker: list[str]):
    result = run(pytorch_job(worker, master))
    assert result.spec["roles"]["worker"]["nodes"] == 3
    assert messages(result, "Master.template.spec.containers[0].command --node_rank (0)")


@pytest.mark.parametrize("option", ["--nproc_per_node=4", "--tee=3", "--max-restarts=1"])
def test_master_and_workers_may_not_differ_in_other_options(option: str):
    with pytest.raises(SpecError, match="the same as the workers'"):
        run(pytorch_job(["torchrun", "--nnodes=3", "train.py"], ["torchrun", "--nnodes=3", option, "train.py"]))


@pytest.mark.parametrize(
    ("option", "processes", "fate"),
    [
        ("$PET_NPROC_PER_NODE", 8, "carried"),
        ("8", 8, "carried"),
        ("4", 4, "left out: the command's own --nproc-per-node counts, which is 4"),
        ("$(count)", None, "left out: the command's own --nproc-per-node counts, which only its shell can tell"),
    ],
)
def test_the_source_s_number_of_processes_fills_the_command_or_is_named(option: str, processes: int | None, fate: str):
    command = ["bash", "-c", f"set -e; torchrun --nproc-per-node={option} train.py"]
    result = run(pytorch_job(command, nprocPerNode="8"))
    assert result.spec["roles"]["worker"].get("nproc_per_node") == processes
    if fate == "carried":
        assert [one.field for one in result.carried if one.source == ("spec", "nprocPerNode")] == [
            ("roles", "worker", "nproc_per_node")
        ]
        assert not messages(result, "nproc")
    else:
        assert any(fate in message for message in messages(result, "spec.nprocPerNode"))
    assert not messages(result, "PET_NPROC_PER_NODE")
