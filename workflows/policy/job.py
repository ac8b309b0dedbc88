"""The decisions of one job: `decide(state, event, job, now)` is everything that a TrainingJob ever decides.

It first takes in the event's facts (`apply_event`), then brings the job as far as the facts allow: judges a broken
world, replaces lost nodes, forms the next world, completes, stops. The second part reads the state only and never the
event, so the same facts lead to the same decision in whatever order they came.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from uuid import UUID

from perdure.contract import EvidenceSource, FailureClass, JobPhase, LossCause, NodePhase, World
from perdure.spec.job import JobSpec
from perdure.spec.recovery import CapacityLoss
from perdure.workflows.policy.capacity import joining, node_avoidance, planned_changes, waiting
from perdure.workflows.policy.checkpoints import commits, trust
from perdure.workflows.policy.diagnosis import claims, first_steps
from perdure.workflows.policy.diagnosis.interruptions import interrupt
from perdure.workflows.policy.facts import user_requests
from perdure.workflows.policy.facts.events import Event
from perdure.workflows.policy.facts.reduce import reduce
from perdure.workflows.policy.record import incidents, observations
from perdure.workflows.policy.repair import hold_on_failure
from perdure.workflows.policy.repair.recovery import Verdict, decide_repair, record
from perdure.workflows.policy.state.budget import backoff
from perdure.workflows.policy.state.job import Interruption, JobState, NodeFailure, NodeState, Outcome
from perdure.workflows.policy.world import entering, stages, succession
from perdure.workflows.policy.world.rendezvous import choose_members, form_world, ports_remembered, usable

TokenSource = Callable[[], UUID]
"""Makes the secrets of new incarnations: `workflow.uuid4`, so that a replay makes the same ones."""


def decide(state: JobState, event: Event, job: JobSpec, now: datetime, *, new_token: TokenSource) -> JobState:
    """Returns the state of the job after an event."""
    return advance(apply_event(state, event, job, now), job, now, new_token=new_token)


def apply_event(state: JobState, event: Event, job: JobSpec, now: datetime) -> JobState:
    """Takes in an event. `advance` must follow: after the last event, if several arrive at once."""
    state = joining.accept_machine(reduce(state, event, now), event, job, now)
    state = joining.apply_ticket(state, event, now)
    state = planned_changes.end_node(commits.apply(state, event, job, now), event, job, now)
    return user_requests.apply(state, event, job, now)


def advance(state: JobState, job: JobSpec, now: datetime, *, new_token: TokenSource) -> JobState:
    """Brings the job as far as the known facts allow."""
    if state.outcome is not None:
        return _with_phase(hold_on_failure.end_when_due(state, now), job)
    state = user_requests.apply_postponed(_check_limits(state, job, now), job, now)
    if state.outcome is None and state.suspended:
        state = _dismiss(state, job, now)
    elif state.outcome is None:
        state = stages.advance(state, now)
        state = entering.inquire(state, job, now)
        state = succession.presume_ends(state, now)
        state = _give_up_on_unreachable(state, job, now)
        state = _recover(state, job, now)
        if state.outcome is None:
            # The next world waits for the end of the surplus, too.
            state = _dismiss_idle_surplus(state, job, now)
            state = _form(state, job, now)
            state = _staff(state, job, now, new_token=new_token)
            state = observations.observe_uncreated(_note_stepping(state, now), now)
    return _with_phase(hold_on_failure.begin(state, job, now), job)


def _recover(state: JobState, job: JobSpec, now: datetime) -> JobState:
    interruption = state.interruption
    if interruption is None or interruption.decided:
        return state
    verdict = decide_repair(state, interruption, job, now)
    if verdict is None:
        return state
    if not interruption.counted:
        state = trust.judge(state, verdict.failure, now)
    state = record(state, verdict, interruption, job, now)
    for rank in verdict.replace:
        node = state.nodes.get(rank)
        # A replacement that an earlier verdict on the same world requested has not failed.
        if node is not None and node.alive and state.is_member(node):
            state = state.with_node(
                succession.drop(
                    state,
                    node,
                    phase=NodePhase.LOST,
                    since=now,
                    reason=verdict.title,
                    loss_cause=_cause(rank, interruption),
                    # The next incarnation must reach the rendezvous before a world waits for it.
                    failed_starts=max(node.failed_starts, min(node.missed_worlds, 1)),
                )
            )
    return (
        stages.restart_failed_commands(state, interruption) if state.between_stages and state.outcome is None else state
    )


def _cause(rank: int, interruption: Interruption) -> LossCause:
    """The cause of the loss of a node that is given up although it is not known to be gone."""
    if rank in interruption.ranks_with(FailureClass.NODE_UNRESPONSIVE, FailureClass.CANNOT_RUN):
        return LossCause.MACHINE
    # The node itself reports that something ends it. If its machine were the reason, the backend would have reported
    # it.
    ended = interruption.ranks_with(FailureClass.NODE_LOST, FailureClass.DISRUPTED)
    return LossCause.WANTED if rank in ended else LossCause.UNKNOWN


def _give_up_on_unreachable(state: JobState, job: JobSpec, now: datetime) -> JobState:
    """Gives up members that stay unreachable while their world is stopped: they cannot receive the next one."""
    interruption = state.interruption
    if state.between_stages:
        return _give_up_on_silent(state, job, now)
    if interruption is None or not interruption.decided or _may_still_train(state, interruption):
        return state
    if now < unreachable_deadline(state, job, interruption):
        return state
    for node in state.members:
        if node.alive and not node.reachable:
            failure = NodeFailure(
                rank=node.rank,
                failure=FailureClass.NODE_UNRESPONSIVE,
                time=now,
                text=f"node {node.rank} stayed unreachable while its world was stopped: {node.reason}",
            )
            state = incidents.add_evidence(
                state, now=now, time=now, source=EvidenceSource.LEASE, text=failure.text, rank=node.rank
            ).replace(interruption=_because_of(interruption, failure))
            interruption = state.interruption or interruption
    return state


def _because_of(interruption: Interruption, failure: NodeFailure) -> Interruption:
    """Adds a failure to the interruption; what a request began becomes the story of a failure."""
    if interruption.requested is not None:
        return Interruption(since=interruption.since, failures=(failure,))
    return interruption.model_copy(update={"failures": (*interruption.failures, failure), "decided": False})


def _may_still_train(state: JobState, interruption: Interruption) -> bool:
    """Whether only a request interrupts the world, and all its members are alive."""
    if interruption.requested is None:
        return False
    alive = sum(node.alive for node in state.members)
    return state.world is None or alive == state.world.nodes


def _give_up_on_silent(state: JobState, job: JobSpec, now: datetime) -> JobState:
    """Gives up an unreachable node between two worlds. It may work, so this happens only once nothing else is waited
    for."""
    limit = waiting.limit_of(state, job)
    if limit is None or now < limit.at:
        return state
    for node in stages.silent_nodes(state):
        text = f"node {node.rank} stayed unreachable while all others waited for it: {node.reason}"
        failure = NodeFailure(rank=node.rank, failure=FailureClass.NODE_UNRESPONSIVE, time=now, text=text)
        state = interrupt(state, failure, now=now, source=EvidenceSource.LEASE)
    return state


def unreachable_deadline(state: JobState, job: JobSpec, interruption: Interruption) -> datetime:
    """The time from which an unreachable member is given up, if its world is broken."""
    deadline = interruption.since + job.timing.lease.timeout
    return max(deadline, state.control_lag_until) if state.control_lag_until is not None else deadline


def candidates(state: JobState) -> list[NodeState]:
    """Nodes that can be given a world: they wait for one, or are in the current one.

    While the world is stopped, a replacement counts from its agent's first report on: the others start their ranks
    while its command is still on its way to the rendezvous. A replacement whose last incarnation did not reach the
    rendezvous must first reach it. A node that is cut off from the others counts only where there is no world without
    it, and a node whose predecessor may still train does not count at all.
    """
    if state.between_stages:
        return [
            node
            for node in state.nodes.values()
            if node.reachable and not node.predecessor and node.rank < state.nodes_max and stages.at_stage(state, node)
        ]
    is_stopped = state.world is not None and state.interruption is not None
    found = [
        node
        for node in state.nodes.values()
        if node.alive
        and node.reachable
        and not node.predecessor
        and node.rank < state.nodes_max
        and (
            stages.at_stage(state, node)
            or state.is_member(node)
            # A command that starts over first skips the torchruns that have finished, and may have other work between
            # them.
            or (
                is_stopped
                and node.phase is NodePhase.JOINED
                and node.failed_starts == 0
                and not state.stages_complete
                and not state.prepares
                and not node.ended
            )
        )
    ]
    connected = [node for node in found if not node.cut_off or state.is_member(node)]
    return found if is_stopped and len(connected) < state.nodes_min else connected


def _form(state: JobState, job: JobSpec, now: datetime) -> JobState:
    """Sends out the next world, if one is due and possible."""
    world = state.world
    interruption = state.interruption
    if interruption is not None and not interruption.decided:
        return state
    available = candidates(state)
    size = usable(len(available), minimum=state.nodes_min, maximum=state.nodes_max, unit=state.unit)
    if state.between_stages or world is None:
        state = stages.stop_if_commands_disagree(state, now, ready_nodes=0 if size else len(available))
        if state.outcome is not None:
            return state
    if state.between_stages and (resting := _rest(state, job, now, size=size, available=len(available))) is not None:
        return resting
    surplus = world is not None and any(rank >= state.nodes_max for rank in world.members)
    if world is not None and not state.between_stages and interruption is None and not surplus and size <= world.nodes:
        return planned_changes.forget_world(state.replace(ready_since=None, waiting_since=None))
    # From here on a world is due: there is none, it broke, it must shrink, or it can grow.
    if not state.between_stages and any(node.alive and not node.reachable for node in state.members):
        # The node cannot be sent a world. While its own world steps, that is not evidence against it.
        return state
    is_stopped = world is None or interruption is not None or state.between_stages
    if size == 0:
        return waiting.wait(state, job, now, available=len(available)) if is_stopped else state
    ready_since = state.ready_since or now
    state = state.replace(ready_since=ready_since)
    if not _is_time(state, job, now, size=size, available=len(available), ready_since=ready_since, surplus=surplus):
        return state.replace(waiting_since=state.waiting_since or now) if is_stopped else state
    if not is_stopped and (held := planned_changes.hold_world(state, job, now)) is not None:
        return held
    formed = form_world(
        state.nodes,
        choose_members(available, size, world),
        generation=state.generation + 1,
        previous=world,
        restarted=_to_restart(state),
        stage=state.stages_complete,
        first_step=first_steps.limit_of(_with_fresh_progress(state) if state.between_stages else state, job),
    )
    if formed is None:
        if not is_stopped:
            return state
        missing = "none of them offers a port for its store"
        # A last call that is over does not begin again.
        over = now - ready_since >= job.timing.rendezvous.last_call
        state = waiting.wait(state, job, now, available=len(available), missing=missing)
        return state.replace(ready_since=ready_since if over else None)
    if surplus and not state.between_stages:
        state = planned_changes.settle(_announce(state, formed, job, now), now)
        state = _dismiss_surplus(state, job, now)
    if state.leaving:
        return succession.hold(state)
    if state.between_stages:
        state = _with_fresh_progress(state)
    elif world is not None:
        state = _continue_ended_members(_announce(state, formed, job, now))
    if not is_stopped:
        state = planned_changes.settle(state, now)
    host = state.nodes[formed.store_rank]
    state = state.with_node(
        host.replace(
            store_ports=tuple(port for port in host.store_ports if port != formed.store_port),
            used_ports=(*host.used_ports, formed.store_port)[-ports_remembered(job.network) :],
        )
    )
    state = claims.remember_ranks(succession.leave_out(user_requests.settle(state, formed), formed))
    return incidents.record_world(
        state.replace(
            world=formed,
            world_decided_at=now,
            generation=formed.generation,
            interruption=None,
            waiting_since=None,
            queued_since=None,
            ready_since=None,
        )
    )


def _announce(state: JobState, formed: World, job: JobSpec, now: datetime) -> JobState:
    """Records why another world follows one that nothing has interrupted."""
    world = state.world
    if world is None or state.interruption is not None:
        return state
    text = f"world {'grows' if formed.nodes > world.nodes else 'shrinks'} from {world.nodes} to {formed.nodes} nodes"
    reasons = user_requests.reasons(state, formed.members.keys() ^ world.members.keys())
    text = f"{text}: {reasons}" if reasons else text
    state = user_requests.request(state, text, now, by_user=bool(reasons))
    return record(state, _verdict_of_request(state, job, now), _interruption(state, now), job, now)


def _dismiss_surplus(state: JobState, job: JobSpec, now: datetime) -> JobState:
    """Ends the members that the next world has no place for, before it is formed."""
    for node in state.members:
        if node.alive and node.rank >= state.nodes_max:
            state = succession.dismiss(state, node, job, now, phase=NodePhase.REMOVED, reason="scaled down")
    return state


def _dismiss_idle_surplus(state: JobState, job: JobSpec, now: datetime) -> JobState:
    """Ends the nodes for which the job has no place any more, and which are in no world that trains."""
    for node in list(state.nodes.values()):
        if node.alive and node.rank >= state.nodes_max and (state.between_stages or not state.is_member(node)):
            state = succession.dismiss(state, node, job, now, phase=NodePhase.REMOVED, reason="scaled down")
    return state


def _rest(state: JobState, job: JobSpec, now: datetime, *, size: int, available: int) -> JobState | None:
    """Returns the state while no world of the next stage is due; None where one is."""
    if stages.working_nodes(state):
        return state.replace(ready_since=None, waiting_since=None)
    if stages.silent_nodes(state):
        return state.replace(waiting_since=state.waiting_since or now, ready_since=None)
    if size:
        return None
    if stages.awaits_nodes(state):
        return waiting.wait(state, job, now, available=available)
    return state.replace(ready_since=None, waiting_since=None)


def _continue_ended_members(state: JobState) -> JobState:
    """Marks all commands of a broken world as running: ranks that had finished in it train again with the others.

    A command that ended in an earlier stage, or without entering a world, has nothing more to do and keeps its mark.
    """
    nodes = {rank: node.replace(ended=False) if state.is_member(node) else node for rank, node in state.nodes.items()}
    return state.replace(nodes=nodes)


def _with_fresh_progress(state: JobState) -> JobState:
    """Resets progress after a stage: its steps say nothing about the progress of the next one."""
    fresh = {"failures_without_progress": 0, "best_step": -1, "last_generation_steps": -1}
    return state.replace(progress=None, first_step=None, missed_first_steps=0, last_failure=None, **fresh)


def _to_restart(state: JobState) -> set[int]:
    """Nodes whose command did not enter the current world, which is over because of that."""
    if state.interruption is None:
        return set()
    missed = state.interruption.ranks_with(FailureClass.RENDEZVOUS_TIMEOUT)
    return {rank for rank in missed if state.nodes[rank].missed_worlds}


def _is_time(
    state: JobState, job: JobSpec, now: datetime, *, size: int, available: int, ready_since: datetime, surplus: bool
) -> bool:
    """Whether a world of this size should be formed now, rather than waiting for more nodes."""
    full = usable(state.nodes_max, minimum=state.nodes_min, maximum=state.nodes_max, unit=state.unit)
    if size >= full or surplus or (state.between_stages and not stages.awaits_nodes(state)):
        return True
    world = state.world
    if world is not None and state.interruption is not None:
        if size >= min(world.nodes, full) or job.recovery.on_capacity_loss is not CapacityLoss.WAIT:
            return True
        return state.waiting_since is not None and now - state.waiting_since >= job.recovery.replace_timeout
    return now - ready_since >= job.timing.rendezvous.last_call


def _staff(state: JobState, job: JobSpec, now: datetime, *, new_token: TokenSource) -> JobState:
    """Gives every slot a living node, and keeps no other node."""
    state = _dismiss_idle_surplus(state, job, now)
    missing: list[int] = []
    for rank in range(state.nodes_max):
        node = state.nodes.get(rank)
        # A node that has finished is needed again if the others' world broke.
        if node is not None and (node.alive or stages.is_done(state, node)):
            continue
        if node is not None and node.phase is NodePhase.LOST:
            if node.not_before is None and (delay := backoff(node.failed_starts)):
                node = node.replace(not_before=node.since + delay)
                state = state.with_node(node)
            if node.not_before is not None and now < node.not_before:
                continue
            state = node_avoidance.remember(state, node)
        missing.append(rank)
    # Several nodes may have been lost on one machine.
    avoids = node_avoidance.machines_to_avoid(state, job, now) if missing else ()
    for rank in missing:
        node = state.nodes.get(rank)
        newer = NodeState(
            rank=rank,
            incarnation=node.incarnation + 1 if node else 1,
            token=new_token().hex,
            since=now,
            processes=node.processes if node else 1,
            failed_starts=node.failed_starts if node else 0,
            uncreated_since=node.uncreated_since if node else None,
            reason=succession.reason_of_successor(node) if node else "",
            avoids=avoids,
            catching_up=state.stages_complete > 0,
        )
        state = state.with_node(succession.succeed(state, node, newer, job, now))
    return incidents.record_avoided_machines(state, avoids)


def _dismiss(state: JobState, job: JobSpec, now: datetime) -> JobState:
    """Ends all nodes of a suspended job; their incarnation numbers are kept, so that none is ever used again."""
    if state.world is None and not any(node.alive for node in state.nodes.values()):
        # Which commands have ended was decided with the last world: without it every stage looks incomplete.
        return state.replace(interruption=None, waiting_since=None, queued_since=None, ready_since=None)
    for node in list(state.nodes.values()):
        # Outside of a complete stage every command starts over, including that of a node that ended and left before.
        ended = node.ended and state.between_stages
        if node.alive:
            changes = {"phase": NodePhase.REMOVED, "reason": "suspended", "store_ports": (), "ended": ended}
            state = succession.dismiss(state, node, job, now, **changes)
        else:
            state = state.with_node(node.replace(ended=ended))
    return state.replace(world=None, interruption=None, waiting_since=None, queued_since=None, ready_since=None)


def _check_limits(state: JobState, job: JobSpec, now: datetime) -> JobState:
    deadline = job.limits.active_deadline
    if deadline is not None and now - state.started_at >= deadline:
        reason = f"limits.active_deadline ({deadline}) is over"
        return state.stop(Outcome(phase=JobPhase.FAILED, exit_code=5, reason=reason, decided_at=now))
    return state


def _note_stepping(state: JobState, now: datetime) -> JobState:
    if state.interruption is not None:
        return state
    if state.between_stages:
        return incidents.caught_up(state, now) if stages.has_recovered(state) else state
    return incidents.follow_running(state, now)


def _interruption(state: JobState, now: datetime) -> Interruption:
    return state.interruption or Interruption(since=now)


def _verdict_of_request(state: JobState, job: JobSpec, now: datetime) -> Verdict:
    verdict = decide_repair(state, _interruption(state, now), job, now)
    assert verdict is not None, "a request needs no waiting"
    return verdict


def _with_phase(state: JobState, job: JobSpec) -> JobState:
    phase, reason = _phase(state, job)
    return state.replace(phase=phase, reason=reason)


def _phase(state: JobState, job: JobSpec) -> tuple[JobPhase, str]:
    world = state.world
    if state.outcome is not None:
        return JobPhase.HELD if state.held else JobPhase.STOPPING, state.outcome.reason
    if state.suspended:
        return JobPhase.SUSPENDED, state.reason
    incident = state.open_incident
    queued = state.queued_since is not None and waiting.in_queue(state)
    if queued or (state.waiting_since is not None and (world is not None or state.generation > 0)):
        return JobPhase.WAITING, waiting.describe(state, job, available=len(candidates(state)))
    if state.interruption is not None or (incident is not None and world is not None):
        texts = (incident.title if incident else "", succession.why_held(state))
        return JobPhase.RECOVERING, "; ".join(text for text in texts if text)
    if world is None:
        ready = sum(node.phase is NodePhase.READY for node in state.nodes.values())
        blocked = waiting.blocking_node(state)
        why = f"; node {blocked.rank}: {blocked.reason}" if blocked else ""
        return JobPhase.STARTING, f"{ready} of {state.nodes_max} nodes are ready{why}"
    if state.between_stages:
        return JobPhase.RUNNING, stages.describe(state)
    if not state.stepping:
        late = "".join(f"; node {node.rank}: {node.reason}" for node in state.members if node.preparing)
        return JobPhase.RENDEZVOUS, f"generation {world.generation} with {world.nodes} nodes is starting{late}"
    parts = (f"{world.nodes} of {state.nodes_max} nodes, {world.processes} ranks", first_steps.describe(state))
    return JobPhase.RUNNING, "; ".join(part for part in parts if part)
