"""Tests of the conditions that objects get where something changes while they are looked at."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from perdure.base.errors import ControlPlaneUnreachable, Refused
from perdure.client.views import Submission
from perdure.contract import JobPhase, JobResult, JobStatus
from perdure.operator.owners import Owners
from perdure.operator.ownership import Ownership
from perdure.operator.reconcile import Reconciler
from perdure.operator.resource import FINALIZER, TrainingJobResource
from perdure.operator.runs import Run
from perdure.operator.status import Condition, Truth
from perdure.spec.job import JobSpec
from tests.operator.known_jobs import NOW, running_job

SUCCEEDED = JobResult(
    phase=JobPhase.SUCCEEDED, exit_code=0, reason="", generations=1, restarts=0, started_at=NOW, finished_at=NOW
)
SPEC: dict[str, Any] = {"roles": {"worker": {"nodes": 2, "command": ["torchrun", "train.py"], "image": "acme/llama"}}}


def an_object(spec: dict[str, Any] | None = None, **status: Any) -> TrainingJobResource:
    metadata = {"name": "llama", "namespace": "nlp", "uid": "1", "generation": 2, "finalizers": [FINALIZER]}
    return TrainingJobResource.model_validate(
        {"metadata": metadata, "spec": {**SPEC, **(spec or {})}, "status": {"observedGeneration": 2, **status}}
    )


def acceptance(reason: str = "Valid") -> dict[str, Any]:
    status = "True" if reason == "Valid" else "False"
    return {"type": "Accepted", "status": status, "reason": reason, "lastTransitionTime": NOW}


class PlayedApi:
    """Takes changes of an object, and counts them."""

    def __init__(self, known: TrainingJobResource) -> None:
        self._known = known.model_dump(by_alias=True)
        self.changes = 0

    async def patch(self, path: str, content: dict[str, Any], *, insist: bool = True) -> dict[str, Any]:
        self.changes += 1
        self._known["metadata"] |= {"finalizers": content["metadata"].get("finalizers", [FINALIZER])}
        self._known["status"] = content.get("status", self._known["status"])
        return self._known

    async def create(self, path: str, content: dict[str, Any]) -> dict[str, Any]:
        return content


class PlayedRun:
    """A run that is open, and refuses to be suspended for as long as it says so."""

    def __init__(self, *, object_uid: str = "1", phase: JobPhase = JobPhase.RUNNING, refusal: str = "") -> None:
        ids = {"workflow_id": "job/nlp/llama", "run_id": "r", "first_run_id": "r", "object_uid": object_uid}
        self.run = Run(**ids, open=True, page="")
        self.earlier: Run | None = None
        self.job = running_job(phase=phase, nodes_allowed=2)
        self.refusal = refusal
        self.requests = 0
        self.started = 0

    def end(self) -> None:
        """Lets the job succeed."""
        self.run = replace(self.run, open=False)
        self.job = running_job(phase=JobPhase.SUCCEEDED, nodes_allowed=2)

    async def result(self, of: TrainingJobResource, run: Run) -> tuple[JobResult, JobStatus]:
        assert not run.open
        return SUCCEEDED, self.job

    async def has_nodes(self, run: Run) -> bool:
        return False

    async def start(self, job: JobSpec, of: TrainingJobResource, *, owner: str = "") -> Submission:
        self.started += 1
        return Submission(name="llama", namespace="nlp", workflow_id="job/nlp/llama", run_id="s", page="")

    async def find(self, of: TrainingJobResource) -> Run:
        return self.run

    async def find_ended(self, of: TrainingJobResource) -> Run | None:
        return self.earlier

    async def spec_of(self, run: Run) -> JobSpec:
        return an_object().job()[0]

    async def status(self, of: TrainingJobResource) -> JobStatus:
        return self.job

    async def leading_role(self, of: TrainingJobResource, job: JobStatus) -> JobStatus:
        return job

    async def step(self, job: JobStatus) -> None:
        return None

    async def suspend(self, of: TrainingJobResource, *, suspended: bool, role: str | None = None) -> None:
        self.requests += 1
        if self.refusal:
            raise Refused(self.refusal)
        self.job = running_job(phase=JobPhase.SUSPENDED, nodes_allowed=2)


def reconciler(api: PlayedApi, runs: Any) -> Reconciler:
    return Reconciler(cast("Any", api), runs, Owners(cast("Any", api), Ownership.IGNORE))


def accepted(known: TrainingJobResource) -> Condition:
    found = known.status.condition("Accepted")
    assert found is not None
    return found


async def test_a_change_that_the_job_refuses_for_now_is_requested_again_until_it_is_made():
    known = an_object({"suspend": True}, runId="r", phase="RUNNING", conditions=[acceptance()])
    api, runs = PlayedApi(known), PlayedRun(refusal="role ps is being suspended; try again when that is done")
    operator = reconciler(api, runs)
    looked = await operator.look(known)
    refused = accepted(looked.resource)
    assert (refused.status, refused.reason) == (Truth.FALSE, "ChangeRefused")
    assert (runs.requests, looked.again is not None) == (1, True)
    changes = api.changes
    looked = await operator.look(looked.resource)
    assert (runs.requests, api.changes) == (2, changes), "the same refusal is no news"
    runs.refusal = ""
    looked = await operator.look(looked.resource)
    assert (runs.requests, looked.resource.status.phase) == (3, "SUSPENDED")
    assert accepted(looked.resource).status is Truth.TRUE
    await operator.look(looked.resource)
    assert runs.requests == 3


@pytest.mark.parametrize("has_ended", [False, True], ids=["runs", "has-ended"])
@pytest.mark.parametrize("reason", ["NameTaken", "Forbidden"])
async def test_an_object_whose_job_was_started_is_accepted_although_that_could_not_be_written_then(
    reason: str, has_ended: bool
):
    known, runs = an_object(phase="REFUSED", conditions=[acceptance(reason)]), PlayedRun()
    if has_ended:
        runs.end()
    looked = await reconciler(PlayedApi(known), runs).look(known)
    assert looked.resource.status.phase == ("SUCCEEDED" if has_ended else "RUNNING")
    assert (accepted(looked.resource).status, accepted(looked.resource).reason) == (Truth.TRUE, "Valid")


async def test_a_change_that_comes_too_late_is_told_once_the_job_has_ended():
    changed = {"roles": {"worker": {**SPEC["roles"]["worker"], "command": ["torchrun", "other.py"]}}}
    known = an_object(changed, runId="r", phase="RUNNING", observedGeneration=1, conditions=[acceptance()])
    runs = PlayedRun()
    runs.end()
    operator = reconciler(PlayedApi(known), runs)
    looked = await operator.look(known)
    assert looked.resource.status.finished
    for _ in range(2):
        looked = await operator.look(looked.resource)
    assert (accepted(looked.resource).status, accepted(looked.resource).reason) == (Truth.FALSE, "Ended")


async def test_the_end_of_a_job_is_not_put_in_doubt_while_its_nodes_wind_down():
    ended = {"phase": "SUCCEEDED", "finishedAt": NOW, "conditions": [acceptance()]}
    known = an_object(runId="r", **ended)
    api = PlayedApi(known)
    looked = await reconciler(api, PlayedRun()).doubt(known, ControlPlaneUnreachable("Temporal does not answer"))
    assert (looked.resource.status, api.changes) == (known.status, 0)


@pytest.mark.parametrize("phase", [JobPhase.STOPPING, JobPhase.HELD, JobPhase.CANCELLED])
async def test_an_object_adopts_no_job_that_is_ending(phase: JobPhase):
    known = an_object()
    api, runs = PlayedApi(known), PlayedRun(object_uid="earlier", phase=phase)
    operator = reconciler(api, runs)
    looked = await operator.look(known)
    waits = accepted(looked.resource)
    assert (waits.status, waits.reason) == (Truth.FALSE, "NameTaken")
    assert "the job of an earlier object of this name is ending" in waits.message
    assert looked.again is not None
    runs.end()
    looked = await operator.look(looked.resource)
    assert (runs.started, accepted(looked.resource).reason) == (1, "Valid")


async def test_an_object_adopts_a_job_that_runs():
    known = an_object()
    looked = await reconciler(PlayedApi(known), PlayedRun(object_uid="earlier")).look(known)
    assert (looked.resource.status.run_id, accepted(looked.resource).reason) == ("r", "Adopted")


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "forgotten"])
async def test_the_end_of_a_job_is_shown_although_another_one_has_its_name_by_now(is_known: bool):
    known = an_object(runId="r", phase="RUNNING", conditions=[acceptance()])
    runs = PlayedRun()
    runs.earlier = replace(runs.run, open=False) if is_known else None
    runs.run = replace(runs.run, run_id="of-another", first_run_id="of-another", object_uid="")
    looked = await reconciler(PlayedApi(known), runs).look(known)
    running = looked.resource.status.condition("Running")
    assert running is not None
    if is_known:
        assert looked.resource.status.phase == "SUCCEEDED"
        assert looked.resource.status.condition("Succeeded") is not None
    else:
        assert (running.status, running.reason) == (Truth.UNKNOWN, "RunNotFound")
