"""Routes of agents' messages: each class declares where its messages go and how they are kept, once for all parts.

The agent's outbox and connection, the gateway's list of what an agent may send, and the handlers of groups are made
from these declarations.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from perdure.contract.base import Message
from perdure.contract.identity import NodeCredentials

__all__ = ["Destination", "Route", "RoutedMessage", "routed_to"]


class Destination(StrEnum):
    """The workflow that receives a message. A job and a group receive signals, a dataset and a store updates."""

    JOB = "JOB"
    GROUP = "GROUP"
    DATASET = "DATASET"
    STORE = "STORE"


@dataclass(frozen=True)
class Route:
    """The way of one kind of message from an agent to a workflow."""

    to: Destination
    name: str
    """The name of the signal or the update."""
    newest_only: bool = False
    """A message replaces an undelivered one of its kind about the same subject. Without this, each of them counts."""
    journaled: bool = True
    """The agent keeps an undelivered message on disk. Without this, it is telemetry that a restart may lose."""
    first: bool = False
    """It is sent before all other kinds."""
    urgent: bool = False
    """It is never given a longer timeout because the server is slow."""
    spread: bool = False
    """All nodes of a world or a group send it at the same time, and no workflow waits for it."""


_ROUTED: dict[Destination, dict[str, type[RoutedMessage]]] = {destination: {} for destination in Destination}


class RoutedMessage(Message):
    """Base of all messages that an agent sends to a workflow of its job. Only this package declares them."""

    route: ClassVar[Route]
    sender: NodeCredentials

    def __init_subclass__(cls, *, route: Route | None, **rest: Any) -> None:
        """Declares a message.

        Args:
            route: its route; None for a base class, which is never sent.
            rest: what pydantic takes.

        Raises:
            TypeError: if the gateway must not let agents send it: another package declares it, or the name is taken.
        """
        super().__init_subclass__(**rest)
        if route is None:
            return
        if cls.__module__.rpartition(".")[0] != __package__:
            raise TypeError(f"{cls.__qualname__}: messages of agents are declared in {__package__}")
        if route.name in _ROUTED[route.to]:
            raise TypeError(f"{cls.__qualname__}: {route.name} is another message to the same workflow")
        cls.route = route
        _ROUTED[route.to][route.name] = cls


def routed_to(destination: Destination) -> dict[str, type[RoutedMessage]]:
    """Returns all kinds of messages that agents send to a workflow, by the names of their signals or updates."""
    return dict(_ROUTED[destination])
