"""Recognises what a group delivers twice: a delivery that seemed to fail may have arrived, and is repeated."""

from __future__ import annotations

from workflows.messages import GroupTransitions, NodeTransition
from workflows.policy.state import JobState, TransitionsTaken


def accept(state: JobState, message: GroupTransitions) -> tuple[JobState, tuple[NodeTransition, ...] | None]:
    """The edges that were not taken before, and the state that remembers them; None where the message is a repeat."""
    if message.before is None:
        return state, message.transitions
    taken = state.taken.get(message.group, TransitionsTaken())
    if message.sequence <= taken.sequence:
        return state, None
    known = TransitionsTaken(sequence=message.sequence, transitions=message.before + len(message.transitions))
    return (
        state.changed(taken={**state.taken, message.group: known}),
        message.transitions[max(0, taken.transitions - message.before) :],
    )


def begin_ownership_epoch(state: JobState, group: int, ownership_epoch: str) -> JobState:
    """A group is started or adopted: it may be another one, which counts from the beginning."""
    taken = {other: known for other, known in state.taken.items() if other != group}
    return state.changed(ownership_epochs={**state.ownership_epochs, group: ownership_epoch}, taken=taken)
