"""Learning rates for those who let the global batch grow with the world."""

from __future__ import annotations

from typing import Literal


def scaled_learning_rate(
    learning_rate: float, *, tuned_for: int, samples: int, rule: Literal["linear", "square-root"] = "linear"
) -> float:
    """Returns the learning rate for a global batch of another size than the one that it was found for.

    Linear suits SGD (Goyal et al. 2017, with a warm-up after each growth), the square root Adam and its kin (Malladi
    et al. 2022). With `GlobalBatch` no rule is needed, since its size never changes.

    Args:
        learning_rate: That of the tuned training.
        tuned_for: Samples of its global batch.
        samples: Samples of the present one.
        rule: By which power of the ratio the rate grows.

    Raises:
        ValueError: if a number of samples is below 1.
    """
    for name, value in (("tuned_for", tuned_for), ("samples", samples)):
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, found {value}")
    ratio = samples / tuned_for
    return learning_rate * (ratio if rule == "linear" else ratio**0.5)
