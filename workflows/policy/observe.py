"""From what was heard to what is known: facts only, no decision.

Stale words are told from news here: by the job's uid, the incarnation and its token, the sequence number of repeats,
and the generation that they are about.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import singledispatch

from workflows.messages import (
    AgentMessage,
    EdgeKind,
    EvidenceSource,
    FailureClass,
    FailureKind,
    LossCause,
    NodeEdge,
    NodePhase,
    Progress,
    ProgressSource,
)
from workflows.policy import incidents
from workflows.policy.events import (
    EdgeSeen,
    Event,
    FailureReported,
    GroupAdopted,
    GroupWoundDown,
    NodeFinished,
)
from workflows.policy.failures import classify
from workflows.policy.state import Interruption, JobState, NodeFailure, NodeState

CONTROL_LAG = timedelta(seconds=5)
"""A report older than this on arrival says that the control plane had been away."""

CONTROL_LAG_GRACE = timedelta(seconds=15)
"""How long agents may then take to poll again: the SDK's backoff grows to about 10 s."""

_REMEMBERED_SEQUENCES = 32


def observe(state: JobState, event: Event, now: datetime) -> JobState:
    """The state with the event's facts in it."""
    return _observe(event, state, now)


@singledispatch
def _observe(event: object, state: JobState, now: datetime) -> JobState:
    return state


@_observe.register
def _(event: FailureReported, state: JobState, now: datetime) -> JobState:
    failure = event.failure
    known = _hear(state, failure, now)
    if known is None:
        return state
    state, node = known
    failure_class, text, exit_code = classify(failure)
    member = state.is_member(node)
    node = node.changed(
        phase=NodePhase.READY if failure.kind is FailureKind.RANKS else NodePhase.JOINED,
        since=now,
        store_ports=_fresh_ports(node, failure.store_ports),
        reachable=True,
    )
    state = state.with_node(node).changed(progress=_further(state.progress, failure.progress))
    if state.outcome is not None or (node.finished and state.world and node.finished >= state.world.generation):
        return state
    in_its_world = failure.kind in (FailureKind.RANKS, FailureKind.RENDEZVOUS)
    if not member:
        if in_its_world:
            return state
        # Its command left before it could take part; there is no world to restart it in, so the node is replaced.
        state = _lose(state, node, now, text, LossCause.JOB)
        if state.world is not None:
            return state
    elif state.world is not None and failure.generation < state.world.generation:
        commanded_since = state.world_decided_at is not None and failure.time > state.world_decided_at
        if in_its_world or not commanded_since:
            # About a world that is over: the story of why, but no reason to end this one.
            if state.open_incident is None:
                return state
            return incidents.sighted(
                state, now=now, time=failure.time, source=EvidenceSource.AGENT, text=text, rank=node.rank
            )
    if failure.kind is FailureKind.RENDEZVOUS:
        state = state.with_node(node.changed(missed_worlds=node.missed_worlds + 1))
    certain = not (failure_class is FailureClass.USER_CODE and not any(rank.error for rank in failure.ranks))
    # Who ends a node knows why; its backend says so a moment later.
    certain = (certain or failure.kind is not FailureKind.RANKS) and failure.kind is not FailureKind.NODE
    return interrupted(
        state,
        NodeFailure(
            rank=node.rank,
            failure=failure_class,
            time=failure.time,
            exit_code=exit_code,
            text=text,
            log_tail=failure.log_tail or next((rank.traceback or "" for rank in failure.ranks), ""),
            certain=certain,
        ),
        now=now,
        source=EvidenceSource.PEERS if failure_class is FailureClass.PEER_LOST else EvidenceSource.AGENT,
    )


@_observe.register
def _(event: NodeFinished, state: JobState, now: datetime) -> JobState:
    finished = event.finished
    known = _hear(state, finished, now)
    if known is None:
        return state
    state, node = known
    if not state.is_member(node) or state.world is None or finished.generation != state.world.generation:
        return state
    return state.with_node(node.changed(finished=finished.generation)).changed(
        progress=_further(state.progress, finished.progress)
    )


@_observe.register
def _(event: GroupAdopted, state: JobState, now: datetime) -> JobState:
    for view in event.nodes:
        state = _newer_generation(state, view.generation, now)
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
                commanded=view.generation,
                avoids=view.avoids,
            )
        )
    return state


@_observe.register
def _(event: GroupWoundDown, state: JobState, now: datetime) -> JobState:
    if state.outcome is None:
        # Not at this job's wish, which goes on: the group is started again.
        return state
    return state.changed(wound_down_groups=tuple(sorted({*state.wound_down_groups, event.group})))


@_observe.register
def _(event: EdgeSeen, state: JobState, now: datetime) -> JobState:
    edge = event.edge
    node = state.nodes.get(edge.rank)
    state = _newer_generation(state, edge.generation, now)
    if node is None or node.incarnation != edge.incarnation or not node.alive:
        return state
    match edge.kind:
        case EdgeKind.CREATED | EdgeKind.PENDING:
            if node.phase in (NodePhase.REQUESTED, NodePhase.PENDING, NodePhase.CREATED):
                phase = NodePhase.CREATED if edge.kind is EdgeKind.CREATED else NodePhase.PENDING
                node = node.changed(phase=phase, since=now, reason=edge.detail, queued=edge.queued)
                if edge.detail:
                    state = incidents.waits(state, f"node {edge.rank}: {edge.detail}")
        case EdgeKind.JOINED:
            if node.phase is not NodePhase.READY:
                node = node.changed(phase=NodePhase.JOINED, since=now, reason="", queued=False)
            node = node.changed(reachable=True)
        case EdgeKind.READY:
            return _ready(state.with_node(_facts(node, edge)), edge, now)
        case EdgeKind.STEPPING:
            first = edge.generation > node.stepping
            node = node.changed(stepping=max(node.stepping, edge.generation), reachable=True, missed_worlds=0)
            if state.world is not None and edge.generation == state.world.generation:
                state = incidents.entered(state, edge.entered_at or edge.time)
                if first and edge.starts is not None:
                    state = incidents.started(state, edge.starts)
        case EdgeKind.STALLED:
            node = node.changed(stalled_in=edge.generation, stalled_since=edge.time)
        case EdgeKind.GOING_ON:
            node = node.changed(stalled_in=0, stalled_since=None)
        case EdgeKind.COMMANDED:
            node = node.changed(commanded=max(node.commanded, edge.generation), reachable=True)
            if state.world is not None and edge.generation == state.world.generation:
                state = incidents.commanded(state, edge.time)
        case EdgeKind.UNREACHABLE:
            node = node.changed(reachable=False, reason=edge.detail)
        case EdgeKind.REACHABLE:
            node = node.changed(reachable=True, reason="")
        case EdgeKind.UNRESPONSIVE:
            return _unresponsive(state, node, edge, now)
        case EdgeKind.LOST | EdgeKind.CREATE_FAILED:
            return _gone(state, node, edge, now)
        case EdgeKind.REMOVED:
            node = node.changed(phase=NodePhase.REMOVED, since=now)
        case EdgeKind.STORE_PORTS:
            pass
    return state.with_node(_facts(node, edge))


def interrupted(state: JobState, failure: NodeFailure, *, now: datetime, source: EvidenceSource) -> JobState:
    """The current world is over, and this is one sign of it."""
    interruption = state.interruption or Interruption(since=now)
    if interruption.requested is not None:
        # What a user asked for is under way and restarts every rank anyway.
        return state
    for node in state.stalled:
        # Nothing was done about it, but the interruption began here.
        state = incidents.sighted(
            state,
            now=now,
            time=node.stalled_since or now,
            source=EvidenceSource.AGENT,
            text=f"node {node.rank} stepped for the last time",
            rank=node.rank,
        )
    state = incidents.sighted(
        state,
        now=now,
        time=failure.time,
        source=source,
        text=failure.text,
        rank=failure.rank,
        log_tail=failure.log_tail,
    )
    return state.changed(
        interruption=interruption.model_copy(
            update={
                "failures": (*interruption.failures, failure),
                # A new culprit before the next world is formed: decide again with all that is known.
                "decided": interruption.decided and failure.failure is FailureClass.PEER_LOST,
            }
        )
    )


def _newer_generation(state: JobState, generation: int, now: datetime) -> JobState:
    """Somebody knows a generation that this job does not: it was reset, and its world is not the newest."""
    if generation <= state.generation:
        return state
    state = state.changed(generation=generation)
    if state.world is None or state.interruption is not None:
        return state
    text = f"nodes are in generation {generation}: the job took over from an earlier run of itself"
    state = incidents.sighted(state, now=now, time=now, source=EvidenceSource.AGENT, text=text)
    return state.changed(interruption=Interruption(since=now, requested=text))


def _ready(state: JobState, edge: NodeEdge, now: datetime) -> JobState:
    node = state.nodes[edge.rank]
    world = state.world
    node = node.changed(phase=NodePhase.READY, since=now, reason=edge.detail, cut_off=bool(edge.detail))
    state = state.with_node(node.changed(reachable=True, failed_starts=0))
    over = world is not None and state.is_member(node) and edge.generation >= world.generation
    if not over or state.interruption is not None or state.outcome is not None:
        return state
    # Its ranks are down, and its own report may still be on the way on its other path.
    return interrupted(
        state,
        NodeFailure(
            rank=edge.rank,
            failure=FailureClass.PEER_LOST,
            time=edge.time,
            text=f"node {edge.rank} waits for a new world",
        ),
        now=now,
        source=EvidenceSource.PEERS,
    )


def _unresponsive(state: JobState, node: NodeState, edge: NodeEdge, now: datetime) -> JobState:
    state = state.with_node(node.changed(reachable=False, reason=edge.detail))
    world = state.world
    if world is None or not state.is_member(node) or state.outcome is not None:
        return state
    stands_still = edge.generation == world.generation and node.stepping < world.generation
    if not stands_still or (state.control_lag_until is not None and now < state.control_lag_until):
        return state
    return interrupted(
        state,
        NodeFailure(
            rank=node.rank,
            failure=FailureClass.NODE_UNRESPONSIVE,
            time=edge.time,
            text=f"node {node.rank} does not take commands: {edge.detail}",
        ),
        now=now,
        source=EvidenceSource.COMMAND,
    )


def _gone(state: JobState, node: NodeState, edge: NodeEdge, now: datetime) -> JobState:
    refused = edge.kind is EdgeKind.CREATE_FAILED
    text = f"node {node.rank} {'was refused' if refused else 'lost'}: {edge.detail or 'no reason given'}"
    done = state.world is not None and node.finished >= state.world.generation
    lost = _lose(state, node.changed(host=edge.host or node.host), now, edge.detail, edge.cause)
    member = state.is_member(node) and not done
    if state.outcome is not None or not (member or refused):
        return lost
    return interrupted(
        lost,
        NodeFailure(
            rank=node.rank,
            failure=FailureClass.CREATE_FAILED if refused else FailureClass.NODE_LOST,
            time=edge.time,
            text=text,
        ),
        now=now,
        source=edge.source,
    )


def _lose(state: JobState, node: NodeState, now: datetime, reason: str, cause: LossCause) -> JobState:
    never_ready = node.phase is not NodePhase.READY and not state.is_member(node)
    return state.with_node(
        node.changed(
            phase=NodePhase.LOST,
            since=now,
            reason=reason,
            loss_cause=cause,
            failed_starts=node.failed_starts + 1 if never_ready else 0,
            store_ports=(),
        )
    )


def _hear(state: JobState, message: AgentMessage, now: datetime) -> tuple[JobState, NodeState] | None:
    """The sender's node; None where the message is not from a current incarnation, or is a repeat."""
    sender = message.sender
    node = state.nodes.get(sender.rank)
    if sender.uid != state.uid or node is None or not node.alive:
        return None
    if (sender.incarnation, sender.token) != (node.incarnation, node.token) or message.sequence in node.heard:
        return None
    node = node.changed(heard=(*node.heard, message.sequence)[-_REMEMBERED_SEQUENCES:])
    state = state.with_node(node)
    if now - message.time > CONTROL_LAG:
        state = state.changed(control_lag_until=now + CONTROL_LAG_GRACE)
    return state, node


def _facts(node: NodeState, edge: NodeEdge) -> NodeState:
    """What an edge says beside its kind."""
    return node.changed(
        address=edge.address or node.address,
        host=edge.host or node.host,
        processes=edge.processes or node.processes,
        command_nodes=edge.command_nodes or node.command_nodes,
        store_ports=node.store_ports if edge.store_ports is None else _fresh_ports(node, edge.store_ports),
    )


def _fresh_ports(node: NodeState, reported: tuple[int, ...]) -> tuple[int, ...]:
    """Ports that no generation has used; a report may be older than the last use."""
    return tuple(port for port in reported if port not in node.used_ports) or node.store_ports


def _further(known: Progress | None, heard: Progress | None) -> Progress | None:
    if known is None or heard is None:
        return heard or known
    if heard.source is not known.source:
        return heard if heard.source is ProgressSource.REPORTED else known
    return heard if heard.step >= known.step else known
