"""Replaces nodes that are gone; meanwhile the job waits or continues with fewer, as its specification says."""

from __future__ import annotations

from perdure.base.words import count
from perdure.contract import AwaitNodes, RestartRanks, Shrink, Stop
from perdure.spec.recovery import CapacityLoss
from perdure.workflows.policy.checkpoints import holds, other_size
from perdure.workflows.policy.diagnosis.failures import FAILURE_CLASSES
from perdure.workflows.policy.record.action_words import replacement
from perdure.workflows.policy.repair.case import Case, Rejected, Verdict
from perdure.workflows.policy.world.rendezvous import usable


def decide(case: Case) -> Verdict | None:
    culprit, give_up = case.culprit, case.traits.give_up
    if give_up is None or not (give_up.at_once or culprit.rank in case.gone):
        return None
    state, recovery = case.state, case.job.recovery
    in_place = Rejected(RestartRanks(), give_up.why_not_in_place)
    title, choice = _what_is_gone(case), recovery.on_capacity_loss
    if choice is CapacityLoss.FAIL:
        reason = f"{title}, and recovery.on_capacity_loss is fail: {culprit.text}"
        rule = 'node-loss/4 "on_capacity_loss is fail: stop"'
        return case.blame(rule, Stop(reason=reason, exit_code=3), title=title, rejected=(in_place,))
    replace = case.replace(case.gone, between_worlds=state.between_stages)
    request = replacement(replace)
    if state.between_stages:
        return case.blame(
            'node-loss/5 "between two worlds: replace, disturb no other"',
            replace,
            title=f"{title}, {request}",
            rejected=(in_place, Rejected(RestartRanks(others=True), "their commands continue")),
        )
    survivors, needed = len(case.survivors), other_size.needed_nodes(state)
    size = usable(survivors, minimum=state.nodes_min, maximum=state.nodes_max, unit=state.unit)
    lost = other_size.why_needed(state) if needed is not None and survivors < needed else ""
    if size and choice is CapacityLoss.SHRINK:
        lost = lost or holds.obstacle(state, case.job, leaves=True)
    if lost:
        return case.blame(
            'node-loss/6 "fewer nodes would begin without the state: replace, then continue"',
            replace,
            AwaitNodes(patience=recovery.replace_timeout),
            title=f"{title}, {request}",
            rejected=(in_place, Rejected(Shrink(), lost)),
        )
    if size and choice is CapacityLoss.SHRINK:
        before = state.world.nodes if state.world else 0
        return case.blame(
            'node-loss/2 "n >= min: shrink"',
            Shrink(size=size, survivors=survivors),
            replace,
            title=f"{title}: {before:,} to {count(size, 'node')}, {request}",
            rejected=(in_place, Rejected(AwaitNodes(), "recovery.on_capacity_loss is shrink")),
        )
    too_few = f"{survivors} survivors are fewer than nodes.min = {state.nodes_min}"
    return case.blame(
        'node-loss/1 "replace, then continue"',
        replace,
        AwaitNodes(patience=recovery.replace_timeout),
        title=f"{title}, {request}",
        rejected=(in_place, Rejected(Shrink(), "recovery.on_capacity_loss is wait" if size else too_few)),
    )


def _what_is_gone(case: Case) -> str:
    """Lists each node that is given up, once, with its known state."""
    left = set(case.gone)
    parts: list[str] = []
    for failure, traits in FAILURE_CLASSES.items():
        if traits.give_up is None:
            continue
        ranks = sorted(left & case.interruption.ranks_with(failure))
        left.difference_update(ranks)
        if ranks:
            parts.append(f"node{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} {traits.give_up.what}")
    return ", ".join(parts)
