"""What a role remembers of nodes whose memory ran out: see `perdure.workflows.policy.capacity.memory_requests`."""

from __future__ import annotations

from perdure.contract import Message


class MemoryKill(Message):
    """A world that ended because the memory of a node had run out."""

    generation: int
    had: int
    """Bytes that the node had: the more of what it requested and what its memory controller allowed."""
    steps: int | None = None
    """Steps of that world until then; None where none are known."""


class HostMemory(Message):
    """What the nodes of a role request, and why it is not what the specification says."""

    requested: int | None = None
    """Bytes that new nodes request; None for `resources.memory` of the specification."""
    kills: tuple[MemoryKill, ...] = ()
    """The worlds after which that was raised, the newest last."""
