"""What users ask of a running job: arguments and answer of its updates."""

from __future__ import annotations

from workflows.messages.base import Message, ShortText


class ScaleRequest(Message):
    """Update `scale`."""

    nodes: str
    """`4`, or `2:8` for min and max."""
    role: str | None = None
    """Needed only where the job has several."""
    reason: ShortText = ""


class ReasonRequest(Message):
    """Updates `suspend`, `resume`, `restart`."""

    reason: ShortText = ""


class RelaunchRequest(Message):
    """Update `relaunch_node`."""

    rank: int
    reason: ShortText = ""


class Accepted(Message):
    """The answer to an update."""

    message: str
    """What happens now, in a sentence."""
