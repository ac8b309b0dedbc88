"""Records pauses that ended by themselves: nodes that could not be reached, ranks that stalled and stepped again.

Nothing was interrupted and nothing was done, so an observation is no interruption: it is written when it is over, as a
closed entry among the incidents, so that `perdure explain` can account for a pause that nothing else explains. Pauses
that overlap are one entry: a partition silences several nodes, and ranks on both sides of it stall.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from perdure.spec.durations import format_duration
from workflows.messages import Considered, Evidence, EvidenceSource, IncidentView, Observation
from workflows.policy.incidents import KEPT_EVIDENCE, KEPT_INCIDENTS
from workflows.policy.state import JobState, NodeState

SHORTEST = timedelta(seconds=10)
"""Shorter silences are left out: a restart of an agent or of a worker looks the same."""

KEPT = 10
"""Observations that a job keeps; older ones make room for incidents."""

_NAMED = 4

_NO_REPLACEMENT = Considered(
    option="replace the node",
    why_not="a node that cannot be reached may train: nothing reported that its ranks had failed",
)
_NO_RESTART = Considered(
    option="restart the ranks", why_not="a long evaluation or a slow disk looks the same from outside"
)


def observe_reachable(state: JobState, node: NodeState, now: datetime) -> JobState:
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


def observe_stall_ended(state: JobState, node: NodeState, at: datetime, now: datetime) -> JobState:
    """Records that the ranks of a node step again; `node` is its state before."""
    since = node.stalled_since
    if since is None or state.world is None or node.stalled_in != state.world.generation:
        return state
    evidence = (
        Evidence(
            time=since,
            source=EvidenceSource.AGENT,
            rank=node.rank,
            text=f"node {node.rank} made its last step before the pause",
        ),
        Evidence(time=at, source=EvidenceSource.AGENT, rank=node.rank, text=f"node {node.rank} stepped again"),
    )
    return _add(state, node, Observation(stalled=(node.rank,)), evidence, since=since, until=max(since, at), now=now)


def _add(
    state: JobState,
    node: NodeState,
    seen: Observation,
    evidence: tuple[Evidence, ...],
    *,
    since: datetime,
    until: datetime,
    now: datetime,
) -> JobState:
    if not state.is_member(node) or state.between_stages or state.interruption is not None or state.outcome is not None:
        return state
    interrupted = (one for one in state.incidents if one.observation is None)
    if any(one.over_at is None or one.over_at > since for one in interrupted):
        # An incident of that time covers it.
        return state
    last = state.incidents[-1] if state.incidents else None
    merges = last is not None and last.observation is not None and last.generation_before == state.generation
    if last is not None and merges and last.observation and (last.closed_at or until) >= since:
        seen = _union(last.observation, seen)
        since, until = min(last.started_at, since), max(last.closed_at or until, until)
        evidence = tuple(sorted((*last.evidence, *evidence), key=lambda sign: sign.time))[-KEPT_EVIDENCE:]
        kept, number, noticed_at = state.incidents[:-1], last.number, last.noticed_at
    else:
        kept, number, noticed_at = state.incidents, state.incident_count + 1, max(since, evidence[0].time)
    entry = IncidentView(
        number=number,
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
    observed = [one.number for one in (*kept, entry) if one.observation is not None]
    forgotten = set(observed[:-KEPT])
    incidents = tuple(one for one in (*kept, entry) if one.number not in forgotten)[-KEPT_INCIDENTS:]
    return state.replace(incidents=incidents, incident_count=max(state.incident_count, number))


def _union(one: Observation, other: Observation) -> Observation:
    return Observation(
        unreachable=tuple(sorted({*one.unreachable, *other.unreachable})),
        stalled=tuple(sorted({*one.stalled, *other.stalled})),
    )


def _title(state: JobState, seen: Observation, duration: timedelta) -> str:
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
