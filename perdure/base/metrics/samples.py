"""Samples of metrics: what monitors read, and what is exported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Sample:
    """The value of one series at the time when it was read."""

    name: str
    """The metric's name; one of `perdure.base.metrics.METRICS` if it is exported."""
    value: float
    labels: Mapping[str, str] = field(default_factory=dict[str, str])


class Monitor(Protocol):
    """Something that is read from time to time. A monitor may take long and may raise: its reader handles both."""

    name: str

    def read(self) -> Sequence[Sample]:
        """Returns what is known now; no samples if there is nothing to read."""
        ...
