"""Recognizes messages of a group that arrive twice: a delivery that seemed to fail may have arrived, and is
repeated."""

from __future__ import annotations

from perdure.contract import GroupTransitions
from perdure.contract.transitions import AnyTransition
from perdure.workflows.policy.state.job import JobState, TransitionsTaken


def accept(state: JobState, message: GroupTransitions) -> tuple[JobState, tuple[AnyTransition, ...] | None]:
    """Returns the state that remembers the message, and its transitions that are new; None where the message is a
    repeat."""
    if message.before is None:
        return state, message.transitions
    taken = state.taken.get(message.group, TransitionsTaken())
    if message.sequence <= taken.sequence:
        return state, None
    known = TransitionsTaken(sequence=message.sequence, transitions=message.before + len(message.transitions))
    return (
        state.replace(taken={**state.taken, message.group: known}),
        message.transitions[max(0, taken.transitions - message.before) :],
    )


def begin_ownership_epoch(state: JobState, group: int, ownership_epoch: str) -> JobState:
    """Starts counting a group's messages from the beginning: it was started or adopted, and may be another one."""
    taken = {other: known for other, known in state.taken.items() if other != group}
    return state.replace(ownership_epochs={**state.ownership_epochs, group: ownership_epoch}, taken=taken)
