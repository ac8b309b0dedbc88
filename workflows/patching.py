"""Determines the release whose behavior a run follows: see `perdure.workflows.policy.behavior`."""

from __future__ import annotations

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from perdure.workflows.policy.behavior import CURRENT, OLDEST, Behavior


def behavior_of_this_run() -> Behavior:
    """The behavior that this run began with; a new run begins with the current one. Call it once, in `workflow.init`.

    It records one marker, the patch ID `behavior-N`, as `workflow.patched` does.
    """
    newest_first = sorted(Behavior, reverse=True)
    return next(known for known in newest_first if known is OLDEST or workflow.patched(f"behavior-{known.value}"))


def newer_behavior_begins(followed: Behavior) -> bool:
    """Whether a run that follows an older behavior continues as new at this moment, to follow the current one.

    It does so at the first quiet moment that is not yet in its history. The answer is recorded where it is yes. A
    replay gives the recorded answer, so the patch ID belongs to this very moment.
    """
    moment = workflow.info().get_current_history_length()
    return followed < CURRENT and workflow.patched(f"behavior-{CURRENT.value}-from-{moment}")
