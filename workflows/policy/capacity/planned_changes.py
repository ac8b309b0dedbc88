"""Has a checkpoint made in storage before a change that is planned stops the ranks.

What is in the memory of nodes is lost with them, and a state that is split over ranks fits only a world of the same
size. So a job that stores checkpoints makes one before it is suspended, before a node is replaced on request, before
its world grows or shrinks while it trains, and before something is done about a slow rank. The ranks train on until
the checkpoint is durable: the change costs the steps since that checkpoint.

The same holds for a node that another party ends: a preemption, a drain, a SIGTERM. Its ranks train on until the job
releases it, for half of the grace period at most.

The change waits for `checkpoint.save_timeout` at most, and not at all where there is nothing to save: no steps were
made yet, the role serves others, the script saves nothing into the storage, a failure has stopped the world, or the
job ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from perdure.contract import Evidence, EvidenceSource, Incarnation
from perdure.contract.identity import identity_of
from perdure.contract.transitions import NodeEnding
from perdure.spec.job import JobSpec
from perdure.workflows.policy.behavior import Behavior
from perdure.workflows.policy.checkpoints import commits
from perdure.workflows.policy.facts.events import Event, RelaunchRequested, SuspendRequested
from perdure.workflows.policy.record import incidents
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.role import PostponedChange


def postpone(
    state: RoleInJob, request: SuspendRequested | RelaunchRequested, job: JobSpec, now: datetime
) -> RoleInJob | None:
    """Keeps a user's request until a checkpoint is durable; None where it is carried out at once."""
    waits = _begin(state, job, now, title=_title(request))
    if waits is None or waits.postponed is None:
        return None
    if isinstance(request, RelaunchRequested):
        request = request.replace(incarnation=state.nodes[request.rank].incarnation)
    return waits.replace(postponed=waits.postponed.with_request(request))


def end_node(state: RoleInJob, event: Event, job: JobSpec, now: datetime) -> RoleInJob:
    """Has a checkpoint made before a node ends that another party ends, or releases the node at once."""
    if not isinstance(event, NodeEnding):
        return state
    node = state.nodes.get(event.rank)
    if node is None or node.incarnation != event.incarnation or not node.alive or node.released:
        return state
    waits = (
        _begin(state, job, now, title=f"node {node.rank} ends, as {event.detail}") if state.is_member(node) else None
    )
    if waits is None or waits.postponed is None:
        return state.with_node(node.replace(released=True))
    ending = Incarnation(**identity_of(event))
    others = (one for one in waits.postponed.endings if one.key != ending.key)
    return waits.replace(postponed=waits.postponed.replace(endings=(*others, ending)))


def release_nodes(state: RoleInJob, endings: Iterable[Incarnation]) -> RoleInJob:
    """Lets nodes end that have waited for a checkpoint."""
    for ending in endings:
        node = state.nodes.get(ending.rank)
        if node is not None and node.incarnation == ending.incarnation and node.alive:
            state = state.with_node(node.replace(released=True))
    return state


def hold_world(state: RoleInJob, job: JobSpec, now: datetime) -> RoleInJob | None:
    """The state while the next world waits for a checkpoint of the current one; None where it does not."""
    postponed = state.postponed
    if postponed is not None and is_due(state, now) and postponed.generation == state.generation:
        return None
    return _begin(state, job, now, title="the next world is formed")


def forget_world(state: RoleInJob) -> RoleInJob:
    """No other world is due any more."""
    postponed = state.postponed
    forgotten = postponed is not None and not postponed.requested and not postponed.slow_rank
    return state.replace(postponed=None) if forgotten else state


def hold_slow_rank(state: RoleInJob, job: JobSpec, now: datetime, *, title: str) -> RoleInJob | None:
    """The state while a repair of a slow rank waits for a checkpoint; None where it does not."""
    postponed = state.postponed
    if postponed is not None and is_due(state, now) and postponed.generation == state.generation:
        return None
    waits = _begin(state, job, now, title=title)
    if waits is None or waits.postponed is None:
        return None
    return waits.replace(postponed=waits.postponed.replace(slow_rank=True))


def forget_slow_rank(state: RoleInJob) -> RoleInJob:
    """Nothing is to be done about a slow rank any more."""
    postponed = state.postponed
    if postponed is None or not postponed.slow_rank:
        return state
    return state.replace(postponed=postponed.replace(slow_rank=False) if postponed.requested else None)


def withdraw_suspension(state: RoleInJob) -> RoleInJob:
    """The job is to be resumed before it was suspended."""
    postponed = state.postponed
    if postponed is None or not (postponed.relaunches or postponed.endings):
        return state.replace(postponed=None)
    return state.replace(postponed=postponed.replace(suspend=None))


def is_due(state: RoleInJob, now: datetime) -> bool:
    """Whether nothing is waited for any longer: the checkpoint is durable, it is too late for it, or its world is
    gone."""
    postponed = state.postponed
    if postponed is None:
        return False
    over = now >= postponed.until or state.outcome is not None or not any(node.alive for node in state.members)
    return over or state.checkpoints.answered >= postponed.checkpoint_request


def settle(state: RoleInJob, now: datetime) -> RoleInJob:
    """Ends the wait; the open incident, which the change has begun, shows the result."""
    postponed = state.postponed
    if postponed is None:
        return state
    state = state.replace(postponed=None)
    if state.open_incident is None:
        return state
    evidence = Evidence(time=now, source=EvidenceSource.AGENT, text=_outcome(state, postponed))
    return incidents.add_evidence(state, evidence, now=now)


def describe(state: RoleInJob) -> str:
    """What the job waits for, for people; empty where no change waits."""
    postponed = state.postponed
    if postponed is None or not (postponed.requested or postponed.generation == state.generation):
        return ""
    return f"a checkpoint, then {postponed.title}, at {postponed.until:%H:%M:%S} UTC at the latest"


def _begin(state: RoleInJob, job: JobSpec, now: datetime, *, title: str) -> RoleInJob | None:
    """Requests a checkpoint, unless one is requested already; None where none is worth waiting for."""
    before = state.postponed
    if before is not None and (before.suspend is not None or not is_due(state, now)):
        return state
    trains = state.stepping and state.interruption is None and not state.between_stages and state.outcome is None
    serves = job.roles[state.role].ready is not None
    if job.stored is None or not job.stored.save_timeout or not trains or serves or commits.saves_nothing(state):
        return None
    state = commits.request(state)
    before = before if state.behavior >= Behavior.RELEASE_0_4 else None
    return state.replace(
        postponed=PostponedChange(
            title=title,
            checkpoint_request=state.checkpoints.requests,
            since=now,
            until=now + job.stored.save_timeout,
            generation=state.generation,
            # These are due, and not carried out yet: their checkpoint was reported together with what this one is for.
            relaunches=before.relaunches if before is not None else (),
            endings=before.endings if before is not None else (),
        )
    )


def _title(request: SuspendRequested | RelaunchRequested) -> str:
    if isinstance(request, SuspendRequested):
        return f"{f'the role {request.role}' if request.role else 'the job'} is suspended"
    return f"node {request.rank} is replaced"


def _outcome(state: RoleInJob, postponed: PostponedChange) -> str:
    durable, waited = state.checkpoints.durable, f"requested at {postponed.since:%H:%M:%S} UTC before this change"
    if durable is not None and state.checkpoints.answered >= postponed.checkpoint_request:
        return f"the checkpoint of step {durable.checkpoint.step:,}, {waited}, is durable"
    why = state.checkpoints.problem or "the ranks reported none"
    return f"the checkpoint {waited} was not durable in time, and the change did not wait longer: {why}"
