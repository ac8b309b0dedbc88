"""An agent has reported that a rank does not compute what the other ranks compute."""

from __future__ import annotations

from datetime import datetime

from perdure.contract import Corruption, CorruptionKind
from perdure.workflows.policy.behavior import Behavior
from perdure.workflows.policy.diagnosis.corruption import describe, end_world, failure_of
from perdure.workflows.policy.facts.rank_reports import accept_rank_report
from perdure.workflows.policy.record import observations
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.node import NodeFailure
from perdure.workflows.policy.state.role import WrongResult

_KEPT = 32
"""Wrong results that are kept while repairs are paused: the job's state carries them, and more name no device."""


def on_corruption(state: RoleInJob, report: Corruption, now: datetime) -> RoleInJob:
    """Takes in a finding about a rank of the current world, and ends that world unless no device can be wrong."""
    found = report.found
    state, node = accept_rank_report(state, report, now, rank=found.rank, step=found.step, about="a wrong result")
    if node is None or state.finished:
        return state
    if found.kind in (CorruptionKind.NOT_DETERMINISTIC, CorruptionKind.UNKNOWN):
        return observations.observe_not_deterministic(state, node.rank, found, report.time, now)
    failure = failure_of(node, found, report.time)
    if state.repairs_paused_until is not None:
        state = _keep(state, failure, generation=report.generation)
        return observations.observe_unrepaired(state, node.rank, describe(found, node.host), report.time, now)
    return end_world(state, failure, now, generation=report.generation)


def _keep(state: RoleInJob, failure: NodeFailure, *, generation: int) -> RoleInJob:
    if state.behavior < Behavior.RELEASE_0_4:
        return state
    others = (one for one in state.wrong_results if one.generation == generation and one.failure.rank != failure.rank)
    kept = (*others, WrongResult(generation=generation, failure=failure))[:_KEPT]
    return state.replace(wrong_results=kept)
