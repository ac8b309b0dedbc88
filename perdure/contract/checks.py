"""What checks of a node's machine have found: the question of users to its agent, and the answer."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from perdure.contract.base import Message, Number, ShortText, Vocabulary, shorten
from perdure.contract.identity import NodeId
from perdure.contract.nodes import LARGEST_PORT
from perdure.contract.questions import Question
from perdure_training.node_api.replay_files import LARGEST_REQUEST

__all__ = ["Check", "CheckKind", "CheckNode", "NodeChecks", "NodeLink", "Peer"]

MOST_CHECKS = 64
"""Checks of one node: a few, one for each device, and one for each node that it is to reach."""


_Label = Annotated[str, AfterValidator(lambda text: shorten(text, 256))]


class CheckKind(Vocabulary):
    """A set of checks."""

    QUICK = "QUICK"
    """Those that take a fraction of a second: processor, memory, folders, names, clock, other nodes."""
    FULL = "FULL"
    """The same, and the devices, which takes an import of torch."""
    LINK = "LINK"
    """The bandwidth between two nodes."""
    REPLAY = "REPLAY"
    """A step of the training, computed again by other ranks, where the script can do that."""
    UNKNOWN = "UNKNOWN"
    """Treated as QUICK."""


class Peer(Message):
    """A node that another one is to reach."""

    rank: int
    address: str
    port: int = Field(ge=1, le=LARGEST_PORT)


class NodeLink(Message):
    """One end of a link between two nodes."""

    address: str
    """The address at which the first node listens."""
    port: int = Field(ge=1, le=LARGEST_PORT)
    end: Literal[0, 1]
    """0 for the first node."""


class CheckNode(Question):
    """Asks for checks of a node's machine."""

    subject: ClassVar[str] = "checks"
    activity: Literal["check_node"] = "check_node"
    kind: CheckKind = CheckKind.QUICK
    peers: tuple[Peer, ...] = ()
    """The nodes that it is to reach."""
    link: NodeLink | None = None
    """The link to measure, for `LINK`."""
    request: int = Field(default=0, ge=0, le=LARGEST_REQUEST)
    """The replay that all nodes take part in, for `REPLAY`: a newer one has a larger number."""

    @property
    def takes(self) -> timedelta:
        """The time that the checks may take."""
        return timedelta(seconds=30 if self.kind is CheckKind.QUICK else 90)


class Check(Message):
    """What one check has found."""

    name: _Label
    subject: _Label = ""
    """What was checked, where there are several: a folder, a device, a node."""
    value: float | None = None
    """None where nothing could be measured."""
    checksum: _Label = ""
    """What was computed, where the figure says nothing: of a replay."""
    unit: _Label = ""
    bound: float | None = None
    """The worst value that passes; None where there is nothing to compare with."""
    bound_source: _Label = ""
    """Where the bound comes from."""
    usual: float | None = None
    """The median of what the same machine has measured before; None where too little is known."""
    earlier: int = 0
    """The number of these figures."""
    is_slower_than_before: bool = False
    """It has failed beside the machine's own earlier figures."""
    problem: ShortText = ""
    """Why it has failed; empty where it passes."""
    seconds: Number = 0.0
    """How long it took."""

    @property
    def key(self) -> tuple[str, str]:
        """Distinguishes it from the other checks of its node."""
        return self.name, self.subject


Checks = Annotated[tuple[Check, ...], AfterValidator(lambda checks: checks[:MOST_CHECKS])]
"""The checks of one node; further ones are left out."""


class NodeChecks(Message):
    """What the checks of one node have found."""

    node: int
    """The node's number in `perdure nodes`."""
    host: str = ""
    """Its machine."""
    checks: Checks = ()

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that have failed."""
        return tuple(check for check in self.checks if check.problem)

    @classmethod
    def unanswered(cls, node: NodeId, problem: str) -> NodeChecks:
        """Returns the checks of a node that has not answered: that is a failed one."""
        return cls(node=node.rank, checks=(Check(name="answer", problem=problem),))
