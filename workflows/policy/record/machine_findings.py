"""Records what was found of machines and interrupted nothing: slow ranks, what an experiment has shown about one, and
checks that machines have failed.

As other observations, these are closed entries among the incidents, so that `perdure explain` tells of a machine what
is known of it.
"""

from __future__ import annotations

from datetime import datetime

from perdure.contract import (
    Check,
    Considered,
    Evidence,
    EvidenceSource,
    IncidentView,
    Observation,
    SlowCause,
    Slowness,
    Straggler,
)
from perdure.contract.base import shorten
from perdure.workflows.policy.diagnosis.preflight import describe
from perdure.workflows.policy.record.incidents import KEPT_EVIDENCE
from perdure.workflows.policy.record.observations import append
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.node import NodeState

_NOT_TAKEN_IN = Considered(
    option="take it in", why_not="a second run of the check says the same, and other nodes pass it"
)

_NO_REPLACEMENT_OF_SUSPECT = Considered(
    option="replace the node", why_not="its ranks have restarted and train; the same failure again tells more"
)


def observe_straggler(state: RoleInJob, found: Straggler, text: str, now: datetime, *, why_not: str) -> RoleInJob:
    """Records a rank for which all others wait, once in a world. Those of one world are one entry.

    Args:
        state: The job.
        found: The rank.
        text: Describes it, for people.
        now: The present time.
        why_not: Why its node is not replaced at once.
    """
    sign = Evidence(time=now, source=EvidenceSource.AGENT, rank=found.node, text=text)
    begun = next((one for one in reversed(state.own_incidents) if _of_straggler(state, one)), None)
    if begun is not None and begun.observation is not None:
        known = begun.observation.stragglers
        if any(one.rank == found.rank for one in known):
            return state
        seen = begun.observation.replace(stragglers=(*known, found)[:KEPT_EVIDENCE])
        entry = begun.replace(observation=seen, evidence=(*begun.evidence, sign)[:KEPT_EVIDENCE])
        return state.replace(incidents=tuple(entry if one.number == entry.number else one for one in state.incidents))
    entry = IncidentView(
        number=state.incident_count + 1,
        role=state.role,
        title=f"rank {found.rank} is slow, and the others wait for it; training continued",
        started_at=now,
        noticed_at=now,
        closed_at=now,
        observation=Observation(stragglers=(found,)),
        evidence=(sign,),
        considered=(Considered(option="replace the node", why_not=why_not),),
        generation_before=state.generation,
        nodes_before=state.world.nodes if state.world else 0,
    )
    return append(state, state.incidents, entry)


def observe_verdict(state: RoleInJob, found: Slowness, sign: Evidence, now: datetime) -> RoleInJob:
    """Records what an experiment has shown about a slow rank, where nothing follows from it."""
    rank = f"rank {found.rank.rank}"
    titles = {
        SlowCause.MACHINE: f"node {found.rank.node} is slow at another place, too, and the job has no other for it",
        SlowCause.PLACE: f"{rank} is slow because of its own work, not of its machine",
        SlowCause.NEITHER: f"{rank} and its node are as fast as the others since they were moved",
    }
    whys = {
        SlowCause.MACHINE: "the job creates no other node: its backend does not, or recovery.on_capacity_loss is fail",
        SlowCause.PLACE: "the rank is slow on another machine, too",
    }
    cause = found.cause or SlowCause.UNKNOWN
    entry = IncidentView(
        number=state.incident_count + 1,
        role=state.role,
        title=f"{titles.get(cause, f'why {rank} was slow is not known')}; training continued",
        slowness=found,
        started_at=now,
        noticed_at=now,
        closed_at=now,
        observation=Observation(stragglers=(found.rank,)),
        evidence=(sign,),
        considered=(Considered(option="replace the node", why_not=whys.get(cause, "nothing speaks against it")),),
        generation_before=state.generation,
        nodes_before=state.world.nodes if state.world else 0,
    )
    return append(state, state.incidents, entry)


def observe_failed_check(
    state: RoleInJob, node: NodeState, checks: tuple[Check, ...], now: datetime, *, taken_in: str = ""
) -> RoleInJob:
    """Records that the machine of a new node fails checks.

    Args:
        state: The job.
        node: The node.
        checks: The checks that have failed.
        now: The present time.
        taken_in: Why the node is taken in nevertheless; empty where it is not.
    """
    texts = [shorten(f"node {node.rank}: {describe(check)}") for check in checks]
    what = f"node {node.rank} {'was taken in although it fails a check' if taken_in else 'was not taken in'}"
    other = Considered(option="replace the node", why_not=taken_in) if taken_in else _NOT_TAKEN_IN
    entry = IncidentView(
        number=state.incident_count + 1,
        role=state.role,
        title=shorten(f"{what}: {describe(checks[0])}"),
        started_at=node.checked_at or now,
        noticed_at=now,
        closed_at=now,
        observation=Observation(failed_check=True, refused=not taken_in),
        evidence=tuple(
            Evidence(time=node.checked_at or now, source=EvidenceSource.AGENT, rank=node.rank, text=text)
            for text in texts[:KEPT_EVIDENCE]
        ),
        considered=(other,),
        generation_before=state.generation,
        nodes_before=state.world.nodes if state.world else 0,
    )
    return append(state, state.incidents, entry)


def observe_suspect_machine(state: RoleInJob, node: NodeState, checks: tuple[Check, ...], now: datetime) -> RoleInJob:
    """Records that a machine failed checks after a failure that may be its own."""
    texts = [node.suspicion, *(shorten(f"node {node.rank}: {describe(check)}") for check in checks)]
    entry = IncidentView(
        number=state.incident_count + 1,
        role=state.role,
        title=shorten(f"the machine of node {node.rank}, {node.host}, failed a check: {describe(checks[0])}"),
        started_at=node.checked_at or now,
        noticed_at=now,
        closed_at=now,
        observation=Observation(failed_check=True, suspected=True),
        evidence=tuple(
            Evidence(time=node.checked_at or now, source=EvidenceSource.AGENT, rank=node.rank, text=text)
            for text in texts[:KEPT_EVIDENCE]
        ),
        considered=(_NO_REPLACEMENT_OF_SUSPECT,),
        generation_before=state.generation,
        nodes_before=state.world.nodes if state.world else 0,
    )
    return append(state, state.incidents, entry)


def _of_straggler(state: RoleInJob, entry: IncidentView) -> bool:
    """Whether the entry is about slow ranks of the role's present world."""
    found = entry.observation is not None and bool(entry.observation.stragglers)
    return found and entry.generation_before == state.generation
