"""Facts of a node that its group, its job and users know alike: each is defined here, once.

A group, a job and a view know more of a node, each something else, and derive from these.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from perdure.contract.base import Message, ShortText, Time
from perdure.contract.vocabulary import NodePhase

__all__ = ["NodeFacts", "WorldRequest"]

MOST_RANKS = 4_096
"""Ranks of one node. It bounds what a node can claim: a job adds these numbers up."""
LARGEST_PORT = 2**16 - 1
MOST_PORTS = 64
"""Ports of one list. A job carries them in its state, which the server limits; further ones are left out."""


def _possible_ports(ports: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(port for port in ports if 0 < port <= LARGEST_PORT)[:MOST_PORTS]


Ports = Annotated[tuple[int, ...], AfterValidator(_possible_ports)]


class WorldRequest(Message):
    """What a node brings into the world that its command requests."""

    processes: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Ranks that this node will start."""
    store_ports: Ports = ()
    """Ports on which this node already listens, each for the store of one generation."""
    command_nodes: ShortText | None = None
    """The number of nodes that its command requests from torchrun, as MIN:MAX, if it differs from the job's."""


class NodeFacts(WorldRequest):
    """How far a node is, where it runs, and what it requested a world with."""

    phase: NodePhase = NodePhase.REQUESTED
    since: Time
    """When the phase began."""
    reason: str = ""
    """Why the node is PENDING or LOST."""
    host: str = ""
    address: str = ""
