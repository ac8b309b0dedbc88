"""Decides which new nodes are taken into a world, by what the checks of their machines have found (`preflight`).

| a node | is |
|-|-|
| passes all checks | taken in |
| fails one | asked to check again, once |
| fails it again, and another node passes it | not taken in: it is replaced, and its machine is avoided |
| fails what every node fails, or is slower than before beside no other machine | taken in, and that is recorded |
| fails, after two in its place were refused | taken in: three bad machines are less likely than a bad check |

So no job waits for a machine that there is not. Nodes that have begun to check are waited for, for a moment: beside
their figures that of the first one means something.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from perdure.base.words import count
from perdure.contract import Check, LossCause, NodeChecks, NodePhase
from perdure.workflows.policy.behavior import Behavior
from perdure.workflows.policy.diagnosis import preflight
from perdure.workflows.policy.record import incidents, machine_findings
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.node import NodeState
from perdure.workflows.policy.world import succession

WAIT = timedelta(seconds=10)
"""The time that a node which was checked waits for the figures of others."""

LONGEST = timedelta(minutes=3)
"""The time after which a node that waits for a world and has reported no checks has failed them: an agent reports
within a minute and a half whatever it finds."""

RUNS = 2

REFUSALS = 2
"""Nodes of one place that are refused in a row."""

_NO_REPORT = Check(name="report", problem=f"its agent has reported no checks within {LONGEST.seconds // 60} minutes")


def admit(state: RoleInJob, now: datetime) -> RoleInJob:
    """Takes in the nodes whose machines are known to be good enough, and gives up those that are not."""
    due = [node for node in state.nodes.values() if node.unchecked and _is_due(state, node, now)]
    if not due:
        return state
    judged = {one.node: one for one in preflight.judge(map(checks_of, filter(_is_alive, state.nodes.values())))}
    stand_out = preflight.stand_out(judged.values())
    others_report = any(one.checks for one in judged.values())
    for node in due:
        failed = judged[node.rank].failed or (() if node.checks else (_NO_REPORT,))
        if failed and node.checked_runs and max(node.checked_runs, node.check_runs) < RUNS:
            state = state.with_node(node.replace(check_runs=RUNS))
        elif (node.checked_runs < node.check_runs and not _is_overdue(state, node, now)) or not _is_settled(
            state, node, now
        ):
            continue
        elif not failed:
            state = _take_in(state, node)
        elif node.refusals >= REFUSALS:
            state = _take_in(state, node, failed, f"its place was refused {count(node.refusals, 'time')} in a row", now)
        elif node.rank in stand_out or (not node.checks and others_report):
            state = _refuse(state, node, stand_out.get(node.rank, failed), now)
        else:
            other = "machine" if any(check.is_slower_than_before for check in failed) else "node"
            state = _take_in(state, node, failed, f"no other {other} passes that check", now)
    return state


def next_looks(state: RoleInJob) -> list[datetime]:
    """The times until which nodes wait for figures, their own or those of others."""
    waiting = [node for node in state.nodes.values() if node.unchecked and node.alive]
    times = [node.checked_at + WAIT for node in waiting if node.checked_at is not None]
    ends = [max(end, _excused_until(state) or end) for end in ends_of_checks(state)]
    return [*times, *ends, *(node.since + LONGEST for node in waiting if node.phase is NodePhase.READY)]


def checks_of(node: NodeState) -> NodeChecks:
    """The checks of a node; of one that was taken in the figures."""
    kept = [key.partition(" ") for key in node.figures]
    figures = (Check(name=name, subject=subject, value=node.figures[f"{name} {subject}"]) for name, _, subject in kept)
    return NodeChecks(node=node.rank, host=node.host, checks=node.checks or tuple(figures))


def ends_of_checks(state: RoleInJob) -> list[datetime]:
    """The times until which agents report what they have measured."""
    waiting = (node for node in state.nodes.values() if node.unchecked and node.alive and not node.checked_runs)
    return [node.since + LONGEST for node in waiting if node.phase is NodePhase.READY]


def _is_due(state: RoleInJob, node: NodeState, now: datetime) -> bool:
    return node.unchecked and node.alive and (bool(node.checked_runs) or _is_overdue(state, node, now))


def _is_alive(node: NodeState) -> bool:
    return node.alive


def _is_overdue(state: RoleInJob, node: NodeState, now: datetime) -> bool:
    end = max(node.since + LONGEST, _excused_until(state) or node.since)
    return node.phase is NodePhase.READY and now >= end


def _excused_until(state: RoleInJob) -> datetime | None:
    """The time until which reports may still be on their way."""
    return state.control_lag_until if state.behavior >= Behavior.RELEASE_0_4 else None


def _is_settled(state: RoleInJob, node: NodeState, now: datetime) -> bool:
    """Whether the figures of the others are known that are being measured now."""
    measures = (NodePhase.JOINED, NodePhase.READY)
    awaited = [
        other
        for other in state.nodes.values()
        if other.unchecked and other.phase in measures and other.reachable and not other.checked_runs
    ]
    return not awaited or node.checked_at is None or now >= node.checked_at + WAIT


def _take_in(
    state: RoleInJob, node: NodeState, failed: tuple[Check, ...] = (), why: str = "", now: datetime | None = None
) -> RoleInJob:
    if failed and now is not None:
        state = machine_findings.observe_failed_check(state, node, failed, now, taken_in=why)
    figures = {f"{check.name} {check.subject}": check.value for check in node.checks if check.value is not None}
    return state.with_node(node.replace(unchecked=False, checks=(), figures=figures, refusals=0))


def _refuse(state: RoleInJob, node: NodeState, failed: tuple[Check, ...], now: datetime) -> RoleInJob:
    reason = f"its machine failed a check: {preflight.describe(failed[0])}"
    state = machine_findings.observe_failed_check(state, node, failed, now)
    state = incidents.waits(state, f"node {node.rank} was not taken in: {reason}")
    refused = succession.drop(
        state,
        node,
        phase=NodePhase.LOST,
        since=now,
        reason=reason,
        loss_cause=LossCause.MACHINE,
        failed_starts=node.refusals + 1,
        refusals=node.refusals + 1,
        unchecked=False,
        checks=(),
    )
    return state.with_node(refused)
