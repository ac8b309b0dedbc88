"""Tests of what an agent reports of losses and gradient norms that are not finite numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.contract import BadNumber, Failure, NumberKind
from perdure_training.node_api.bodies import HandlerHello, ReadyReport
from perdure_training.node_api.number_file import FoundNumber, number_path, write_numbers
from tests.agent.bench import NOW, Bench, rank


@pytest.fixture
def node(tmp_path: Path) -> Bench:
    """A node with two ranks, in generation 1."""
    bench = Bench(tmp_path)
    bench.node.on_handler_hello(HandlerHello(pid=1, min_nodes=2, max_nodes=4, processes=2))
    bench.apply(1)
    bench.enter(1)
    return bench


def find(node: Bench, local_rank: int, *numbers: FoundNumber, generation: int = 1) -> None:
    world = node.node.state.world
    assert world is not None
    path = number_path(node.config.run_dir / "progress", world.base_rank + local_rank)
    write_numbers(path, numbers, generation=generation)


def loss(step: int, **fields: object) -> FoundNumber:
    return FoundNumber(**{"name": "loss", "value": "nan", "step": step, "time": NOW.timestamp(), **fields})  # pyrefly: ignore[bad-argument-type]


def reports(node: Bench) -> list[BadNumber]:
    node.node.training.report_findings()
    return node.job.of(BadNumber)


def test_the_earliest_loss_of_a_node_is_reported_once_in_a_world(node: Bench):
    assert reports(node) == []
    find(node, 0, loss(42))
    find(node, 1, loss(41, last_finite=40, samples=("train: samples 1, 2 of epoch 0",)))
    [report] = reports(node)
    world = node.node.state.world
    assert world is not None
    number = report.number
    assert (number.rank, number.kind, number.value, number.step) == (world.base_rank + 1, NumberKind.LOSS, "nan", 41)
    assert (number.last_finite, number.samples) == (40, ("train: samples 1, 2 of epoch 0",))
    assert (report.generation, report.time, report.progress) == (1, NOW, node.node._progress())
    assert len(reports(node)) == 1


def test_a_loss_is_reported_after_a_norm_of_an_earlier_step(node: Bench):
    norm = loss(40, name="grad_norm", value="inf")
    find(node, 0, norm)
    assert len(reports(node)) == 1
    find(node, 0, norm, loss(41))
    assert [one.number.kind for one in reports(node)] == [NumberKind.GRADIENT_NORM, NumberKind.LOSS]


def test_numbers_of_an_older_world_are_not_reported(node: Bench):
    find(node, 0, loss(42), generation=0)
    assert reports(node) == []
    find(node, 0, loss(42))
    node.apply(2)
    assert reports(node) == [], "the node has another world, and is in none yet"


def test_a_script_that_ends_because_of_its_loss_has_it_reported_before_its_failure(node: Bench):
    find(node, 0, loss(42))
    error = rank(error="AssertionError: loss is not finite")
    node.node.on_ready(ReadyReport(after_generation=1, ranks=(error,), store_ports=(1,)))
    assert [type(message) for message in node.job.messages] == [BadNumber, Failure]
