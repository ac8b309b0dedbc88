"""Records what interrupted nothing: nodes that could not be reached, ranks that stalled and stepped again, a storage
that took no checkpoints or has only damaged ones, a backend that created no nodes, a loss that was not a number.

Nothing was interrupted and nothing was done, so an observation is not an interruption: it is written when it is over,
as a closed entry among the incidents, so that `perdure explain` can account for a pause that nothing else explains.
Pauses that overlap are one entry: a partition silences several nodes, and ranks on both sides of it stall.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from perdure.contract import (
    Considered,
    Evidence,
    EvidenceSource,
    FoundCorruption,
    IncidentView,
    NumberKind,
    Observation,
)
from perdure.contract.base import shorten
from perdure.spec.durations import format_duration
from perdure.workflows.policy.diagnosis import hangs
from perdure.workflows.policy.record.incidents import KEPT_EVIDENCE
from perdure.workflows.policy.record.observed import add_sign, append, begun, new_entry, put
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.node import NodeState
from perdure.workflows.policy.state.role import SeenNumber

SHORTEST = timedelta(seconds=10)
"""Shorter silences are left out: a restart of an agent or of a worker looks the same."""

_NAMED = 4

_NO_REPLACEMENT = Considered(
    option="replace the node",
    why_not="a node that cannot be reached may train: nothing reported that its ranks had failed",
)
_NO_RESTART = Considered(
    option="restart the ranks", why_not="a long evaluation or a slow disk looks the same from outside"
)

_NO_ROLLBACK = {
    kind: (Considered(option="go back to a state from before it", why_not=why_not),)
    for kinds, why_not in (
        ((NumberKind.LOSS,), "recovery.on_nan is report"),
        (
            (NumberKind.GRADIENT_NORM,),
            "a step whose gradients overflow may be left out by the script, and the next one is sound",
        ),
        ((NumberKind.LOSS_SPIKE, NumberKind.GRADIENT_NORM_SPIKE), "most spikes pass by themselves"),
    )
    for kind in kinds
}

_NO_WAITING_FOR_ROOM = Considered(
    option="wait for a machine with more room",
    why_not="scaling.relax.after is over, and scaling.relax says that less will do",
)

_NO_BLAME = Considered(
    option="replace a node", why_not="what differs with itself, or on several ranks, is no fault of one device"
)

_NO_REPAIR = Considered(option="repair it", why_not="a user has paused repairs")

_NO_STOP = Considered(
    option="stop the training", why_not="snapshots in memory are made on; the agents try to store the next one again"
)

_NO_STOP_OF_JOB = Considered(option="stop the job", why_not="checkpoint.on_unusable is start_over")

_NO_STOP_FOR_GOAL = Considered(option="stop the job", why_not="limits.active_deadline stops jobs, and a goal does not")

_NO_KEEPING = Considered(
    option="keep its number of nodes", why_not="scaling.share is true; `perdure scale` to a single number keeps it"
)

_NO_END = Considered(
    option="stop the job", why_not="it has nodes.min nodes, and what refuses the others may end at any time"
)


def observe_reachable(state: RoleInJob, node: NodeState, now: datetime) -> RoleInJob:
    """Records that a node can be reached again; `node` is its state before."""
    since = node.silent_since
    if node.reachable or since is None or now - since < SHORTEST:
        return state
    evidence = (
        Evidence(
            time=since,
            source=EvidenceSource.LEASE,
            rank=node.rank,
            text=f"node {node.rank} could not be reached{f': {node.reason}' if node.reason else ''}",
        ),
        Evidence(time=now, source=EvidenceSource.LEASE, rank=node.rank, text=f"node {node.rank} was reachable again"),
    )
    return _add(state, node, Observation(unreachable=(node.rank,)), evidence, since=since, until=now, now=now)


def observe_stall_ended(state: RoleInJob, node: NodeState, at: datetime, now: datetime) -> RoleInJob:
    """Records that the ranks of a node step again; `node` is its state before."""
    since = node.stalled_since
    if since is None or state.world is None or node.stalled_in != state.world.generation:
        return state
    found = hangs.of(state)
    evidence = (
        Evidence(
            time=since,
            source=EvidenceSource.AGENT,
            rank=node.rank,
            text=f"node {node.rank} made its last step before the pause",
        ),
        *((Evidence(time=since, source=EvidenceSource.AGENT, text=hangs.describe(found)),) if found else ()),
        Evidence(time=at, source=EvidenceSource.AGENT, rank=node.rank, text=f"node {node.rank} stepped again"),
    )
    return _add(state, node, Observation(stalled=(node.rank,)), evidence, since=since, until=max(since, at), now=now)


def observe_storage(state: RoleInJob, now: datetime, *, over: bool) -> RoleInJob:
    """Records that checkpoints cannot be stored, at once, since that may last; and how long it lasted, once one is
    durable."""
    known = state.checkpoints
    since, durable = known.problem_since, known.durable
    if since is None:
        return state
    earlier = next((one for one in state.own_incidents if _of_storage(one) and one.started_at == since), None)
    if earlier is None and over:
        return state
    took = format_duration(timedelta(seconds=round((now - since).total_seconds())))
    evidence = earlier.evidence if earlier is not None else ()
    texts = [] if over else [known.problem]
    if earlier is None:
        newest = (
            f"that of step {durable.checkpoint.step:,}, of {durable.committed_at:%H:%M:%S} UTC" if durable else "none"
        )
        texts.append(f"the newest durable checkpoint of this run was {newest}")
    signs = (Evidence(time=now, source=EvidenceSource.AGENT, text=text) for text in texts)
    texts_known = {sign.text for sign in evidence}
    evidence = (*evidence, *(sign for sign in signs if sign.text not in texts_known))[-KEPT_EVIDENCE:]
    title = f"no checkpoint could be stored for {took}" if over else "no checkpoint can be stored"
    entry = new_entry(
        state,
        Observation(storage=True),
        f"{title}; training continued",
        at=since,
        now=now,
        evidence=evidence,
        considered=(_NO_STOP,),
    )
    return put(state, entry.replace(number=earlier.number, noticed_at=earlier.noticed_at) if earlier else entry)


def observe_start_over(
    state: RoleInJob, node: NodeState, damages: tuple[str, ...], *, since: datetime, now: datetime
) -> RoleInJob:
    """Records that the script started over beside damaged checkpoints.

    Args:
        state: The job.
        node: The node of rank 0, which reports it.
        damages: Each checkpoint with its damage.
        since: The time of the report.
        now: The present time.
    """
    signs = (Evidence(time=since, source=EvidenceSource.AGENT, rank=node.rank, text=damage) for damage in damages)
    entry = new_entry(
        state,
        Observation(started_over=True),
        "no checkpoint in storage could be loaded: the script started over",
        at=since,
        now=now,
        evidence=signs,
        considered=(_NO_STOP_OF_JOB,),
    )
    return put(state, entry)


def observe_bad_number(state: RoleInJob, seen: SeenNumber, text: str, now: datetime) -> RoleInJob:
    """Records a number that is not finite and interrupts nothing. Those of one world are one entry."""
    samples = f"; {'; '.join(seen.number.samples)}" if seen.number.samples else ""
    sign = Evidence(time=seen.time, source=EvidenceSource.AGENT, rank=seen.node, text=shorten(f"{text}{samples}"))
    earlier = begun(state, lambda seen: seen.bad_number)
    if earlier is not None:
        return put(state, add_sign(earlier, sign))
    entry = new_entry(
        state,
        Observation(bad_number=True),
        f"{text}; training continued",
        at=seen.time,
        now=now,
        evidence=[sign],
        considered=_NO_ROLLBACK.get(seen.number.kind, ()),
    )
    return put(state, entry)


def observe_missed_nodes(
    state: RoleInJob, title: str, evidence: Evidence, *, since: datetime, again: datetime, now: datetime
) -> RoleInJob:
    """Records that nodes for a larger world did not come. Those of one world are one entry.

    Args:
        state: The role.
        title: What did not come, for users.
        evidence: What is known of the nodes.
        since: When they were requested.
        again: When they are requested again.
        now: The present time.
    """
    why_not = f"scaling.patience is over; they are requested again at {again:%H:%M:%S} UTC"
    considered = (Considered(option="wait for them", why_not=why_not),)
    earlier = begun(state, lambda seen: seen.missed_nodes)
    if earlier is not None:
        return put(state, add_sign(earlier, evidence).replace(title=title, closed_at=now, considered=considered))
    entry = new_entry(
        state, Observation(missed_nodes=True), title, at=since, now=now, evidence=[evidence], considered=considered
    )
    return put(state, entry)


def observe_missed_goal(state: RoleInJob, evidence: Evidence, now: datetime) -> RoleInJob:
    """Records that no number of nodes reaches the goal of `scaling.policy`, and what would."""
    title = evidence.text.partition(": ")[0]
    seen, considered = Observation(missed_goal=True), (_NO_STOP_FOR_GOAL,)
    return put(state, new_entry(state, seen, title, at=now, now=now, evidence=[evidence], considered=considered))


def observe_new_goal(state: RoleInJob, title: str, evidence: Evidence, now: datetime) -> RoleInJob:
    """Records that a user has changed `scaling`."""
    return put(
        state, new_entry(state, Observation(new_goal=True), title, at=now, now=now, evidence=[evidence], considered=())
    )


def observe_sharing(state: RoleInJob, title: str, evidence: Evidence, now: datetime) -> RoleInJob:
    """Records that the sharing of the cluster has given nodes to the role, or taken some."""
    entry = new_entry(
        state, Observation(shared=True), title, at=now, now=now, evidence=[evidence], considered=(_NO_KEEPING,)
    )
    return put(state, entry)


def observe_smaller_requests(
    state: RoleInJob, title: str, evidence: Evidence, *, since: datetime, now: datetime
) -> RoleInJob:
    """Records that new nodes request less, since no machine had room for more."""
    seen, considered = Observation(smaller_requests=True), (_NO_WAITING_FOR_ROOM,)
    entry = new_entry(state, seen, title, at=since, now=now, evidence=[evidence], considered=considered)
    return put(state, entry)


def observe_unrepaired(state: RoleInJob, node: int, text: str, time: datetime, now: datetime) -> RoleInJob:
    """Records what would have ended a world, had a user not paused repairs. Those of one world are one entry."""
    sign = Evidence(time=time, source=EvidenceSource.AGENT, rank=node, text=shorten(text))
    earlier = begun(state, lambda seen: seen.unrepaired)
    if earlier is not None:
        return put(state, add_sign(earlier, sign))
    entry = new_entry(
        state,
        Observation(unrepaired=True),
        shorten(f"{text}; repairs were paused, and training continued"),
        at=time,
        now=now,
        evidence=[sign],
        considered=(_NO_REPAIR,),
    )
    return put(state, entry)


def observe_not_deterministic(
    state: RoleInJob, node: int, found: FoundCorruption, time: datetime, now: datetime
) -> RoleInJob:
    """Records, once for a job, that replays of its steps say nothing about devices."""
    if any(map(_of_replays, state.own_incidents)):
        return state
    signs = (Evidence(time=time, source=EvidenceSource.AGENT, rank=node, text=text) for text in found.checksums)
    entry = new_entry(
        state,
        Observation(not_deterministic=True),
        f"step {found.step:,} cannot be replayed: no device is checked",
        at=time,
        now=now,
        evidence=signs,
        considered=(_NO_BLAME,),
    )
    return put(state, entry)


def uncreated_nodes(state: RoleInJob) -> list[NodeState]:
    """Returns the nodes that the backend cannot create for now, other than for lack of capacity."""
    nodes = (node for node in state.nodes.values() if node.uncreated_since is not None)
    return [node for node in nodes if node.rank < state.nodes_max and not state.rests]


def observe_uncreated(state: RoleInJob, now: datetime) -> RoleInJob:
    """Records that nodes cannot be created beside a world that trains, at once, since that may last; and how long it
    lasted, once they are created. A job that lacks the nodes records it in the incident that it waits in."""
    nodes = uncreated_nodes(state)
    earlier = next((one for one in reversed(state.own_incidents) if _of_uncreated(one) and one.closed_at is None), None)
    trains = state.world is not None and state.interruption is None and state.open_incident is None
    if earlier is None and not (nodes and trains):
        return state
    ranks = sorted(
        {*(earlier.observation.uncreated if earlier and earlier.observation else ()), *(n.rank for n in nodes)}
    )
    known = earlier.evidence if earlier is not None else ()
    told = {sign.rank for sign in known}
    # The reason contains the incarnation's name, so only the first one of each node is kept.
    found = (
        Evidence(time=now, source=EvidenceSource.BACKEND, rank=node.rank, text=node.reason)
        for node in nodes
        if node.reason and node.rank not in told
    )
    started_at = earlier.started_at if earlier else min(node.uncreated_since or now for node in nodes)
    names, took = _names(tuple(ranks)), format_duration(timedelta(seconds=round((now - started_at).total_seconds())))
    entry = new_entry(
        state,
        Observation(uncreated=tuple(ranks)),
        f"{names} cannot be created" if nodes else f"{names} could not be created for {took}",
        at=started_at,
        now=now,
        evidence=(*known, *found),
        considered=(_NO_END,),
    ).replace(closed_at=None if nodes else now)
    if earlier is not None:
        entry = earlier.replace(
            title=entry.title, closed_at=entry.closed_at, observation=entry.observation, evidence=entry.evidence
        )
    return state if entry == earlier else put(state, entry)


def _of_pause(state: RoleInJob, entry: IncidentView) -> bool:
    """Whether the entry is about a pause of the role's present world."""
    in_this_world = (entry.role, entry.generation_before) == (state.role, state.generation)
    seen = entry.observation
    return in_this_world and seen is not None and bool(seen.unreachable or seen.stalled)


def _of_uncreated(entry: IncidentView) -> bool:
    return entry.observation is not None and bool(entry.observation.uncreated)


def _of_storage(entry: IncidentView) -> bool:
    return entry.observation is not None and entry.observation.storage


def _of_replays(entry: IncidentView) -> bool:
    return entry.observation is not None and entry.observation.not_deterministic


def _add(
    state: RoleInJob,
    node: NodeState,
    seen: Observation,
    evidence: tuple[Evidence, ...],
    *,
    since: datetime,
    until: datetime,
    now: datetime,
) -> RoleInJob:
    if not state.is_member(node) or state.between_stages or state.interruption is not None or state.outcome is not None:
        return state
    interrupted = (one for one in state.own_incidents if one.observation is None)
    if any(one.over_at is None or one.over_at > since for one in interrupted):
        # An incident of that time covers it.
        return state
    last = state.incidents[-1] if state.incidents else None
    if last is not None and last.observation and _of_pause(state, last) and (last.closed_at or until) >= since:
        seen = _union(last.observation, seen)
        since, until = min(last.started_at, since), max(last.closed_at or until, until)
        evidence = tuple(sorted((*last.evidence, *evidence), key=lambda sign: sign.time))[-KEPT_EVIDENCE:]
        kept, number, noticed_at = state.incidents[:-1], last.number, last.noticed_at
    else:
        kept, number, noticed_at = state.incidents, state.incident_count + 1, max(since, evidence[0].time)
    entry = IncidentView(
        number=number,
        role=state.role,
        title=_title(state, seen, until - since),
        started_at=since,
        noticed_at=noticed_at,
        closed_at=until,
        observation=seen,
        evidence=evidence,
        considered=(
            *((_NO_REPLACEMENT,) if seen.unreachable else ()),
            *((_NO_RESTART,) if seen.stalled else ()),
        ),
        generation_before=state.generation,
        nodes_before=state.world.nodes if state.world else 0,
    )
    return append(state, kept, entry)


def _union(one: Observation, other: Observation) -> Observation:
    return Observation(
        unreachable=tuple(sorted({*one.unreachable, *other.unreachable})),
        stalled=tuple(sorted({*one.stalled, *other.stalled})),
    )


def _title(state: RoleInJob, seen: Observation, duration: timedelta) -> str:
    took = format_duration(timedelta(seconds=round(duration.total_seconds())))
    nodes = state.world.nodes if state.world else 0
    silent = f"{_names(seen.unreachable)} could not be reached"
    if nodes > 1 and len(seen.unreachable) == nodes:
        silent = "no node could be reached, so the control plane or its network was away"
    if seen.stalled:
        return f"training stalled for {took} and continued by itself" + (f"; {silent}" if seen.unreachable else "")
    return f"{silent}, for {took}; no node reported that training stalled"


def _names(ranks: tuple[int, ...]) -> str:
    if len(ranks) > _NAMED:
        return f"{len(ranks)} nodes"
    return f"node{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
