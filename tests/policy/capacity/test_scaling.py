"""How many nodes a job keeps where it chooses by its speed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.cli.explain import explanation
from perdure.cli.plan import sizes
from perdure.contract import JobPhase, JobStatus, Progress, ProgressSource, RankStepTimes, ScalingView
from perdure.contract.transitions import NodePace, NodePending, NodePortsChanged, NodeRemoved, NodeStepTimes
from perdure.spec.recovery import StragglerAction
from perdure.workflows.policy.capacity import scaling
from perdure.workflows.policy.facts.events import RepairsPaused, ResumeRequested, ScaleRequested, SuspendRequested
from perdure.workflows.policy.record.projections import status_of
from tests.policy.capacity.test_throughput import Law, best, shared
from tests.policy.scenario import START, Scenario


class ScaledJob(Scenario):
    """A job whose steps take what a law says, and whose nodes come as soon as they are requested."""

    def __init__(
        self,
        nodes: str = "2:16",
        *,
        law: Law,
        total: int | None = None,
        node_group: int = 1,
        room: int = 1000,
        **choice: Any,
    ) -> None:
        role = {"nodes": nodes, "command": ["torchrun", "train.py"], "node_group": node_group}
        scaling = {"policy": "efficient", "batch": "global", "settle": "30s", **choice}
        super().__init__(roles={"worker": role | {"scaling": scaling}})
        self.law = law
        self.step = 0
        self.total = total
        self.room = room
        self.sizes: list[int] = []
        """The numbers of nodes of all worlds."""
        self.arrive()

    def arrive(self) -> ScaledJob:
        """Nodes that are requested come as far as there is room, those that are dismissed end, and the world that
        follows steps."""
        waiting = [n.rank for n in self.state.nodes.values() if n.alive and not self.state.is_member(n)]
        self.ready(*waiting[: max(self.room - sum(n.alive for n in self.state.members), 0)])
        self.wait(self.job.timing.rendezvous.last_call)
        for node in list(self.state.leaving):
            self.transition(node.rank, NodeRemoved, incarnation=node.incarnation)
        if (world := self.state.world) is not None:
            if not self.sizes or world.generation != self.last_generation:
                self.sizes.append(world.nodes)
                self.last_generation = world.generation
                self.steps()
                # Its agent listens on other ports than the one that this world has taken.
                ports = tuple(next(self._ports) for _ in range(4))
                self.transition(world.store_rank, NodePortsChanged, store_ports=ports)
            self.wait(10)
        return self

    last_generation = 0

    def pass_time(self, minutes: float) -> ScaledJob:
        self.wait(timedelta(minutes=minutes))
        return self.arrive()

    def measure(self, noise: float = 1.0) -> ScaledJob:
        """The world has settled, and its first node tells how fast it is."""
        world = self.state.world
        assert world is not None
        first = next(rank for rank, member in world.members.items() if member.base_rank == 0)
        step = self.law(world.nodes) * noise
        self.wait(30)
        self.step += round(30 / step)
        progress = Progress(
            step=self.step, total_steps=self.total, source=ProgressSource.REPORTED, last_step_at=self.now
        )
        self.transition(first, NodePace, generation=world.generation, step=step, progress=progress)
        return self

    def allow(self, minimum: int, maximum: int) -> ScaledJob:
        """A user says how many nodes there may be."""
        self.take(ScaleRequested(minimum=minimum, maximum=maximum))
        return self.arrive()

    def settle(self, noise: Callable[[], float] = lambda: 1.0) -> ScaledJob:
        """Lets the job measure and change until it keeps its number."""
        for _ in range(12):
            before = len(self.sizes)
            self.measure(noise()).arrive()
            if len(self.sizes) == before:
                return self
        raise AssertionError(f"it does not settle: {self.sizes}")

    @property
    def nodes_requested(self) -> list[int]:
        return [node.rank for node in self.state.nodes.values() if node.alive]

    @property
    def status(self) -> JobStatus:
        return status_of(self.state, self.job, groups=(), phase=JobPhase.RUNNING, now=self.now)

    @property
    def view(self) -> ScalingView:
        found = scaling.view(self.state, self.job, self.now)
        assert found is not None
        return found


def test_two_tries_find_the_number_that_pays() -> None:
    law = shared(8, 0.25)
    job = ScaledJob(law=law).settle()
    assert job.sizes == [16, 6, 13]
    assert best(law, range(2, 17), 0.7) == 13
    assert job.view.chosen == job.sizes[-1]
    assert [resized.is_try for resized in job.view.resized] == [True, True]


def test_a_job_with_one_measurement_says_what_it_lacks() -> None:
    job = ScaledJob(law=shared(8, 0.25))
    job.take(RepairsPaused(until=START + timedelta(days=1)))
    job.measure()
    assert (job.view.chosen, job.view.why) == (
        None,
        "too little is measured to say how many nodes pay: it tries another number",
    )


def test_a_valley_that_two_measurements_cannot_show_is_looked_for() -> None:
    job = ScaledJob("1:6", law=lambda nodes: 0.598 / nodes + 0.035 * nodes, min_efficiency=0.05).settle()
    assert job.sizes == [6, 2, 4], "a straight line through 6 and 2 has its shortest step at 6"


def test_a_valley_that_is_none_is_left_again() -> None:
    job = ScaledJob("1:6", law=lambda nodes: 0.3 / nodes + 0.3, min_efficiency=0.05).settle()
    assert job.sizes == [6, 2, 5, 6]


@given(
    st.floats(0.5, 10), st.floats(0, 1), st.floats(0.4, 0.85), st.booleans(), st.tuples(*[st.floats(0.99, 1.01)] * 8)
)
def test_a_job_settles_near_the_best_and_never_tries_a_number_twice(
    compute: float, exchange: float, least: float, is_global: bool, noise: tuple[float, ...]
) -> None:
    def law(nodes: int) -> float:
        return compute / nodes + exchange if is_global else compute + exchange * nodes

    job = ScaledJob(law=law, min_efficiency=least, batch="global" if is_global else "per-rank")
    job.settle(iter(noise).__next__)
    tried = [resized.after for resized in job.view.resized if resized.is_try]
    assert len(tried) == len(set(tried)) <= 5
    fewest, most = (best(law, range(2, 17), least + d, global_batch=is_global) for d in (0.15, -0.15))
    assert fewest <= job.sizes[-1] <= most


def test_groups_of_nodes_stay_whole() -> None:
    job = ScaledJob("4:16", law=shared(8, 0.25), node_group=4).settle()
    assert job.sizes == [16, 8, 12]


def test_what_a_user_allows_counts_and_is_chosen_within() -> None:
    job = ScaledJob(law=shared(8, 0.5)).settle()
    job.allow(12, 14)
    assert job.sizes[-1] == 14
    job.settle()
    assert 12 <= job.sizes[-1] <= 14
    job.allow(9, 9)
    assert job.settle().sizes[-1] == 9
    assert job.view.why == "no other number of nodes is allowed"


def test_a_range_that_a_user_gives_is_tried_at_once() -> None:
    job = ScaledJob("2:4", law=shared(8, 0.25)).settle()
    job.allow(2, 16)
    before = job.now
    job.measure().arrive()
    assert job.view.resized[-1].is_try
    assert job.view.resized[-1].time - before < timedelta(minutes=1)
    assert job.settle().sizes[-1] == 13


def test_a_law_that_changes_is_measured_again_but_not_at_once() -> None:
    job = ScaledJob(law=shared(8, 0.5)).settle()
    kept, changes = job.sizes[-1], len(job.sizes)
    job.law = shared(8, 0)
    job.measure().arrive()
    assert len(job.sizes) == changes
    assert "its speed has changed" in job.view.why
    job.wait(20 * 30)
    job.arrive()
    job.settle()
    assert job.sizes[-1] == 16 > kept


def test_little_that_is_left_is_not_worth_a_try() -> None:
    job = ScaledJob(law=shared(8, 0.5), total=100).settle()
    assert job.sizes == [16]
    assert "a change costs 60.0 s, too much of the" in job.view.why


def test_a_world_with_a_slow_rank_says_nothing_about_its_size() -> None:
    job = ScaledJob("2:4", law=shared(8, 0.5))
    for rank in range(4):
        times = RankStepTimes(rank=rank, compute=2 if rank else 3, wait=1.2 if rank else 0.2, rest=0.1)
        job.transition(rank, NodeStepTimes, generation=job.generation, ranks=(times,))
    assert job.measure().arrive().sizes == [4]
    assert job.view.paces == ()
    assert job.view.why.startswith("rank 0 is slow, so the speed with 4 nodes counts only once that has lasted for 10m")


def slow_job(**spec: Any) -> ScaledJob:
    job = ScaledJob("2:4", law=shared(8, 0.5))
    job.job = job.job.model_copy(update=spec)
    return rank_0_is_slow(job)


def rank_0_is_slow(job: ScaledJob) -> ScaledJob:
    world = job.state.world
    assert world is not None
    for slot, member in world.members.items():
        rank = member.base_rank
        times = RankStepTimes(rank=rank, compute=2 if rank else 3, wait=1.2 if rank else 0.2, rest=0.1)
        job.transition(slot, NodeStepTimes, generation=job.generation, ranks=(times,))
    return job


def test_a_rank_that_is_slow_for_good_belongs_to_the_speed_of_its_job() -> None:
    job = slow_job().measure().measure()
    assert [pace.nodes for pace in job.view.paces] == [4]
    assert [pace.nodes for pace in rank_0_is_slow(job).view.paces] == [4], "it is known already"


def test_a_slow_rank_that_is_known_to_have_more_work_leaves_no_measurement_out() -> None:
    job = slow_job()
    slow = job.state.memory.slow_ranks.replace(own_work={0: 4})
    job.state = job.state.replace(memory=job.state.memory.replace(slow_ranks=slow))
    assert [pace.nodes for pace in job.measure().view.paces] == [4]


def test_a_slow_rank_about_which_something_will_be_done_is_waited_for() -> None:
    recovery = ScaledJob("2:4", law=shared(8, 0.5)).job.recovery.model_copy(
        update={"on_straggler": StragglerAction.REPLACE}
    )
    job = slow_job(recovery=recovery)
    assert job.state.memory.slow_ranks.suspect is not None
    assert job.measure().measure().view.paces == ()


def test_nothing_is_changed_while_a_user_looks_at_the_job() -> None:
    job = ScaledJob(law=shared(8, 0.5))
    job.take(RepairsPaused(until=job.now.replace(hour=3)))
    assert job.measure().arrive().sizes == [16]


@pytest.mark.parametrize("claim", ["another node", "an older world"])
def test_only_the_first_node_of_the_present_world_tells_its_speed(claim: str) -> None:
    job = ScaledJob(law=shared(8, 0.5))
    generation = job.generation if claim == "another node" else job.generation - 1
    job.transition(5 if claim == "another node" else 0, NodePace, generation=generation, step=0.1)
    assert job.view.paces == ()


def test_explain_says_why_the_number_was_changed() -> None:
    job = ScaledJob(law=shared(8, 0.5)).settle()
    texts = [explanation(incident, job="job", flag="").plain for incident in job.state.incidents]
    assert "to measure the speed with 6 nodes (scaling.policy is efficient)" in texts[0]
    assert "requested by a user" not in "".join(texts)


def test_unless_asked_for_a_job_takes_all_it_gets() -> None:
    job = ScaledJob(law=shared(8, 0.5), policy="max")
    assert job.measure().arrive().sizes == [16]
    assert scaling.view(job.state, job.job, job.now) is None


def test_nodes_that_never_become_free_are_given_up_and_requested_again_after_pauses_that_double() -> None:
    job = ScaledJob(law=shared(8, 0.25), room=6, patience="10m").settle()
    assert job.sizes == [6, 2, 6]
    assert job.state.nodes_max == 13
    assert "it waits for nodes: 13 are wanted, until " in job.view.why
    for pause in (20, 40, 80, 160, 240, 240):
        job.pass_time(10.5)
        assert (job.state.nodes_max, len(job.nodes_requested), job.view.resized[-1].gave_up) == (6, 6, True)
        assert "7 nodes were requested and did not come; they are requested again at" in job.view.why
        assert job.state.scaling.missed is not None
        again = job.state.scaling.missed.until
        assert again - job.view.resized[-1].time == timedelta(minutes=pause)
        job.wait(again - job.now - timedelta(seconds=1))
        assert job.state.nodes_max == 6
        job.wait(1)
        assert job.state.nodes_max == 13
    assert job.sizes == [6, 2, 6]
    job.room = 16
    assert job.arrive().settle().sizes == [6, 2, 6, 13]
    assert job.state.scaling.missed is None


def test_explain_and_status_say_which_nodes_did_not_come() -> None:
    job = ScaledJob(law=shared(8, 0.25), room=6, patience="10m").settle()
    for _ in range(2):
        job.wait(timedelta(minutes=40))
    [told] = [one for one in job.state.incidents if one.observation is not None]
    text = explanation(told, job="job", flag="").plain
    assert "13 nodes were requested and 6 train: the others did not come within 10m" in text
    assert "nothing was interrupted: the world trains with the nodes that it has" in text
    assert "give them up for now, and choose among the numbers of nodes that there are" in text
    assert "scaling.patience is over; they are requested again at" in text
    assert len(told.evidence) == 2


def test_nodes_that_come_are_trained_with_and_only_the_others_given_up() -> None:
    job = ScaledJob(law=shared(8, 0.25), room=6, patience="10m").settle()
    job.room = 9
    job.arrive()
    assert job.sizes[-1] == 9
    job.measure().arrive()
    job.pass_time(11)
    assert (job.state.nodes_max, job.sizes[-1]) == (9, 9)


def test_nodes_that_vanish_while_a_world_grows_are_not_awaited_forever() -> None:
    job = ScaledJob(law=shared(8, 0.25), room=6, patience="10m").settle()
    job.ready(*range(6, 13))
    job.wait(job.job.timing.rendezvous.last_call)
    assert job.state.world is not None
    assert job.state.world.nodes == 13
    for rank in range(6, 13):
        job.lost(rank)
    job.pass_time(1)
    assert job.sizes[-1] == 6
    assert job.state.nodes_max == 13
    job.measure().arrive()
    job.pass_time(11)
    assert job.state.nodes_max == 6


def test_a_member_keeps_its_place_though_nodes_of_places_before_it_did_not_come() -> None:
    job = ScaledJob(law=shared(8, 0.25), room=6, patience="10m").settle()
    job.ready(9, 11).wait(job.job.timing.rendezvous.last_call).steps()
    assert job.state.world is not None
    assert sorted(job.state.world.members) == [*range(6), 9, 11]
    job.measure()
    job.wait(timedelta(minutes=11))
    assert sorted(job.state.world.members) == [*range(6), 9, 11]
    assert job.state.nodes_max == 12
    assert job.view.resized[-1].gave_up


@given(st.lists(st.integers(2, 16), min_size=1, max_size=4), st.floats(0, 0.6))
@settings(deadline=None, max_examples=8)
def test_whatever_room_there_is_a_job_trains_and_waits_for_no_node_longer_than_its_patience(
    rooms: list[int], exchange: float
) -> None:
    job = ScaledJob(law=shared(8, exchange), room=rooms[0], patience="10m")
    for room in rooms:
        job.room = room
        for _ in range(6):
            job.measure().arrive().pass_time(14)
            assert job.state.stepping
            waits, formed = job.state.scaling.awaited_since, job.state.world_decided_at
            assert waits is None or formed is None or job.now - max(waits, formed) <= timedelta(minutes=10)
    gave_up = [one.time for one in job.view.resized if one.gave_up]
    assert all(later - earlier >= timedelta(minutes=20) for earlier, later in pairwise(gave_up))


def test_a_deadline_is_met_with_the_fewest_nodes_and_told_at_once_where_it_cannot_be() -> None:
    law, finish_by = shared(8, 0.5), START + timedelta(hours=5)
    # 2.4 h with 16 nodes, 5.6 h with 4.
    job = ScaledJob(law=law, total=8000, policy="deadline", finish_by=finish_by).settle()
    assert job.sizes == [16, 6]
    assert job.view.meets == tuple(range(5, 17))
    assert "6 nodes finish at 2026-01-01 04:0" in job.view.why
    assert not job.view.problem

    late = ScaledJob(law=law, total=8000, policy="deadline", finish_by=START + timedelta(hours=2)).settle()
    assert late.sizes == [16, 6, 16]
    assert late.view.meets == ()
    assert "nodes could make it, by what was measured, and 16 are allowed" in late.view.problem
    assert late.view.problem in late.status.warnings
    [told] = [one for one in late.state.incidents if one.observation is not None]
    assert told.title == "no number of nodes surely finishes by 2026-01-01 02:00 UTC"
    assert "a goal does not" in explanation(told, job="job", flag="").plain


def test_a_job_that_falls_behind_its_deadline_grows_and_explains_it() -> None:
    job = ScaledJob(law=shared(8, 0.5), total=8000, policy="deadline", finish_by=START + timedelta(hours=5)).settle()
    # Half of the time goes into evaluations, which a usual step does not show.
    job.pass_time(60)
    progress = Progress(step=job.step + 900, total_steps=8000, last_step_at=job.now)
    job.transition(0, NodePace, generation=job.generation, step=job.law(6), progress=progress)
    job.arrive().settle()
    assert job.sizes[-1] > 6
    assert job.view.pauses > 1.5
    texts = [explanation(incident, job="job", flag="").plain for incident in job.state.incidents]
    assert any("(scaling.policy is deadline)" in text for text in texts)


def test_a_budget_is_kept_by_what_all_nodes_have_taken() -> None:
    # Hours of nodes, for 8,000 steps: 20 with 2 nodes, 31 with 12, 36 with 16.
    job = ScaledJob(law=shared(8, 0.5), total=8000, policy="budget", max_cost=64, price=2).settle()
    assert job.sizes[-1] in range(8, 12)
    assert 0 < job.state.scaling.node_seconds < 3600
    assert "max_cost is 64.00" in job.view.why
    assert job.view.price == 2


def hours_counted(job: ScaledJob) -> float:
    return job.state.scaling.node_seconds / 3600


def test_each_hour_counts_the_nodes_that_there_were_in_it() -> None:
    job = ScaledJob(law=shared(8, 0.5), total=8000, policy="budget", max_cost=640, price=2)
    before = hours_counted(job)
    job.now += timedelta(hours=1)
    job.lost_together(*range(1, 16))
    assert hours_counted(job) - before == pytest.approx(16), "they were lost at its end"


def test_a_suspended_job_and_one_in_a_queue_take_nothing() -> None:
    job = ScaledJob(law=shared(8, 0.5), total=8000, policy="budget", max_cost=640, price=2)
    job.now += timedelta(hours=1)
    job.take(SuspendRequested())
    before = hours_counted(job)
    assert before == pytest.approx(16, abs=0.5)
    job.now += timedelta(hours=48)
    job.take(ResumeRequested())
    for rank in range(16):
        job.transition(rank, NodePending, queued=True)
    job.now += timedelta(hours=3)
    job.ready(*range(16))
    assert hours_counted(job) == pytest.approx(before)


@pytest.mark.parametrize("policy", [{"policy": "budget", "max_gpu_hours": 10}, {"policy": "manual"}])
def test_without_a_goal_that_can_be_judged_nothing_is_tried(policy: dict[str, Any]) -> None:
    job = ScaledJob(law=shared(8, 0.5), **policy).settle()
    assert job.sizes == [16]
    assert [pace.nodes for pace in job.view.paces] == [16]
    job.allow(3, 3)
    assert job.settle().sizes == [16, 3]


def test_steps_of_the_specification_count_where_the_script_tells_none() -> None:
    job = ScaledJob(law=shared(8, 0.5), policy="deadline", finish_by=START + timedelta(hours=5), steps=8000).settle()
    assert job.sizes == [16, 6]


class PerRankJob(ScaledJob):
    """A job each of whose ranks has a fixed number of samples: a step takes as long with any number of nodes."""

    def __init__(self, *, scales: bool, **choice: Any) -> None:
        self._scales = scales
        super().__init__(law=lambda nodes: 1.0, batch="per-rank", **choice)

    def measure(self, noise: float = 1.0) -> ScaledJob:
        if self._scales and self.state.world is not None:
            self.total = 160_000 // self.state.world.nodes
        return super().measure(noise)


def test_a_script_of_fixed_steps_gets_no_nodes_that_make_none_of_them_sooner() -> None:
    # 10,000 steps of a second with 16 nodes.
    goal = {"policy": "deadline", "finish_by": START + timedelta(hours=4)}
    job = PerRankJob(scales=False, total=10_000, **goal).settle()
    assert (job.sizes, job.view.fixed_steps) == ([16, 6, 2], True), "2 nodes finish as soon as 16"
    rests = {round(size.rest or 0) for size in sizes(job.view, job.status, also=[], price=None)}
    assert len(rests) == 1
    stated = PerRankJob(scales=False, steps=10_000, **goal).settle()
    assert stated.sizes == job.sizes
    shared_out = PerRankJob(scales=True, **goal).settle()
    assert not shared_out.view.fixed_steps
    assert shared_out.sizes[-1] in range(12, 17), "their samples are divided by the nodes"
