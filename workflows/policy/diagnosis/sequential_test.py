"""A sequential test among several hypotheses: after each observation it decides, or asks for another one.

Each observation favors one hypothesis. While one is true, at least `OWN` of the observations favor it. The test ends
where the first hypothesis leads each other one by so many observations that `(OWN / (1 - OWN)) ** lead`, the ratio of
their likelihoods, is 1 / `ERROR`: Wald's test (1945, "Sequential tests of statistical hypotheses"), for more than two
hypotheses as by Baum and Veeravalli (1994, "A sequential procedure for multihypothesis testing"). The probability that
a wrong one ever leads so far is that of a gambler's ruin, at most `ERROR`, however often one looks and whichever
hypothesis the other observations favor; so the inverse of the ratio is a p-value that stays valid.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

Hypothesis = TypeVar("Hypothesis", bound=Hashable)

ERROR = 0.001
"""The probability of a certain wrong verdict, at most."""
OWN = 0.8
"""The least share of observations that favor a hypothesis that is true: other work of a machine spoils some."""


@dataclass(frozen=True)
class Decision(Generic[Hypothesis]):
    """The end of a test."""

    hypothesis: Hypothesis
    p_value: float
    observations: int
    """The number of observations after which it was made."""


def decide(favored: Iterable[Hypothesis | None]) -> Decision[Hypothesis] | None:
    """Returns the decision of the first observations that are enough for one.

    Args:
        favored: The hypothesis that each observation favors, in their order; None for one that favors none.

    Returns:
        None while the observations decide nothing.
    """
    ratio = OWN / (1 - OWN)
    lead = math.ceil(math.log(1 / ERROR) / math.log(ratio))
    counts: Counter[Hypothesis] = Counter()
    for number, one in enumerate(favored, start=1):
        if one is None:
            continue
        counts[one] += 1
        (first, most), *others = counts.most_common(2)
        ahead = most - (others[0][1] if others else 0)
        if ahead >= lead:
            return Decision(first, ratio**-ahead, number)
    return None
