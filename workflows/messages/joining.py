"""Between a machine that a user or a scheduler started and the job that it would work for: the update `join`."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from workflows.messages.backends import NodeRequest
from workflows.messages.base import Message, Time


class JoinRequest(Message):
    """Update `join` of TrainingJob: asks for a place among its nodes. The same request twice gets the same place."""

    node_id: str = Field(min_length=1, max_length=128)
    """Identifies the machine in its allocation. A process that joins under it again succeeds the one that joined
    before."""
    session: str = Field(min_length=8, max_length=64)
    """One process that joins; made anew by each."""
    stay: int = Field(default=1, ge=1)
    """Counts the session's places: a higher one says that nothing of the one before is left."""
    started_at: Time
    """When the session began, by its host's clock."""
    host: str = ""
    """The machine's name, for people."""
    place: int | None = Field(default=None, ge=0)
    """The node (slot) that it would like to be, where that one is free."""
    command: tuple[str, ...] | None = None
    """What it was told to run; None for whatever the job runs."""


class JoinAnswer(Message):
    """A place, or the answer that it is being made ready and must be requested again."""

    node: NodeRequest | None = None
    """All that the machine needs to become the node, its token included."""
    reason: str = ""
    """What is being waited for, where there is no node yet."""


class JoinRefusal(StrEnum):
    """Why a job gives no place: the type of the update's error."""

    NO_PLACE = "NoPlace"
    """There may be one later."""
    DISPLACED = "Displaced"
    """A newer session has come under the same node ID: this one is over."""
    OVER = "Over"
    """The place that this very request was given is gone: the machine must ask as a new stay."""
    OTHER_COMMAND = "OtherCommand"
    """The machine was told to run something else than the job does."""
    OTHER_BACKEND = "OtherBackend"
    """The job's backend makes its nodes itself."""
    ENDING = "Ending"
    """The job winds down."""
