"""Events that a job receives. `perdure.workflows.policy.decide.decide` decides on each of them."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from perdure.contract import (
    BadNumber,
    Corruption,
    Failure,
    Finished,
    JoinRequest,
    Message,
    NodesSuggested,
    NodeView,
    RoomSeen,
    ShardsSetAside,
    Ticket,
    World,
)
from perdure.contract.base import Time
from perdure.contract.transitions import AnyTransition


class GroupAdopted(Message):
    """A group that already ran has sent its table: the job was reset, or adopted the group."""

    group: int
    nodes: tuple[NodeView, ...]
    world: World | None = None
    """The newest world that the group was sent, without its members."""
    declined: bool = False
    """The group has declined a desired state: the job has known these nodes up to the task to which it was reset."""


class GroupWoundDown(Message):
    """A group has deleted all its nodes."""

    group: int


class TimePassed(Message):
    """A deadline of `perdure.workflows.policy.timers` may have passed."""


class ScaleRequested(Message):
    minimum: int
    maximum: int
    reason: str = ""
    resources: dict[str, str] = Field(default={})
    """What new nodes request of `cpu` and `memory`."""
    older: bool = False
    """As in `ScaleRequest`."""


class ScalingChanged(Message):
    """The specification of the role has another `scaling` than before."""

    change: str
    """Its fields that differ, for users."""
    reason: str = ""


class SuspendRequested(Message):
    reason: str = ""
    role: str = ""
    """The only role that is suspended; empty for the whole job."""


class ResumeRequested(Message):
    reason: str = ""
    role: str = ""
    """The only role that is resumed; empty for the whole job."""


class RestartRequested(Message):
    reason: str = ""
    older: bool = False
    """The ranks take an older state than the one that they wait for."""


class RelaunchRequested(Message):
    rank: int
    reason: str = ""
    incarnation: int = 0
    """The only incarnation that is replaced; 0 for the current one."""
    resources: dict[str, str] = Field(default={})
    """What this node requests of `cpu` and `memory` from then on."""


class TicketIssued(Message):
    """The owner made a ticket for joining through the gateway."""

    ticket: Ticket


class TicketRevoked(Message):
    """The owner has withdrawn a ticket: its machines lose their places."""

    id: str


class RepairsPaused(Message):
    """A user looks at ranks that do not step, or at wrong numbers: what does not die is left as it is."""

    until: Time
    reason: str = ""


class RepairsResumed(Message):
    """The user has looked."""


class CheckpointRequested(Message):
    """A user requests a checkpoint in storage."""

    number: int = 0
    """The number that the request has in all roles, at least; 0 for the next one of each."""


class CancelRequested(Message):
    reason: str = ""


RoleEvent = (
    AnyTransition
    | GroupAdopted
    | GroupWoundDown
    | JoinRequest
    | ScaleRequested
    | ScalingChanged
    | NodesSuggested
    | RoomSeen
    | RelaunchRequested
    | RestartRequested
)
"""Events that concern the nodes of one role, and do not name it. A restart without a role concerns all."""

Event = (
    RoleEvent
    | Failure
    | Finished
    | BadNumber
    | Corruption
    | TimePassed
    | SuspendRequested
    | ResumeRequested
    | TicketIssued
    | TicketRevoked
    | CheckpointRequested
    | RepairsPaused
    | RepairsResumed
    | ShardsSetAside
    | CancelRequested
)
"""What a role takes in."""


@dataclass(frozen=True)
class ForRole:
    """An event for one role; without it, the job's only role is meant."""

    role: str | None
    event: RoleEvent


AddressedEvent = Event | ForRole
"""What a job takes in."""


def plain(event: AddressedEvent) -> Event:
    """Returns the event without its address."""
    return event.event if isinstance(event, ForRole) else event
