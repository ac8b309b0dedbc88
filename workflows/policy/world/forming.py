"""Forms the next world and sends it out, once one is due, possible, and waits for nothing.

A world is due where there is none, where it broke, and where it must shrink or can grow. A world that trains is only
stopped for another one that can be formed at once.
"""

from __future__ import annotations

from datetime import datetime

from perdure.base.words import count
from perdure.contract import NodePhase, World
from perdure.spec.job import JobSpec
from perdure.spec.recovery import CapacityLoss
from perdure.workflows.policy.capacity import (
    memory_in_place,
    planned_changes,
    scaling,
    staffing,
    suspect_machines,
    waiting,
)
from perdure.workflows.policy.checkpoints import holds, other_size, state_loss
from perdure.workflows.policy.diagnosis import claims, experiments, first_steps
from perdure.workflows.policy.facts import user_requests
from perdure.workflows.policy.record import incidents
from perdure.workflows.policy.repair import memory
from perdure.workflows.policy.repair.actions import commands_to_restart, places_to_exchange
from perdure.workflows.policy.repair.recovery import recover
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.node import NodeState
from perdure.workflows.policy.world import stages, succession
from perdure.workflows.policy.world.rendezvous import choose_members, form_world, ports_remembered, usable


def form(state: RoleInJob, job: JobSpec, now: datetime) -> RoleInJob:
    """Sends out the next world, if one is due and possible."""
    if state.interruption is not None and not state.interruption.decided:
        return state
    if held := memory_in_place.why_held(state):
        return incidents.waits(state, held)
    if _trains_with_enough(state, state.nodes_max):
        # No other nodes could make it larger, and a decision on one of a thousand nodes reads none of the others.
        return _continue_training(state)
    complete = stages.complete_services(state, job)
    available = [node for node in candidates(state) if node.rank not in complete]
    size = _usable(state, len(available), complete=len(complete))
    if state.between_stages or state.world is None:
        state = stages.stop_if_commands_disagree(state, now, ready_nodes=0 if size else len(available))
        if state.outcome is not None:
            return state
    if state.between_stages and (resting := _rest(state, job, now, size=size, available=len(available))) is not None:
        return resting
    if _trains_with_enough(state, size):
        return _continue_training(state)
    if not state.between_stages and any(node.alive and not node.reachable for node in state.members):
        # The node cannot be sent a world. While its own world steps, that is not evidence against it.
        return waiting.end_in_vain(state, job, now)
    return _form_due_world(state, job, now, available=available, size=size)


def candidates(state: RoleInJob) -> list[NodeState]:
    """Nodes that can be given a world: they wait for one, or are in the current one.

    While the world is stopped, a replacement counts from its agent's first report on: the others start their ranks
    while its command is still on its way to the rendezvous. A replacement whose last incarnation did not reach the
    rendezvous must first reach it. A node that is cut off from the others counts only where there is no world without
    it. A node whose predecessor may still train, or whose machine is not checked yet, does not count at all.
    """
    if state.between_stages:
        return [
            node
            for node in state.nodes.values()
            if node.reachable
            and not node.predecessor
            and not node.unchecked
            and node.rank < state.nodes_max
            and stages.at_stage(state, node)
        ]
    is_stopped = state.world is not None and state.interruption is not None
    found = [
        node
        for node in state.nodes.values()
        if node.alive
        and node.reachable
        and not node.predecessor
        and not node.unchecked
        and node.rank < state.nodes_max
        and (
            state.is_member(node)
            or stages.at_stage(state, node)
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


def _usable(state: RoleInJob, count: int, *, complete: int) -> int:
    """The number of `count` nodes that a world may have beside nodes that have nothing more to do."""
    least, most = max(state.nodes_min - complete, 1), state.nodes_max - complete
    if (needed := other_size.needed_nodes(state)) is not None and not state.between_stages:
        least, most = max(needed, least), min(needed, most)
    return usable(count, minimum=least, maximum=most, unit=state.unit)


def _trains(state: RoleInJob) -> bool:
    """Whether the ranks of a world train, and stop only for another world."""
    return state.world is not None and state.interruption is None and not state.between_stages


def _has_surplus(state: RoleInJob) -> bool:
    """Whether the current world has members for which the job has no place any more."""
    return state.world is not None and max(state.world.members, default=-1) >= state.nodes_max


def _trains_with_enough(state: RoleInJob, size: int) -> bool:
    """Whether the world trains as it is, and one of `size` nodes would not be larger."""
    return _trains(state) and not _has_surplus(state) and state.world is not None and size <= state.world.nodes


def _continue_training(state: RoleInJob) -> RoleInJob:
    return planned_changes.forget_world(state.replace(ready_since=None, waiting_since=None))


def _form_due_world(
    state: RoleInJob, job: JobSpec, now: datetime, *, available: list[NodeState], size: int
) -> RoleInJob:
    """Forms a world that is due: there is none, it broke, it must shrink, or it can grow."""
    trains = _trains(state)
    if size == 0:
        missing = other_size.why_needed(state)
        return state if trains else waiting.wait(state, job, now, available=len(available), missing=missing)
    if state.ready_since is None:
        state = state.replace(ready_since=now, is_due=False)
    if not _is_time(state, job, now, size=size):
        return state if trains else state.replace(waiting_since=state.waiting_since or now)
    state = state if state.is_due else state.replace(is_due=True)
    if trains and (held := planned_changes.hold_world(state, job, now, size=size)) is not None:
        return held
    exchanged = places_to_exchange(state)
    serves = job.roles[state.role].ready is not None
    remembering = memory.begin_stage(state) if state.between_stages else memory.close_interruption(state, now)
    members = choose_members(available, size, state.world)
    formed = form_world(
        state.nodes,
        members,
        generation=state.generation + 1,
        previous=state.world,
        restarted=commands_to_restart(state),
        stage=state.stages_complete,
        first_step=None if serves else first_steps.limit_of(remembering, job),
        distrusted_checkpoints=state.checkpoints.distrusted,
        unsound=state.checkpoints.unsound,
        script_failures=state.checkpoints.script_failures,
        known=state_loss.known_states(state, job, members),
        exchanged=exchanged,
        measurements=experiments.MEASUREMENTS if exchanged else 0,
        pace_over=scaling.measured_over(job.roles[state.role]),
        keeps_processes=serves and not (state.interruption is not None and state.interruption.restarts_all),
        serves=serves,
    )
    if formed is None:
        return state if trains else _wait_for_port(state, job, now, available=len(available))
    if _has_surplus(state) and not state.between_stages:
        state = planned_changes.settle(_announce(state, formed, job, now), now)
        state = staffing.dismiss_surplus(state, job, now)
    if state.leaving:
        return succession.hold(state)
    return _send_out(state, formed, job, now)


def _wait_for_port(state: RoleInJob, job: JobSpec, now: datetime, *, available: int) -> RoleInJob:
    """Waits until a node offers a port for the store of the next world."""
    # A last call that is over does not begin again.
    ready_since = state.ready_since if _is_last_call_over(state, job, now) else None
    missing = "none of them offers a port for its store"
    return waiting.wait(state, job, now, available=available, missing=missing).replace(ready_since=ready_since)


def _send_out(state: RoleInJob, formed: World, job: JobSpec, now: datetime) -> RoleInJob:
    trains = _trains(state)
    if state.between_stages:
        state = memory.begin_stage(state)
    elif state.world is not None:
        state = _announce(state, formed, job, now)
        state = state if job.roles[state.role].ready is not None else _continue_ended_members(state)
    if trains:
        state = planned_changes.settle(state, now)
    host = state.nodes[formed.store_rank]
    state = state.with_node(
        host.replace(
            store_ports=tuple(port for port in host.store_ports if port != formed.store_port),
            used_ports=(*host.used_ports, formed.store_port)[-ports_remembered(job.network) :],
        )
    )
    state = claims.remember_ranks(succession.leave_out(user_requests.settle(state, formed), formed))
    state = memory.close_interruption(suspect_machines.request_checks(state, formed), now)
    state = state.replace(
        world=formed,
        world_decided_at=now,
        generation=formed.generation,
        waiting_since=None,
        queued_since=None,
        ready_since=None,
    )
    return incidents.record_world(planned_changes.follow_world(state, now))


def _rest(state: RoleInJob, job: JobSpec, now: datetime, *, size: int, available: int) -> RoleInJob | None:
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


def _is_time(state: RoleInJob, job: JobSpec, now: datetime, *, size: int) -> bool:
    """Whether a world of this size should be formed now, rather than waiting for more nodes."""
    complete = len(stages.complete_services(state, job))
    full = _usable(state, state.nodes_max - complete, complete=complete)
    if size >= full or _has_surplus(state) or (state.between_stages and not stages.awaits_nodes(state)):
        return True
    world = state.world
    if world is not None and state.interruption is not None:
        waits = job.recovery.on_capacity_loss is CapacityLoss.WAIT or holds.obstacle(state, job, leaves=True)
        if size >= min(world.nodes, full) or not waits:
            return True
        return state.waiting_since is not None and now - state.waiting_since >= job.recovery.replace_timeout
    return _is_last_call_over(state, job, now)


def next_look(state: RoleInJob, job: JobSpec) -> datetime | None:
    """The end of the last call for more nodes; None where a world waits for none."""
    return None if state.ready_since is None else state.ready_since + job.timing.rendezvous.last_call


def _is_last_call_over(state: RoleInJob, job: JobSpec, now: datetime) -> bool:
    end = next_look(state, job)
    return end is not None and now >= end


def _announce(state: RoleInJob, formed: World, job: JobSpec, now: datetime) -> RoleInJob:
    """Records why another world follows one that nothing has interrupted."""
    world = state.world
    if world is None or state.interruption is not None:
        return state
    verb = "grows" if formed.nodes > world.nodes else "shrinks"
    text = f"world {verb} from {world.nodes:,} to {count(formed.nodes, 'node')}"
    reasons = user_requests.reasons(state, formed.members.keys() ^ world.members.keys())
    text = f"{text}: {reasons}" if reasons else text
    by_user = bool(reasons) and not scaling.is_own_choice(state)
    return recover(user_requests.request(state, text, now, by_user=by_user), job, now)


def _continue_ended_members(state: RoleInJob) -> RoleInJob:
    """Marks all commands of a broken world as running: ranks that had finished in it train again with the others.

    A command that ended in an earlier stage, or without entering a world, has nothing more to do and keeps its mark.
    """
    nodes = {rank: node.replace(ended=False) if state.is_member(node) else node for rank, node in state.nodes.items()}
    return state.replace(nodes=nodes)
