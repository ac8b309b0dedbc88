"""Tests of the operator's decisions about objects, on values only."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from perdure.base.kubernetes import KubernetesApi
from perdure.base.kubernetes_errors import KubernetesError
from perdure.contract import JobPhase, JobResult, JobStatus
from perdure.operator.changes import refusal_of_changes
from perdure.operator.owners import Owners
from perdure.operator.ownership import Ownership
from perdure.operator.reconcile import Reconciler
from perdure.operator.resource import FINALIZER, SCALED_ROLES, TrainingJobResource
from perdure.operator.runs import Run, Runs
from perdure.operator.status import Truth
from perdure.spec.errors import SpecError
from perdure.spec.job import Backend, JobSpec
from perdure.spec.validate import validate_spec
from tests.operator.known_jobs import NOW, running_job, running_role


def resource(spec: dict[str, Any] | None = None, **role: Any) -> TrainingJobResource:
    worker = {"nodes": "2:4", "command": ["torchrun", "train.py"], "image": "acme/llama", **role}
    return TrainingJobResource.model_validate(
        {
            "metadata": {"name": "llama", "namespace": "nlp", "uid": "1"},
            "spec": {"roles": {"worker": worker}, **(spec or {})},
        }
    )


def test_an_object_is_a_job_of_its_own_name_in_pods():
    job, warnings = resource({"suspend": True}).job()
    assert (job.name, job.namespace, job.backend) == ("llama", "nlp", Backend.KUBERNETES)
    assert [warning.path for warning in warnings] == ["roles.worker.nodes"]
    assert resource({"backend": "joined"}, image=None).job()[0].backend is Backend.JOINED


class PlayedApi:
    """Takes the status of the objects and the Events about them."""

    async def patch(self, path: str, content: dict[str, Any], *, insist: bool = True) -> dict[str, Any]:
        return {**resource().model_dump(by_alias=True), "status": content["status"]}

    async def create(self, path: str, content: dict[str, Any]) -> dict[str, Any]:
        return content


class NoRuns:
    """No job runs."""

    async def find(self, of: TrainingJobResource) -> None:
        return None


class EndingRun:
    """A job that ends between the question whether it runs and the one for its status."""

    def __init__(self) -> None:
        self.open = True

    async def find(self, of: TrainingJobResource) -> Run:
        ids = {"workflow_id": "job/nlp/llama", "run_id": "r", "first_run_id": "r", "object_uid": "1"}
        return Run(**ids, open=self.open, page="")

    async def spec_of(self, run: Run) -> JobSpec:
        return resource().job()[0]

    async def status(self, of: TrainingJobResource) -> JobStatus:
        self.open = False
        return running_job(phase=JobPhase.FAILED)

    async def leading_role(self, of: TrainingJobResource, job: JobStatus) -> JobStatus:
        return job

    async def step(self, job: JobStatus) -> None:
        return None

    async def result(self, of: TrainingJobResource, run: Run) -> tuple[JobResult, None]:
        known: dict[str, Any] = {"phase": JobPhase.FAILED, "exit_code": 1, "reason": "it raised"}
        known |= {"generations": 1, "restarts": 0, "started_at": NOW, "finished_at": NOW}
        return JobResult(**known), None


@pytest.mark.parametrize("phase", ["RUNNING", "FAILED"], ids=["in time", "as an earlier release left it"])
async def test_a_job_that_ends_while_its_object_is_looked_at_gets_the_condition_of_its_end(phase: str):
    api, runs = cast("KubernetesApi", PlayedApi()), cast("Runs", EndingRun())
    reconciler = Reconciler(api, runs, Owners(api, Ownership.IGNORE))
    known = resource()
    known = known.model_copy(
        update={
            "metadata": known.metadata.model_copy(update={"finalizers": (FINALIZER,)}),
            "status": known.status.model_copy(update={"phase": phase, "run_id": "r"}),
        }
    )
    for _ in range(3):
        looked = await reconciler.look(known)
        known = looked.resource
        if known.status.finished:
            break
        assert looked.again is not None, "it is looked at again"
    failed = known.status.condition("Failed")
    assert failed is not None
    assert (failed.status, failed.message) == (Truth.TRUE, "it raised")
    assert known.status.finished_at is not None


def refused_resource() -> TrainingJobResource:
    return resource({"backend": "local"}, image=None)


class OlderDefinition(PlayedApi):
    """Drops a field of each status, as long as it is so."""

    drops = "phase"

    def __init__(self) -> None:
        self.patches = 0

    async def patch(self, path: str, content: dict[str, Any], *, insist: bool = True) -> dict[str, Any]:
        self.patches += 1
        kept = {name: value for name, value in content["status"].items() if name != self.drops}
        return {**refused_resource().model_dump(by_alias=True), "status": kept}


async def test_a_field_that_an_older_definition_drops_is_said_and_not_written_again(caplog: pytest.LogCaptureFixture):
    api = OlderDefinition()
    reconciler = Reconciler(cast("Any", api), cast("Any", NoRuns()), Owners(cast("Any", api), Ownership.IGNORE))
    known = refused_resource()
    for _ in range(3):
        known = (await reconciler.look(known)).resource
    assert api.patches == 1
    assert caplog.text.count("is older than this operator and drops status.phase") == 1
    api.drops = ""
    known = known.model_copy(update={"status": known.status.model_copy(update={"conditions": ()})})
    for _ in range(2):
        known = (await reconciler.look(known)).resource
    assert known.status.phase == "REFUSED"
    assert api.patches == 2


class KeepingApi(PlayedApi):
    """Refuses to delete objects, as long as it is so."""

    def __init__(self) -> None:
        self.problem: KubernetesError | None = KubernetesError(403, "Forbidden", 'User "operator" cannot delete it')
        self.deleted: list[str] = []

    async def delete(self, path: str, *, uid: str, insist: bool) -> None:
        assert not insist, "others of the namespace are served meanwhile"
        if self.problem is not None:
            raise self.problem
        self.deleted.append(path)


async def test_an_object_that_may_not_be_deleted_says_so():
    api = KeepingApi()
    reconciler = Reconciler(cast("Any", api), cast("Any", None), cast("Any", None))
    known = resource({"ttl_after_finished": "1s"})
    ended = {"run_id": "r", "phase": "SUCCEEDED", "finished_at": NOW}
    known = known.model_copy(update={"status": known.status.model_copy(update=ended)})
    looked = await reconciler.look(known)
    accepted = looked.resource.status.condition("Accepted")
    assert accepted is not None
    assert (accepted.status, accepted.reason) == (Truth.FALSE, "NotDeleted")
    assert 'may not delete the object: User "operator" cannot delete it (403)' in accepted.message
    assert looked.again is not None, "the right may be granted"
    api.problem = None
    assert (await reconciler.look(known)).again is None
    assert api.deleted == [known.path]


@pytest.mark.parametrize("backend", [Backend.LOCAL, Backend.RAY])
async def test_no_object_runs_where_the_rights_of_its_owner_bound_nothing_unless_the_site_allows_it(backend: Backend):
    api, runs = cast("KubernetesApi", PlayedApi()), cast("Runs", NoRuns())
    owners = Owners(api, Ownership.IGNORE)
    foreign = resource({"backend": backend.value, "suspend": True}, image=None)
    looked = await Reconciler(api, runs, owners).look(foreign)
    accepted = looked.resource.status.condition("Accepted")
    assert accepted is not None
    assert (accepted.status, accepted.reason) == (Truth.FALSE, "Forbidden")
    assert f'backend: got "{backend}"; this operator starts jobs on kubernetes, joined only' in accepted.message
    allowed = await Reconciler(api, runs, owners, backends=[backend]).look(foreign)
    accepted = allowed.resource.status.condition("Accepted")
    assert accepted is not None
    assert accepted.status is Truth.TRUE


def test_a_wrong_object_is_refused_in_the_words_of_validate():
    wrong = resource({"retry": {"max_restart": 3}}, nodes="four")
    with pytest.raises(SpecError) as of_object:
        wrong.job()
    with pytest.raises(SpecError) as of_file:
        validate_spec({"name": "llama", "namespace": "nlp", "backend": "kubernetes", **wrong.spec})
    assert str(of_object.value) == str(of_file.value)
    assert 'retry.max_restart: unknown field; did you mean "max_restarts"?' in str(of_object.value)


def test_an_object_has_its_name_in_its_metadata_only():
    with pytest.raises(SpecError, match=r'name: the object\'s metadata sets it: llama; got "other"; remove it'):
        resource({"name": "other"}).job()


@pytest.mark.parametrize(
    ("nodes", "replicas", "expected"),
    [
        (4, 6, (6, 6, 1)),
        ("2:8", 6, (2, 6, 1)),
        ("4:8", 2, (2, 2, 1)),
        ({"min": 2, "max": 8, "unit": 2}, 4, (2, 4, 2)),
        (4, 0, (4, 4, 1)),
        (4, None, (4, 4, 1)),
    ],
)
def test_replicas_take_the_place_of_nodes_as_kubectl_scale_sets_them(
    nodes: Any, replicas: int | None, expected: tuple[int, int, int]
):
    scaled = resource({"replicas": replicas}, nodes=nodes)
    (role,) = scaled.job()[0].roles.values()
    assert (role.nodes.min, role.nodes.max, role.nodes.unit) == expected
    assert scaled.suspended is (replicas == 0)
    assert refusal_of_changes(resource(nodes=nodes).job()[0], scaled.job()[0]) == ""


def test_replicas_that_nodes_cannot_have_are_refused():
    with pytest.raises(SpecError, match="unit is 2; expected min"):
        resource({"replicas": 3}, nodes={"min": 2, "max": 8, "unit": 2}).job()


@pytest.mark.parametrize(
    ("stated", "nodes", "expected"),
    [
        (1, 3, (3, 3)),
        ("2:4", 3, (2, 3)),
        ("2:4", 6, (2, 6)),
        ({"min": 1, "max": 1}, 2, (2, 2)),
    ],
)
def test_a_role_has_the_nodes_that_a_plan_says_until_the_object_states_others(
    stated: Any, nodes: int, expected: tuple[int, int]
):
    known = resource(nodes=stated)
    scaled = {"worker": {"stated": known.stated_nodes("worker"), "nodes": nodes, "plan": "more"}}

    def with_annotation(text: str, nodes: Any) -> TrainingJobResource:
        other = resource(nodes=nodes)
        metadata = other.metadata.model_copy(update={"annotations": {SCALED_ROLES: text}})
        return other.model_copy(update={"metadata": metadata})

    def counts(known: TrainingJobResource) -> tuple[int, int]:
        (role,) = known.job()[0].roles.values()
        return role.nodes.min, role.nodes.max

    text = json.dumps(scaled)
    assert counts(with_annotation(text, stated)) == expected
    assert counts(with_annotation(text, 7)) == (7, 7)
    assert counts(with_annotation(text.replace("worker", "gone"), 7)) == (7, 7)
    for nonsense in (
        "",
        "[]",
        "null",
        '{"worker": 4}',
        '{"worker": {"stated": "", "nodes": 4, "plan": ""}}',
        text.replace(str(nodes), "0"),
    ):
        assert counts(with_annotation(nonsense, stated)) == counts(known)


def scaled_by(*writers: str, replicas: int, nodes: Any, **role: Any) -> TrainingJobResource:
    """An object whose replicas these programs have set."""
    fields = [
        {"manager": "kubectl", "fieldsV1": {"f:spec": {"f:roles": {}}}},
        *({"manager": one, "fieldsV1": {"f:spec": {"f:replicas": {}}}, "subresource": "scale"} for one in writers),
    ]
    known = resource({"replicas": replicas}, nodes=nodes, **role)
    return known.model_validate(
        {"metadata": {**known.metadata.model_dump(by_alias=True), "managedFields": fields}, "spec": known.spec}
    )


@pytest.mark.parametrize(
    ("writers", "nodes", "replicas", "expected", "told"),
    [
        (("kube-controller-manager",), "2:4", 3, (2, 3), []),
        (("kube-controller-manager",), "2:4", 7, (2, 4), ["asks for 7 nodes, and nodes of role worker is 2:4"]),
        (("keda",), "2:4", 1, (2, 2), ["keda asks for 1 node"]),
        (("kube-controller-manager",), 4, 6, (4, 4), ["nodes of role worker is 4: the job has 4"]),
        (("kube-controller-manager",), {"min": 2, "max": 8, "unit": 2}, 5, (2, 4), ["the job has 4"]),
        (("kubectl",), "2:4", 7, (2, 7), []),
        (("kube-controller-manager", "kubectl"), "2:4", 7, (2, 7), []),
        ((), "2:4", 7, (2, 7), []),
    ],
)
def test_an_autoscaler_moves_within_the_nodes_that_the_user_states_and_a_user_beyond_them(
    writers: tuple[str, ...], nodes: Any, replicas: int, expected: tuple[int, int], told: list[str]
):
    job, warnings = scaled_by(*writers, replicas=replicas, nodes=nodes).job()
    count = job.roles["worker"].nodes
    assert (count.min, count.max) == expected
    about = [warning.message for warning in warnings if warning.path == "replicas"]
    assert len(about) == len(told)
    assert all(text in message for text, message in zip(told, about, strict=True))


def of_roles(spec: dict[str, Any] | None = None, **nodes: Any) -> TrainingJobResource:
    """A trainer and two servers."""
    server = {"nodes": nodes.get("ps", 2), "command": ["serve"], "image": "acme/ps", "ready": {"port": 80}}
    trainer = {"nodes": nodes.get("trainer", 4), "command": ["torchrun", "train.py"], "image": "acme/llama"}
    return resource({"roles": {"ps": server, "trainer": trainer}, **(spec or {})})


def test_replicas_of_a_job_of_several_roles_are_those_of_the_role_that_ends_it():
    roles = of_roles({"replicas": 6}).job()[0].roles
    assert {name: role.nodes.max for name, role in roles.items()} == {"ps": 2, "trainer": 6}


@pytest.mark.parametrize(
    ("spec", "nodes", "told"),
    [
        ({}, {}, []),
        ({"replicas": 6}, {}, [("trainer", "6")]),
        ({}, {"ps": 3, "trainer": "2:4"}, [("ps", "3"), ("trainer", "2:4")]),
        ({"suspend": True}, {}, ["suspend"]),
    ],
)
async def test_each_role_of_a_running_job_follows_its_object(
    spec: dict[str, Any], nodes: dict[str, Any], told: list[Any]
):
    runs = SteeredRuns()
    job = running_job(role="ps", by_role=(running_role("ps", 2), running_role("trainer", 4)))
    reconciler = Reconciler(cast("Any", None), cast("Any", runs), cast("Any", None))
    assert await reconciler._carry(of_roles(spec, **nodes), job) is bool(told)
    assert runs.told == told


@pytest.mark.parametrize(
    ("stated", "job", "told"),
    [
        (True, {}, ["suspend"]),
        (True, {"suspending": True}, []),
        (True, {"phase": JobPhase.SUSPENDED}, []),
        (False, {"suspending": True}, ["resume"]),
        (False, {"phase": JobPhase.SUSPENDED}, ["resume"]),
        (False, {}, []),
    ],
)
async def test_a_suspension_that_waits_for_a_checkpoint_is_requested_once_and_taken_back(
    stated: bool, job: dict[str, Any], told: list[str]
):
    runs = SteeredRuns()
    reconciler = Reconciler(cast("Any", None), cast("Any", runs), cast("Any", None))
    described = resource({"suspend": stated})
    nodes = described.job()[0].roles["worker"].nodes
    known = running_job(nodes_min=nodes.min, nodes_max=nodes.max, nodes_allowed=nodes.max, **job)
    assert await reconciler._carry(described, known) is bool(told)
    assert runs.told == told


SUSPENDED = {"phase": JobPhase.SUSPENDED, "suspended_alone": True}


@pytest.mark.parametrize(
    ("stated", "ps", "trainer", "told"),
    [
        ({}, {}, {}, []),
        ({}, SUSPENDED, {}, []),
        ({"ps": True}, {}, {}, [("suspend", "ps")]),
        ({"ps": True}, {"suspended_alone": True}, {}, []),
        ({"ps": True}, SUSPENDED, {}, []),
        ({"ps": False}, SUSPENDED, {}, [("resume", "ps")]),
        ({"ps": True, "trainer": True}, {}, {}, [("suspend", "ps")]),
        ({"ps": True, "trainer": True}, {"suspended_alone": True}, {}, []),
        ({"ps": True, "trainer": True}, SUSPENDED, {}, [("suspend", "trainer")]),
        ({"ps": True, "trainer": True}, SUSPENDED, SUSPENDED, []),
        ({"ps": True}, {"phase": JobPhase.SUCCEEDED}, {}, []),
        ({"trainer": True}, {"phase": JobPhase.SUCCEEDED}, SUSPENDED, []),
    ],
)
async def test_a_role_is_suspended_as_its_object_states(
    stated: dict[str, bool], ps: dict[str, Any], trainer: dict[str, Any], told: list[Any]
):
    runs = SteeredRuns()
    roles = (running_role("ps", 2).replace(**ps), running_role("trainer", 4).replace(**trainer))
    phase = JobPhase.SUSPENDED if trainer else JobPhase.RUNNING
    job = running_job(role="trainer", phase=phase, by_role=roles)
    described = of_roles()
    for name, suspended in stated.items():
        cast("Any", described.spec)["roles"][name]["suspend"] = suspended
    reconciler = Reconciler(cast("Any", None), cast("Any", runs), cast("Any", None))
    assert await reconciler._carry(described, job) is bool(told)
    assert runs.told == told
    assert refusal_of_changes(of_roles().job()[0], described.job()[0]) == ""
    assert described.leading_role == "trainer"


def test_the_only_role_of_an_object_is_suspended_as_its_job():
    assert resource(suspend=True).suspended
    assert not resource(suspend=False).suspended
    assert not resource().suspended


async def test_a_role_that_has_chosen_fewer_nodes_than_its_object_allows_keeps_them():
    runs = SteeredRuns()
    job = running_job(role="ps", by_role=(running_role("ps", 2), running_role("trainer", 2, allowed=4)))
    reconciler = Reconciler(cast("Any", None), cast("Any", runs), cast("Any", None))
    assert not await reconciler._carry(of_roles(trainer="2:4"), job)


class SteeredRuns:
    """Takes down what the operator requests of a job."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    async def scale(
        self, resource: TrainingJobResource, role: str, nodes: str, scaling: dict[str, Any] | None = None
    ) -> None:
        self.told.append((role, nodes) if scaling is None else (role, nodes, scaling))

    async def suspend(self, resource: TrainingJobResource, *, suspended: bool, role: str | None = None) -> None:
        what = "suspend" if suspended else "resume"
        self.told.append((what, role) if role else what)


BY_TIME = {"policy": "deadline", "finish_by": "2026-12-01T08:00:00Z"}


@pytest.mark.parametrize(
    ("spec", "stated", "running", "told"),
    [
        ({}, {}, {}, []),
        ({}, {"scaling": BY_TIME}, {}, [("worker", "", BY_TIME)]),
        ({}, {"scaling": {"finish_by": "2026-12-01T09:00:00+01:00", "policy": "deadline"}}, BY_TIME, []),
        ({}, {"scaling": BY_TIME, "nodes": "2:8"}, {}, [("worker", "2:8", BY_TIME)]),
        ({}, {}, BY_TIME, [("worker", "", {})]),
        # A preset may have stated it, and a worker of an older release does not say.
        ({"runtime": "h100"}, {}, BY_TIME, []),
        ({}, {"scaling": BY_TIME}, None, []),
    ],
)
async def test_a_running_job_follows_the_goal_of_its_object(
    spec: dict[str, Any], stated: dict[str, Any], running: dict[str, Any] | None, told: list[Any]
):
    runs = SteeredRuns()
    job = running_job(role="worker", nodes_max=4, goal=running)
    reconciler = Reconciler(cast("Any", None), cast("Any", runs), cast("Any", None))
    assert await reconciler._carry(resource(spec, **stated), job) is bool(told)
    assert runs.told == told


def test_a_single_number_of_replicas_is_no_error_of_a_policy_that_chooses_in_a_range():
    job, _ = resource({"replicas": 2}, nodes="2:8", scaling={"policy": "efficient"}).job()
    assert str(job.roles["worker"].nodes) == "2"


@pytest.mark.parametrize(
    ("spec", "role", "named"),
    [
        ({}, {}, ""),
        ({}, {"nodes": 8}, ""),
        ({}, {"scaling": {"policy": "deadline", "finish_by": "2026-12-01T08:00:00Z"}}, ""),
        ({}, {"nodes": {"min": 2, "max": 4, "unit": 2}}, "roles.worker.nodes.unit: cannot change"),
        ({}, {"command": ["torchrun", "other.py"]}, "roles.worker.command: cannot change"),
        ({"env": {"A": "1"}, "queue": "q"}, {}, "queue, env.A: cannot change"),
        ({"env": dict.fromkeys("ABCDEFG", "")}, {}, "env.A, env.B, env.C, env.D, env.E and 2 more: cannot"),
    ],
)
def test_a_running_job_takes_other_numbers_of_nodes_and_nothing_else(
    spec: dict[str, Any], role: dict[str, Any], named: str
):
    refusal = refusal_of_changes(resource().job()[0], resource(spec, **role).job()[0])
    assert refusal.startswith(named)
    assert bool(refusal) is bool(named)
