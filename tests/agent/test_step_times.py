"""When a node reports how the steps of its ranks split."""

from __future__ import annotations

import math

from perdure.agent.step_times import StepTimesReports, with_slowed_devices
from perdure.contract import RankStepTimes
from perdure_training.node_api.bodies import DeviceUsage
from perdure_training.node_api.progress_file import StepTimes


class Played:
    """A node with two ranks, whose measurements come at the same time, ten seconds apart."""

    def __init__(self, *, nodes: int = 4) -> None:
        self._reports = StepTimesReports()
        self._nodes = nodes
        self.now = 1000.0

    def measure(
        self, reading: int, *computes: float, generation: int = 1, wait: float = 0.1
    ) -> tuple[RankStepTimes, ...]:
        self.now += 10
        times = {rank: StepTimes(compute, wait, 0.0, readings=reading) for rank, compute in enumerate(computes)}
        return self._reports.follow(times, generation=generation, processes=2, nodes=self._nodes, now=self.now)


def computes(ranks: tuple[RankStepTimes, ...]) -> list[float]:
    return [one.compute for one in ranks]


def test_a_world_is_reported_once_after_its_warm_up():
    node = Played()
    assert [node.measure(reading, 0.2, 0.2) for reading in (1, 2)] == [(), ()]
    assert computes(node.measure(3, 0.3, 0.21)) == [0.2, 0.2]
    assert [node.measure(reading, 0.2, 0.2) for reading in range(4, 30)] == [()] * 26


def test_a_small_change_is_reported_but_not_at_once_again():
    node = Played()
    for reading in range(1, 10):
        node.measure(reading, 0.2, 0.2)
    assert node.measure(10, 0.225, 0.2) == ()
    assert computes(node.measure(11, 0.225, 0.2)) == [0.225, 0.2]
    assert [node.measure(reading, 0.25, 0.2) for reading in (12, 13, 14, 15, 16)] == [()] * 5
    assert computes(node.measure(17, 0.25, 0.2)) == [0.25, 0.2]


def test_large_changes_are_reported_at_once_a_few_times():
    node = Played()
    for reading in range(1, 5):
        node.measure(reading, 0.2, 0.2)
    large = [node.measure(reading, 0.2 + 0.1 * (reading // 2), 0.2) for reading in range(6, 16)]
    assert [round(one[0].compute, 1) for one in large if one] == [0.5, 0.6, 0.7]
    for reading in range(20, 90):
        node.measure(reading, 0.9, 0.2)
    assert [bool(node.measure(reading, 0.4, 0.2)) for reading in (90, 91)] == [False, True]


def test_a_rank_that_waits_for_one_that_has_become_slow_is_reported_at_once():
    node = Played()
    for reading in range(1, 6):
        node.measure(reading, 0.2, 0.2)
    assert node.measure(6, 0.2, 0.2, wait=0.2) == ()
    assert [one.wait for one in node.measure(7, 0.2, 0.2, wait=0.2)] == [0.2, 0.2]


def test_one_unusual_measurement_is_not_reported():
    node = Played()
    for reading in range(1, 10):
        node.measure(reading, 0.2, 0.2)
    assert [node.measure(10, 0.9, 0.2), *(node.measure(reading, 0.2, 0.2) for reading in (11, 12))] == [()] * 3


def test_a_measurement_counts_once_however_often_it_is_looked_at():
    node = Played()
    assert [node.measure(reading, 0.2, 0.2) for reading in (1, 2, 2, 2, 2)] == [()] * 5


def test_nothing_is_reported_while_a_rank_cannot_tell():
    node = Played()
    assert [node.measure(reading, 0.2, math.nan) for reading in range(1, 6)] == [()] * 5
    assert [node.measure(reading, 0.2) for reading in range(6, 10)] == [()] * 4


def test_the_next_world_is_reported_again():
    node = Played()
    for reading in range(1, 5):
        node.measure(reading, 0.2, 0.2)
    found = [node.measure(reading, 0.2, 0.2, generation=2) for reading in (1, 2, 3)]
    assert [computes(one) for one in found] == [[], [], [0.2, 0.2]]


def test_of_very_many_ranks_each_node_reports_its_slowest():
    node = Played(nodes=1000)
    for reading in (1, 2):
        node.measure(reading, 0.2, 0.3)
    assert computes(node.measure(3, 0.2, 0.3)) == [0.3]


def test_each_rank_has_the_reason_of_its_own_gpu_if_it_has_one():
    ranks = [RankStepTimes(rank=rank, compute=0.1, wait=0.0, rest=0.0) for rank in (4, 5)]
    devices = [DeviceUsage(index=0), DeviceUsage(index=1, slowed="power")]

    def slowed(*known: DeviceUsage) -> list[str]:
        return [one.slowed for one in with_slowed_devices(ranks, known, base_rank=4, processes=2)]

    assert slowed(*devices) == ["", "power"]
    assert slowed() == slowed(*devices, *devices) == ["", ""]
