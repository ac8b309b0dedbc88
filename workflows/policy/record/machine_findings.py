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
    Observation,
    SlowCause,
    Slowness,
    Straggler,
)
from perdure.contract.base import shorten
from perdure.workflows.policy.diagnosis.preflight import describe
from perdure.workflows.policy.record.incidents import KEPT_EVIDENCE
from perdure.workflows.policy.record.observed import add_sign, begun, new_entry, put
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
    earlier = begun(state, lambda seen: bool(seen.stragglers))
    if earlier is not None and earlier.observation is not None:
        known = earlier.observation.stragglers
        if any(one.rank == found.rank for one in known):
            return state
        seen = earlier.observation.replace(stragglers=(*known, found)[:KEPT_EVIDENCE])
        return put(state, add_sign(earlier.replace(observation=seen), sign))
    entry = new_entry(
        state,
        Observation(stragglers=(found,)),
        f"rank {found.rank} is slow, and the others wait for it; training continued",
        at=now,
        now=now,
        evidence=[sign],
        considered=(Considered(option="replace the node", why_not=why_not),),
    )
    return put(state, entry)


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
    entry = new_entry(
        state,
        Observation(stragglers=(found.rank,)),
        f"{titles.get(cause, f'why {rank} was slow is not known')}; training continued",
        at=now,
        now=now,
        evidence=[sign],
        considered=(Considered(option="replace the node", why_not=whys.get(cause, "nothing speaks against it")),),
    )
    return put(state, entry.replace(slowness=found))


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
    what = f"node {node.rank} {'was taken in although it fails a check' if taken_in else 'was not taken in'}"
    entry = new_entry(
        state,
        Observation(failed_check=True, refused=not taken_in),
        shorten(f"{what}: {describe(checks[0])}"),
        at=node.checked_at or now,
        now=now,
        evidence=_signs(node, checks, now),
        considered=(Considered(option="replace the node", why_not=taken_in) if taken_in else _NOT_TAKEN_IN,),
    )
    return put(state, entry)


def observe_suspect_machine(state: RoleInJob, node: NodeState, checks: tuple[Check, ...], now: datetime) -> RoleInJob:
    """Records that a machine failed checks after a failure that may be its own."""
    signs = _signs(node, checks, now)
    entry = new_entry(
        state,
        Observation(failed_check=True, suspected=True),
        shorten(f"the machine of node {node.rank}, {node.host}, failed a check: {describe(checks[0])}"),
        at=node.checked_at or now,
        now=now,
        evidence=[signs[0].replace(text=node.suspicion), *signs],
        considered=(_NO_REPLACEMENT_OF_SUSPECT,),
    )
    return put(state, entry)


def _signs(node: NodeState, checks: tuple[Check, ...], now: datetime) -> list[Evidence]:
    """Returns a piece of evidence for each check that the machine of the node has failed."""
    return [
        Evidence(
            time=node.checked_at or now,
            source=EvidenceSource.AGENT,
            rank=node.rank,
            text=shorten(f"node {node.rank}: {describe(check)}"),
        )
        for check in checks
    ]
