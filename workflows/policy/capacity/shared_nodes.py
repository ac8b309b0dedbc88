"""Follows the advice of the sharing of the cluster: `scaling.share`. The cluster advises, and the job decides.

Advice is only taken within what the specification or a user allows, and carried out as a user's request to scale is:
a world that shrinks first makes a checkpoint. A job that gets no advice trains on with the nodes that it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from perdure.base.words import count
from perdure.contract import Evidence, EvidenceSource, Exchange, NodesSuggested, Resized, Suggestion
from perdure.spec.job import JobSpec
from perdure.workflows.policy.capacity import missing_nodes, scaling
from perdure.workflows.policy.record import observations
from perdure.workflows.policy.state.job import RoleInJob


def follow(state: RoleInJob, advice: NodesSuggested, job: JobSpec, now: datetime) -> RoleInJob:
    """Changes the number of nodes as advised, as far as it may."""
    role, known = job.roles[state.role], state.scaling
    if not role.scaling.share or advice.number <= known.advice or state.is_over or state.suspended:
        return state
    known = known.replace(advice=advice.number)
    sizes = scaling.sizes_of(state, role)
    allowed = [size for size in sizes if size <= advice.nodes]
    if not allowed:
        # Fewer than the fewest never happens by itself.
        return state.replace(scaling=known)
    before, size = state.nodes_max, allowed[-1]
    places = missing_nodes.places(state, size)
    if places == before:
        return state.replace(scaling=known)
    why = describe(advice, before, size)
    known = known.replace(
        largest=scaling.largest_of(state), advised=Suggestion(nodes=size, why=why, time=now)
    ).with_resized(Resized(time=now, before=before, after=size, is_try=False))
    changed = range(min(before, size), max(before, size))
    state = state.replace(
        scaling=known,
        nodes_max=places,
        ready_since=None,
        request_reasons=state.request_reasons | dict.fromkeys(changed, why),
    )
    evidence = Evidence(time=now, source=EvidenceSource.BACKEND, text=why)
    return observations.observe_sharing(state, why, evidence, now)


def describe(advice: NodesSuggested, before: int, after: int) -> str:
    """Says what is given to or taken from the job, and who has or gets it."""
    parts = (
        [*_named(advice.of, "from"), *([f"{advice.free} that are free"] if advice.free else [])]
        if after > before or not advice.to
        else _named(advice.to, "to")
    )
    return f"the sharing of the cluster advises {count(after, 'node')} instead of {before:,}" + (
        f": {', '.join(parts)}" if parts else ""
    )


def _named(exchanged: Sequence[Exchange], preposition: str) -> list[str]:
    return [f"{one.nodes} {preposition} {one.job}" for one in exchanged]
