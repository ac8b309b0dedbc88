"""Messages of the update `join`: between a job and a machine that a user or a scheduler started."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from workflows.messages.backends import NodeRequest
from workflows.messages.base import Message, Time


class JoinRequest(Message):
    """Update `join` of TrainingJob: requests a place among its nodes. A repeated request gets the same place."""

    node_id: str = Field(min_length=1, max_length=128)
    """Identifies the machine in its allocation. A process that joins under the same ID succeeds the previous one."""
    session: str = Field(min_length=8, max_length=64)
    """Identifies one joining process; each generates its own."""
    stay: int = Field(default=1, ge=1)
    """Counts the session's places: a higher number proves that all processes of the previous place have ended."""
    started_at: Time
    """When the session began, by its host's clock."""
    host: str = ""
    """The machine's name, for people."""
    place: int | None = Field(default=None, ge=0)
    """The node (slot) that the machine prefers, if it is free."""
    command: tuple[str, ...] | None = None
    """The command that the machine was started for; None accepts any job's command."""


class JoinAnswer(Message):
    """A place; or, while the job prepares it, the reason to request it again."""

    node: NodeRequest | None = None
    """Everything that the machine needs to become the node, including the token."""
    reason: str = ""
    """Why there is no node yet."""


class JoinRefusal(StrEnum):
    """Reasons why a job refuses a place: the type of the update's error."""

    NO_PLACE = "NoPlace"
    """No place is free; there may be one later."""
    DISPLACED = "Displaced"
    """A newer session has joined under the same node ID: this one is over."""
    OVER = "Over"
    """The place that this request was given no longer exists: the machine must request one with a new `stay`."""
    OTHER_COMMAND = "OtherCommand"
    """The machine was started for another command than the job's."""
    OTHER_BACKEND = "OtherBackend"
    """The job's backend creates its nodes itself."""
    ENDING = "Ending"
    """The job is ending."""
