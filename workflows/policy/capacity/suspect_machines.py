"""Chooses the machines that are checked while their ranks restart anyway, and judges what these checks find.

| a failure | may be the machine's |
|-|-|
| a crash in native code, a fault of a device | memory or a device is damaged |
| a wrong result | a processor or a device computes wrongly |
| a rank that hangs in the kernel | a disk, a mount or a driver does not answer |
| anything that a rank began, on a machine on which the job has lost a node | it happens there again |

A few other machines are checked as well, to compare with. The request goes out with the next world, so nothing waits
for it. New nodes avoid a machine that fails; its node stays, since it trains.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from perdure.contract import Check, FailureClass, HangKind, NodeChecks, World
from perdure.workflows.policy.capacity import admission, node_avoidance
from perdure.workflows.policy.diagnosis import preflight
from perdure.workflows.policy.diagnosis.failures import VICTIMS
from perdure.workflows.policy.record import machine_findings
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.node import NodeState
from perdure.workflows.policy.state.role import Interruption

_RUNS = 2
"""Runs of the checks, of which the better one counts: the start of ranks disturbs one."""
_COMPARED = 3
"""Other machines that are checked as well."""
_CLASSES = (FailureClass.CRASH, FailureClass.DEVICE_FAULT, FailureClass.CORRUPTION)


def request_checks(state: RoleInJob, formed: World) -> RoleInJob:
    """Has the machines checked that may have caused the interruption which a new world ends."""
    interruption = state.interruption
    if interruption is None or interruption.requested is not None:
        return state
    members = {rank: state.nodes[rank] for rank in formed.members if state.nodes[rank].host}
    suspects = {rank: text for rank, text in _reasons(state, interruption).items() if rank in members}
    if not suspects:
        return state
    hosts = {members[rank].host for rank in suspects}
    others = [rank for rank, node in members.items() if node.host not in hosts][:_COMPARED]
    for rank in (*suspects, *others):
        node = members[rank]
        runs = max(node.check_runs, node.checked_runs) + _RUNS
        state = state.with_node(node.replace(check_runs=runs, checks=(), suspicion=suspects.get(rank, "")))
    return state


def judge(state: RoleInJob, now: datetime) -> RoleInJob:
    """Judges the nodes whose checks are complete, beside what is known of others. One that passes is judged again when
    further figures arrive."""
    suspects = [node for node in state.nodes.values() if node.alive and node.suspicion and _is_complete(node)]
    if not suspects:
        return state
    judged = {node.node: node for node in preflight.judge(map(admission.checks_of, _alive(state)))}
    is_final = all(_is_complete(node) for node in _alive(state))
    for node in suspects:
        failed = _own_failures(judged[node.rank], judged.values())
        if failed:
            state = machine_findings.observe_suspect_machine(state, node, failed, now)
            state = node_avoidance.suspect(state, node.host, now)
        if failed or is_final:
            text = preflight.describe(failed[0]) if failed else ""
            state = state.with_node(node.replace(suspicion="", failed_check=text))
    return state


def _reasons(state: RoleInJob, interruption: Interruption) -> dict[int, str]:
    """The nodes whose machines may be the cause, each with what happened there."""
    lost = {loss.host for loss in state.losses}
    found: dict[int, str] = {}
    for failure in interruption.failures:
        again = state.nodes[failure.rank].host in lost and bool(failure.ranks) and failure.failure not in VICTIMS
        if failure.failure in _CLASSES or again:
            found.setdefault(failure.rank, failure.text)
    hang = interruption.hang
    if hang is not None and hang.kind is HangKind.KERNEL and hang.node is not None:
        found.setdefault(hang.node, "a rank slept in the kernel")
    return found


def _own_failures(node: NodeChecks, others: Iterable[NodeChecks]) -> tuple[Check, ...]:
    """The failed checks that no other machine fails."""
    common = {check.name for other in others if other.host != node.host for check in other.failed}
    return tuple(check for check in node.failed if check.name not in common)


def _alive(state: RoleInJob) -> list[NodeState]:
    return [node for node in state.nodes.values() if node.alive]


def _is_complete(node: NodeState) -> bool:
    return node.checked_runs >= node.check_runs
