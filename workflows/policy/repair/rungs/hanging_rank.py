"""Ends a rank that hangs: in place first, then on another node, and with the job where the script itself hangs."""

from __future__ import annotations

from dataclasses import replace

from perdure.contract import FailureClass, Hang, HangKind, ReplaceNodes, RestartRanks
from perdure.spec.recovery import HangAction
from perdure.workflows.policy.record.action_words import replacement
from perdure.workflows.policy.repair import charges
from perdure.workflows.policy.repair.case import Case, Rejected, Verdict
from perdure.workflows.policy.repair.rungs.permanent_failure import stop


def decide(case: Case) -> Verdict | None:
    culprit, hang = case.culprit, case.interruption.hang
    if culprit.failure is not FailureClass.RANK_HANG or hang is None:
        return None
    return replace(_decide(case, hang), hang=hang)


def _decide(case: Case, hang: Hang) -> Verdict:
    culprit = case.culprit
    before = _hangs_before(case)
    if hang.at and any(_elsewhere(known, hang) for known in before) and _gains_nothing(case):
        reason = f"the script hangs on several nodes, in {hang.at}: {culprit.text}"
        return stop(case, 'hang/3 "the same line on another node: it is the script"', reason, 1)
    if hang.node is None:
        return Verdict(
            rule='hang/1 "ranks wait for each other: restart in place"',
            title=culprit.text,
            actions=(RestartRanks(ends_hang=True),),
            failure=culprit.failure,
            rejected=(Rejected(ReplaceNodes(), "no evidence names a node"),),
        )
    why, in_place = _why_replace(case, hang, before)
    if why and case.may_replace:
        replacing = case.replace((hang.node,), suspected=True)
        return case.blame(
            f'hang/2 "{why}: replace the node"',
            replacing,
            RestartRanks(others=True),
            title=f"{culprit.text}, {replacement(replacing)}",
            rejected=(Rejected(RestartRanks(), in_place),),
        )
    return case.blame(
        'hang/1 "a rank hangs: restart in place"',
        RestartRanks(ends_hang=True),
        title=culprit.text,
        rejected=(Rejected(ReplaceNodes(), "it is replaced if it hangs again"),),
    )


def _why_replace(case: Case, hang: Hang, before: list[Hang]) -> tuple[str, str]:
    """Why the node is replaced, for the rule's name, and why its ranks are not restarted there; both empty where they
    are."""
    if case.job.recovery.on_hang is HangAction.REPLACE:
        return "recovery.on_hang", "recovery.on_hang is replace"
    if hang.kind is HangKind.KERNEL:
        return "no signal ends it", "the kernel ends no process that sleeps in it"
    if any((known.node, known.incarnation) == (hang.node, hang.incarnation) for known in before):
        return "the same node again", "that was done for the last hang"
    return "", ""


def _hangs_before(case: Case) -> list[Hang]:
    """The hangs of the role within the window of the restart budget, without the present one."""
    since = case.now - case.job.retry.window
    past = (known for known in case.state.own_incidents if known.over_at is not None and known.noticed_at >= since)
    return [known.hang for known in past if known.hang is not None]


def _elsewhere(known: Hang, hang: Hang) -> bool:
    return known.at == hang.at and (known.node, known.incarnation) != (hang.node, hang.incarnation)


def _gains_nothing(case: Case) -> bool:
    return charges.failures_without_progress(case.state, case.culprit) > 0
