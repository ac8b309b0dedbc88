"""Recognizes messages of a group that arrive twice: a delivery that seemed to fail may have arrived, and is
repeated."""

from __future__ import annotations

from perdure.contract import GroupTransitions
from perdure.contract.transitions import AnyTransition
from perdure.workflows.policy.state.role import RoleState, TransitionsTaken


def accept(role: RoleState, message: GroupTransitions) -> tuple[RoleState, tuple[AnyTransition, ...] | None]:
    """Returns the role that remembers the message, and its transitions that are new; None where the message is a
    repeat."""
    if message.before is None:
        return role, message.transitions
    taken = role.taken.get(message.group, TransitionsTaken())
    if message.sequence <= taken.sequence:
        return role, None
    known = TransitionsTaken(sequence=message.sequence, transitions=message.before + len(message.transitions))
    return (
        role.replace(taken={**role.taken, message.group: known}),
        message.transitions[max(0, taken.transitions - message.before) :],
    )


def begin_ownership_epoch(role: RoleState, group: int, ownership_epoch: str) -> RoleState:
    """Starts counting a group's messages from the beginning: it was started or adopted, and may be another one."""
    taken = {other: known for other, known in role.taken.items() if other != group}
    return role.replace(ownership_epochs={**role.ownership_epochs, group: ownership_epoch}, taken=taken)
