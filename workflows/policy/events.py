"""What a job can hear. Each event is decided on by `workflows.policy.job.decide`."""

from __future__ import annotations

from workflows.messages import Failure, Finished, JoinRequest, Message, NodeEdge, NodeView


class FailureReported(Message):
    """An agent's `failure`."""

    failure: Failure


class NodeFinished(Message):
    """An agent's `finished`."""

    finished: Finished


class EdgeSeen(Message):
    """One node changed, as its group saw it."""

    edge: NodeEdge


class GroupAdopted(Message):
    """A group that already ran told its table: the job was reset, or took over."""

    group: int
    nodes: tuple[NodeView, ...]


class GroupWoundDown(Message):
    """Nothing of the group is left."""

    group: int


class JoinAsked(Message):
    """A machine that a user or a scheduler started requests a place, and is not refused."""

    request: JoinRequest


class TimePassed(Message):
    """A deadline of `workflows.policy.timers` may be over."""


class ScaleAsked(Message):
    minimum: int
    maximum: int
    reason: str = ""


class SuspendAsked(Message):
    reason: str = ""


class ResumeAsked(Message):
    reason: str = ""


class RestartAsked(Message):
    reason: str = ""


class RelaunchAsked(Message):
    rank: int
    reason: str = ""


class CancelAsked(Message):
    reason: str = ""


Event = (
    FailureReported
    | NodeFinished
    | EdgeSeen
    | GroupAdopted
    | GroupWoundDown
    | JoinAsked
    | TimePassed
    | ScaleAsked
    | SuspendAsked
    | ResumeAsked
    | RestartAsked
    | RelaunchAsked
    | CancelAsked
)
