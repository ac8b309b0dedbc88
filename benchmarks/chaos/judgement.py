"""Checks the explanations of jobs against the injected faults: these are known, so each claim can be verified."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from perdure.contract import EvidenceSource, FailureClass, IncidentView

from .faults import INTERRUPTING, Fault, Kind

BEFORE = 15.0
"""Maximum seconds from a fault to its first evidence in an incident: a lease takes 10 s to lapse."""

SEES = {
    FailureClass.KILLED: {
        Kind.RANK,
        Kind.RANKS_OF_TWO_NODES,
        Kind.STAND_IN,
        Kind.WARM_INTERPRETER,
        Kind.TORCHRUN,
        Kind.COMMAND,
        Kind.LAUNCHER,
    },
    FailureClass.COMMAND_LOST: {Kind.TORCHRUN, Kind.COMMAND, Kind.LAUNCHER},
    FailureClass.NODE_LOST: {Kind.NODE, Kind.LAUNCHER, Kind.AGENT},
    FailureClass.DISRUPTED: {Kind.NODE, Kind.LAUNCHER},
    FailureClass.NODE_UNRESPONSIVE: {Kind.NODE, Kind.AGENT, Kind.FROZEN_AGENT, Kind.LAUNCHER},
}
"""The faults that can cause each failure class that an incident names."""


def doubts(job: str, incidents: Sequence[IncidentView], faults: Sequence[Fault]) -> list[str]:
    """Returns the claims of incidents that the faults do not support, as messages."""
    ours = [fault for fault in faults if fault.job == job and fault.processes]
    return [
        *(doubt for incident in incidents for doubt in _doubts_of(incident, ours)),
        *_untold(incidents, ours),
    ]


OFTEN = 3
"""A kind of process that was looked for this often, and never found, is not recognized."""


def never_hit(faults: Sequence[Fault]) -> list[Kind]:
    """Returns the kinds of faults that hit no process, however often they were tried: the site was spared of them."""
    tried = Counter(fault.kind for fault in faults)
    hit = {fault.kind for fault in faults if fault.processes}
    return [kind for kind, times in tried.items() if times >= OFTEN and kind not in hit]


def _doubts_of(incident: IncidentView, faults: Sequence[Fault]) -> list[str]:
    name = f"#{incident.number} {incident.title}"
    found: list[str] = []
    if incident.failure is None:
        return found
    begin = incident.started_at.timestamp()
    end = (incident.decided_at or incident.noticed_at).timestamp()
    near = [fault for fault in faults if begin - BEFORE <= fault.time <= end + 1]
    if not near:
        return [f"{name}: nothing was injected before it"]
    kinds = SEES.get(incident.failure)
    if kinds is not None and not any(fault.kind in kinds for fault in near):
        found.append(f"{name}: {incident.failure} after {_names(near)}")
    if kinds is None and incident.failure is not FailureClass.PEER_LOST:
        found.append(f"{name}: {incident.failure}, which was not injected")
    if incident.culprit is not None and not any(incident.culprit in fault.nodes for fault in near):
        found.append(f"{name}: culprit node {incident.culprit} after {_names(near)}")
    last = max(fault.time for fault in near)
    if incident.decided_at is not None and incident.decided_at.timestamp() - last > BEFORE:
        found.append(f"{name}: decided {incident.decided_at.timestamp() - last:.1f} s after {_names(near)}")
    if any(evidence.source is EvidenceSource.USER for evidence in incident.evidence):
        found.append(f"{name}: evidence of a user, and there was none")
    return found


def _untold(incidents: Sequence[IncidentView], faults: Sequence[Fault]) -> list[str]:
    """Returns the faults of a training job that no incident shows."""
    return [
        f"{fault.kind} of node {node} at {fault.time:.1f}: no incident shows it"
        for fault in faults
        if fault.kind in INTERRUPTING and fault.phase == "RUNNING"
        for node in fault.nodes
        # A node that is not in the world yet, as one that joins a smaller one, interrupts nothing.
        if fault.members is None or node in fault.members
        if not any(_shows(incident, node, fault.time) for incident in incidents)
    ]


def _shows(incident: IncidentView, node: int, time: float) -> bool:
    return any(
        evidence.rank == node and abs(evidence.time.timestamp() - time) < BEFORE for evidence in incident.evidence
    )


def _names(faults: Sequence[Fault]) -> str:
    return ", ".join(f"{fault.kind} of node {'+'.join(map(str, fault.nodes))}" for fault in faults)
