"""What ranks have found about their own numbers: from agents to jobs."""

from __future__ import annotations

from perdure.contract.agents import AgentMessage, Progress, Steps, Texts
from perdure.contract.base import Message, ShortText, Vocabulary
from perdure.contract.routes import Destination, Route

__all__ = [
    "BadNumber",
    "Corruption",
    "CorruptionKind",
    "FoundCorruption",
    "NumberKind",
    "RankNumber",
]


class NumberKind(Vocabulary):
    """The numbers of a script that are followed."""

    LOSS = "LOSS"
    """It is computed from the state of the step before: where it is not finite, that state may not be sound."""
    GRADIENT_NORM = "GRADIENT_NORM"
    """It may overflow in a step that is then left out, as with scaled losses in half precision."""
    LOSS_SPIKE = "LOSS_SPIKE"
    """It is finite, and far above what it was in the last steps."""
    GRADIENT_NORM_SPIKE = "GRADIENT_NORM_SPIKE"
    UNKNOWN = "UNKNOWN"
    """A number that only a newer release knows."""


class RankNumber(Message):
    """The first number of its kind of a rank: not finite, or a spike."""

    rank: int
    """The global rank."""
    kind: NumberKind
    value: ShortText
    """As text, since no message carries a number that is not finite: `nan`, `inf` or `-inf`."""
    step: int
    last_finite: int | None = None
    """The newest step before it whose loss was finite; None where the rank has reported none in this world."""
    samples: Texts = ()
    """The samples of that step, one text for each leased dataset."""


class BadNumber(AgentMessage, route=Route(Destination.JOB, "bad_number", first=True, urgent=True)):
    """A rank of the node has reported a loss or a gradient norm that is not a finite number. An agent reports one loss
    and one norm for each generation, those of the earliest step."""

    generation: int
    number: RankNumber
    progress: Progress | None = None


class CorruptionKind(Vocabulary):
    """What ranks that should compute the same have compared."""

    GRADIENTS = "GRADIENTS"
    """The gradients of one rank's batch, which another rank has computed again."""
    PARAMETERS = "PARAMETERS"
    """The parameters, which are the same on all ranks."""
    NOT_DETERMINISTIC = "NOT_DETERMINISTIC"
    """The comparison says nothing about devices: the script's step differs with itself."""
    UNKNOWN = "UNKNOWN"
    """A comparison that only a newer release knows."""


class FoundCorruption(Message):
    """What a rank's check has found: see `perdure_training.replay`."""

    rank: int
    """The global rank that reports it; no rank reports it of another one."""
    kind: CorruptionKind
    step: int
    """The step that was checked."""
    sound: int | None = None
    """The newest step whose state is known to be sound; None where no check of this world says so."""
    suspects: Steps = ()
    """The global ranks of which one has computed wrongly; only this one if that is known."""
    repeats: bool = False
    """Its replays are wrong, too: not only this step."""
    device: ShortText = ""
    checksums: Texts = ()
    """One text for each result, for people."""

    @property
    def is_named(self) -> bool:
        """Whether it is known that this rank has computed wrongly."""
        return self.suspects == (self.rank,)


class Corruption(AgentMessage, route=Route(Destination.JOB, "corruption", first=True, urgent=True)):
    """A rank of the node does not compute what the other ranks compute. Reported once for each world."""

    generation: int
    found: FoundCorruption
    progress: Progress | None = None
