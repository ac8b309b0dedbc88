"""How fast a job is with numbers of nodes between and beside those that were measured."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from perdure.contract import Pace
from perdure.workflows.policy.capacity.throughput import Throughput

Law = Callable[[int], float]


def measured(law: Law, *nodes: int, global_batch: bool = True) -> Throughput:
    return Throughput([Pace(nodes=n, step=law(n), generation=1) for n in nodes], global_batch=global_batch)


def shared(compute: float, exchange: float) -> Law:
    """The computation of a step is divided by the nodes, its communication is not."""
    return lambda nodes: compute / nodes + exchange


def best(law: Law, sizes: range, min_efficiency: float, *, global_batch: bool = True) -> int:
    """The choice of one who knows the law."""
    found = measured(law, *sizes, global_batch=global_batch).efficient(sizes, min_efficiency)
    assert found is not None
    return found


@given(st.floats(0.1, 10), st.floats(0, 1), st.integers(1, 64))
def test_two_measurements_tell_a_law_of_that_form_everywhere(compute: float, exchange: float, nodes: int) -> None:
    law = shared(compute, exchange)
    expected = measured(law, 2, 8).step(nodes)
    assert expected is not None
    assert expected.seconds == pytest.approx(max(law(nodes), law(8) / 4))
    assert expected.measured == (nodes in (2, 8))


def test_a_batch_for_each_rank_grows_with_the_nodes() -> None:
    throughput = measured(lambda nodes: 1 + 0.1 * nodes, 2, 4, global_batch=False)
    expected = throughput.step(8)
    assert expected is not None
    assert expected.seconds == pytest.approx(1.8)
    assert throughput.speed(8) == pytest.approx(8 / 1.8)


def test_one_measurement_says_nothing_of_other_numbers() -> None:
    throughput = measured(shared(1, 0.1), 4)
    assert throughput.step(8) is None
    assert throughput.speed(4) == pytest.approx(1 / 0.35)
    assert throughput.efficient(range(2, 9), 0.7) is None


def test_the_nearest_measurements_count() -> None:
    def kinked(nodes: int) -> float:
        """A ninth node is in another rack."""
        return 4 / nodes + (0.0 if nodes <= 8 else 1.0)

    expected = measured(kinked, 2, 4, 16).step(3)
    assert expected is not None
    assert expected.seconds == pytest.approx(kinked(3), rel=0.03)


@given(st.floats(0.5, 10), st.floats(0, 1), st.floats(0.02, 0.5), st.integers(2, 15))
@example(compute=0.5, fixed=0.0, growth=0.49999999999999994, nodes=2)
def test_three_measurements_tell_where_steps_are_shortest(
    compute: float, fixed: float, growth: float, nodes: int
) -> None:
    def law(nodes: int) -> float:
        return compute / nodes + fixed + growth * nodes

    throughput = measured(law, 1, 4, 16)
    expected = throughput.step(nodes)
    assert expected is not None
    # Where the valley is at the first or the last measurement, rounding decides which form counts.
    if 1 + 1e-6 < compute / growth < 16**2 - 1e-6:
        assert expected.seconds == pytest.approx(law(nodes), rel=1e-6)
    else:
        assert expected.seconds >= law(nodes) * (1 - 1e-6), "a straight line over 1/nodes lies above a curve like this"


def test_two_measurements_leave_open_whether_steps_are_shortest_between_them() -> None:
    def grows(nodes: int) -> float:
        return 0.598 / nodes + 0.035 * nodes

    assert measured(grows, 2, 6).possible_valley(6, range(1, 7)) == 4
    assert measured(grows, 2, 6).possible_valley(6, range(2, 7, 4)) is None, "no other number is allowed"
    assert measured(grows, 2, 4, 6).possible_valley(6, range(1, 7)) is None, "three measurements tell"
    assert measured(shared(8, 0.25), 6, 16).possible_valley(16, range(2, 17)) is None, "it could gain next to nothing"
    assert measured(grows, 2, 6, global_batch=False).possible_valley(6, range(1, 7)) is None


@given(st.floats(0.5, 10), st.floats(0, 0.5), st.floats(0.3, 0.99))
def test_what_two_far_measurements_choose_is_what_all_would(compute: float, exchange: float, least: float) -> None:
    law, sizes = shared(compute, exchange), range(1, 17)
    chosen = measured(law, 4, 16).efficient(sizes, least)
    # Where a node adds exactly as much as it must, rounding decides.
    assert chosen in (best(law, sizes, least - 1e-6), best(law, sizes, least + 1e-6))


@pytest.mark.parametrize(
    ("law", "chosen"),
    [
        pytest.param(shared(1, 0), 16, id="nothing is exchanged"),
        pytest.param(shared(0, 1), 2, id="more nodes add nothing"),
        pytest.param(lambda nodes: 0.1 * nodes, 2, id="more nodes make it slower"),
    ],
)
def test_extremes(law: Law, chosen: int) -> None:
    assert best(law, range(2, 17), 0.7) == chosen
