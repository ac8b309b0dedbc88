"""Decides whether something is done about a slow rank, and when: it must have cost more than a restart does.

How long a rank will stay slow is unknown. A job that acts once the others have waited for as long as a restart takes
loses at most twice the time that it would lose if it knew (the ski rental problem: Karlin, Manasse, Rudolph and Sleator
1988, "Competitive snoopy caching"). What passes by itself before that needs no restart.
"""

from __future__ import annotations

from datetime import datetime
from statistics import median

from perdure.contract import Evidence, EvidenceSource, FailureClass, RankStepTimes, SlowCause, Slowness, Straggler
from perdure.spec.capabilities import CAPABILITIES
from perdure.spec.job import JobSpec
from perdure.spec.recovery import CapacityLoss, StragglerAction
from perdure.workflows.policy.behavior import Behavior
from perdure.workflows.policy.capacity import planned_changes
from perdure.workflows.policy.diagnosis import experiments, stragglers
from perdure.workflows.policy.diagnosis.interruptions import interrupt
from perdure.workflows.policy.record import incidents, machine_findings
from perdure.workflows.policy.state.budget import within_window
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.node import NodeFailure
from perdure.workflows.policy.state.slow_ranks import SlowNode, SlowRanks

_LATER = "that waits until the others have waited for this rank for as long as a restart takes"


def judge(state: RoleInJob, job: JobSpec, now: datetime) -> RoleInJob:
    """Records the ranks that are found to be slow, and interrupts their world if something is to be done about one."""
    return _act(_conclude(_compare(state, job, now), job, now), job, now)


def forget_missed(state: RoleInJob) -> RoleInJob:
    """Forgets an experiment that cannot take place any more: another world was formed than the one that it needs, or
    that world was interrupted."""
    experiment = state.memory.slow_ranks.experiment
    if experiment is None or experiments.has_begun(state, experiment):
        return state
    if state.generation < experiment.generation and state.interruption is not None:
        return state
    return _remember(state, experiment=None)


def next_look(state: RoleInJob, job: JobSpec) -> datetime | None:
    """The time at which something is done about a slow rank, or an experiment ends; None where nothing is due."""
    known = state.memory.slow_ranks
    if known.experiment is not None:
        return known.experiment.until
    return _due(state, job, known.suspect) if known.suspect is not None else None


def end_of_suspicion(state: RoleInJob, job: JobSpec) -> datetime | None:
    """The time at which something is done about a slow rank unless it is reported to be fast again; None where nothing
    may be done now."""
    slow = state.memory.slow_ranks.suspect
    if slow is None or state.postponed is not None or state.repairs_paused_until is not None:
        return None
    return _due(state, job, slow) if _may_act(state, slow) else None


def _compare(state: RoleInJob, job: JobSpec, now: datetime) -> RoleInJob:
    """Compares the ranks when all nodes of the world have reported how their steps split."""
    world = state.world
    if not state.new_step_times or world is None:
        return state
    state = state.replace(new_step_times=False)
    reported = [node for node in state.members if node.alive and node.step_times_in == world.generation]
    if len(reported) < len(state.members):
        return state
    times = [times for node in reported for times in node.step_times]
    step = _step(times)
    state = incidents.record_step_after(state, step)
    known = state.memory.slow_ranks
    if known.experiment is not None or _is_proven(known, world.generation):
        return state
    owners = {times.rank: node for node in reported for times in node.step_times}
    slow_ranks = stragglers.find(times, {rank: node.rank for rank, node in owners.items()})
    found = [slow.replace(node=owners[slow.rank].rank, host=owners[slow.rank].host) for slow in slow_ranks]
    state = _learn_of_replaced(state, found)
    suspect: SlowNode | None = None
    for slow in found:
        obstacle = _obstacle(state, job, slow, now)
        why_not = obstacle or _LATER
        state = machine_findings.observe_straggler(state, slow, stragglers.describe(slow), now, why_not=why_not)
        if suspect is None and not obstacle:
            suspect = SlowNode(
                slowness=Slowness(rank=slow, step_before=step),
                incarnation=state.nodes[slow.node].incarnation,
                generation=world.generation,
                since=_since(known, slow, world.generation) or now,
            )
    return _remember(state, suspect=suspect)


def _conclude(state: RoleInJob, job: JobSpec, now: datetime) -> RoleInJob:
    """Ends an experiment that has a verdict, or will have none."""
    state = forget_missed(state)
    experiment = state.memory.slow_ranks.experiment
    if experiment is None or not experiments.has_begun(state, experiment):
        return state
    found = experiments.judge(state, experiment, over=now >= experiment.until)
    if found is None:
        return state
    text = experiments.describe(experiment, found)
    suspect = state.nodes[experiment.suspect.rank]
    evidence = Evidence(time=now, source=EvidenceSource.AGENT, rank=suspect.rank, text=text)
    state = _remember(state, experiment=None)
    state = incidents.record_verdict(state, experiment.generation, found, evidence)
    if found.cause is SlowCause.PLACE and state.world is not None:
        own_work = {**state.memory.slow_ranks.own_work, found.rank.rank: state.world.processes}
        state = _remember(state, own_work=own_work)
    if found.cause is SlowCause.MACHINE and _may_replace(job):
        slow = SlowNode(slowness=found, incarnation=suspect.incarnation, generation=state.generation, since=now)
        return _remember(state, suspect=slow)
    return machine_findings.observe_verdict(state, found, evidence, now)


def _act(state: RoleInJob, job: JobSpec, now: datetime) -> RoleInJob:
    known = state.memory.slow_ranks
    slow = known.suspect
    if slow is None or not _may_act(state, slow):
        return planned_changes.forget_slow_rank(state)
    if state.repairs_paused_until is not None and state.behavior >= Behavior.RELEASE_0_4:
        # What is saved now is old by the time of the repair.
        return planned_changes.forget_slow_rank(state)
    if now < _due(state, job, slow) or state.repairs_paused_until is not None:
        return state
    suspect, found = state.nodes[slow.slowness.rank.node], slow.slowness
    is_known = found.cause is SlowCause.MACHINE or job.recovery.on_straggler is StragglerAction.REPLACE
    partner = None if is_known else experiments.choose_partner(state, suspect)
    if partner is None and not is_known:
        return state
    title = f"node {suspect.rank} is replaced"
    if partner is not None:
        title = f"nodes {suspect.rank} and {partner.rank} exchange their places"
    if (held := planned_changes.hold_slow_rank(state, job, now, title=title, leaves=partner is None)) is not None:
        return held
    failure = NodeFailure(
        rank=suspect.rank,
        failure=FailureClass.THROTTLED if found.rank.slowed else FailureClass.STRAGGLER,
        time=now,
        text=stragglers.describe(found.rank),
        ranks=(found.rank.rank,),
    )
    state = interrupt(state, failure, now=now, generation=slow.generation)
    interruption = state.interruption
    if interruption is None or interruption.requested is not None:
        return state
    interruption = interruption.replace(slowness=found, partner=partner.rank if partner is not None else None)
    state = planned_changes.settle(state.replace(interruption=interruption), now)
    if partner is not None:
        experiment = experiments.plan(state, found, suspect, partner, now)
        return _remember(state, suspect=None, experiment=experiment, acted_at=now)
    return _remember(state, suspect=None, acted_at=now, replaced={**known.replaced, suspect.rank: suspect.incarnation})


def _may_act(state: RoleInJob, slow: SlowNode) -> bool:
    """Whether something may be done about a slow rank now: its world trains, and nothing else is in progress."""
    world, node = state.world, state.nodes[slow.slowness.rank.node]
    if world is None or world.generation != slow.generation or node.incarnation != slow.incarnation:
        return False
    if state.interruption is not None or state.outcome is not None or state.between_stages or state.finished:
        return False
    if state.postponed is not None and not state.postponed.slow_rank:
        return False
    return state.stepping and not state.stalled and all(one.alive and one.reachable for one in state.members)


def _obstacle(state: RoleInJob, job: JobSpec, slow: Straggler, now: datetime) -> str:
    """Why nothing will be done about a slow rank in this world; empty where something will."""
    world, action = state.world, job.recovery.on_straggler
    if action is StragglerAction.REPORT:
        return "a rank that is given longer samples than the others looks the same"
    if world is not None and state.memory.slow_ranks.own_work.get(slow.rank) == world.processes:
        return "the rank is slow on another machine, too: it has more work than the others"
    if action is StragglerAction.REPLACE and not _may_replace(job):
        return "the job creates no other node: its backend does not, or recovery.on_capacity_loss is fail"
    if action is StragglerAction.EXPERIMENT and experiments.choose_partner(state, state.nodes[slow.node]) is None:
        return "no other node has as many ranks, with which it could exchange its place"
    if 2 * (len(within_window(state.restarts, now=now, window=job.retry.window)) + 1) > job.retry.max_restarts:
        return "half of retry.max_restarts is kept for failures"
    return ""


def _may_replace(job: JobSpec) -> bool:
    return CAPABILITIES[job.backend].creates_nodes and job.recovery.on_capacity_loss is not CapacityLoss.FAIL


def _due(state: RoleInJob, job: JobSpec, slow: SlowNode) -> datetime:
    """The time at which the others have waited for a slow rank for as long as a restart takes. What an experiment has
    shown need not wait."""
    if slow.slowness.cause is SlowCause.MACHINE:
        return slow.since
    cost = incidents.restart_cost(state, slow.slowness.step_before) or job.timing.stragglers.restart_cost
    due = slow.since + cost / slow.slowness.rank.lost
    if state.control_lag_until is not None and state.behavior >= Behavior.RELEASE_0_4:
        # That it is fast again may be on its way.
        due = max(due, state.control_lag_until)
    acted_at = state.memory.slow_ranks.acted_at
    return due if acted_at is None else max(due, acted_at + job.timing.stragglers.between)


def _learn_of_replaced(state: RoleInJob, found: list[Straggler]) -> RoleInJob:
    """Remembers that a rank has more work than the others if the successor of its node is slow, too."""
    known, world = state.memory.slow_ranks, state.world
    if not known.replaced or world is None:
        return state
    seen = {rank for rank in known.replaced if rank in world.members}
    own_work = {
        slow.rank: world.processes
        for slow in found
        if slow.node in seen and state.nodes[slow.node].incarnation > known.replaced[slow.node]
    }
    left = {rank: incarnation for rank, incarnation in known.replaced.items() if rank not in seen}
    return _remember(state, replaced=left, own_work={**known.own_work, **own_work})


def _is_proven(known: SlowRanks, generation: int) -> bool:
    """Whether an experiment in this world has shown which machine is slow, and its node is still to be replaced."""
    suspect = known.suspect
    return suspect is not None and suspect.generation == generation and suspect.slowness.cause is SlowCause.MACHINE


def _since(known: SlowRanks, slow: Straggler, generation: int) -> datetime | None:
    """Since when the same rank is known to be slow in this world."""
    before = known.suspect
    is_same = before is not None and (before.generation, before.slowness.rank.rank) == (generation, slow.rank)
    return before.since if before is not None and is_same else None


def _step(times: list[RankStepTimes]) -> float:
    return median(one.compute + one.wait + one.rest for one in times) if times else 0.0


def _remember(state: RoleInJob, **changes: object) -> RoleInJob:
    slow_ranks = state.memory.slow_ranks.replace(**changes)
    return state.replace(memory=state.memory.replace(slow_ranks=slow_ranks))
