"""Waits for a culprit's report, for a backend that knows why it ends a node, or for the loss of more nodes."""

from __future__ import annotations

from datetime import datetime, timedelta

from perdure.contract import FailureClass, Wait
from perdure.workflows.policy.diagnosis.failures import GONE, NODE_FAILURES, VICTIMS
from perdure.workflows.policy.repair.case import Case, Verdict

_WORTH_WAITING = timedelta(milliseconds=100)


def decide(case: Case) -> Verdict | None:
    until = end_of_wait(case)
    if until is None or case.now >= until:
        return None
    return case.blame('reports/1 "wait for more reports"', Wait(until=until), rejected=())


def end_of_wait(case: Case) -> datetime | None:
    """The time until which more reports are awaited; None where the known ones are enough."""
    interruption, timing = case.interruption, case.job.timing
    since = interruption.since + interruption.excused
    certain = {failure.failure for failure in interruption.failures if failure.certain} - VICTIMS
    if certain:
        settles = len(case.state.members) * timing.rendezvous.settle_per_node
        return since + settles if certain & NODE_FAILURES and settles >= _WORTH_WAITING else None
    if interruption.ranks_with(*GONE):
        # The node's agent reports the end. The backend learns it from a kubelet, and knows of the drain or the
        # deletion.
        return since + timing.lease.timeout
    reported = {failure.rank for failure in interruption.failures}
    # After an outage the report of the step that followed comes a moment later.
    may_be_late = bool(interruption.ranks_with(FailureClass.HANG))
    if all(node.rank in reported for node in case.state.members if node.alive) and not may_be_late:
        return None
    return since + timing.rendezvous.victim_grace
