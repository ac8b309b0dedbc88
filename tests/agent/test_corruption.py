"""Tests of what an agent reports of ranks that do not compute what the others compute."""

from __future__ import annotations

from pathlib import Path

from perdure.contract import Corruption, CorruptionKind
from perdure_training.node_api.bodies import HandlerHello
from perdure_training.node_api.corruption_file import GRADIENTS, corruption_path, write_corruption
from perdure_training.node_api.corruption_file import Corruption as Found
from tests.agent.bench import NOW, Bench


def test_the_finding_of_a_rank_is_reported_once_in_its_world(tmp_path: Path):
    node = Bench(tmp_path)
    node.node.on_handler_hello(HandlerHello(pid=1, min_nodes=2, max_nodes=4, processes=2))
    node.apply(1)
    node.enter(1)
    world = node.node.state.world
    assert world is not None
    rank = world.base_rank + 1
    path = corruption_path(node.config.run_dir / "progress", rank)
    found = Found(kind=GRADIENTS, step=6, sound=3, suspects=(rank,), repeats=True, device="cpu", time=NOW.timestamp())
    write_corruption(path, found, generation=0)
    node.node.training.report_findings()
    assert node.job.of(Corruption) == [], "it is of an older world"
    write_corruption(path, found, generation=1)
    node.node.training.report_findings()
    node.node.training.report_findings()
    [report] = node.job.of(Corruption)
    assert (report.generation, report.time) == (1, NOW)
    assert (report.found.rank, report.found.kind, report.found.step) == (rank, CorruptionKind.GRADIENTS, 6)
    assert (report.found.sound, report.found.is_named, report.found.repeats) == (3, True, True)
