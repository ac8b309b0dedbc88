"""Recognizes messages of a group that arrive twice: a delivery that seemed to fail may have arrived, and is
repeated."""

from __future__ import annotations

from perdure.contract import GroupTransitions
from perdure.contract.transitions import AnyTransition
from perdure.workflows.policy.state.role import RoleState, TransitionsTaken


def accept(role: RoleState, message: GroupTransitions) -> tuple[RoleState, tuple[AnyTransition, ...] | None]:
    """Returns the role that remembers the message, and its transitions that are new; None where the message is a
    repeat.

    A group that was reset counts from an earlier moment, so its numbers say nothing about what it has sent before: all
    of such a message is new. Some of its transitions may have been taken before, which changes nothing.
    """
    if message.before is None:
        return role, message.transitions
    taken = role.taken.get(message.group, TransitionsTaken())
    if taken.run and message.runs and taken.run not in message.runs:
        taken = TransitionsTaken()
    if message.sequence <= taken.sequence:
        return role, None
    known = TransitionsTaken(
        sequence=message.sequence,
        transitions=message.before + len(message.transitions),
        run=message.runs[-1] if message.runs else "",
    )
    return (
        role.replace(taken={**role.taken, message.group: known}),
        message.transitions[max(0, taken.transitions - message.before) :],
    )


def begin_ownership_epoch(role: RoleState, group: int, ownership_epoch: str) -> RoleState:
    """Starts counting a group's messages from the beginning: it was started or adopted, and may be another one."""
    taken = {other: known for other, known in role.taken.items() if other != group}
    return role.replace(ownership_epochs={**role.ownership_epochs, group: ownership_epoch}, taken=taken)
