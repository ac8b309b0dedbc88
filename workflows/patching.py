"""Determines the release whose behavior a run follows: see `perdure.workflows.policy.behavior`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from perdure.workflows.policy.behavior import CURRENT, OLDEST, Behavior

_START = 3
"""Events of a run when its first task begins: its start, and a task that is scheduled and started."""


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


def may_begin_after_reset() -> bool:
    """Whether this run may have been reset to its first task; call it once, at the start of the workflow's main method.

    Such a run does not see it: it begins with the same arguments. But its history has more than the three events of a
    start, as that of a run that was sent a signal at once.
    """
    return workflow.info().get_current_history_length() > _START and workflow.patched("begins-after-reset")


def bounds_group_run() -> bool:
    """Whether this run of a group lets telemetry that waits make room for newer, ends before its history is too large,
    and leases sparingly; call it once, in `workflow.init`."""
    return workflow.patched("newest-telemetry")


def starts_again_after_reset() -> bool:
    """Whether a workflow beside a job that has completed is started again where its job was reset."""
    return workflow.patched("companions-of-reset-jobs")


def bounds_grants() -> bool:
    """Whether this run of a dataset bounds what an exchange looks through; call it once, in `workflow.init`. An earlier
    run would take what it has granted for free when it is replayed."""
    return workflow.patched("bounded-grants")


def spaces_tries() -> bool:
    """Whether this run of a dataset tries shards that have failed again after a pause; call it once, in
    `workflow.init`. An earlier run has leased them at once."""
    return workflow.patched("spaced-tries")


def keeps_what_is_done() -> bool:
    """Whether a process that begins beside those that continue moves a dataset to no position in this run; call it
    once, in `workflow.init`. An earlier run has moved it."""
    return workflow.patched("stays-done")


def splits_here() -> bool:
    """Whether a message that is too large is split at this moment, as any release does that asks."""
    return workflow.patched(f"splits-transitions-{workflow.info().get_current_history_length()}")


def on_reset_of_this_run(follow: Callable[[], None]) -> None:
    """Calls `follow` when this run was reset to a task after its first one; call it once, in `workflow.init`.

    A run that was reset to its first task begins like any other. A later task has the state of that moment, and the
    server gives a run that is reset another random seed. Whether it is followed is recorded, as a run that was reset
    under a release that did not has to make the same commands when it is replayed.
    """
    loop = asyncio.get_running_loop()

    def decide() -> None:
        if workflow.patched(f"follows-reset-{workflow.info().get_current_history_length()}"):
            follow()

    def decide_soon(_seed: int) -> None:
        # Within the callback there is no workflow yet that could record anything.
        loop.call_soon(decide)

    workflow.register_random_seed_callback(decide_soon)
