"""Turns events into known facts; it decides nothing.

Stale messages are recognized here: by the job's uid, the incarnation and its token, the sequence numbers, and the
generation that they are about.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import singledispatch

from perdure.contract import (
    AgentMessage,
    EvidenceSource,
    Failure,
    FailureClass,
    FailureKind,
    Finished,
    LossCause,
    NodePhase,
    NodeTransition,
    Progress,
    ProgressSource,
    ShardsSetAside,
    TransitionKind,
)
from perdure.workflows.policy.diagnosis import claims, first_steps
from perdure.workflows.policy.diagnosis.failures import node_failure, source_of
from perdure.workflows.policy.diagnosis.interruptions import (
    count_another_try,
    explain_earlier_world,
    interrupt,
    record_command_failure,
)
from perdure.workflows.policy.facts.events import Event, GroupAdopted, GroupWoundDown
from perdure.workflows.policy.record import incidents, observations
from perdure.workflows.policy.state.job import Interruption, JobState, NodeFailure, NodeState
from perdure.workflows.policy.world import succession

CONTROL_LAG = timedelta(seconds=5)
"""A report that is older than this on arrival shows that the control plane was unavailable."""

CONTROL_LAG_GRACE = timedelta(seconds=15)
"""The time that agents may then take to poll again: the SDK's backoff grows to about 10 s."""

_REMEMBERED_SEQUENCES = 32

_MOST_DATASETS = 32
"""Datasets whose failed shards the job names."""

_PREPARES = "its command runs and has not started its torchrun yet; only limits.active_deadline ends that"

_OLD_AGENT = "its agent is of an older release and cannot skip torchruns that have finished; update it"


def reduce(state: JobState, event: Event, now: datetime) -> JobState:
    """Takes in the event's facts."""
    return _observe(event, state, now)


@singledispatch
def _observe(event: object, state: JobState, now: datetime) -> JobState:
    return state


@_observe.register
def _(failure: Failure, state: JobState, now: datetime) -> JobState:
    known = _accept_message(state, failure, now)
    if known is None:
        return state
    state, node = known
    state, failure = claims.verify_failure(state, node, failure)
    before_steps = not state.has_stepped and failure.progress is None
    reported = node_failure(failure, before_steps=before_steps)
    member = state.is_member(node)
    node = _with_preparation(node, preparing=False).replace(
        phase=NodePhase.READY if failure.kind is FailureKind.RANKS else NodePhase.JOINED,
        since=now,
        store_ports=_fresh_ports(node, failure.store_ports),
        reachable=True,
        ranks_ended=failure.kind is FailureKind.NODE,
    )
    state = state.with_node(node).replace(progress=_newest_progress(state, failure.progress))
    if state.between_stages and state.outcome is None:
        if failure.kind in (FailureKind.RANKS, FailureKind.RENDEZVOUS) or node.ended:
            return state
        # The command failed after its torchruns, or while it catches up: no world can break.
        return record_command_failure(state, reported, now)
    if state.outcome is not None:
        return state
    if node.finished and state.world and node.finished >= state.world.generation:
        failed = failure.kind is FailureKind.COMMAND and not node.ended
        return state.with_node(node.replace(failed=reported)) if failed else state
    in_its_world = failure.kind in (FailureKind.RANKS, FailureKind.RENDEZVOUS, FailureKind.UNKNOWN)
    if not member:
        if in_its_world:
            return state
        # The command ended before it could take part. There is no world to restart it in, so the node is replaced. If
        # it was in an earlier world, its agent may have started the command again since it sent this report.
        # What such a command lacks may be missing on its machine only.
        cause = LossCause.MACHINE if reported.failure is FailureClass.CANNOT_RUN else LossCause.JOB
        state = _lose(state, succession.drop(state, node), now, reported.text, cause)
        if state.world is not None:
            return state
        state = count_another_try(state, node, now)
    elif state.world is not None and failure.generation < state.world.generation:
        commanded_since = state.world_decided_at is not None and failure.time > state.world_decided_at
        if in_its_world or failure.starts_again or not commanded_since:
            return explain_earlier_world(state, reported, generation=failure.generation)
    if failure.kind is FailureKind.RENDEZVOUS:
        state = state.with_node(node.replace(missed_worlds=node.missed_worlds + 1))
    return interrupt(state, reported, now=now, source=source_of(reported), generation=failure.generation)


@_observe.register
def _(finished: Finished, state: JobState, now: datetime) -> JobState:
    known = _accept_message(state, finished, now)
    if known is None:
        return state
    state, node = known
    world, ended = state.world, not finished.command_runs
    if world is not None and state.is_member(node) and finished.generation == world.generation:
        node = node.replace(
            finished=finished.generation,
            ended=node.ended or ended,
            counts_stages=node.counts_stages or finished.command_runs,
            catching_up=node.catching_up and not ended,
        )
        return state.with_node(node).replace(progress=_newest_progress(state, finished.progress))
    outside = world is None or state.between_stages or not state.is_member(node)
    if not ended or not outside:
        return state
    # The command has nothing more to do. A world that the node is not a member of is not affected.
    text = "its command has ended with 0"
    return state.with_node(node.replace(ended=True, catching_up=False, phase=NodePhase.JOINED, since=now, reason=text))


@_observe.register
def _(event: GroupAdopted, state: JobState, now: datetime) -> JobState:
    for view in event.nodes:
        generation = view.generation if claims.is_possible(state, view.generation) else state.generation
        state = _newer_generation(state, generation, now)
        ours = state.nodes.get(view.rank)
        if ours is not None and ours.incarnation > view.incarnation:
            continue
        state = state.with_node(
            NodeState(
                rank=view.rank,
                incarnation=view.incarnation,
                token=view.token,
                phase=view.phase,
                since=view.since or now,
                reason=view.reason,
                reachable=view.reachable,
                host=view.host,
                address=view.address,
                processes=view.processes,
                store_ports=view.store_ports,
                command_nodes=view.command_nodes,
                commanded=generation,
                avoids=view.avoids,
            )
        )
    return state


@_observe.register
def _(event: GroupWoundDown, state: JobState, now: datetime) -> JobState:
    if state.outcome is None:
        # The job did not request it and continues: the group is started again.
        return state
    return state.replace(wound_down_groups=tuple(sorted({*state.wound_down_groups, event.group})))


@_observe.register
def _(transition: NodeTransition, state: JobState, now: datetime) -> JobState:
    node = state.nodes.get(transition.rank)
    if not claims.is_possible(state, transition.generation):
        what = f"node {transition.rank} has reported generation {transition.generation}, and the job is in"
        state = claims.count(state, f"{what} generation {state.generation}")
        transition = transition.model_copy(update={"generation": state.generation})
    state = succession.observe_end(_newer_generation(state, transition.generation, now), transition)
    if node is None or node.incarnation != transition.incarnation or not node.alive:
        return state
    match transition.kind:
        case TransitionKind.CREATED | TransitionKind.PENDING:
            # The agent may report before the command's container can be created.
            obstructed = transition.kind is TransitionKind.PENDING and node.phase is NodePhase.JOINED
            if obstructed or node.phase in (NodePhase.REQUESTED, NodePhase.PENDING, NodePhase.CREATED):
                phase = NodePhase.CREATED if transition.kind is TransitionKind.CREATED else NodePhase.PENDING
                node = node.replace(phase=phase, since=now, reason=transition.detail, queued=transition.queued)
                refused = transition.absent and not transition.queued
                node = node.replace(uncreated_since=(node.uncreated_since or now) if refused else None)
                if transition.detail:
                    state = incidents.waits(state, f"node {transition.rank}: {transition.detail}")
        case TransitionKind.JOINED:
            if transition.waits is not None:
                node = node.replace(waits=transition.waits)
                if node.waits:
                    state = incidents.waits(state, f"node {node.rank}: {node.waits}")
            if transition.preparing:
                state = state.replace(prepares=True)
            elif node.phase is not NodePhase.READY:
                node = node.replace(
                    phase=NodePhase.JOINED, since=now, reason=node.waits, queued=False, uncreated_since=None
                )
            node = _with_preparation(node.replace(reachable=True), preparing=transition.preparing or node.preparing)
        case TransitionKind.READY:
            return _ready(state.with_node(_facts(node, transition)), transition, now)
        case TransitionKind.STEPPING:
            first = transition.generation > node.stepping
            node = node.replace(
                stepping=max(node.stepping, transition.generation),
                stepped=max(node.stepped, transition.generation) if transition.counted else node.stepped,
                without_checkpoints=transition.generation if transition.saves is False else node.without_checkpoints,
                reachable=True,
                missed_worlds=0,
            )
            node = _with_preparation(node, preparing=False)
            if state.world is not None and transition.generation == state.world.generation:
                state = incidents.record_entry(state, transition.entered_at or transition.time)
                if first and transition.starts is not None:
                    state = incidents.record_starts(state, transition.starts)
                if transition.counted and state.is_member(node):
                    state = first_steps.learn(state.with_node(node), transition, now)
        case TransitionKind.STALLED:
            node = node.replace(
                stalled_in=transition.generation,
                stalled_since=transition.time,
                stalled_at_start=transition.at_start,
            )
            if transition.at_start:
                state = first_steps.miss(state.with_node(node), node, transition, now)
        case TransitionKind.STALL_ENDED:
            state = observations.observe_stall_ended(state, node, transition.time, now)
            node = node.replace(stalled_in=0, stalled_since=None, stalled_at_start=False)
        case TransitionKind.COMMANDED:
            node = node.replace(
                commanded=max(node.commanded, transition.generation),
                entered=max(node.entered, transition.entered or 0),
                reachable=True,
            )
            if state.world is not None and transition.generation == state.world.generation:
                state = incidents.record_commands(state, transition.time)
                came = node.preparing and not transition.preparing
                node = _with_preparation(node, preparing=transition.preparing)
                # A command that has just reached its torchrun is asked once more.
                if _has_not_entered(state, node, transition) and not came:
                    return _count_missed_world(state.with_node(node), transition, now)
        case TransitionKind.UNREACHABLE:
            node = _silent(node, transition, now)
        case TransitionKind.REACHABLE:
            state = observations.observe_reachable(state, node, now)
            node = node.replace(reachable=True, reason=node.waits)
        case TransitionKind.UNRESPONSIVE:
            return _unresponsive(state, node, transition, now)
        case TransitionKind.LOST | TransitionKind.CREATE_FAILED:
            return _end_node(state, node, transition, now)
        case TransitionKind.REMOVED:
            node = node.replace(phase=NodePhase.REMOVED, since=now)
        case TransitionKind.STORE_PORTS | TransitionKind.UNKNOWN:
            pass
        case (
            TransitionKind.CHECKPOINT_STORED
            | TransitionKind.CHECKPOINT_COMMITTED
            | TransitionKind.CHECKPOINT_RESTORED
            | TransitionKind.ENDING
        ):
            # See `policy.checkpoints.commits` and `policy.capacity.planned_changes`.
            pass
    return state.with_node(_facts(node, transition))


def _newer_generation(state: JobState, generation: int, now: datetime) -> JobState:
    """Takes in a generation that this job does not know: the job was reset, and its world is not the newest."""
    if generation <= state.generation:
        return state
    state = state.replace(generation=generation)
    if state.world is None or state.interruption is not None:
        return state
    text = f"nodes are in generation {generation}: the job took over from an earlier run of itself"
    state = incidents.add_evidence(state, now=now, time=now, source=EvidenceSource.AGENT, text=text)
    return state.replace(interruption=Interruption(since=now, requested=text))


def _ready(state: JobState, transition: NodeTransition, now: datetime) -> JobState:
    node = state.nodes[transition.rank]
    world = state.world
    node = _with_preparation(node, preparing=False)
    node = node.replace(phase=NodePhase.READY, since=now, reason=transition.detail, waits="")
    node = node.replace(cut_off=bool(transition.detail))
    if transition.stage is not None:
        # Only the job decides that a stage is complete. A node that has passed more stages knows what a reset job has
        # lost.
        state = state.replace(stages_complete=max(state.stages_complete, transition.stage))
    node = _asks_for_a_world(state, node, transition.stage, transition.generation)
    state = state.with_node(node.replace(reachable=True, failed_starts=0, uncreated_since=None))
    if state.between_stages:
        return state
    over = world is not None and state.is_member(node) and transition.generation >= world.generation
    if not over or state.interruption is not None or state.outcome is not None:
        return state
    # The node's ranks are down, and its own failure report may still be on the way to the job.
    text = f"node {transition.rank} waits for a new world"
    return _interrupt(
        state,
        transition,
        now,
        FailureClass.PEER_LOST,
        text,
        source=EvidenceSource.PEERS,
        generation=transition.generation,
    )


def _interrupt(
    state: JobState,
    transition: NodeTransition,
    now: datetime,
    failure: FailureClass,
    text: str,
    *,
    source: EvidenceSource,
    generation: int = 0,
) -> JobState:
    """Records that the current world is over because of a transition."""
    reported = NodeFailure(rank=transition.rank, failure=failure, time=transition.time, text=text)
    return interrupt(state, reported, now=now, source=source, generation=generation)


def _asks_for_a_world(state: JobState, node: NodeState, stage: int | None, after_generation: int) -> NodeState:
    """Updates a node whose command requests a world.

    Args:
        state: The job.
        node: The node before the request.
        stage: The number of torchruns of the command that ended before the one that requests; None where its agent
            cannot tell.
        after_generation: The newest generation that the node has entered.
    """
    if stage is None:
        reached = after_generation >= state.complete_generation
        return node.replace(
            stage=state.stages_complete if reached else 0, ended=False, reason=node.reason if reached else _OLD_AGENT
        )
    caught_up = stage + 1 >= state.stages_complete
    return node.replace(stage=stage, counts_stages=True, ended=False, catching_up=node.catching_up and not caught_up)


def _unresponsive(state: JobState, node: NodeState, transition: NodeTransition, now: datetime) -> JobState:
    state = state.with_node(_silent(node, transition, now))
    world = state.world
    if world is None or not state.is_member(node) or state.outcome is not None or state.between_stages:
        return state
    # A node that has entered may be too busy with its first step to take a command in time; its lease shows if it is
    # gone.
    is_stopped = transition.generation == world.generation and max(node.stepping, node.entered) < world.generation
    if not is_stopped or (state.control_lag_until is not None and now < state.control_lag_until):
        return state
    text = f"node {node.rank} does not take commands: {transition.detail}"
    return _interrupt(state, transition, now, FailureClass.NODE_UNRESPONSIVE, text, source=EvidenceSource.COMMAND)


def _with_preparation(node: NodeState, *, preparing: bool) -> NodeState:
    """Updates the node with its agent's report about work before the command's torchrun."""
    if node.preparing is preparing:
        return node
    return node.replace(preparing=preparing, reason=_PREPARES if preparing else "")


def _silent(node: NodeState, transition: NodeTransition, now: datetime) -> NodeState:
    return node.replace(
        reachable=False, reason=transition.detail, silent_since=now if node.reachable else node.silent_since or now
    )


def _has_not_entered(state: JobState, node: NodeState, transition: NodeTransition) -> bool:
    """Whether this is the answer to the job's newest inquiry, and says that the node is not in its world."""
    inquired, decided = state.inquired_at, state.world_decided_at
    if (
        inquired is None
        or decided is None
        or inquired < decided
        or transition.inquiry != state.inquiry
        or transition.entered is None
    ):
        return False
    late = max(node.entered, node.stepping, node.finished) < transition.generation
    return late and not transition.preparing and state.is_member(node) and state.outcome is None


def _count_missed_world(state: JobState, transition: NodeTransition, now: datetime) -> JobState:
    node = state.nodes[transition.rank]
    state = state.with_node(node.replace(missed_worlds=node.missed_worlds + 1))
    why = transition.detail or "the reason is not known"
    text = f"it was given generation {transition.generation} and has not entered it: {why}"
    return _interrupt(state, transition, now, FailureClass.RENDEZVOUS_TIMEOUT, text, source=EvidenceSource.COMMAND)


def _end_node(state: JobState, node: NodeState, transition: NodeTransition, now: datetime) -> JobState:
    refused = transition.kind is TransitionKind.CREATE_FAILED
    # The specification itself cannot be started, by this node or any other.
    launch = refused and transition.cause is LossCause.JOB
    what = "cannot be started" if launch else "was refused" if refused else "lost"
    text = f"node {node.rank} {what}: {transition.detail or 'no reason given'}"
    done = state.world is not None and node.finished >= state.world.generation
    done = done and (node.ended or not state.between_stages)
    lost = _lose(state, node.replace(host=transition.host or node.host), now, transition.detail, transition.cause)
    member = state.is_member(node) and not done
    if refused and state.generation:
        # The specification has trained, so the refusal may end: a world that trains is not ended by it, and one that
        # lacks the node waits for it.
        known = lost.nodes[node.rank]
        lost = lost.with_node(known.replace(uncreated_since=known.uncreated_since or now))
        lost, refused, launch = incidents.waits(lost, text), False, False
    if state.outcome is not None or not (member or refused):
        return lost
    disrupted = transition.cause is LossCause.WANTED
    failure = FailureClass.DISRUPTED if disrupted else FailureClass.NODE_LOST
    if refused:
        failure = FailureClass.LAUNCH if launch else FailureClass.CREATE_FAILED
    return _interrupt(lost, transition, now, failure, text, source=transition.source)


def _lose(state: JobState, node: NodeState, now: datetime, reason: str, cause: LossCause) -> JobState:
    never_ready = node.phase is not NodePhase.READY and not state.is_member(node)
    return state.with_node(
        node.replace(
            phase=NodePhase.LOST,
            since=now,
            reason=reason,
            loss_cause=cause,
            failed_starts=node.failed_starts + 1 if never_ready else 0,
            store_ports=(),
        )
    )


def _accept_message(state: JobState, message: AgentMessage, now: datetime) -> tuple[JobState, NodeState] | None:
    """The sender's node; None where the message is a repeat, or not from a current incarnation."""
    sender = message.sender
    node = state.nodes.get(sender.rank)
    if node is None or not state.is_current(sender) or message.sequence in node.sequences:
        return None
    node = node.replace(sequences=(*node.sequences, message.sequence)[-_REMEMBERED_SEQUENCES:])
    state = state.with_node(node)
    if now - message.time > CONTROL_LAG:
        state = state.replace(control_lag_until=now + CONTROL_LAG_GRACE)
    return state, node


@_observe.register
def _(aside: ShardsSetAside, state: JobState, now: datetime) -> JobState:
    known, reported = state.unprocessed, aside.unprocessed
    if reported.dataset not in known and len(known) >= _MOST_DATASETS:
        return state
    return state.replace(unprocessed={**known, reported.dataset: reported})


def _facts(node: NodeState, transition: NodeTransition) -> NodeState:
    """Copies the facts of a transition that do not depend on its kind."""
    return node.replace(
        address=transition.address or node.address,
        host=transition.host or node.host,
        processes=transition.processes or node.processes,
        command_nodes=transition.command_nodes or node.command_nodes,
        store_ports=node.store_ports if transition.store_ports is None else _fresh_ports(node, transition.store_ports),
    )


def _fresh_ports(node: NodeState, reported: tuple[int, ...]) -> tuple[int, ...]:
    """Ports that no generation has used; a report may be older than the last use."""
    return tuple(port for port in reported if port not in node.used_ports) or node.store_ports


def _newest_progress(state: JobState, reported: Progress | None) -> Progress | None:
    """Returns the progress of the newest world, in which a lower step is not an older one: ranks begin with a
    checkpoint, and counts with 0. Of one world the furthest counts, as reports may be late."""
    known = state.progress
    if known is None or reported is None:
        return reported or known
    if reported.source is not known.source:
        return reported if reported.source is ProgressSource.REPORTED else known
    if reported.generation != known.generation:
        return max(known, reported, key=lambda progress: progress.generation)
    return reported if reported.step >= known.step else known
