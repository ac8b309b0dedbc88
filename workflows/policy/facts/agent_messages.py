"""What the messages have in common that agents send to the job itself: which of them count, and their progress."""

from __future__ import annotations

from datetime import datetime, timedelta

from perdure.contract import AgentMessage, Progress, ProgressSource
from perdure.contract.courses import join_courses
from perdure.contract.peaks import join_peaks
from perdure.workflows.policy.behavior import Behavior
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.node import NodeState

CONTROL_LAG = timedelta(seconds=5)
"""A report that arrives so long after its agent has made it shows that the control plane was unavailable."""

CONTROL_LAG_GRACE = timedelta(seconds=15)
"""The time that agents may then take to poll again: the SDK's backoff grows to about 10 s."""

_REMEMBERED_SEQUENCES = 32


def accept_message(state: RoleInJob, message: AgentMessage, now: datetime) -> tuple[RoleInJob, NodeState] | None:
    """The sender's node; None where the message is a repeat, or not from a current incarnation."""
    sender = message.sender
    node = state.nodes.get(sender.rank)
    if node is None or not state.is_current(sender) or message.sequence in node.sequences:
        return None
    node = node.replace(sequences=(*node.sequences, message.sequence)[-_REMEMBERED_SEQUENCES:])
    state = state.with_node(node)
    if now - (message.reported_at or message.time) > CONTROL_LAG:
        state = state.replace(control_lag_until=now + CONTROL_LAG_GRACE)
    return state, node


def take_progress(state: RoleInJob, reported: Progress | None) -> RoleInJob:
    """Takes in the progress of a node, and the most that it has used of its machine."""
    if reported is None:
        return state
    if reported.generation > state.generation and state.behavior >= Behavior.RELEASE_0_4:
        # Nothing later would count as progress. A job that was reset soon learns in which generation its nodes are.
        reported = reported.replace(generation=state.generation)
    peaks = join_peaks((state.peaks, reported.peaks))
    return state.replace(progress=_newest(state, reported.replace(peaks=None)), peaks=peaks)


def _newest(state: RoleInJob, reported: Progress) -> Progress:
    """Returns the progress of the newest world, in which a lower step is not an older one: ranks begin with a
    checkpoint, and counts with 0. Of one world the furthest counts, as reports may be late."""
    known = state.progress
    if known is None:
        return reported
    return _newer(known, reported).replace(course=join_courses(known.course, reported.course))


def _newer(known: Progress, reported: Progress) -> Progress:
    if reported.source is not known.source:
        return reported if reported.source is ProgressSource.REPORTED else known
    if reported.generation != known.generation:
        return max(known, reported, key=lambda progress: progress.generation)
    return reported if reported.step >= known.step else known
