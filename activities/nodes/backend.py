"""The protocol of node backends: the interface between the workflows and processes, pods or joined machines.

A backend keeps no state of its own. After a crash of the worker it is called again, and must then do the same again
without creating or deleting anything twice.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from perdure.contract import CreatedNode, GroupRef, NodeEvent, NodeRef, NodeRequest, NodeResize, WatchRequest

if TYPE_CHECKING:
    # Nodes start by these modules, and none waits for the import of Temporal's client.
    from temporalio.client import Client


@dataclass(frozen=True)
class Revocation:
    """A request by a user to remove the whole job, made in the backend's system: the job is cancelled, and no node is
    replaced."""

    reason: str
    """A message for users."""


Fact = NodeEvent | Revocation
"""An item that a watch yields."""


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
    """The value of the spec's `backend` that selects it."""

    async def create(self, request: NodeRequest) -> CreatedNode:
        """Creates the node. Returns before the node's agent has reported.

        Raises:
            NodeRefused: if this request can never succeed.
            JobRevoked: if the whole job is no longer desired.
            NodeNotYet: if the node has to wait; it is requested again.
        """
        ...

    async def delete(self, *nodes: NodeRef) -> Mapping[str, str]:
        """Ends nodes of one group: SIGTERM, the grace period, SIGKILL, and all processes that they left behind.

        Returns:
            As `NodesDeleted.left`.

        Raises:
            RemovalDenied: if a permission or a rule denies it for now.
        """
        ...

    async def describe(self, node: NodeRef) -> NodeEvent | None:
        """Returns the node's current state; None if it does not exist."""
        ...

    def watch(self, request: WatchRequest) -> AsyncGenerator[tuple[Fact, ...]]:
        """Yields batches of facts until it is closed."""
        ...


@runtime_checkable
class SharingBackend(Protocol):
    """A backend that creates objects that the nodes of a job share."""

    async def clear(self, group: GroupRef) -> None:
        """Ends all nodes of the group, including those that the group does not know, and removes the objects that the
        job's nodes share if the job has no nodes left. Returns after it has verified that nothing remains.

        Raises:
            RemovalDenied: if a permission or a rule denies it for now.
        """
        ...


@runtime_checkable
class ResizingBackend(Protocol):
    """A backend that can give a node more memory while it runs."""

    async def resize(self, node: NodeResize) -> str:
        """Gives the node this much memory; repeating it changes nothing. Returns why the node does not have it and will
        not soon, a message for users; empty once it has."""
        ...


@runtime_checkable
class TidyingBackend(Protocol):
    """A backend that can leave objects behind that no running workflow would remove."""

    async def keep_tidy(self, client: Client) -> None:
        """Removes objects of closed jobs. Runs until it is cancelled."""
        ...


class NodeRefused(Exception):
    """The backend will never create this node; the message says which field to change, and to what."""


class RemovalDenied(Exception):
    """A permission or a rule of the backend's system denies the removal of nodes, which may be allowed later.

    What a job that has closed leaves behind is removed by `TidyingBackend`.
    """


class JobRevoked(Exception):
    """The whole job is no longer desired, detected while creating a node; see `Revocation`."""


class NodeNotYet(Exception):
    """The backend cannot create this node yet, which is not an error; the message says what the node waits for."""

    def __init__(self, message: str, *, queued: bool = True) -> None:
        """Creates the exception.

        Args:
            message: for users; says what the node waits for.
            queued: whether the node waits for capacity, as in `NodeEvent`; otherwise for something that a user must
                create.
        """
        super().__init__(message)
        self.queued = queued
