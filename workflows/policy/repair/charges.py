"""Charges restarts to two budgets, once per interruption: restarts in a sliding window, and those that gain no step.

The steps that were made are compared with those before the last failure that was charged.
"""

from __future__ import annotations

from datetime import timedelta

from perdure.contract import FailureClass, ProgressSource
from perdure.workflows.policy.behavior import Behavior
from perdure.workflows.policy.diagnosis.failures import (
    FAILURE_CLASSES,
    NEED_PROGRESS,
    NODE_FAILURES,
    USERS_OWN,
    VICTIMS,
)
from perdure.workflows.policy.repair.case import Case, Verdict
from perdure.workflows.policy.state.budget import follows, made_progress, within_window
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.memory import EarlyEnd, RaisedError
from perdure.workflows.policy.state.node import NodeFailure, NodeState

_EARLY = timedelta(minutes=1)
"""The time from the decision on a world within which an end is an early one; a busy machine imports torch in it."""

_LASTING = timedelta(hours=1)
"""The time from the decision on a world after which another failure than the last one begins a new series."""


def restarts_in_window(case: Case) -> int:
    """The restarts that use up the budget."""
    return len(within_window(case.state.restarts, now=case.now, window=case.job.retry.window))


def continue_from(state: RoleInJob, step: int, *, tries_older: bool) -> RoleInJob:
    """Records the saved step that a world continues from, so that progress is compared with that of the training which
    goes on: after a return to an older step the first new one is progress, and so is what follows a newer one.

    Args:
        state: The role.
        step: The step.
        tries_older: Whether it is older because the job failed after newer ones. Then it shows progress by coming
            further than they did.
    """
    known = state.memory
    if state.behavior < Behavior.RELEASE_0_4 or step == known.continued_from:
        return state
    if known.continued_from is None:
        return state.replace(memory=known.replace(continued_from=step))
    if tries_older and step < known.continued_from:
        return state
    return state.replace(memory=known.replace(continued_from=step, best_step=min(known.best_step, step)))


def failures_without_progress(state: RoleInJob, culprit: NodeFailure) -> int:
    """The number of failures in a row that need progress in between and made none, including this one."""
    known = state.memory
    if culprit.failure not in NEED_PROGRESS and not _peer_ended_at_a_step(state, culprit):
        return known.failures_without_progress
    if made_progress(state.progress, best_step=known.best_step, last_generation_steps=known.last_generation_steps):
        return 0
    if culprit.failure not in USERS_OWN and _continued_further(state):
        return 0
    if _is_another_after_long(state, culprit):
        return 0
    return known.failures_without_progress + 1


def _is_another_after_long(state: RoleInJob, culprit: NodeFailure) -> bool:
    """Whether a world that has lasted was ended by another failure than the one before it, where no step is reported.

    Counted steps begin at 0 in each world, and there are none of a program without an optimizer of torch's, or with a
    compiled one: they do not tell whether worlds of days come further. What always fails fails the same way.
    """
    known, progress, begun = state.memory, state.progress, state.world_decided_at
    if state.behavior < Behavior.RELEASE_0_4 or known.last_failure is None or begun is None:
        return False
    if (progress is not None and progress.source is ProgressSource.REPORTED) or culprit.time - begun < _LASTING:
        return False
    if culprit.failure is not known.last_failure:
        # A kill in between says nothing about the failures before and after it.
        return known.last_failure in NEED_PROGRESS
    last = known.last_error
    return last is not None and culprit.raised_at not in ("", last.raised_at)


def _continued_further(state: RoleInJob) -> bool:
    """Whether the failed world continued from a later step than the one before it. Its steps count from 0, and networks
    break when they like: worlds may get less far each time by chance, while the training goes on."""
    restored, known = _restored_step(state), state.memory
    counts = state.behavior >= Behavior.RELEASE_0_4 and known.last_failure is not None
    return counts and restored is not None and restored > known.restored_step


def _restored_step(state: RoleInJob) -> int | None:
    """The step from which the present world continued; None where it loaded none by a checkpointer."""
    known = state.checkpoints
    return known.restored_step if state.world is not None and known.restored_generation == state.generation else None


def _peer_ended_at_a_step(state: RoleInJob, culprit: NodeFailure) -> bool:
    """Whether ranks that stepped have lost another one, and no node reports why it is gone. A rank that ends by itself
    without an error, as by an early stop on rank 0 alone, does so again at the same step.

    Before the first step it is mostly the network, which the budget of restarts tolerates for longer.
    """
    progress = state.progress
    stepped = progress is not None and progress.generation_steps > 0
    return state.behavior >= Behavior.RELEASE_0_4 and culprit.failure is FailureClass.PEER_LOST and stepped


def happens_again(case: Case) -> bool:
    """Whether the last failure has come again although it was tried once more, at the same step."""
    again = case.traits.once_more and case.culprit.failure is case.state.memory.last_failure
    return again and failures_without_progress(case.state, case.culprit) > 0


def raised_again(case: Case) -> RaisedError | None:
    """The culprit's error with all machines that have shown it in a row, if the last failure was the same one and no
    step was gained since."""
    known, found = case.state.memory.last_error, _raised(case)
    if known is None or found is None or known.raised_at != found.raised_at:
        return None
    if not failures_without_progress(case.state, case.culprit):
        return None
    return known.on(*found.machines)


def early_end(case: Case) -> EarlyEnd | None:
    """The culprit's end, with how often in a row it came, if its class says neither who caused it nor that another node
    did, and it came soon after the start of the world and before a step, or without any ranks."""
    culprit, state = case.culprit, case.state
    if culprit.failure in NEED_PROGRESS | NODE_FAILURES | VICTIMS or (culprit.exit_code, culprit.signal) == (
        None,
        None,
    ):
        return None
    # However long a command works without ranks, the next try gains nothing on it.
    without_ranks = state.between_stages or state.world is None
    if not without_ranks:
        stepped = any(node.stepped >= state.generation for node in state.members)
        if stepped or state.world_decided_at is None or culprit.time - state.world_decided_at > _EARLY:
            return None
    end = EarlyEnd(
        rank=culprit.rank,
        exit_code=culprit.exit_code,
        signal=culprit.signal,
        generation=state.generation,
        without_ranks=without_ranks,
    )
    return end.after(state.memory.early_end)


def note_error(state: RoleInJob, failure: NodeFailure) -> RoleInJob:
    """Adds the machine of a node that reports the error of the last failure, too: most such reports come after the
    decision."""
    known = state.memory.last_error
    if known is None or known.raised_at != failure.raised_at:
        return state
    known = known.on(machine_of(state.nodes[failure.rank]))
    return state.replace(memory=state.memory.replace(last_error=known))


def machine_of(node: NodeState) -> str:
    """The name of a node's machine; of the node, where its machine is not known."""
    return node.host or f"node {node.rank}.{node.incarnation}"


def _raised(case: Case) -> RaisedError | None:
    """The error of the culprit, if it is the script's own, with the machines that show it."""
    raised_at = case.culprit.raised_at
    if not raised_at or not case.traits.recurs:
        return None
    shows = (case.state.nodes[one.rank] for one in case.interruption.failures if one.raised_at == raised_at)
    return RaisedError(raised_at=raised_at).on(*map(machine_of, shows))


def belongs_to_the_last(case: Case, failure: FailureClass) -> bool:
    """Whether a lost node belongs to those that the last restart was for."""
    return failure in NODE_FAILURES and follows(case.state.restarts, now=case.now, within=case.job.retry.same_loss)


def charge(case: Case, verdict: Verdict) -> RoleInJob:
    """Charges the verdict to the budgets, once per interruption."""
    state, failure, progress = case.state, verdict.failure, case.state.progress
    if failure is None or case.interruption.counted:
        return state
    reported = progress is not None and progress.source is ProgressSource.REPORTED
    # The next attempt counts its steps anew, and is compared with the last one that failed.
    after = state.replace(progress=progress if reported else None)
    if not FAILURE_CLASSES[failure].counts:
        return after
    if not verdict.stop and not belongs_to_the_last(case, failure):
        restarts = within_window(state.restarts, now=case.now, window=case.job.retry.window)
        after = after.replace(restarts=(*restarts, case.now), restart_count=state.restart_count + 1)
    best = state.memory.best_step
    charged = state.memory.replace(
        last_failure=failure,
        last_error=raised_again(case) or _raised(case),
        early_end=early_end(case),
        failures_without_progress=failures_without_progress(state, case.culprit),
        best_step=max(best, progress.step) if progress is not None and reported else best,
        last_generation_steps=progress.generation_steps if progress is not None else -1,
        restored_step=-1 if (restored := _restored_step(state)) is None else restored,
    )
    return after.replace(memory=charged)
