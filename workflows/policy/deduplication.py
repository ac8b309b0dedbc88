"""Recognises what a group delivers twice: a delivery that seemed to fail may have arrived, and is repeated."""

from __future__ import annotations

from workflows.messages import GroupEdges, NodeEdge
from workflows.policy.state import EdgesTaken, JobState


def accept(state: JobState, message: GroupEdges) -> tuple[JobState, tuple[NodeEdge, ...] | None]:
    """The edges that were not taken before, and the state that remembers them; None where the message is a repeat."""
    if message.before is None:
        return state, message.edges
    taken = state.taken.get(message.group, EdgesTaken())
    if message.sequence <= taken.sequence:
        return state, None
    known = EdgesTaken(sequence=message.sequence, edges=message.before + len(message.edges))
    return (
        state.changed(taken={**state.taken, message.group: known}),
        message.edges[max(0, taken.edges - message.before) :],
    )


def begin_tenure(state: JobState, group: int, tenure: str) -> JobState:
    """A group is started or adopted: it may be another one, which counts from the beginning."""
    taken = {other: known for other, known in state.taken.items() if other != group}
    return state.changed(tenures={**state.tenures, group: tenure}, taken=taken)
