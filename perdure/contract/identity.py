"""The identity of a node, which messages about nodes have in common."""

from __future__ import annotations

from typing import TypedDict

from pydantic import Field

from perdure.contract.base import Message

__all__ = ["Incarnation", "NodeCredentials", "NodeId", "identity_of"]


class Identity(TypedDict):
    """The fields by which a message names an incarnation."""

    rank: int
    incarnation: int


class Incarnation(Message):
    """One incarnation of a node, where its job and role are known."""

    rank: int = Field(ge=0)
    """The node's slot in its role, 0 to max-1; it outlives incarnations. The rank inside a world is `group_rank`."""
    incarnation: int = Field(ge=1)

    @property
    def key(self) -> tuple[int, int]:
        """The rank and the incarnation."""
        return self.rank, self.incarnation


def identity_of(node: Incarnation) -> Identity:
    """Returns the fields of another message about the same incarnation."""
    return Identity(rank=node.rank, incarnation=node.incarnation)


class NodeId(Incarnation):
    """One incarnation of one node among all jobs."""

    uid: str
    """The job run's uid: 8 hexadecimal digits."""
    role: str

    @property
    def path(self) -> str:
        """The ID as text: a part of the names of the node's task queue and log, and the mark of its processes."""
        return f"{self.uid}/{self.role}-{self.rank}/{self.incarnation}"


class NodeCredentials(NodeId):
    """A node's ID and what proves it."""

    token: str = Field(repr=False)
    """A secret of this incarnation: agents prove themselves with it, and commands to the agent carry it."""
