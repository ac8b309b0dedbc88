"""Tests of what holds for a job of several roles whatever happens to them, in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.contract import JobPhase
from perdure.spec.role_relations import roles_restarted_with
from perdure.workflows.policy.facts.events import ResumeRequested, SuspendRequested
from perdure.workflows.policy.state.job import JobState
from tests.policy.job_of_roles import Roles

NAMES = ("trainer", "ps", "data")
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            (
                "killed",
                "lost",
                "runs",
                "runs",
                "runs",
                "ended",
                "wait",
                "suspend",
                "resume",
                "suspend role",
                "resume role",
            )
        ),
        st.sampled_from(NAMES),
        st.integers(0, 1),
    ),
    max_size=25,
)
RELATIONS = st.sampled_from(({}, {"restart_with": ["trainer"]}, {"on_failure": "job"}))


def jobs(relation: dict[str, object]) -> Roles:
    return Roles(
        max_restarts=100,
        trainer={"depends_on": {"ps": "ready"}},
        ps={"ready": {"port": 6000}, "depends_on": {"data": "completed"}, **relation},
        data={"nodes": 1},
    )


def happen(job: Roles, kind: str, role: str, rank: int) -> None:
    node = job.view(role).nodes.get(rank)
    match kind:
        case "killed" if node is not None and node.alive and job.view(role).stepping:
            job.rank_killed(role, rank)
        case "lost" if node is not None and node.alive:
            job.lost(role, rank)
        case "runs" if not job.view(role).is_idle:
            job.runs(role)
        case "ended" if job.view(role).stepping and role != "ps":
            job.command_ended(role)
        case "wait":
            job.wait(30)
        case "suspend role" if not job.view(role).is_over:
            job.take(SuspendRequested(role=role))
        case "resume role":
            job.take(ResumeRequested(role=role))
        case "suspend" if not job.state.suspended:
            job.take(SuspendRequested())
        case "resume" if job.state.suspended:
            job.take(ResumeRequested())
        case _:
            pass


def only_related_roles_restart_and_the_job_ends(
    events: list[tuple[str, str, int]], relation: dict[str, object]
) -> None:
    job = jobs(relation)
    for kind, role, rank in events:
        before = job.state
        happen(job, kind, role, rank)
        concerned = {role, *roles_restarted_with(role, job.job.roles)}
        for name, known in before.roles.items():
            if kind in ("killed", "lost") and name not in concerned:
                assert job.state.roles[name].generation == known.generation, f"{name} restarts for {role}"
            if job.view(name).rests and job.state.outcome is None:
                assert job.state.roles[name].is_idle
            if known.completed and job.state.outcome is None:
                assert job.state.roles[name].is_idle
        if job.state.outcome is not None:
            break
        assert JobState.model_validate_json(job.state.model_dump_json()) == job.state
    for role in ("", *NAMES):
        job.take(ResumeRequested(role=role))
    for _ in range(20):
        for name in ("data", "ps", "trainer"):
            if job.state.outcome is None and not job.view(name).is_idle:
                job.runs(name)
                if name == "data" and job.view(name).stepping:
                    job.command_ended(name)
        job.wait(60)
    if job.state.outcome is None:
        job.runs("trainer").command_ended("trainer")
    assert job.state.outcome is not None
    assert job.state.outcome.phase is JobPhase.SUCCEEDED


@settings(max_examples=settings().max_examples // 3)
@given(EVENTS, RELATIONS)
def test_only_related_roles_restart_and_the_job_ends(
    events: list[tuple[str, str, int]], relation: dict[str, object]
) -> None:
    only_related_roles_restart_and_the_job_ends(events, relation)


@pytest.mark.long("workflows")
@pytest.mark.timeout(900)
@settings(max_examples=200)
@given(EVENTS, RELATIONS)
def test_only_related_roles_restart_and_the_job_ends_in_depth(
    events: list[tuple[str, str, int]], relation: dict[str, object]
) -> None:
    only_related_roles_restart_and_the_job_ends(events, relation)
