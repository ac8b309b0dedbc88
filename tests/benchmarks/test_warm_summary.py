from __future__ import annotations

import pytest

from benchmarks.recovery.records import Scenario, SystemName, TrialRecord
from benchmarks.warm.scripts import ScriptTrial, scripts
from benchmarks.warm.steady import Pair, StepTimes
from benchmarks.warm.summary import headline, ratio_to_floor, script_rows


def kill(system: SystemName, seconds: float | None, *, size: int = 2, number: int = 1) -> TrialRecord:
    return TrialRecord(
        system=system,
        scenario=Scenario.WORKER,
        number=number,
        size=size,
        recovered=seconds is not None,
        seconds=seconds,
    )


KILLS = [
    kill(SystemName.PERDURE, 0.4),
    kill(SystemName.TORCHRUN, 4.0),
    kill(SystemName.DLROVER, None),
    kill(SystemName.FLOOR, 2.0),
    kill(SystemName.PERDURE, 0.9, size=4),
    kill(SystemName.TORCHRUN, 3.0, size=4),
    kill(SystemName.FLOOR, 6.0, size=4),
]
SCRIPTS = [
    ScriptTrial(script="ddp", number=1, recovered=True, warm=True, seconds=0.5),
    ScriptTrial(script="ddp", number=2, recovered=True, seconds=1.5),
    ScriptTrial(script="fsdp2", number=1, recovered=False, error="not stepping again within 120 s"),
]


def test_the_ratios_are_those_of_the_size_where_they_are_worst() -> None:
    found = headline(KILLS, SCRIPTS, None)
    assert (found.warm_ratio_peer, found.warm_ratio_floor) == (0.3, 0.2)


def test_every_trial_of_ours_counts_whether_it_recovered() -> None:
    found = headline(KILLS, SCRIPTS, None)
    assert (found.recovered, found.runs) == (4, 5)


def test_nothing_measured_is_no_figure() -> None:
    assert ratio_to_floor([kill(SystemName.PERDURE, 0.4)]) is None
    assert headline([], [], None).model_dump() == {
        "warm_ratio_peer": None,
        "warm_ratio_floor": None,
        "recovered": 0,
        "runs": 0,
        "step_ratio": None,
        "zygote_mb": None,
    }


def test_step_times_are_compared_with_their_neighbours() -> None:
    # The machine slows down to half its speed on the way, and one block is disturbed.
    steady = Pair(started=(1.0, 1.0, 2.0, 2.0, 2.0), forked=(1.01, 1.01, 2.02, 9.0, 2.02))
    unlucky = Pair(started=(1.0,), forked=(1.5,))
    times = StepTimes(pairs=(steady, unlucky, steady), interpreter_mb=600.4)
    assert times.ratio == pytest.approx(1.01)
    assert headline([], [], times).step_ratio == pytest.approx(1.01)
    assert headline([], [], times).zygote_mb == 600


def test_a_row_per_kind_of_script() -> None:
    ddp, fsdp2 = script_rows(SCRIPTS)
    assert (ddp.script, ddp.runs, ddp.recovered, ddp.warm, ddp.median_seconds) == ("ddp", 2, 2, 1, 1.0)
    assert (fsdp2.recovered, fsdp2.median_seconds) == (0, None)


def test_there_are_scripts_to_kill_ranks_of() -> None:
    assert {"ddp", "fsdp2", "compiled", "threads"} <= set(scripts())
