"""An agent has reported that a rank does not compute what the other ranks compute."""

from __future__ import annotations

from datetime import datetime

from perdure.contract import Corruption, CorruptionKind, Evidence, EvidenceSource
from perdure.workflows.policy.diagnosis.corruption import describe, failure_of
from perdure.workflows.policy.diagnosis.interruptions import interrupt
from perdure.workflows.policy.facts.rank_reports import accept_rank_report
from perdure.workflows.policy.record import incidents, observations
from perdure.workflows.policy.state.job import RoleInJob

_NAMED = 4
"""Checksums that become evidence."""


def on_corruption(state: RoleInJob, report: Corruption, now: datetime) -> RoleInJob:
    """Takes in a finding about a rank of the current world, and ends that world unless no device can be wrong."""
    found = report.found
    state, node = accept_rank_report(state, report, now, rank=found.rank, step=found.step, about="a wrong result")
    if node is None or state.finished:
        return state
    if found.kind in (CorruptionKind.NOT_DETERMINISTIC, CorruptionKind.UNKNOWN):
        return observations.observe_not_deterministic(state, node.rank, found, report.time, now)
    if state.repairs_paused_until is not None:
        return observations.observe_unrepaired(state, node.rank, describe(found, node.host), report.time, now)
    state = interrupt(state, failure_of(node, found, report.time), now=now, generation=report.generation)
    for text in found.checksums[:_NAMED]:
        evidence = Evidence(time=report.time, source=EvidenceSource.AGENT, rank=node.rank, text=text)
        state = incidents.add_evidence(state, evidence, now=now)
    return state
