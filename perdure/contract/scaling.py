"""What a job knows of its speed with different numbers of nodes, and what it makes of that."""

from __future__ import annotations

from perdure.contract.base import Message, ShortText, Time

__all__ = [
    "Pace",
    "Resized",
    "ScalingView",
    "Suggestion",
]


class Pace(Message):
    """How fast the steps of a world were."""

    nodes: int
    step: float
    """Seconds of a usual step."""
    spread: float = 0
    """Half the distance between the quartiles of its measurements, in seconds."""
    generation: int


class Resized(Message):
    """A number of nodes that a job has chosen by itself."""

    time: Time
    before: int
    after: int
    is_try: bool
    """It was chosen to measure the speed; otherwise because of what was measured."""
    expected_step: float | None = None
    """Seconds of a step that were expected with it; None where nothing was."""
    gave_up: bool = False
    """Nodes that it had requested did not come."""


class Suggestion(Message):
    """A number of nodes that the sharing of its cluster has advised a job to have."""

    nodes: int
    why: ShortText
    time: Time


class ScalingView(Message):
    """What a job knows of its speed with different numbers of nodes, and what it makes of that."""

    fewest: int
    largest: int
    unit: int = 1
    global_batch: bool = False
    """Steps have a fixed number of samples; otherwise their number grows with that of the nodes."""
    min_efficiency: float
    """`scaling.min_efficiency`."""
    paces: tuple[Pace, ...] = ()
    """The newest measurement with each number of nodes, by that number."""
    chosen: int | None = None
    """The number of nodes that the measurements speak for; None while there are too few."""
    why: str = ""
    """What the job waits for, or why it keeps its number, in a sentence."""
    policy: str = "efficient"
    """`scaling.policy`."""
    problem: str = ""
    """Why no number of nodes reaches the goal of `policy`, and what would; empty where one does."""
    meets: tuple[int, ...] = ()
    """The numbers of nodes that reach it, as far as that is known."""
    price: float | None = None
    """`scaling.price`."""
    fixed_steps: bool = False
    """The training makes the same steps with any number of nodes, whatever the samples of one."""
    steps_left: int | None = None
    """Steps that are left, as the present world counts them."""
    pauses: float = 1.0
    """The time that steps take together with all pauses, in times of the steps alone."""
    resized: tuple[Resized, ...] = ()
    """The newest changes that the job has made by itself, the oldest first."""
    shares: bool = False
    """`scaling.share`."""
    priority: float = 1.0
    """`scaling.priority`."""
    advised: Suggestion | None = None
    """The newest advice that it has followed; None where there was none since a user scaled it."""
