"""The number of nodes that an elastic role trains with."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, cast

from pydantic import BeforeValidator, Field, model_validator

from .base import Section
from .durations import PositiveDuration, format_duration
from .quantities import Amount, amount


class ScalingPolicy(StrEnum):
    """Ways to choose the number of nodes between `nodes.min` and `nodes.max`."""

    MAX = "max"
    """As many as there are."""
    EFFICIENT = "efficient"
    """As many as still pay: measures how fast the job is with different numbers, and keeps the largest one whose last
    nodes add `min_efficiency` of what the nodes before them do."""
    DEADLINE = "deadline"
    """The fewest that finish by `finish_by`, by the speed that was measured and the steps that are left."""
    BUDGET = "budget"
    """The number that finishes soonest within `max_cost` or `max_gpu_hours`."""
    MANUAL = "manual"
    """As many as a user asks for: measures the speed with each, for `perdure plan`, and changes nothing."""


class BatchSize(StrEnum):
    """What the number of samples in a step depends on."""

    PER_RANK = "per-rank"
    """Each rank has a fixed number: a step of more nodes has more samples."""
    GLOBAL = "global"
    """A step has a fixed number, as with `perdure_training.elastic.GlobalBatch`: with more nodes it is shorter."""


def _time_with_zone(value: Any) -> datetime:
    try:
        time = value if isinstance(value, datetime) else datetime.fromisoformat(value)
    except (TypeError, ValueError):
        time = None
    if time is None or time.tzinfo is None:
        raise ValueError("expected a time with its zone such as 2026-12-01T08:00:00Z")
    return time.astimezone(UTC)


Deadline = Annotated[datetime, BeforeValidator(_time_with_zone)]
"""A time with its zone. A number is none: it would count seconds since 1970."""

_LONGEST = timedelta(days=365)

PositiveAmount = Annotated[float, Field(gt=0, allow_inf_nan=False)]

FIELDS_OF = {
    "finish_by": ScalingPolicy.DEADLINE,
    "max_cost": ScalingPolicy.BUDGET,
    "max_gpu_hours": ScalingPolicy.BUDGET,
}
"""Goals, each with the only policy that has a use for it."""


def goal_words(scaling: Mapping[str, Any]) -> str:
    """Returns `scaling` of a specification in words: `policy deadline, finish_by 2026-12-01T08:00:00Z`."""
    words: list[str] = []
    for name, value in {"policy": ScalingPolicy.MAX, **scaling}.items():
        shown = str(value).lower() if isinstance(value, bool) else str(value)
        parts = cast("Mapping[str, object]", value).items() if isinstance(value, Mapping) else ()
        words.append(f"{name} " + (" and ".join(f"{part} {amount}" for part, amount in parts) or shown))
    return ", ".join(words)


class Relax(Section):
    """The least that a node may request where no machine has room for more."""

    cpu: Amount | None = None
    """The fewest processors, less than `resources.cpu`. Unset: it requests `resources.cpu` whatever happens."""
    memory: Amount | None = None
    """The least memory, less than `resources.memory`. Unset: it requests `resources.memory` whatever happens."""
    after: PositiveDuration = timedelta(minutes=1)
    """How long a node waits for a machine with room for its full request."""

    @model_validator(mode="after")
    def _is_something(self) -> Relax:
        if self.cpu is None and self.memory is None:
            raise ValueError("neither cpu nor memory is given; give the least that a node needs, such as cpu: 4")
        for field, quantity in (("cpu", self.cpu), ("memory", self.memory)):
            if quantity is not None and amount(quantity) <= 0:
                raise ValueError(f"{field} is {quantity}; expected more than 0")
        return self


class Scaling(Section):
    """The choice of the number of nodes, for elastic roles."""

    policy: ScalingPolicy = ScalingPolicy.MAX
    """`max` trains with as many nodes as there are; `efficient` measures the speed with different numbers, and keeps
    the largest one whose last nodes still pay; `deadline` keeps the fewest nodes that finish by `finish_by`; `budget`
    finishes as soon as `max_cost` or `max_gpu_hours` allows; `manual` only measures (docs/scaling.md)."""
    min_efficiency: Annotated[float, Field(gt=0, le=1)] = 0.7
    """The share of the speed of the nodes before them that further nodes must add: with 0.7, going from 4 nodes to 8
    must make the job at least 1.7 times as fast."""
    finish_by: Deadline | None = None
    """When the training is to be finished, with the zone, such as `2026-12-01T08:00:00Z`: for `deadline`."""
    max_cost: PositiveAmount | None = None
    """What all nodes of the role may cost together, from its first to its last step, in the unit of `price`: for
    `budget`. The job goes on where it costs more, and warns before."""
    price: PositiveAmount | None = None
    """The price of a node for an hour: for `max_cost`, and for the costs that `perdure plan` shows."""
    max_gpu_hours: PositiveAmount | None = None
    """What all ranks of the role may take together, in hours of one rank: for `budget`."""
    steps: Annotated[int, Field(ge=1)] | None = None
    """Steps that the training makes, where its script does not report them (`perdure_training.report(total=...)`)."""
    batch: BatchSize = BatchSize.PER_RANK
    """What more nodes do to a step: `per-rank`, each rank has a fixed number of samples, so a step has more of them;
    `global`, a step has a fixed number of samples, so it is shorter."""
    settle: PositiveDuration = timedelta(seconds=30)
    """The time of steps in a world over which its speed is measured; longer where steps are long."""
    share: bool = False
    """Shares the cluster with other jobs that do: it has more nodes where they add most, and gives some to a job that
    gains more by them, between `nodes.min` and `nodes.max`, after a checkpoint. `policy` stays `max` (docs/scaling.md).
    """
    priority: PositiveAmount = 1.0
    """How much what its nodes add counts in sharing: with 2, a node adds as much as one that is twice as useful to
    another job."""
    patience: PositiveDuration = timedelta(minutes=10)
    """How long nodes that `policy` has requested are waited for. Those that have not come are given up, and requested
    again after twice this time, then after twice as long each time, at most after 4 hours."""

    memory_max: Amount | None = None
    """The most memory that a node may request after the memory of one has run out: each time 1.5 times as much as
    before, beginning with `resources.memory`. Unset: it requests `resources.memory` whatever happens
    (docs/scaling.md)."""
    relax: Relax | None = None
    """The least that a node may request where no machine has room for `resources`. Unset: it waits for a machine that
    has (docs/scaling.md)."""

    @model_validator(mode="after")
    def _comes_to_an_end(self) -> Scaling:
        for field, duration in (("settle", self.settle), ("patience", self.patience)):
            if duration > _LONGEST:
                raise ValueError(
                    f"{field} is {format_duration(duration)}; expected at most {format_duration(_LONGEST)}"
                )
        return self

    @model_validator(mode="after")
    def _has_some_memory(self) -> Scaling:
        if self.memory_max is not None and amount(self.memory_max) < 1:
            raise ValueError(f"memory_max is {self.memory_max}; expected at least a byte, such as 64Gi")
        return self

    @model_validator(mode="after")
    def _has_its_goal(self) -> Scaling:
        for field, policy in FIELDS_OF.items():
            if getattr(self, field) is not None and self.policy is not policy:
                raise ValueError(
                    f"{field} is given, and policy is {self.policy}, which has no use for it; set policy to {policy}"
                )
        if self.policy is ScalingPolicy.DEADLINE and self.finish_by is None:
            raise ValueError("policy is deadline, and finish_by is not given; set it, such as 2026-12-01T08:00:00Z")
        if self.policy is ScalingPolicy.BUDGET and (self.max_cost is None) == (self.max_gpu_hours is None):
            raise ValueError("policy is budget; give either max_cost, with price, or max_gpu_hours")
        if self.max_cost is not None and self.price is None:
            raise ValueError("max_cost is given, and price is not; set price to that of a node for an hour")
        return self

    @model_validator(mode="after")
    def _shares_or_chooses(self) -> Scaling:
        if self.share and self.policy is not ScalingPolicy.MAX:
            raise ValueError(
                f"share is true, and policy is {self.policy}: the number of nodes is chosen for all jobs of the "
                "cluster, or for this one alone; leave one of them out"
            )
        if self.priority != 1 and not self.share:
            raise ValueError("priority is given, and share is false, which has no use for it; set share to true")
        return self

    @property
    def measures(self) -> bool:
        """Whether the speed with each number of nodes is measured."""
        return self.share or self.policy is not ScalingPolicy.MAX
