"""Messages between a job and machines that a user or a scheduler started, and between these and the gateway.

A machine that reaches Temporal sends the update `join` itself. The gateway sends it for others, in the name of a ticket
that the job's owner made.
"""

from __future__ import annotations

from datetime import timedelta

from pydantic import Field

from perdure.contract.backends import NodeRequest
from perdure.contract.base import Message, ShortText, Time, Vocabulary
from perdure.contract.views import JobResult
from perdure.contract.vocabulary import LossCause

__all__ = [
    "DepartureCall",
    "JoinAnswer",
    "JoinRefusal",
    "JoinRequest",
    "JoinedMachine",
    "MachinesView",
    "PlaceAnswer",
    "PlaceCall",
    "ResultAnswer",
    "ResultCall",
    "Ticket",
    "TicketRef",
    "TicketRequest",
]


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
    boot: str = Field(default="", max_length=64)
    """The ID of the boot of its host's kernel; empty from a release that does not send it."""
    uptime: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Seconds from that boot to the session's beginning: a clock that is set back does not change them."""
    host: str = ""
    """The machine's name, for people."""
    role: str | None = None
    """The role among whose nodes the place is; None for the first that lacks nodes."""
    place: int | None = Field(default=None, ge=0)
    """The node (slot) that the machine prefers, if it is free."""
    command: tuple[str, ...] | None = None
    """The command that the machine was started for; None accepts any job's command."""
    ticket: str = ""
    """The ID of the ticket that the gateway has seen; empty if the machine reached Temporal itself."""


class JoinAnswer(Message):
    """A place; or, while the job prepares it, the reason to request it again."""

    node: NodeRequest | None = None
    """Everything that the machine needs to become the node, including the token."""
    reason: str = ""
    """Why there is no node yet."""
    again: timedelta | None = None
    """The time until the machine is to request the place again, where there is no node yet: of hundreds of machines
    that wait, each has its turn. None from an earlier release."""


class JoinRefusal(Vocabulary):
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
    UNKNOWN_ROLE = "UnknownRole"
    """The job has no such role."""
    ENDING = "Ending"
    """The job is ending."""
    TICKET = "Ticket"
    """The ticket has expired or was revoked."""
    UNKNOWN = "UNKNOWN"
    """A reason of a newer release: the text says what it is."""


class Ticket(Message):
    """Admits machines to one job, at the gateway. The job keeps a digest, so that no history holds the secret."""

    id: str = Field(min_length=8, max_length=64)
    """Names the ticket, for people and in requests."""
    digest: str = Field(pattern="^[0-9a-f]{64}$")
    """SHA-256 of the ticket's secret."""
    nodes: int = Field(ge=1)
    """The most places that its machines may have at a time."""
    expires_at: Time
    """From then on it gives no place to a machine that had none."""


class TicketRequest(Message):
    """Argument of the update `issue_ticket`."""

    id: str = Field(min_length=8, max_length=64)
    digest: str = Field(pattern="^[0-9a-f]{64}$")
    nodes: int = Field(ge=1)
    lifetime: timedelta = Field(gt=timedelta())


class TicketRef(Message):
    """Argument of the update `revoke_ticket`."""

    id: str


class JoinedMachine(Message):
    """A machine that has a place."""

    role: str
    rank: int
    incarnation: int
    session: str


class MachinesView(Message):
    """Answer to the query `machines`: what the gateway has to know of a job."""

    uid: str
    tickets: tuple[Ticket, ...] = ()
    machines: tuple[JoinedMachine, ...] = ()


class PlaceCall(Message):
    """A machine's call `Join` of the gateway. The job's name is that of its ticket."""

    namespace: str
    job: str
    request: JoinRequest


class PlaceAnswer(Message):
    """The gateway's answer to `Join`: one of the three."""

    answer: JoinAnswer | None = None
    grant: str = ""
    """What the agent of the node may do, where the answer has one."""
    temporal_namespace: str = ""
    """Where the grant is valid."""
    result: JobResult | None = None
    """Set: the job has ended."""
    refusal: JoinRefusal | None = None
    reason: ShortText = ""
    """The reason of the refusal."""


class DepartureCall(Message):
    """A machine's call `Leave` of the gateway: no process of its node runs any more."""

    time: Time
    reason: ShortText
    cause: LossCause = LossCause.UNKNOWN


class ResultCall(Message):
    """A machine's call `Result` of the gateway."""

    namespace: str
    job: str
    first_run_id: str = ""
    """The run that gave the place; empty: the newest one."""


class ResultAnswer(Message):
    """The gateway's answer to `Result`, after at most half a minute."""

    result: JobResult | None = None
    ending: bool = False
    """The job has no result yet, and will have one soon."""
