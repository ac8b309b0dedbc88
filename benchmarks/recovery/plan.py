"""Plans the order of trials, and forecasts their duration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .records import Scenario, SystemName, TrialRecord, count_trials


@dataclass(frozen=True)
class PlannedTrial:
    system: SystemName
    scenario: Scenario
    number: int
    size: int = 2


USUAL_SECONDS: Mapping[SystemName, Mapping[Scenario, float]] = {
    SystemName.TORCHRUN: dict(zip(Scenario, (70, 100, 60, 130), strict=False)),
    SystemName.TORCHRUN_OWN_STORE: dict(zip(Scenario, (18, 32, 57, 60), strict=False)),
    SystemName.DLROVER: dict(zip(Scenario, (25, 30, 80, 60), strict=False)),
    SystemName.PERDURE: {
        Scenario.WORKER: 12,
        Scenario.NODE_REPLACED: 17,
        Scenario.NODE_LOST: 13,
        Scenario.RANK_DURING_REPAIR: 25,
        Scenario.SLOW_TO_DIE: 35,
    },
    SystemName.PERDURE_COLD: {Scenario.WORKER: 15, Scenario.NODE_REPLACED: 18, Scenario.NODE_LOST: 15},
    SystemName.FLOOR: {Scenario.WORKER: 4, Scenario.NODE_REPLACED: 4, Scenario.NODE_LOST: 3},
    SystemName.PERDURE_WITHHELD: {Scenario.NODE_REPLACED: 25},
}
"""Usual duration of a trial on two cores, including hangs; used only for the forecast."""


def plan(
    wanted: Mapping[tuple[SystemName, Scenario], int], *, size: int = 2, done: Iterable[TrialRecord] = ()
) -> list[PlannedTrial]:
    """Returns the remaining trials, interleaved: each system is spread evenly over the run, as are changes of the
    machine's load."""
    already = count_trials(record for record in done if record.size == size)
    trials = [
        ((number - 0.5) / runs, PlannedTrial(system, scenario, number, size))
        for (system, scenario), runs in wanted.items()
        for number in range(already[system, scenario] + 1, runs + 1)
    ]
    return [trial for _, trial in sorted(trials, key=lambda entry: entry[0])]


def forecast_seconds(trials: Iterable[PlannedTrial]) -> float:
    return sum(USUAL_SECONDS[trial.system][trial.scenario] for trial in trials)
