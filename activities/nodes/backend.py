"""What every way of running nodes must offer: the seam between the workflows and processes, pods or actors.

A backend holds no state that matters: it is asked again after any crash of the worker, and must then do the same
once more without doing it twice.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from temporalio.client import Client

from workflows.messages import CreatedNode, GroupRef, NodeEvent, NodeRef, NodeRequest, WatchRequest


@dataclass(frozen=True)
class Revocation:
    """A user removes the whole job where its nodes are: it is cancelled, and no node is replaced."""

    reason: str
    """For people."""


Fact = NodeEvent | Revocation
"""What a watch tells."""


class NodeBackend(Protocol):
    """Creates, deletes and watches nodes.

    Invariants:
        - Names are deterministic: creating the same incarnation twice makes one node, and an incarnation that has
          ended is never started again under its name.
        - Deleting what does not exist succeeds. When `delete` returns, no process of theirs runs.
        - A node outlives the worker that created it.
        - `watch` begins with one event for every node of the group that exists, and for every one that its request
          knows and that does not, so that a new watch learns what the last one missed; events may repeat.

    The joined backend owns no machine and promises less: see its module.
    """

    name: str
    """As the spec's `backend` names it."""

    async def create(self, request: NodeRequest) -> CreatedNode:
        """Makes the node exist. Returns before its agent has spoken.

        Raises:
            NodeRefused: if this request can never succeed.
            JobRevoked: if the job as a whole is no longer desired.
            NodeNotYet: if its turn has not come; it is requested again.
        """
        ...

    async def delete(self, *nodes: NodeRef) -> None:
        """Ends nodes of one group: SIGTERM, the grace, SIGKILL, and everything that they left."""
        ...

    async def describe(self, node: NodeRef) -> NodeEvent | None:
        """The node's state now; None where it does not exist."""
        ...

    def watch(self, request: WatchRequest) -> AsyncGenerator[tuple[Fact, ...]]:
        """Yields batches of facts until it is closed."""
        ...


@runtime_checkable
class SharingBackend(Protocol):
    """A backend that keeps more of a job than its nodes."""

    async def clear(self, group: GroupRef) -> None:
        """Ends all nodes of the group, also those that the group does not know of, and removes what the job's nodes
        share where no node of the job is left. Returns when it has seen that nothing is there."""
        ...


@runtime_checkable
class TidyingBackend(Protocol):
    """A backend where something may stay behind that no running workflow would remove."""

    async def keep_tidy(self, client: Client) -> None:
        """Removes what belongs to jobs that are over, for as long as it runs."""
        ...


class NodeRefused(Exception):
    """The backend will never create this node; the message says which field to change, and to what."""


class JobRevoked(Exception):
    """See `Revocation`; met while creating a node."""


class NodeNotYet(Exception):
    """The backend will create this node later, and nothing is wrong; the message says what it waits for."""

    def __init__(self, message: str, *, queued: bool = True) -> None:
        """Says what the node waits for.

        Args:
            message: for people.
            queued: whether it waits for room, as in `NodeEvent`; otherwise for something that a user must make.
        """
        super().__init__(message)
        self.queued = queued
