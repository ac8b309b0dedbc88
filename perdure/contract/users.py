"""Requests of users to a running job: arguments and answers of its updates."""

from __future__ import annotations

from pydantic import Field, JsonValue

from perdure.contract.base import Message, ShortText
from perdure.spec.durations import Duration

__all__ = [
    "Accepted",
    "NodesQuery",
    "PauseRequest",
    "ReasonRequest",
    "RelaunchRequest",
    "RestartRequest",
    "RoleRequest",
    "ScaleRequest",
]


AS_SPECIFIED = "auto"
"""The number of nodes that the specification states, and that its policy chooses within."""

OBJECT_MEMO = "perdure.dev/object"
"""Key of the memo that holds the uid of the TrainingJob object which a run was started for."""


class ScaleRequest(Message):
    """Argument of the update `scale`."""

    nodes: str = ""
    """`4`, `2:8` for min and max, or `auto` for what the specification states. Empty, where `scaling` is given: it
    stays as it is."""
    role: str | None = None
    """Required only for a job with several roles."""
    reason: ShortText = ""
    resources: dict[str, str] = Field(default={})
    """What nodes of the role that are created from now on request of `cpu` and `memory`; others keep what they have."""
    scaling: dict[str, JsonValue] | None = None
    """The whole `scaling` of the role, as in a specification, which replaces the present one; None: it stays as it
    is."""
    older: bool = False
    """A world of that size is formed also where it cannot load the newest state: its ranks continue with an older one,
    or begin anew."""


class PauseRequest(Message):
    """Argument of the update `pause_repairs`."""

    duration: Duration
    reason: ShortText = ""


class ReasonRequest(Message):
    """Argument of the updates `resume_repairs` and `save_checkpoint`."""

    reason: ShortText = ""


class RoleRequest(ReasonRequest):
    """Argument of the updates `suspend` and `resume`."""

    role: str | None = None
    """The only role that is meant; None for all."""


class RestartRequest(RoleRequest):
    """Argument of the update `restart`."""

    older: bool = False
    """The ranks wait for a newer state than they can load, and are to continue with the older one."""


class NodesQuery(Message):
    """Argument of the query `nodes`. A single one: Temporal passes arguments on untyped where the caller leaves some of
    several out."""

    group: int | None = None
    """Only the nodes of this group."""
    role: str | None = None
    """As in `ScaleRequest`."""


class RelaunchRequest(Message):
    """Argument of the update `relaunch_node`."""

    rank: int
    role: str | None = None
    """As in `ScaleRequest`."""
    reason: ShortText = ""
    resources: dict[str, str] = Field(default={})
    """What this node requests of `cpu` and `memory` from then on, whatever other nodes of its role request."""


class Accepted(Message):
    """The answer to an update."""

    message: str
    """The action that the job takes now, in one sentence."""
    checkpoint_request: int = 0
    """The number of the requested checkpoint, by which `CheckpointView.answered` shows that it is durable."""
