"""Tests of how often a step is saved, and of the agreement on it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed import HashStore

from perdure_training.checkpoint.cadence import AgreedCadence, Cadence


@dataclass
class Training:
    """A training whose steps and saves take exactly this long."""

    cadence: Cadence = field(init=False)
    step_seconds: float = 0.1
    busy: float = 0.0
    now: float = 0.0
    step: int = 0
    finishing: float = 0.0
    agreed: int | None = None

    def __post_init__(self) -> None:
        self.cadence = Cadence(
            "auto", max_overhead=0.03, clock=lambda: self.now, used=lambda: self.busy * 2 * self.now, cores=2
        )

    def save(self, stall: float, *, steps: int = 1, saved: bool = True, finishing: float = 0.0) -> int | None:
        """Trains for some steps and saves; returns the number that is chosen then."""
        self.step += steps
        self.now += steps * self.step_seconds
        with self.cadence.measure(self.step, agreed=self.agreed, finishing=self.finishing) as measured:
            self.now += stall
            measured.saved = saved
        self.finishing += finishing
        self.agreed = measured.every or self.agreed
        return measured.every

    def save_first(self, stall: float) -> int | None:
        """Makes the saves after which the first number is chosen."""
        # The first ones also allocate memory.
        for number in range(5):
            assert self.save(stall * (20 if number < 3 else 1)) is None
        return self.save(stall)


@pytest.mark.parametrize(("stall", "every"), [(0.001, 1), (0.009, 4), (0.49, 196)])
def test_auto_saves_as_often_as_the_overhead_allows(stall: float, every: int):
    training = Training()
    assert training.save_first(stall) == every
    assert training.save(stall) is None
    assert training.cadence.is_due(every, agreed=every)
    assert every == 1 or not training.cadence.is_due(every + 1, agreed=every)


@pytest.mark.parametrize(("busy", "every"), [(0.0, 4), (0.5, 6), (1.0, 8), (3.0, 8)])
def test_auto_counts_what_follows_a_save_as_far_as_the_cores_are_busy(busy: float, every: int):
    training = Training(busy=busy)
    assert [training.save(0.009, finishing=0.009) for _ in range(6)] == [None] * 5 + [every]


def test_auto_saves_more_rarely_when_saves_cost_more_and_more_often_when_they_cost_less_again():
    training = Training()
    assert training.save_first(0.009) == 4
    chosen = [training.save(0.045, steps=training.agreed or 1) for _ in range(24)]
    assert chosen[:3] == [None] * 3
    assert training.agreed == 18
    assert chosen[-8:] == [None] * 8
    for _ in range(24):
        training.save(0.009, steps=training.agreed or 1)
    assert training.agreed == 4


def test_auto_does_not_follow_noise_nor_one_accident():
    training = Training()
    assert training.save_first(0.024) == 10
    for stall in (0.026, 0.022, 0.027, 0.023):
        assert [training.save(stall, steps=10) for _ in range(4)] == [None] * 4
    assert training.save(3.0, steps=10) is None
    assert [training.save(0.024, steps=10) for _ in range(11)] == [None] * 11


@given(st.lists(st.floats(0.01, 0.05), min_size=200, max_size=200))
def test_auto_costs_what_is_allowed_however_saves_vary(stalls: list[float]):
    training = Training()
    training.save_first(max(stalls))
    began, cost = training.now, 0.0
    for stall in stalls:
        training.save(stall, steps=training.agreed or 1)
        cost += stall
    assert cost / (training.now - began - cost) <= 0.03 * 1.25


def test_what_was_not_saved_says_nothing_of_the_cost():
    training = Training()
    assert [training.save(0.0, saved=False) for _ in range(20)] == [None] * 20
    assert training.save_first(0.009) == 4


def test_saves_of_one_step_choose_nothing_until_steps_were_made():
    training = Training()
    assert [training.save(0.009, steps=0) for _ in range(8)] == [None] * 8
    assert training.save(0.009) == 4


def test_a_number_needs_no_measuring():
    cadence = Cadence(5, max_overhead=0.03)
    assert not cadence.is_auto
    for step in range(1, 30):
        with cadence.measure(step, agreed=None, finishing=0.0) as measured:
            pass
        assert measured.every is None
        assert cadence.is_due(step, agreed=None) == (step % 5 == 0)


@given(
    costs=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    choices=st.sets(st.integers(7, 200)),
    ahead=st.integers(0, 2**200 - 1),
    stride=st.sampled_from([1, 2, 3, 7, 10]),
    requested=st.sets(st.integers(7, 200), max_size=8),
)
@example(costs=[3, 5], choices={9}, ahead=1 << 9, stride=10, requested=set())
@example(costs=[3, 5], choices={9}, ahead=1 << 9, stride=10, requested={11})
@example(costs=[1, 7, 9], choices={16, 17}, ahead=1 << 17, stride=5, requested=set())
def test_all_ranks_save_the_same_steps(
    costs: list[int], choices: set[int], ahead: int, stride: int, requested: set[int]
):
    """Of two ranks, which make each step together, now one and now the other saves it first, as the bits of a number
    say. Their script calls for a save at each so many steps, and requests some of them, which are saved in any case."""
    store = HashStore()
    ranks = [AgreedCadence(store), AgreedCadence(store)]
    numbers = list(costs)
    ranks[0].choose(numbers.pop(0), step=6)
    for step in range(7 * stride, 200 * stride, stride):
        every: list[int | None] = []
        for rank in ranks if ahead >> step // stride & 1 else ranks[::-1]:
            number = rank.every(step)
            assert number is not None
            every.append(number)
            if step % number == 0 or step // stride in requested:
                rank.look(step)
                if rank is ranks[0] and step // stride in choices and numbers:
                    rank.choose(numbers.pop(0), step=step)
        assert every[0] == every[1]


def test_another_number_is_adopted():
    store = HashStore()
    rank, other = AgreedCadence(store), AgreedCadence(store)
    assert rank.every(6) is None
    rank.choose(5, step=6)
    assert (rank.every(7), other.every(7)) == (5, 5)
    rank.choose(3, step=15)
    for step in (15, 20):
        for one in (rank, other):
            assert one.every(step) == 5
            one.look(step)
    assert (rank.every(21), other.every(21)) == (3, 3)


class GoneStore:
    """The store of a generation that ends."""

    def check(self, keys: list[str], /) -> bool:
        return True

    def get(self, key: str, /) -> bytes:
        if self.gone:
            raise RuntimeError("connection reset")
        return b"0 5 5"

    def set(self, key: str, value: str, /) -> None:
        raise RuntimeError("connection reset")

    gone = False


def test_a_store_that_is_gone_fails_no_save():
    store = GoneStore()
    cadence = AgreedCadence(store)
    assert cadence.every(1) == 5
    store.gone = True
    cadence.look(10)
    cadence.choose(7, step=10)
    assert cadence.every(30) == 5
