"""Changes of nodes, as their group reports them to the job: one model for each kind of change.

A job decides on these, and a group sends nothing else: so what a kind says is what a job can know about it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast, get_args

from pydantic import BeforeValidator, Field

from perdure.contract.agents import REFUSAL_LASTS, PrintedLines, Progress, StepTimesOfRanks, WorldStart
from perdure.contract.base import Number, ShortText, Time
from perdure.contract.checkpoints import CheckpointRef, Restore, StoredCheckpoint
from perdure.contract.checks import Checks
from perdure.contract.hangs import StallLook
from perdure.contract.identity import Incarnation
from perdure.contract.nodes import Ports, WorldRequest
from perdure.contract.vocabulary import LossCause
from perdure.spec.durations import Duration

__all__ = [
    "AnyTransition",
    "NodeChangedOtherwise",
    "NodeChecked",
    "NodeCommanded",
    "NodeCommittedCheckpoint",
    "NodeCreateFailed",
    "NodeCreated",
    "NodeEnding",
    "NodeJoined",
    "NodeLost",
    "NodeMemoryRaised",
    "NodePace",
    "NodePending",
    "NodePollsRefused",
    "NodePortsChanged",
    "NodeReachable",
    "NodeReady",
    "NodeRemoved",
    "NodeRestoredCheckpoint",
    "NodeStallEnded",
    "NodeStallLook",
    "NodeStalled",
    "NodeStepTimes",
    "NodeStepping",
    "NodeStoredCheckpoint",
    "NodeTransition",
    "NodeUnreachable",
    "NodeUnresponsive",
]


class NodeTransition(Incarnation):
    """One change of one node, as its group saw it."""

    time: Time
    generation: int = 0
    """The generation that the change is about, or the newest that the node knows; 0 for none."""


class NodeCreated(NodeTransition):
    """Its backend has created it."""

    kind: Literal["CREATED"] = "CREATED"


class NodePending(NodeTransition):
    """Its backend has not started it yet."""

    kind: Literal["PENDING"] = "PENDING"
    detail: ShortText = ""
    """What it waits for."""
    queued: bool = False
    """As in `NodeEvent`."""
    absent: bool = False
    """As in `NodeEvent`."""


class NodeJoined(NodeTransition):
    """Its agent has reported, or has not accepted a world."""

    kind: Literal["JOINED"] = "JOINED"
    address: ShortText = ""
    host: ShortText = ""
    preparing: bool = False
    """The node's command runs, and has not started its torchrun yet."""
    waits: ShortText | None = None
    """What the node's command waits for before it starts; None where that has not changed."""


class NodeReady(NodeTransition, WorldRequest):
    """Its command waits for a world."""

    kind: Literal["READY"] = "READY"
    detail: ShortText = ""
    """Why it cannot connect to the world that trains; empty if it can."""
    stage: int = 0
    """As in `Ready`."""


class NodeStepping(NodeTransition, WorldStart):
    """Its ranks step, or have run for long enough to be taken for healthy."""

    kind: Literal["STEPPING"] = "STEPPING"


class NodeStalled(NodeTransition):
    """Its ranks have stopped stepping."""

    kind: Literal["STALLED"] = "STALLED"
    at_start: bool = False
    """As in `Stall`."""


class NodeStallLook(NodeTransition):
    """Where its stalled ranks are."""

    kind: Literal["STALL_LOOK"] = "STALL_LOOK"
    look: StallLook


class NodeStallEnded(NodeTransition):
    """Its ranks step again after a stall."""

    kind: Literal["STALL_ENDED"] = "STALL_ENDED"


class NodeStepTimes(NodeTransition):
    """How the steps of its ranks split has changed."""

    kind: Literal["STEP_TIMES"] = "STEP_TIMES"
    ranks: StepTimesOfRanks = ()


class NodePace(NodeTransition):
    """How fast its world steps."""

    kind: Literal["PACE"] = "PACE"
    step: Number
    """As in `PaceReport`."""
    spread: Number = 0
    """As in `PaceReport`."""
    progress: Progress | None = None


class NodeChecked(NodeTransition):
    """It has checked its machine."""

    kind: Literal["CHECKED"] = "CHECKED"
    run: int = 1
    """As in `Checked`."""
    checks: Checks = ()


class NodePortsChanged(NodeTransition):
    """It listens on other ports for the store."""

    kind: Literal["STORE_PORTS"] = "STORE_PORTS"
    store_ports: Ports = ()


class NodeCommanded(NodeTransition):
    """Its agent has accepted a world."""

    kind: Literal["COMMANDED"] = "COMMANDED"
    detail: ShortText = ""
    """Why the node has not entered that world, if it has not."""
    entered: int | None = None
    """The newest generation that the node has entered; None where its agent does not report it."""
    inquiry: int = 0
    """The newest inquiry that the command answers."""
    printed: PrintedLines | None = None
    """What the node has printed in the world before."""
    preparing: bool = False
    """The node's command runs, and has not started its torchrun yet."""


class NodeUnreachable(NodeTransition):
    """Its lease has lapsed."""

    kind: Literal["UNREACHABLE"] = "UNREACHABLE"
    detail: ShortText = ""


class NodeReachable(NodeTransition):
    """Its agent reports again after its lease had lapsed."""

    kind: Literal["REACHABLE"] = "REACHABLE"
    address: ShortText = ""
    host: ShortText = ""


class NodePollsRefused(NodeTransition):
    """The Temporal server refuses to hand its agent commands and leases, for lack of capacity."""

    kind: Literal["POLLS_REFUSED"] = "POLLS_REFUSED"
    cause: ShortText = ""
    """The server's text."""
    lasts: Duration = REFUSAL_LASTS
    """How long that counts, as the agent says."""


class NodeUnresponsive(NodeTransition):
    """Its agent did not take a command for the current generation."""

    kind: Literal["UNRESPONSIVE"] = "UNRESPONSIVE"
    detail: ShortText = ""


class NodeLost(NodeTransition):
    """Its backend has found that its processes have ended."""

    kind: Literal["LOST"] = "LOST"
    detail: ShortText = ""
    cause: LossCause = LossCause.UNKNOWN
    host: ShortText | None = None
    """Its machine; None where that is unknown."""
    out_of_memory: bool = False
    """What it may use of its machine's memory had run out."""


class NodeCreateFailed(NodeTransition):
    """Its backend has refused to create it, or can never start it."""

    kind: Literal["CREATE_FAILED"] = "CREATE_FAILED"
    detail: ShortText = ""
    cause: LossCause = LossCause.UNKNOWN


class NodeMemoryRaised(NodeTransition):
    """It has the memory that it is to have, or will not have it where it runs."""

    kind: Literal["MEMORY_RAISED"] = "MEMORY_RAISED"
    memory: int = 0
    """Bytes that it was to have."""
    problem: ShortText = ""
    """Why it has not; empty where it has."""


class NodeRemoved(NodeTransition):
    """Its deletion has ended."""

    kind: Literal["REMOVED"] = "REMOVED"
    certain: bool = True
    """No process of the node runs any more. False where only its agent could end it and did not answer."""
    left: ShortText = ""
    """As in `NodesDeleted`."""


class NodeStoredCheckpoint(NodeTransition):
    """Its parts of a checkpoint are durable, or cannot be stored."""

    kind: Literal["CHECKPOINT_STORED"] = "CHECKPOINT_STORED"
    stored: StoredCheckpoint
    problem: ShortText = ""
    """As in `CheckpointStored`."""


class NodeCommittedCheckpoint(NodeTransition):
    """It has carried out the job's decision that a checkpoint is complete, or cannot."""

    kind: Literal["CHECKPOINT_COMMITTED"] = "CHECKPOINT_COMMITTED"
    checkpoint: CheckpointRef
    problem: ShortText = ""
    """As in `CheckpointCommitted`."""


class NodeRestoredCheckpoint(NodeTransition):
    """The ranks of its world continue with a saved step, start over, or stop."""

    kind: Literal["CHECKPOINT_RESTORED"] = "CHECKPOINT_RESTORED"
    restored: Restore


class NodeEnding(NodeTransition):
    """It is being ended from outside, and waits for a checkpoint."""

    kind: Literal["ENDING"] = "ENDING"
    detail: ShortText = ""


class NodeChangedOtherwise(NodeTransition):
    """A kind of change that only a newer group knows: its generation counts."""

    kind: Literal["UNKNOWN"] = "UNKNOWN"


_ANY = (
    NodeCreated
    | NodePending
    | NodeJoined
    | NodeReady
    | NodeStepping
    | NodeStalled
    | NodeStallLook
    | NodeStallEnded
    | NodeStepTimes
    | NodePace
    | NodePortsChanged
    | NodeChecked
    | NodeCommanded
    | NodeUnreachable
    | NodeReachable
    | NodeUnresponsive
    | NodePollsRefused
    | NodeLost
    | NodeCreateFailed
    | NodeMemoryRaised
    | NodeRemoved
    | NodeStoredCheckpoint
    | NodeCommittedCheckpoint
    | NodeRestoredCheckpoint
    | NodeEnding
    | NodeChangedOtherwise
)

KINDS: dict[str, type[AnyTransition]] = {kind.model_fields["kind"].default: kind for kind in get_args(_ANY)}


def _known_kind(value: Any) -> Any:
    """Reads a kind that this release does not know as `UNKNOWN`, so that the message's other transitions count."""
    if not isinstance(value, dict):
        return value
    fields = cast("dict[str, Any]", value)
    return fields if fields.get("kind") in KINDS else {**fields, "kind": "UNKNOWN"}


AnyTransition = Annotated[Annotated[_ANY, Field(discriminator="kind")], BeforeValidator(_known_kind)]
"""A transition in a message."""
