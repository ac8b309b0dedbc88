"""The sequential test: it decides soon where observations agree, and seldom wrongly however long it looks."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.workflows.policy.diagnosis.sequential_test import ERROR, OWN, decide

OBSERVATIONS = 15


def test_five_that_agree_decide():
    assert decide("AAAA") is None
    decision = decide("AAAAAB")
    assert decision is not None
    assert (decision.hypothesis, decision.observations) == ("A", 5)
    assert decision.p_value <= ERROR


def test_one_that_disagrees_takes_another_one_that_agrees():
    assert decide("AABAAA") is None
    decision = decide("AABAAAA")
    assert decision is not None
    assert decision.observations == 7


def test_an_observation_that_favors_none_changes_nothing():
    assert decide(["A", None, "A", "A", "A", None]) is None
    assert decide([None] * 50) is None


@given(st.lists(st.sampled_from("ABC"), max_size=30))
def test_what_comes_after_a_decision_does_not_change_it(favored: list[str]):
    decision = decide(favored)
    if decision is not None:
        assert decide(favored[: decision.observations]) == decision
        assert decide(favored + ["A", "B", "C"]) == decision  # noqa: RUF005


def chances(probabilities: dict[str, float], observations: int) -> dict[str, float]:
    """The exact probability of each decision after so many observations; of `""` that there is none."""
    open_counts: dict[tuple[int, ...], float] = {(0, 0, 0): 1.0}
    decided: defaultdict[str, float] = defaultdict(float)
    for _ in range(observations):
        following: defaultdict[tuple[int, ...], float] = defaultdict(float)
        for counts, chance in open_counts.items():
            for at, (name, probability) in enumerate(probabilities.items()):
                after = tuple(count + (index == at) for index, count in enumerate(counts))
                highest, second, _ = sorted(after, reverse=True)
                # The order of observations does not matter: an order without an earlier decision stands for all.
                ends = highest - second >= LEAD
                if ends:
                    decided[name] += chance * probability
                else:
                    following[after] += chance * probability
        open_counts = following
    return {**decided, "": sum(open_counts.values())}


LEAD = next(lead for lead in range(1, 20) if decide("A" * lead) is not None)


@given(st.floats(OWN, 1.0), st.floats(0, 1))
def test_another_cause_is_seldom_found_where_one_is_true(own: float, share: float):
    found = chances({"A": own, "B": (1 - own) * share, "C": (1 - own) * (1 - share)}, OBSERVATIONS)
    assert found.get("B", 0) + found.get("C", 0) <= ERROR
    assert found[""] <= 0.1


@pytest.mark.parametrize("even", [1 / 3])
def test_where_observations_are_noise_most_experiments_end_without_a_verdict(even: float):
    found = chances({"A": even, "B": even, "C": even}, OBSERVATIONS)
    assert found[""] > 0.6
