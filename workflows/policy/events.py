"""Events that a job receives. `workflows.policy.job.decide` decides on each of them."""

from __future__ import annotations

from workflows.messages import Failure, Finished, JoinRequest, Message, NodeTransition, NodeView


class FailureReported(Message):
    """An agent's `failure`."""

    failure: Failure


class NodeFinished(Message):
    """An agent's `finished`."""

    finished: Finished


class TransitionSeen(Message):
    """One node changed, as its group saw it."""

    transition: NodeTransition


class GroupAdopted(Message):
    """A group that already ran has sent its table: the job was reset, or adopted the group."""

    group: int
    nodes: tuple[NodeView, ...]


class GroupWoundDown(Message):
    """A group has deleted all its nodes."""

    group: int


class JoinRequested(Message):
    """A machine that a user or a scheduler started requests a place, and the job does not refuse it."""

    request: JoinRequest


class TimePassed(Message):
    """A deadline of `workflows.policy.timers` may have passed."""


class ScaleRequested(Message):
    minimum: int
    maximum: int
    reason: str = ""


class SuspendRequested(Message):
    reason: str = ""


class ResumeRequested(Message):
    reason: str = ""


class RestartRequested(Message):
    reason: str = ""


class RelaunchRequested(Message):
    rank: int
    reason: str = ""


class CancelRequested(Message):
    reason: str = ""


Event = (
    FailureReported
    | NodeFinished
    | TransitionSeen
    | GroupAdopted
    | GroupWoundDown
    | JoinRequested
    | TimePassed
    | ScaleRequested
    | SuspendRequested
    | ResumeRequested
    | RestartRequested
    | RelaunchRequested
    | CancelRequested
)
