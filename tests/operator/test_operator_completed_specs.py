"""Tests of objects whose jobs have completed their specifications, by presets and by earlier jobs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from perdure.activities.nodes.kubernetes.presets import Preset, with_preset
from perdure.contract import JobShape
from perdure.operator.changes import refusal_of_changes
from perdure.operator.reconcile import Reconciler
from perdure.operator.resource import TrainingJobResource
from perdure.operator.runs import Run
from perdure.spec.accepted import read_accepted
from perdure.spec.job import JobSpec
from perdure.spec.validate import to_mapping
from perdure.workflows.policy.capacity import past_use
from tests.operator.known_jobs import running_job
from tests.operator.test_operator_conditions import PlayedApi, PlayedRun, accepted, an_object, reconciler
from tests.operator.test_operator_decisions import SteeredRuns, resource, scaled_by

AUTO: dict[str, Any] = {"nodes": "auto", "resources": {"auto": True, "gpu": 8, "cpu": "16"}}
PRESET = """
job: {env: {NCCL_NET: ofi}, timing: {lease: {timeout: 10s}}}
role:
  resources: {gpu: 8}
  tolerations: [{key: gpu, operator: Exists}]
  pod_template: {spec: {containers: [{name: training, env: [{name: A, value: a}]}]}}
"""


def completed(known: TrainingJobResource) -> JobSpec:
    """The specification of the object's job after it has continued as new."""
    job, _ = known.job()
    if job.runtime is not None:
        presets = {job.runtime: Preset(name=job.runtime, place="here", text=PRESET)}
        job = read_accepted(with_preset(to_mapping(job), presets))
    return past_use.fill(job, past_use.choose_all(job, JobShape.of(job), ()))


@pytest.mark.parametrize(
    ("spec", "role", "changed_spec", "changed_role", "named"),
    [
        ({}, AUTO, {"suspend": True}, {}, ""),
        ({}, AUTO, {}, {"nodes": 4}, ""),
        ({}, AUTO, {"replicas": 4}, {}, ""),
        ({}, AUTO, {}, {"resources": {"auto": True, "gpu": 4, "cpu": "16"}}, "roles.worker.resources.gpu: cannot"),
        ({}, AUTO, {}, {"resources": {"auto": True, "gpu": 8, "cpu": "32"}}, "roles.worker.resources.cpu: cannot"),
        ({}, AUTO, {}, {"nodes": 1, "resources": {"gpu": 8, "memory": "1Gi"}}, "roles.worker.resources.cpu, roles.wo"),
        ({}, AUTO, {"env": {"A": "1"}}, {}, "env.A: cannot"),
        ({"runtime": "efa"}, {}, {"suspend": True}, {"nodes": "2:6"}, ""),
        ({"runtime": "efa", "env": {"A": "1"}}, {}, {"env": {"A": "2"}}, {}, "env.A: cannot"),
        ({"runtime": "efa", "env": {"A": "1"}}, {}, {"env": {"A": "1", "NCCL_NET": "ib"}}, {}, "env.NCCL_NET: cannot"),
        ({"runtime": "efa"}, {}, {}, {"resources": {"gpu": 4}}, "roles.worker.resources.gpu: cannot"),
        ({"runtime": "efa"}, {}, {"timing": {"lease": {"heartbeat": "1s"}}}, {}, "timing.lease.heartbeat: cannot"),
        ({"runtime": "efa"}, {}, {"runtime": "h100"}, {}, "runtime: cannot"),
        ({"runtime": "efa"}, {}, {"runtime": None}, {}, "runtime, env.NCCL_NET"),
        ({"runtime": "efa"}, {"tolerations": [{"key": "mine"}]}, {"suspend": True}, {}, ""),
        ({"runtime": "efa"}, {}, {}, {"tolerations": [{"key": "mine"}]}, "roles.worker.tolerations: cannot"),
        ({"runtime": "efa"}, AUTO, {"suspend": True}, {}, ""),
    ],
)
def test_a_job_that_has_completed_its_specification_follows_its_object_as_before(
    spec: dict[str, Any],
    role: dict[str, Any],
    changed_spec: dict[str, Any],
    changed_role: dict[str, Any],
    named: str,
):
    known, changed = resource(spec, **role), resource({**spec, **changed_spec}, **{**role, **changed_role})
    refusal = refusal_of_changes(completed(known), changed.job()[0], completed=True)
    assert refusal.startswith(named)
    assert bool(refusal) is bool(named)


class MeanOwners:
    """An owner who may use no secret."""

    async def refusal(self, of: TrainingJobResource, job: JobSpec) -> str:
        return "secrets: the object's owner may not use it" if job.secrets else ""


class ContinuedRun(PlayedRun):
    """The run of an earlier object, which has continued as new with a secret of its preset or of its owner."""

    def __init__(self) -> None:
        super().__init__(object_uid="earlier")
        self.run = replace(self.run, run_id="s")

    async def spec_of(self, run: Run) -> JobSpec:
        return an_object({"runtime": "efa", "secrets": {"TOKEN": "hub/token"}}).job()[0]


async def test_an_object_adopts_no_job_that_uses_what_its_owner_may_not_use():
    known = an_object({"runtime": "efa"})
    api, runs = PlayedApi(known), ContinuedRun()
    looked = await Reconciler(cast("Any", api), cast("Any", runs), cast("Any", MeanOwners())).look(known)
    assert (accepted(looked.resource).reason, looked.resource.status.run_id) == ("Forbidden", "")
    looked = await reconciler(api, runs).look(known)
    assert (accepted(looked.resource).reason, looked.resource.status.run_id) == ("Adopted", "r")


async def test_a_number_of_nodes_that_the_job_has_chosen_is_requested_again_only_once_the_object_was_changed():
    runs = SteeredRuns()
    reconciler = Reconciler(cast("Any", None), cast("Any", runs), cast("Any", None))
    known, job = resource(**AUTO), running_job(nodes_max=4, nodes_allowed=4)
    assert not await reconciler._carry(known, job)
    assert await reconciler._carry(known, job, edited=True)
    assert runs.told == [("worker", "auto")]


def test_an_autoscaler_does_not_move_a_number_of_nodes_that_the_job_has_chosen():
    known = scaled_by("keda", replicas=3, nodes="auto", resources="auto")
    job, warnings = known.job()
    assert str(job.roles["worker"].nodes) == "auto"
    [told] = [warning.message for warning in warnings if warning.path == "replicas"]
    assert told.startswith("keda asks for 3 nodes, and nodes of role worker is auto")
    job, _ = scaled_by("kubectl", replicas=3, nodes="auto", resources="auto").job()
    assert str(job.roles["worker"].nodes) == "3"
