"""Golden table of nodes of a service that work while the others idle."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from perdure.client.hot_nodes import describe_hot_nodes
from perdure.contract import NodePhase, NodeView, Progress, ResourceUse


def node(rank: int, cores: float | None, progress: Progress | None = None, *, waited: float | None = None) -> NodeView:
    view = NodeView(rank=rank, incarnation=1, phase=NodePhase.READY, since=datetime(2026, 1, 1, tzinfo=UTC))
    return view.model_copy(
        update={"metrics": ResourceUse(cpu_cores=cores, cpu_wait_cores=waited), "progress": progress}
    )


@pytest.mark.parametrize(
    ("cores", "hot"),
    [
        ((0.1, 3.7, 0.3), [1]),
        ((0.9, 0.0), [0]),
        ((0.5, 0.0), []),
        ((3.7, 3.5), []),
        ((3.7, 0.4, 3.7), []),
        ((3.7,), []),
        ((3.7, None), []),
        ((), []),
    ],
    ids=["one", "of two", "light work", "all work", "most work", "alone", "unknown", "none"],
)
def test_a_node_is_hot_where_it_works_and_the_others_idle(cores: tuple[float | None, ...], hot: list[int]) -> None:
    found = describe_hot_nodes("ps", [node(rank, used) for rank, used in enumerate(cores)])
    assert [words.partition(" is hot")[0] for words in found] == [f"ps node {rank}" for rank in hot]


def test_nodes_that_step_together_are_judged_by_their_steps() -> None:
    assert not describe_hot_nodes("trainer", [node(0, 3.7, Progress(step=1)), node(1, 0.1, Progress(step=1))])


def test_the_warning_compares_it_with_the_others() -> None:
    (words,) = describe_hot_nodes("ps", [node(0, 0.4), node(1, 3.71), node(2, 0.2)])
    assert words.startswith(
        "ps node 1 is hot: it uses 3.7 cores, and the others need 0.3 in the median, so they wait for it."
    )


def test_a_node_that_gets_less_than_it_needs_is_hot_too() -> None:
    (words,) = describe_hot_nodes("ps", [node(0, 0.02, waited=0.08), node(1, 0.2, waited=0.75)])
    assert words.startswith("ps node 1 is hot: it uses 0.2 cores and waits for 0.8 more, and the others need 0.1")
    assert not describe_hot_nodes("ps", [node(0, 0.1, waited=0.4), node(1, 0.2, waited=0.75)])
