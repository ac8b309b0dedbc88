"""Finds spikes: numbers far above what they were in the last steps, by median and median absolute deviation.

Both are robust: a few high numbers among the recent ones, such as earlier spikes, change them little. A mean and a
standard deviation would follow them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

WINDOW = 128
"""Numbers that are remembered."""
_LEAST = 32
"""Numbers without which nothing is judged."""
_AGAIN = 16
"""Numbers after which the limit is computed again: it costs as much as a hundred comparisons."""
_DEVIATIONS = 10.0
"""Standard deviations of a spike: losses have longer tails than a normal distribution."""
_TO_STANDARD = 1.4826
"""The standard deviation of normally distributed numbers, in median absolute deviations."""
_SHARE = 0.1
"""The share of the median that a spike exceeds it by at least: deviations of a loss that rests are tiny."""


class RecentNumbers:
    """The last finite numbers of one name."""

    def __init__(self) -> None:
        self._numbers: deque[float] = deque(maxlen=WINDOW)
        self._until_next = _LEAST
        self.usual: float | None = None
        """Their median when the limit was computed last; None before the first time."""
        self._limit = 0.0

    def is_spike(self, number: float) -> bool:
        """Whether a number is one; takes it in as well."""
        spike = self.usual is not None and number > self._limit
        self._numbers.append(number)
        self._until_next -= 1
        if self._until_next <= 0:
            self._until_next = _AGAIN
            self.usual = _median(self._numbers)
            deviation = _TO_STANDARD * _median(abs(one - self.usual) for one in self._numbers)
            self._limit = self.usual + max(_DEVIATIONS * deviation, _SHARE * abs(self.usual))
        return spike


def _median(numbers: Iterable[float]) -> float:
    # The module `statistics` takes ten milliseconds of each start to import.
    ordered = sorted(numbers)
    return ordered[len(ordered) // 2]
