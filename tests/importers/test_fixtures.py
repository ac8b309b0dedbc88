"""Tests of importing documents of each format, from the formats' own documentation: the result, and that nothing is
lost."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from perdure.spec.errors import SpecError, format_path
from perdure.spec.fields import Location
from perdure.spec.importers.documents import FORMATS, WITHOUT_KIND, Imported, import_documents
from perdure.spec.job import Backend
from perdure.spec.load import SpecDocument, read_documents
from perdure.spec.role_relations import roles_that_end
from perdure.spec.validate import parse_spec, validate_spec
from tests.importers.golden import FIXTURES, NAMES, PAIRS, golden_path, imported, render


@pytest.mark.parametrize(("name", "backend"), PAIRS)
def test_a_fixture_becomes_what_is_written_down(name: str, backend: Backend):
    assert render(imported(name, backend)) == golden_path(name, backend).read_text(encoding="utf-8")


def test_every_format_has_a_fixture():
    assert {found.name for found in (*FORMATS, *WITHOUT_KIND)} == {
        imported(name, Backend.LOCAL).format for name in NAMES
    }


@pytest.mark.parametrize("name", NAMES)
def test_what_is_imported_for_this_machine_can_run_as_it_is(name: str):
    result = imported(name, Backend.LOCAL)
    assert result.missing == ()
    spec, _ = validate_spec(result.spec)
    assert spec.backend is Backend.LOCAL


@pytest.mark.parametrize(("name", "backend"), PAIRS)
def test_what_is_imported_is_a_specification(name: str, backend: Backend):
    result = imported(name, backend)
    lacking: set[Location] = {("backend",)}
    if len(result.spec["roles"]) > 1 and backend is Backend.KUBERNETES:
        lacking |= {
            ("roles",),
            *(("roles", role, field) for role in result.spec["roles"] for field in ("ready", "image")),
        }
    assert {problem.location for problem in result.missing} <= lacking, "at most, this release lacks the backend"
    assert parse_spec(result.spec).backend is backend


@pytest.mark.parametrize("name", NAMES)
def test_warnings_carry_the_line_of_their_field(name: str):
    lines = (FIXTURES / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    for warning in imported(name, Backend.LOCAL).warnings:
        last = warning.location[-1]
        if "runtimeEnvYAML" in warning.path or isinstance(last, int) or last.startswith("ConfigMap"):
            continue
        assert warning.line is not None
        assert last.split()[0] in lines[warning.line - 1]


DOCUMENTS = {
    name: [
        replace(document, data=json.loads(json.dumps(document.data)))  # A YAML alias is one mapping in two places.
        for document in read_documents(FIXTURES / f"{name}.yaml")
    ]
    for name in NAMES
}


def test_a_list_is_as_good_as_several_documents():
    apart = import_documents(DOCUMENTS["trainjob"])
    items = [document.data for document in DOCUMENTS["trainjob"]]
    listed = import_documents(
        read_documents(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=1))
    )
    assert listed.spec == apart.spec
    assert {warning.path for warning in listed.warnings} == {warning.path for warning in apart.warnings}
    assert all(warning.line for warning in listed.warnings)


def mappings(value: Any, location: Location = ()) -> list[Location]:
    """All places of a document where a field can be added."""
    if isinstance(value, dict):
        return [location, *(place for key, item in value.items() for place in mappings(item, (*location, key)))]
    if isinstance(value, list):
        return [place for index, item in enumerate(value) for place in mappings(item, (*location, index))]
    return []


PLACES = [
    (name, index, place)
    for name, documents in DOCUMENTS.items()
    for index, document in enumerate(documents)
    for place in mappings(document.data)
]
KNOWN_WORDS = sorted(
    set(re.findall(r"\b[a-z]\w+(?=:)", "\n".join(path.read_text() for path in FIXTURES.glob("*.yaml"))))
)
VALUES = st.one_of(
    st.text("abc-/$ ", max_size=5),
    st.integers(-1, 3),
    st.booleans(),
    st.lists(st.sampled_from(["x", "y"]), min_size=1, max_size=2),
    st.dictionaries(st.sampled_from(["extra", "name"]), st.just("x"), min_size=1),
)


def at(value: Any, location: Location) -> Any:
    for part in location:
        value = value[part]
    return value


def kept(spec: dict[str, Any], result: Imported, extra: Location, value: Any) -> bool:
    """Whether an added field stands in the specification, where the importer says that it went, or need not stand
    there."""
    if extra in result.understood:
        return True
    for carried in result.carried:
        if carried.source == extra:
            return True
        if extra[: len(carried.source)] != carried.source:
            continue
        try:
            found = at(spec, (*carried.field, *extra[len(carried.source) :]))
        except (KeyError, IndexError, TypeError):
            continue
        if found == value or str(found) == str(value):
            return True
    return False


def lost(result: Imported, location: Location, value: Any) -> list[str]:
    """The paths, at and below a field, that are neither named by a warning nor kept: of a mapping, each field may have
    a fate of its own."""
    around = {format_path(location[:end]) for end in range(1, len(location) + 1)}
    if any(format_path(warning.location) in around for warning in result.warnings):
        return []
    if kept(result.spec, result, location, value):
        return []
    children = value.items() if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else ()
    if not children:
        return [format_path(location)]
    return [path for key, item in children for path in lost(result, (*location, key), item)]


def attempt(documents: list[SpecDocument], backend: Backend) -> Imported | SpecError:
    try:
        return import_documents(documents, backend=backend)
    except SpecError as error:
        return error


@example(
    place=("mpijob", 0, ("spec", "mpiReplicaSpecs", "Launcher", "template")),
    field="metadata",
    value={"name": "x"},
    backend=Backend.KUBERNETES,
)
@given(
    place=st.sampled_from(PLACES),
    field=st.one_of(st.sampled_from(["extra", "x-y", "Replicas"]), st.sampled_from(KNOWN_WORDS)),
    value=VALUES,
    backend=st.sampled_from((Backend.KUBERNETES, Backend.LOCAL)),
)
def test_an_added_field_is_carried_over_or_named_or_refused(
    place: tuple[str, int, Location], field: str, value: Any, backend: Backend
):
    name, index, location = place
    documents = [copy.deepcopy(document) for document in DOCUMENTS[name]]
    target = at(documents[index].data, location)
    if field in target:
        return
    target[field] = value
    prefix = prefix_of(DOCUMENTS[name][index], len(documents))
    extra: Location = (*prefix, *location, field)
    result = attempt(documents, backend)
    if isinstance(result, SpecError):
        assert result.problems, "refused without a reason"
        assert all(problem.message or problem.expected for problem in result.problems)
        return
    assert lost(result, extra, value) == []


def prefix_of(document: SpecDocument, count: int) -> Location:
    """Returns the prefix of the paths of a document beside the job."""
    kind = document.data.get("kind")
    return (f"{kind} {document.data['metadata']['name']}",) if count > 1 and kind != "TrainJob" else ()


@given(place=st.sampled_from(PLACES), name=st.text("abcdefgh", min_size=6, max_size=9))
def test_an_unknown_field_is_never_carried_into_the_specification_s_own_fields(
    place: tuple[str, int, Location], name: str
):
    fixture, index, location = place
    documents = [copy.deepcopy(document) for document in DOCUMENTS[fixture]]
    at(documents[index].data, location)[name] = {"nested": "value"}
    result = attempt(documents, Backend.LOCAL)
    if isinstance(result, SpecError):
        return
    prefix = prefix_of(DOCUMENTS[fixture][index], len(documents))
    extra = (*prefix, *location, name)
    assert any(extra[: len(warning.location)] == warning.location for warning in result.warnings)
    assert name not in str(result.spec)


def nodes(value: Any, location: Location = ()) -> list[Location]:
    """All places of a document but the whole."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in children for place in ((*location, key), *nodes(item, (*location, key)))]


ALL_PLACES = [
    (name, index, place)
    for name, documents in DOCUMENTS.items()
    for index, document in enumerate(documents)
    for place in nodes(document.data)
]
JUNK = st.one_of(VALUES, st.none(), st.just(""), st.just([]), st.just({}), st.floats(allow_nan=False), st.just(10**20))


@given(
    place=st.sampled_from(ALL_PLACES),
    junk=JUNK,
    backend=st.sampled_from((Backend.KUBERNETES, Backend.LOCAL)),
)
def test_whatever_stands_somewhere_is_imported_or_refused(
    place: tuple[str, int, Location], junk: Any, backend: Backend
):
    name, index, location = place
    documents = [copy.deepcopy(document) for document in DOCUMENTS[name]]
    at(documents[index].data, location[:-1])[location[-1]] = junk
    result = attempt(documents, backend)
    if isinstance(result, Imported) and not result.missing:
        validate_spec(result.spec)


def test_nodes_that_trained_alone_are_said_to_train_together():
    (document,) = read_documents(FIXTURES / "job.yaml")
    data = json.loads(json.dumps(document.data).replace('"--nnodes=2", ', ""))
    result = import_documents([replace(document, data=data)], backend=Backend.LOCAL)
    assert result.spec["roles"]["worker"]["nodes"] == 2
    assert any("each node trains alone" in warning.message for warning in result.warnings)


def test_tensorflow_s_replicas_become_roles_with_ports_of_their_own():
    spec, _ = validate_spec(imported("tfjob", Backend.LOCAL).spec)
    assert [(name, role.nodes.max, role.ready and role.ready.port) for name, role in spec.roles.items()] == [
        ("chief", 1, 2222),
        ("worker", 3, 2322),
        ("ps", 2, 2422),
        ("evaluator", 1, None),
    ]
    assert (spec.roles["chief"].ends_job, spec.roles["evaluator"].on_failure) == (True, "ignore")
    assert (spec.roles["ps"].restart_with, spec.roles["worker"].restart_on_scale) == (["chief"], ["chief"])


def test_all_workers_of_a_tf_job_end_it_where_it_says_so():
    (document,) = read_documents(FIXTURES / "tfjob.yaml")
    data = json.loads(json.dumps(document.data))
    data["spec"]["successPolicy"] = "AllWorkers"
    result = import_documents([replace(document, data=data)], backend=Backend.LOCAL)
    ends = {name: role.ends_job for name, role in parse_spec(result.spec).roles.items()}
    assert ends == {"chief": None, "worker": True, "ps": None, "evaluator": None}
    data["spec"]["successPolicy"] = "Some"
    with pytest.raises(SpecError, match="successPolicy"):
        import_documents([replace(document, data=data)], backend=Backend.LOCAL)


def test_roles_with_different_values_of_what_a_job_has_once_are_named():
    (document,) = read_documents(FIXTURES / "tfjob.yaml")
    data = json.loads(json.dumps(document.data))
    for kind, seconds in (("Chief", 30), ("PS", 60)):
        data["spec"]["tfReplicaSpecs"][kind]["template"]["spec"]["terminationGracePeriodSeconds"] = seconds
    result = import_documents([replace(document, data=data)], backend=Backend.LOCAL)
    assert result.spec["limits"]["termination_grace_period"] == "30s"
    (warning,) = [one for one in result.warnings if one.path.endswith("terminationGracePeriodSeconds")]
    assert (warning.location[2], warning.value, warning.fate) == ("PS", "60", "dropped")


def test_the_launcher_of_mpi_waits_for_the_workers_and_lists_them(tmp_path: Path):
    spec, _ = validate_spec(imported("mpijob", Backend.LOCAL).spec)
    launcher, worker = spec.roles["launcher"], spec.roles["worker"]
    assert (launcher.depends_on, roles_that_end(spec.roles)) == ({"worker": "ready"}, ("launcher",))
    assert (worker.ready and worker.ready.port, worker.restart_with) == (22, ["launcher"])
    hosts = tmp_path / "hosts"
    command = [word.replace("/tmp/hostfile", str(hosts)) for word in launcher.command]
    assert command[command.index("mpirun") :] == ["mpirun", "-n", "4", "/home/mpiuser/pi"]
    roles = {"worker": {"addresses": ["worker-0.pi.svc:22", "worker-1.pi.svc:22"]}}
    environment = {**os.environ, "PERDURE_ROLES": json.dumps(roles)}
    started = [*command[: command.index("mpirun")], "echo", "started"]
    ran = subprocess.run(started, env=environment, check=True, capture_output=True, text=True)
    assert ran.stdout == "started\n"
    assert hosts.read_text() == "worker-0.pi.svc slots=2\nworker-1.pi.svc slots=2\n"


def test_files_that_the_mpi_operator_mounts_are_written_by_the_launcher_s_shell_or_named():
    (document,) = read_documents(FIXTURES / "mpijob.yaml")
    data = json.loads(json.dumps(document.data))
    launcher = data["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    launcher["args"] = ["--hosts=/etc/mpi/hostfile", "--discover", "/etc/mpi/discover_hosts.sh", "a.py"]
    launcher["env"] = [{"name": "HOSTS", "value": "/etc/mpi/hostfile"}]
    result = import_documents([replace(document, data=data)], backend=Backend.LOCAL)
    role = result.spec["roles"]["launcher"]
    assert role["command"][-3:] == ["--discover", "/etc/mpi/discover_hosts.sh", "a.py"]
    assert "--hosts=/tmp/hostfile" in role["command"]
    assert role["env"]["HOSTS"] == "/tmp/hostfile"
    container = "spec.mpiReplicaSpecs.Launcher.template.spec.containers[0]"
    assert {(one.path, one.message) for one in result.warnings if "/etc/mpi/" in one.part} == {
        (f"{container}.args /etc/mpi/hostfile", "is /tmp/hostfile here"),
        (f"{container}.args /etc/mpi/discover_hosts.sh", "the operator mounts this file, and Perdure does not"),
        (f"{container}.env[0].value /etc/mpi/hostfile", "is /tmp/hostfile here"),
    }


def test_workloads_become_roles_that_end_fail_and_start_as_the_job_config_says():
    (document,) = read_documents(FIXTURES / "jobconfig.yaml")
    data = json.loads(json.dumps(document.data))
    data["failover_exec_strategy"] = 2
    data["dl_config"]["workloads"]["ACTOR"] |= {"number": 6, "total": None, "entry_point": "team.actor::train"}
    result = import_documents([replace(document, data=data)], backend=Backend.LOCAL)
    spec = parse_spec(result.spec)
    actor, rollout = spec.roles["actor"], spec.roles["rollout"]
    assert (actor.nodes.max, actor.nproc_per_node, actor.ends_job, actor.on_failure) == (3, 2, True, "role")
    assert actor.command == ["torchrun", "--no-python", "python", "-c", "from team.actor import train; train()"]
    assert (rollout.nodes.max, rollout.ends_job, rollout.command[0]) == (2, False, "python")
    data["dl_config"]["workloads"] |= {"reward": {"backend": "custom", "entry_point": "a.py"}}
    with pytest.raises(SpecError, match=r'reward\.backend: got "custom"; expected elastic or simple'):
        import_documents([replace(document, data=data)], backend=Backend.LOCAL)


def with_master(*, command: list[str], **container: Any) -> SpecDocument:
    """The job with a master, whose container runs another command and has other fields."""
    (document,) = read_documents(FIXTURES / "pytorchjob-master-worker.yaml")
    data = json.loads(json.dumps(document.data))
    master = data["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    master["nodeSelector"]["gpu"] = "h100"
    master["containers"][0] |= {"command": command, **container}
    return replace(document, data=data)


def test_a_master_with_another_command_is_rank_0_of_one_world():
    document = with_master(command=["python3", "/opt/other.py"], args=["--data=$(DATA)"])
    result = import_documents([document], backend=Backend.LOCAL)
    (role,) = parse_spec(result.spec).roles.values()
    shell = 'if [ "$RANK" = 0 ]; then exec python3 /opt/other.py --data=/data; fi; '
    assert role.command == ["sh", "-c", f"{shell}exec python3 /opt/mnist.py --epochs=1 --data=/data/mnist"]
    assert (role.nodes.max, role.nproc_per_node) == (3, 1)
    named = {one.path: one.fate for one in result.warnings}
    assert named["spec.pytorchReplicaSpecs.Master.template.spec.containers[0].command"] == "changed"
    assert "spec.pytorchReplicaSpecs.Master.template.spec.nodeSelector.gpu" in named


@pytest.mark.parametrize(
    "fields",
    [
        {"command": ["python3", "/opt/mnist.py"], "image": "registry.example/other:1"},
        {"command": ["torchrun", "/opt/other.py"]},
    ],
)
def test_a_master_must_be_able_to_form_one_world_with_the_workers(fields: dict[str, Any]):
    with pytest.raises(SpecError, match=r"Master.*: got .*; expected the same as the workers'"):
        import_documents([with_master(**fields)], backend=Backend.LOCAL)


def test_a_misspelt_field_is_told_from_the_one_that_was_meant():
    (document,) = read_documents(FIXTURES / "pytorchjob-elastic.yaml")
    data = copy.deepcopy(document.data)
    data["spec"]["elasticPolicy"]["maxReplica"] = 7
    result = import_documents([replace(document, data=data)], backend=Backend.LOCAL)
    (warning,) = [warning for warning in result.warnings if warning.fate == "unknown"]
    assert warning.path == "spec.elasticPolicy.maxReplica"
    assert 'did you mean "maxReplicas"?' in warning.message


@pytest.mark.parametrize("other", ["fieldRef", "configMapKeyRef", "resourceFieldRef"])
def test_a_variable_with_two_sources_is_refused_and_none_is_lost(other: str):
    sources = {other: {"fieldPath": "status.podIP"}, "secretKeyRef": {"name": "hub", "key": "token"}}
    container = {"name": "pytorch", "image": "i", "command": ["torchrun", "a.py"]}
    pod = {"spec": {"containers": [container | {"env": [{"name": "TOKEN", "valueFrom": sources}]}]}}
    job: dict[str, Any] = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": "a"}}
    job["spec"] = {"pytorchReplicaSpecs": {"Worker": {"replicas": 2, "template": pod}}}
    (document,) = read_documents(FIXTURES / "job.yaml")
    with pytest.raises(SpecError, match=rf"one source, not {other} and secretKeyRef"):
        import_documents([replace(document, data=job)], backend=Backend.KUBERNETES)
