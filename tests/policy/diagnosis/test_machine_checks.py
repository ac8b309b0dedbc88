"""Tests of how figures of machines are judged: golden tables, and properties of any figures."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.contract import Check, NodeChecks
from perdure.workflows.policy.diagnosis import links, preflight
from perdure.workflows.policy.diagnosis.links import Pair

FIGURES = st.floats(min_value=1e-3, max_value=1e9)


def node(
    number: int,
    value: float | None,
    *,
    name: str = "processor",
    subject: str = "",
    host: str | None = None,
    problem: str = "",
) -> NodeChecks:
    check = Check(name=name, subject=subject, value=value, unit="MB/s", problem=problem)
    return NodeChecks(node=number, host=f"host-{number}" if host is None else host, checks=(check,))


def verdicts(*nodes: NodeChecks) -> dict[int, str]:
    return {one.node: preflight.describe(check) for one in preflight.judge(nodes) for check in one.failed}


@pytest.mark.parametrize(
    ("figures", "failed"),
    [
        ((1000, 1000, 1000), set[int]()),
        ((1000, 1000, 501), set[int]()),
        ((1000, 1000, 499), {2}),
        # Of two, the slow one is the slow one.
        ((1000, 300), {1}),
        ((300,), set[int]()),
        # What most have is usual.
        ((300, 310, 290, 1000), set[int]()),
        ((1000, 100, 100, 1000, 1000), {1, 2}),
    ],
)
def test_a_figure_is_low_beside_those_of_other_machines(figures: tuple[float, ...], failed: set[int]):
    assert verdicts(*(node(number, value) for number, value in enumerate(figures))).keys() == failed


def test_a_failed_check_names_value_bound_and_the_figures_of_the_others():
    assert verdicts(node(0, 1000), node(1, 400), node(2, 1200)) == {
        1: "processor: 400 MB/s is less than 550 MB/s: 50% of the median of 2 other figures, 1,100"
    }


def test_nodes_of_one_machine_are_not_compared():
    assert not verdicts(node(0, 1000, host="a"), node(1, 10, host="a"))
    assert verdicts(node(0, 1000, host="a"), node(1, 10, host="a"), node(2, 1000, host="b")).keys() == {1}


def test_a_device_is_compared_with_the_others_of_its_machine():
    devices = tuple(
        Check(name="matmul", subject=f"cuda:{number}", value=value, unit="GFLOP/s")
        for number, value in enumerate((900.0, 910.0, 500.0))
    )
    (judged,) = preflight.judge([NodeChecks(node=0, host="a", checks=devices)])
    assert [check.subject for check in judged.failed] == ["cuda:2"]


def test_disks_are_compared_folder_by_folder():
    slow = node(1, 90.0, name="disk", subject="temporary folder")
    assert not verdicts(node(0, 1000.0, name="disk", subject="run directory"), slow)
    assert verdicts(node(0, 1000.0, name="disk", subject="temporary folder"), slow).keys() == {1}


@pytest.mark.parametrize(
    ("name", "value", "fails"),
    [
        ("room", 64.0, False),
        ("room", 63.0, True),
        ("clock", 4.9, False),
        ("clock", -4.9, False),
        ("clock", 6.0, True),
        ("clock", -6.0, True),
        ("names", 3.0, False),
        ("something newer", 3.0, False),
        ("processor", None, True),
    ],
)
def test_fixed_bounds(name: str, value: float | None, fails: bool):
    assert bool(verdicts(node(0, value, name=name))) is fails


def test_what_all_nodes_have_in_common_singles_out_none():
    failing = node(0, None, problem="No space left on device"), node(1, None, problem="No space left on device")
    assert preflight.stand_out(preflight.judge(failing)) == {}
    assert preflight.stand_out(preflight.judge((*failing, node(2, 5.0)))).keys() == {0, 1}


def test_the_better_run_of_each_check_counts():
    first = (
        Check(name="a", value=5.0, unit="MB/s"),
        Check(name="clock", value=9.0, unit="s"),
        Check(name="c", problem="x"),
    )
    again = (
        Check(name="a", value=4.0, unit="MB/s"),
        Check(name="clock", value=-1.0, unit="s"),
        Check(name="d", value=1.0),
    )
    assert [(one.name, one.value) for one in preflight.better(first, again)] == [
        ("a", 5.0),
        ("clock", -1.0),
        ("c", None),
        ("d", 1.0),
    ]


def slowed(number: int, value: float, *, usual: float = 1000.0, host: str | None = None) -> NodeChecks:
    """A node of a machine that has measured the usual value before."""
    found = node(number, value, host=host)
    return found.replace(checks=tuple(check.replace(usual=usual, earlier=9) for check in found.checks))


def test_a_machine_that_is_slower_than_before_is_named_where_it_is_alone():
    assert verdicts(slowed(0, 400.0)) == {
        0: "processor: 400 MB/s is less than 500 MB/s: 50% of the median of 9 earlier figures of this machine, 1,000"
    }
    assert not verdicts(slowed(0, 600.0))
    # The stricter one of the two comparisons counts.
    assert verdicts(slowed(0, 600.0), node(1, 2000.0)).keys() == {0}


def test_only_another_machine_singles_out_one_that_is_slower_than_before():
    slow = slowed(0, 400.0, host="a")
    assert not preflight.stand_out(preflight.judge([slow, slowed(1, 1000.0, host="a")]))
    assert preflight.stand_out(preflight.judge([slow, node(1, 700.0, host="b")])).keys() == {0}


@given(st.dictionaries(st.integers(0, 40), st.none() | FIGURES, min_size=1))
def test_never_all_nodes_stand_out(figures: dict[int, float | None]):
    nodes = preflight.judge(node(number, value) for number, value in figures.items())
    assert preflight.stand_out(nodes).keys() < figures.keys()


@given(st.lists(FIGURES, min_size=2, max_size=30), st.floats(0.51, 1.0))
def test_no_machine_fails_while_all_are_within_half_of_each_other(figures: list[float], share: float):
    fastest = max(figures)
    assert not verdicts(*(node(number, max(value, fastest * share)) for number, value in enumerate(figures)))


# Links


def measured(rounds: int, nodes: int, bandwidth: Mapping[frozenset[int], float]) -> dict[Pair, Check]:
    found: dict[Pair, Check] = {}
    for choose in (links.neighbours, links.slowest_with_fastest)[:rounds]:
        for part in choose(range(nodes), found):
            assert len({one for pair in part for one in pair}) == 2 * len(part), "a node is in two pairs at once"
            for pair in part:
                found[pair] = Check(name="link", value=bandwidth.get(frozenset(pair), 1000.0), unit="MB/s")
    return found


def blamed(found: Mapping[Pair, Check]) -> dict[int, str]:
    return {node: check.problem for node, checks in links.judge(found).items() for check in checks if check.problem}


@pytest.mark.parametrize("bad", range(6))
def test_a_node_that_is_slow_with_both_of_its_partners_is_named(bad: int):
    slow = {frozenset((bad, other)): 100.0 for other in range(6) if other != bad}
    found = blamed(measured(2, 6, slow))
    assert found == {bad: f"100 MB/s: node {bad} is slow with every other node"}


@pytest.mark.parametrize("nodes", [4, 5, 8])
def test_a_link_between_two_nodes_that_are_fast_with_others_is_named(nodes: int):
    found = blamed(measured(2, nodes, {frozenset((0, 1)): 100.0}))
    said = "100 MB/s: the link between node 0 and node 1 is slow, and both are fast with others"
    assert found == {0: said, 1: said}


def test_a_pair_that_measures_nothing_is_a_failed_check():
    found = measured(2, 4, {})
    found[2, 3] = Check(name="link", problem="it has not ended within 60 s")
    assert blamed(found)[2].startswith("it has not ended within 60 s: the link between node 2 and node 3")


@pytest.mark.parametrize("nodes", [2, 3, 4, 7, 16])
def test_links_that_are_alike_are_all_good(nodes: int):
    found = measured(2, nodes, {})
    assert {one for pair in found for one in pair} == set(range(nodes))
    assert not blamed(found)


@given(st.integers(2, 12), st.data())
def test_links_of_any_bandwidth_never_blame_every_node(nodes: int, data: st.DataObject):
    pairs = [frozenset((one, other)) for one in range(nodes) for other in range(one)]
    bandwidth = {pair: data.draw(FIGURES) for pair in pairs}
    found = measured(2, nodes, bandwidth)
    slow = {one for one, problem in blamed(found).items() if "every other node" in problem}
    assert len(slow) < nodes
