"""Tests of the view that combines the answers of a job, its groups and its leases."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from perdure.cli import inspect, text
from perdure.cli.live import View, line_of
from perdure.client.views import (
    JobSnapshot,
    NodeLease,
    all_warnings,
    merge_nodes,
    nodes_of_ranks,
    overall_progress,
    training_step,
)
from perdure.contract import (
    CheckpointView,
    CourseSample,
    JobPhase,
    JobStatus,
    LeaseView,
    NodePhase,
    NodeView,
    Observation,
    Progress,
    ProgressSource,
)
from tests.policy.scenario import Scenario
from tests.support.processor_time import ends_within

REPORTED, COUNTED = ProgressSource.REPORTED, ProgressSource.COUNTED
SINCE = datetime(2026, 11, 26, tzinfo=UTC)


def node(rank: int, *, incarnation: int = 1, group_rank: int | None = None, **fields: object) -> NodeView:
    view = NodeView(rank=rank, incarnation=incarnation, phase=NodePhase.READY, since=SINCE, group_rank=group_rank)
    return view.model_copy(update=fields)


def status(progress: Progress | None) -> JobStatus:
    return JobStatus(
        name="x",
        namespace="default",
        uid="01234567",
        phase=JobPhase.RECOVERING,
        role="worker",
        backend="local",
        generation=1,
        nodes=2,
        nodes_min=2,
        nodes_max=2,
        world_size=2,
        restarts=0,
        max_restarts=10,
        restart_window=timedelta(hours=1),
        started_at=datetime.now(UTC),
        progress=progress,
    )


def test_of_several_generations_only_the_newest_counts() -> None:
    """The node whose ranks have not made a step yet still has the count of the generation before."""
    stale = node(0, group_rank=0, progress=Progress(step=95, source=COUNTED, generation=1))
    stepping = [node(rank, group_rank=rank, progress=Progress(step=80 + rank, generation=2)) for rank in (1, 2)]
    progress = overall_progress([stale, *stepping], None)
    assert progress is not None
    assert (progress.step, progress.generation) == (81, 2)
    unknown = node(3, group_rank=3, progress=Progress(step=79))
    progress = overall_progress([stale, *stepping, unknown], None)
    assert progress is not None
    assert progress.step == 79, "an older agent does not say its generation"


def test_the_course_of_a_job_goes_on_where_its_first_rank_has_moved() -> None:
    earlier = [CourseSample(at, at) for at in range(0, 60, 10)]
    known = status(Progress(step=50, source=REPORTED, course=tuple(earlier)))
    moved = Progress(step=70, source=REPORTED, generation=2, course=(CourseSample(55, 40), CourseSample(65, 70)))
    nodes = [node(1, group_rank=0, progress=moved), node(0, group_rank=1, progress=Progress(step=70, generation=2))]
    progress = overall_progress(nodes, known)
    assert progress is not None
    assert progress.course == (*earlier, *moved.course)
    lost = overall_progress([node(0, group_rank=0, progress=Progress(step=1, generation=3))], known)
    assert lost is not None
    assert lost.course == tuple(earlier)


def test_counted_steps_continue_from_the_restored_one() -> None:
    counted = Progress(step=85, source=COUNTED, generation=2)
    restored = CheckpointView(restored_step=95, restored_generation=2)
    assert training_step(counted, restored) == 180
    assert training_step(counted.model_copy(update={"generation": 3}), restored) == 85
    assert training_step(counted.model_copy(update={"source": REPORTED}), restored) == 85
    assert training_step(counted, CheckpointView()) == 85


def test_the_lease_has_the_latest_progress_and_the_group_the_facts() -> None:
    groups = [node(0, host="a", log_path="/log"), node(1, host="b")]
    leases = [NodeLease(rank=0, incarnation=1, view=LeaseView(epoch=3, generation=2, progress=Progress(step=12)))]
    first, second = merge_nodes([node(0, group_rank=0), node(1, group_rank=1)], groups, leases)
    assert (first.host, first.log_path, first.group_rank, first.generation) == ("a", "/log", 0, 2)
    assert first.progress == Progress(step=12)
    assert (second.host, second.progress) == ("b", None)


def test_another_incarnation_says_nothing_about_this_one() -> None:
    groups = [node(0, incarnation=1, host="old")]
    leases = [NodeLease(rank=0, incarnation=1, view=LeaseView(epoch=1, progress=Progress(step=99)))]
    (view,) = merge_nodes([node(0, incarnation=2)], groups, leases)
    assert (view.host, view.progress) == ("", None)


def test_ranks_that_train_apart_are_a_warning_beside_the_jobs_own() -> None:
    own = status(None).model_copy(update={"warnings": ("its own",)})
    together, apart = node(0, group_rank=0, progress=Progress(step=3)), Progress(step=3, apart=True)
    assert all_warnings([together, node(1, progress=apart)], own) == ("its own",), "node 1 is no member"
    first, second = all_warnings([together, node(1, group_rank=1, progress=apart)], own)
    assert first == "its own"
    assert second.startswith("ranks on node 1 step without a process group")
    view = View(name="x", flag="", page="", snapshot=JobSnapshot(time=datetime.now(UTC), status=own))
    assert view.warnings == ("its own",)


def test_a_lost_node_makes_no_progress() -> None:
    leases = [NodeLease(rank=0, incarnation=1, view=LeaseView(epoch=1, progress=Progress(step=5)))]
    (view,) = merge_nodes([node(0, phase=NodePhase.LOST)], [], leases)
    assert view.progress is None


def test_a_stalled_node_shows_for_how_long() -> None:
    stuck = node(1, group_rank=1, stalled_since=datetime.now(UTC) - timedelta(minutes=3, seconds=10))
    assert text.node_state(stuck)[1:] == ("yellow", "no step for 3m 10s")
    assert text.node_state(stuck.model_copy(update={"reachable": False}))[2] == "unreachable"
    assert text.node_state(stuck.model_copy(update={"phase": NodePhase.LOST}))[2] == "lost"


def test_the_world_is_as_far_as_its_slowest_member() -> None:
    views = [
        node(0, group_rank=1, progress=Progress(step=10, steps_per_second=2.0, loss=0.5, source=REPORTED)),
        node(1, group_rank=0, progress=Progress(step=9, steps_per_second=1.5, loss=0.4, source=REPORTED)),
        node(2, progress=Progress(step=1)),
    ]
    progress = overall_progress(views, None)
    assert progress is not None
    assert (progress.step, progress.steps_per_second, progress.loss) == (9, 1.5, 0.4)


def test_reported_steps_are_better_than_counted_ones() -> None:
    views = [
        node(0, group_rank=0, progress=Progress(step=3, source=COUNTED)),
        node(1, group_rank=1, progress=Progress(step=500, total_steps=900, source=REPORTED)),
    ]
    progress = overall_progress(views, None)
    assert progress is not None
    assert (progress.step, progress.total_steps) == (500, 900)


def test_before_anything_steps_the_last_known_step_stands() -> None:
    assert overall_progress([node(0, group_rank=0)], status(Progress(step=7))) == Progress(step=7)
    assert overall_progress([], None) is None


def test_a_world_before_its_first_step_has_no_speed_and_no_node_that_steps() -> None:
    before = Progress(step=704, steps_per_second=4.6, generation=2, source=REPORTED)
    leases = [NodeLease(rank=0, incarnation=1, view=LeaseView(epoch=1, generation=3, progress=before))]
    (view,) = merge_nodes([node(0, group_rank=0)], [], leases)
    assert text.node_state(view)[2] == "in the world"
    current = status(before).model_copy(update={"generation": 3})
    for nodes in ([view], [node(0, group_rank=0, progress=before)], []):
        progress = overall_progress(nodes, current)
        assert progress is not None
        assert (progress.step, progress.steps_per_second) == (704, None)


@pytest.mark.parametrize(
    ("phase", "last_step", "speed"),
    [
        (JobPhase.RUNNING, -1, None),
        (JobPhase.RECOVERING, 1, 4.6),
        (JobPhase.SUSPENDED, 1, None),
    ],
)
def test_an_interruption_has_no_speed_unless_the_old_world_still_steps(
    phase: JobPhase, last_step: int, speed: float | None
) -> None:
    job = Scenario("2").running().lost(1)
    incident = job.incident
    at = incident.started_at + timedelta(seconds=last_step)
    progress = Progress(step=7, steps_per_second=4.6, source=REPORTED, last_step_at=at)
    stopped = status(None).model_copy(update={"phase": phase, "last_incident": incident})
    shown = overall_progress([node(0, group_rank=0, progress=progress)], stopped)
    assert shown is not None
    assert shown.steps_per_second == speed
    over = stopped.model_copy(update={"phase": JobPhase.RUNNING, "last_incident": job.ready(1).steps().incident})
    shown = overall_progress([node(0, group_rank=0, progress=progress)], over)
    assert shown is not None
    assert shown.steps_per_second == 4.6


def test_an_observation_after_the_last_interruption_says_why_the_job_is_as_it_is() -> None:
    job = Scenario("2").running().lost(1).ready(1).steps()
    seen = job.incident.model_copy(update={"number": 2, "title": "rank 1 is slow", "observation": Observation()})
    known = status(None).model_copy(update={"last_incident": job.incident, "reason": "2 of 2 nodes"})
    why = dict(inspect.facts(known, None, (), [job.incident, seen]))["WHY"]
    assert why.startswith("2 of 2 nodes; #1 node 1 lost")
    assert "; #2 rank 1 is slow: nothing was done, " in why
    ended = known.model_copy(update={"finished_at": SINCE})
    assert "#2" not in dict(inspect.facts(ended, None, (), [job.incident, seen]))["WHY"]


def test_ranks_are_on_nodes_in_the_order_of_their_group_ranks() -> None:
    nodes = [node(0, group_rank=1, processes=4), node(1), node(2, group_rank=0, processes=2)]
    assert [set(nodes_of_ranks(nodes, [rank])) for rank in (0, 1, 2, 5, 6)] == [{2}, {2}, {0}, {0}, set()]
    assert nodes_of_ranks(nodes, range(1, 3)) == {0, 2}


def test_a_range_of_ranks_that_do_not_exist_takes_no_time() -> None:
    nodes = [node(0, group_rank=0, processes=4)]
    assert ends_within(5, lambda: nodes_of_ranks(nodes, range(2, 10**18)))


def leased(idle: float | None, *, rank: int = 0, usual: float | None = 0.1) -> NodeLease:
    view = LeaseView(
        epoch=1,
        progress=Progress(step=100, steps_per_second=7.2),
        idle=None if idle is None else timedelta(seconds=idle),
        usual_step=None if usual is None else timedelta(seconds=usual),
    )
    return NodeLease(rank=rank, incarnation=1, view=view)


def test_ranks_that_do_not_step_are_shown_at_once_and_no_rate_is() -> None:
    nodes = merge_nodes([node(0, group_rank=0), node(1, group_rank=1)], (), [leased(71), leased(71, rank=1)])
    assert text.node_state(nodes[0])[1:] == ("yellow", "no step for 1m 11s (usual 0.10 s)")
    assert all(one.progress and one.progress.steps_per_second is None for one in nodes)
    progress = overall_progress(nodes, None)
    assert progress is not None
    assert (progress.step, progress.steps_per_second) == (100, None)
    assert text.stall(status(progress), nodes) == "no step for 1m 11s (usual 0.10 s)"
    running = status(progress).model_copy(update={"phase": JobPhase.RUNNING})
    line = line_of(JobSnapshot(time=datetime.now(UTC), status=running, nodes=nodes, progress=progress))
    assert "no step for 1m 11s (usual 0.10 s)" in line
    assert "steps/s" not in line


@pytest.mark.parametrize(
    ("idle", "usual", "shown"),
    [(4.9, 0.1, False), (5.1, 0.1, True), (71, 20.0, False), (201, 20.0, True), (71, None, True), (None, 0.1, False)],
)
def test_a_step_that_is_merely_slow_is_no_pause(idle: float | None, usual: float | None, shown: bool) -> None:
    [view] = merge_nodes([node(0, group_rank=0)], (), [leased(idle, usual=usual)])
    assert text.node_state(view)[2].startswith("no step for") is shown
    assert view.progress is not None
    assert view.progress.steps_per_second == (None if shown else 7.2)


def test_a_node_outside_of_the_world_is_not_idle() -> None:
    [view] = merge_nodes([node(0)], (), [leased(71)])
    assert text.node_state(view)[2] == "parked"


def test_status_shows_what_is_known_of_a_pause() -> None:
    nodes = merge_nodes([node(0, group_rank=0)], (), [leased(71)])
    running = status(None).model_copy(update={"phase": JobPhase.RUNNING})
    facts = dict(inspect.facts(running, overall_progress(nodes, running), nodes, []))
    assert facts["SPEED"] == "no step for 1m 11s (usual 0.10 s)"
    assert facts["GOOD"].startswith("no step for 1m 11s")
    assert "uninterrupted" not in facts["GOOD"]


def test_status_says_that_slow_ranks_are_not_seen() -> None:
    leases = [NodeLease(rank=0, incarnation=1, view=LeaseView(epoch=1, unsplit_steps=True))]
    nodes = merge_nodes([node(0, group_rank=0), node(1, group_rank=1)], (), leases)
    running = status(Progress(step=3, loss=0.5)).model_copy(update={"phase": JobPhase.RUNNING})
    shown = dict(inspect.facts(running, running.progress, nodes, []))
    assert shown["SPEED"].endswith("slow ranks are not seen: steps are not split into computation and waiting")
    ended = running.model_copy(update={"finished_at": SINCE})
    assert "slow ranks" not in dict(inspect.facts(ended, ended.progress, nodes, []))["SPEED"]
