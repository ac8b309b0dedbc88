import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.recovery.plan import forecast_seconds, plan
from benchmarks.recovery.records import Composition, ResultFile, Scenario, SystemName, TrialRecord
from benchmarks.recovery.report import markdown, print_report
from benchmarks.recovery.summary import (
    Steady,
    SteadyCost,
    headline,
    median_composition,
    ratio_to_better_peer,
    summarize,
)

A, B, C, D, E = Scenario
TORCHRUN, DLROVER, PERDURE = SystemName.TORCHRUN, SystemName.DLROVER, SystemName.PERDURE


def trials(
    system: SystemName, scenario: Scenario, *seconds: float | None, composition: Composition | None = None
) -> list[TrialRecord]:
    return [
        TrialRecord(
            system=system,
            scenario=scenario,
            number=number,
            recovered=value is not None,
            seconds=value,
            error="" if value is not None else "not stepping again within 120 s",
            composition=composition or Composition(),
        )
        for number, value in enumerate(seconds, start=1)
    ]


STEADY = Steady(
    seconds=30,
    costs=(SteadyCost(what="agent", processes=2, cpu_percent=0.314, rss_mb=98.76, private_mb=48.94),),
    job_events_per_minute=1.5,
)


def test_hangs_count_in_the_success_rate_and_not_in_the_median():
    cell = summarize(trials(TORCHRUN, A, 6.0, None, 8.0, None), TORCHRUN, A)
    assert cell is not None
    assert (cell.recovered, cell.trials, cell.median_seconds, cell.slowest_seconds) == (2, 4, 7.0, 8.0)
    assert len(cell.errors) == 2


def test_the_ratio_is_to_the_better_peer_that_recovered_at_all():
    records = [
        *trials(PERDURE, A, 2.0, 3.0, 4.0),
        *trials(TORCHRUN, A, 6.0),
        *trials(DLROVER, A, 7.5),
        *trials(PERDURE, B, 3.0),
        *trials(TORCHRUN, B, None, None),
        *trials(DLROVER, B, 10.0),
    ]
    assert ratio_to_better_peer(records, A) == pytest.approx(0.5)
    assert ratio_to_better_peer(records, B) == pytest.approx(0.3)
    assert ratio_to_better_peer(records, C) is None


def test_the_lease_only_runs_stay_out_of_the_ratio():
    records = [
        *trials(PERDURE, B, 3.0),
        *trials(SystemName.PERDURE_WITHHELD, B, 11.0),
        *trials(DLROVER, B, 10.0),
    ]
    result = headline(records, None)
    assert result.b_ratio == pytest.approx(0.3)
    assert result.lease_only_s == pytest.approx(11.0)
    assert (result.recovered, result.runs) == (2, 2)


def test_parts_are_summed_up_by_their_median():
    records = trials(PERDURE, A, 2.0, composition=Composition(noticed=0.1, decided=0.2)) + trials(
        PERDURE, A, 2.0, None, composition=Composition(noticed=0.3)
    )
    whole = median_composition(records)
    assert whole.noticed == pytest.approx(0.2)
    assert whole.decided == pytest.approx(0.2)
    assert whole.entered is None


def test_the_last_line_is_the_headline(capsys: pytest.CaptureFixture[str]):
    records = [
        *trials(PERDURE, A, 2.0, composition=Composition(happened=0.10, commanded=0.14)),
        *trials(TORCHRUN, A, None, 8.0),
    ]
    print_report(Console(width=200), records, STEADY, {DLROVER: "it does not install"})
    lines = capsys.readouterr().out.strip().splitlines()
    assert json.loads(lines[-1]) == {
        "a_ratio": 0.25,
        "b_ratio": None,
        "c_ratio": None,
        "recovered": 1,
        "runs": 1,
        "lease_only_s": None,
        "agent_rss_mb": 98.8,
        "agent_private_mb": 48.9,
        "agent_cpu_pct": 0.31,
        "decision_ms_p50": 40.0,
        "a_p95_s": 2.0,
        "d_recovered": [],
        "e_recovered": [],
        **{f"{name}_{what}": None for name in "abc" for what in ("lost_steps", "caught_up_s")},
    }
    text = "\n".join(lines)
    assert "not available" in text
    assert "it does not install" in text
    assert "8.0 (1/2)" in text
    assert "not stepping again" in text


def test_the_spread_and_each_recovery_from_two_faults_are_in_the_headline():
    records = [
        *trials(PERDURE, A, *(number / 100 for number in range(1, 41))),
        *trials(TORCHRUN, A, 99.0),
        *trials(PERDURE, D, 3.0, None),
        *trials(TORCHRUN, D, None),
        *trials(PERDURE, E, 4.0),
    ]
    result = headline(records, None)
    assert result.a_p95_s == pytest.approx(0.38)
    assert (result.d_recovered, result.e_recovered) == ((True, False), (True,))
    assert "| torchrun | 99.0 (1/1) |  |  | - (0/1) |  |" in markdown(records, None, {})


def test_work_that_is_done_again_is_told_for_all_systems():
    def caught_up(system: SystemName, steps: int, seconds: float) -> list[TrialRecord]:
        changes = {"steps_redone": steps, "caught_up_seconds": seconds}
        return [record.model_copy(update=changes) for record in trials(system, B, 1.0)]

    records = [*caught_up(PERDURE, 1, 4.25), *caught_up(DLROVER, 19, 17.0), *trials(TORCHRUN, B, None)]
    result = headline(records, None)
    assert (result.a_lost_steps, result.b_lost_steps, result.b_caught_up_s) == (None, 1, 4.25)
    text = markdown(records, None, {})
    assert "| dlrover |  | 19, 17.0 s |  |" in text
    assert "| torchrun |  | -, - s |  |" in text


def test_the_documentation_gets_the_same_tables():
    records = [*trials(PERDURE, A, 2.0, 3.0), *trials(TORCHRUN, A, None, 10.0)]
    text = markdown(records, STEADY, {DLROVER: "it does not install"})
    assert "| perdure | 2.5 (2/2) |  |  |" in text
    assert "| torchrun | 10.0 (1/2) |  |  |" in text
    assert "| dlrover | not available | not available | not available |" in text
    assert "| Perdure / better peer | 0.25 | - | - |" in text
    assert "| agent (mean of 2) | 0.31 | 49 | 99 |" in text
    assert "make bench-recovery" in text


def test_a_plan_spreads_the_systems_evenly_and_leaves_out_what_is_done(tmp_path: Path):
    results = ResultFile(tmp_path / "results.jsonl")
    for record in trials(PERDURE, A, 2.0):
        results.append(record)
    planned = plan({(PERDURE, A): 5, (TORCHRUN, A): 2}, done=results.read())
    assert [(trial.system, trial.number) for trial in planned] == [
        (TORCHRUN, 1),
        (PERDURE, 2),
        (PERDURE, 3),
        (PERDURE, 4),
        (TORCHRUN, 2),
        (PERDURE, 5),
    ]
    assert forecast_seconds(planned) > 0
