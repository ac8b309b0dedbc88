"""Tests that only what must come out of a fault passes in the matrix."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import typer

from benchmarks.faults.__main__ import Backend, closing, listed, matrix, plan
from benchmarks.faults.judgement import (
    CleanRun,
    Expected,
    Outcome,
    Story,
    Throughput,
    judge,
    judge_clean,
    steps_per_second,
)
from benchmarks.faults.ray_site import RAY_ROWS
from benchmarks.faults.rows import PROFILES, REPLACED, ROWS, STRAGGLER
from perdure.contract import Evidence, EvidenceSource, FailureClass, IncidentView, Observation, Straggler
from perdure.contract.actions import Actions, RestartRanks, Stop

FAULT = datetime(2026, 1, 1, tzinfo=UTC)
ONE = frozenset({1})
KILLED = Expected("KILLED", ONE, frozenset({"RESTART_RANKS"}))


RESTARTED: Actions = (RestartRanks(nodes=(1,)),)


def incident(*, after: float = 0.25, actions: Actions = RESTARTED, **fields: Any) -> IncidentView:
    seen = FAULT + timedelta(seconds=after)
    told: dict[str, Any] = {
        "number": 1,
        "title": "node 1: rank 1 SIGKILL",
        "failure": FailureClass.KILLED,
        "culprit": 1,
    }
    times: dict[str, Any] = {"started_at": FAULT, "noticed_at": seen, "decided_at": seen + timedelta(seconds=0.5)}
    return IncidentView(**told | times | dict[str, Any](actions=actions) | fields)


def judged(*incidents: IncidentView, expected: Expected = KILLED, trains: bool = True, **story: Any) -> Outcome:
    made = Story(FAULT.timestamp(), incidents, trains=trains, **story)
    return judge(expected, made, name="fault", backend="local")


def test_a_fault_that_is_told_and_repaired_as_expected_passes():
    outcome = judged(incident(), steps_lost=3)
    assert outcome.passed
    assert (outcome.detected_s, outcome.decided_s, outcome.steps_lost, outcome.problem) == (0.25, 0.75, 3, "")


@pytest.mark.parametrize(
    ("told", "trains", "wrong"),
    [
        ([], True, ["class_ok", "culprit_ok", "action_ok"]),
        ([incident(after=-30)], True, ["class_ok", "culprit_ok", "action_ok"]),
        ([incident(failure=FailureClass.PEER_LOST)], True, ["class_ok"]),
        ([incident(culprit=0)], True, ["culprit_ok"]),
        ([incident(culprit=None)], True, ["culprit_ok"]),
        ([incident(also_failed=(0,))], True, ["culprit_ok"]),
        ([incident(actions=(Stop(),))], True, ["action_ok"]),
        ([incident()], False, ["action_ok"]),
        ([incident(stopped=True)], True, ["action_ok"]),
        ([incident(), incident(number=2)], True, ["action_ok"]),
    ],
)
def test_each_wrong_claim_and_each_further_interruption_is_found(
    told: list[IncidentView], trains: bool, wrong: list[str]
):
    outcome = judged(*told, trains=trains)
    assert not outcome.passed
    assert [name for name in ("class_ok", "culprit_ok", "action_ok") if not getattr(outcome, name)] == wrong
    assert outcome.problem


@pytest.mark.parametrize(
    ("told", "passes"),
    [
        ([incident(failure=FailureClass.NODE_LOST, also_failed=(2,))], True),
        ([incident(), incident(number=2, failure=FailureClass.NODE_LOST, culprit=2)], True),
        ([incident(failure=FailureClass.NODE_LOST, culprit=2), incident(number=2)], False),
        ([incident(), incident(number=2, failure=FailureClass.NODE_LOST, culprit=0)], False),
        ([incident(), incident(number=2), incident(number=3, failure=FailureClass.NODE_LOST, culprit=2)], False),
        ([incident()], False),
    ],
    ids=["as one", "one after the other", "in another order", "of another node", "with a third", "of one alone"],
)
def test_two_faults_at_once_may_be_told_one_after_the_other(told: list[IncidentView], passes: bool):
    both = Expected("NODE_LOST", frozenset({1, 2}), frozenset({"RESTART_RANKS"}), before="KILLED")
    assert judged(*told, expected=both).passed == passes


def test_a_fault_that_is_found_late_does_not_pass():
    outcome = judged(incident(after=1.5))
    assert (outcome.class_ok, outcome.culprit_ok, outcome.action_ok) == (True, True, True)
    assert not outcome.passed


def test_a_fault_that_comes_again_must_stop_the_job_at_the_right_time():
    always = Expected("KILLED", ONE, frozenset({"STOP"}), interruptions=2, stops=True)
    stopped = incident(number=2, actions=(Stop(),), stopped=True)
    assert judged(incident(), stopped, expected=always, trains=False).passed
    assert not judged(stopped, expected=always, trains=False).passed
    assert not judged(incident(), incident(number=2), expected=always, trains=True).passed


SILENT = Expected("", ONE, within=10.0, shown="unreachable")


def observation(*nodes: int) -> IncidentView:
    return incident(after=8.0, failure=None, culprit=None, actions=(), observation=Observation(unreachable=nodes))


def test_what_interrupts_nothing_is_an_observation_or_in_the_status():
    assert judged(observation(1), expected=SILENT).passed
    assert judged(expected=SILENT, shown_at=FAULT.timestamp() + 8, shown=ONE).passed
    for wrong in (
        judged(expected=SILENT),
        judged(observation(0), expected=SILENT),
        judged(observation(1), incident(), expected=SILENT),
        judged(observation(1), expected=SILENT, trains=False),
    ):
        assert not wrong.passed
        assert wrong.problem


def test_an_observation_that_has_no_nodes_names_those_of_its_evidence():
    sign = Evidence(time=FAULT, source=EvidenceSource.AGENT, rank=1, text="the loss is nan")
    seen = incident(failure=None, culprit=None, observation=Observation(bad_number=True), evidence=(sign,))
    assert judged(seen, expected=Expected("", ONE, shown="bad_number")).passed


def test_a_slow_rank_is_named_by_its_node():
    slow = Observation(stragglers=(Straggler(node=1, rank=3, compute=0.1, usual=0.05, lost=0.4),))
    seen = incident(failure=None, culprit=None, observation=slow)
    assert judged(seen, expected=Expected("", ONE, shown="stragglers")).passed


def test_a_class_that_this_release_does_not_have_is_not_built_and_never_passes():
    assert Expected("MADE_UP", ONE).missing == "MADE_UP"
    assert not KILLED.missing
    outcome = Outcome(name="fault", backend="local", not_built="MADE_UP")
    assert not outcome.passed
    assert matrix([outcome]).columns[1]._cells == ["not built"]


def test_so_is_an_observation_that_this_release_does_not_make():
    assert Expected("", ONE, shown="made_up").missing == "made_up"
    assert not SILENT.missing


def test_each_entry_of_a_job_without_a_fault_is_a_false_alarm_and_each_interruption_a_false_repair():
    run = judge_clean("steady", [incident(), observation(1)])
    assert (len(run.alarms), run.repairs) == (2, 1)
    line = closing([], [run, judge_clean("warm-up", []), CleanRun(profile="bursty", problem="not started")], 0.2)
    assert line == {
        "faults": [],
        "clean_runs": 2,
        "false_alarms": 2,
        "false_repairs": 1,
        "evidence_overhead_pct": 0.2,
        "straggler_named_s": None,
        "peers": [],
        "throughput_after_pct": None,
    }


def test_a_slow_rank_is_named_only_where_it_is_the_right_one():
    named = Outcome(name=STRAGGLER, backend="local", detected_s=12.0, culprit_ok=True)
    assert closing([named], [], None)["straggler_named_s"] == 12.0
    assert closing([named.model_copy(update={"culprit_ok": False})], [], None)["straggler_named_s"] is None


def test_a_job_is_to_be_as_fast_again_once_a_slow_rank_is_replaced():
    times = [0.05 * number for number in range(200)]
    assert steps_per_second(times, 2.0, 7.0) == pytest.approx(20.0)
    assert steps_per_second(times, 30.0, 40.0) == 0.0
    again, less = (Throughput(before=20.0, during=10.0, after=after) for after in (19.7, 19.5))
    outcome = judged(incident()).model_copy(update={"name": REPLACED, "throughput": again})
    assert outcome.passed
    assert closing([outcome], [], None)["throughput_after_pct"] == 98.5
    assert not outcome.model_copy(update={"throughput": less}).passed


def test_names_are_chosen_and_an_unknown_one_is_an_error():
    whole = plan("", clean=False, clean_runs=len(PROFILES) + 2)
    assert list(whole.rows) == list(ROWS)
    assert list(whole.profiles) == [*PROFILES, *PROFILES[:2]]
    assert whole.overhead
    some = plan("steady,kill-node,kill-rank", clean=False, clean_runs=12)
    assert ([row.name for row in some.rows], some.profiles, some.overhead) == (
        ["kill-rank", "kill-node"],
        ["steady"],
        False,
    )
    clean = plan("", clean=True, clean_runs=len(PROFILES))
    assert (list(clean.rows), clean.profiles, clean.overhead) == ([], list(PROFILES), False)
    with pytest.raises(typer.BadParameter, match="kill-everything"):
        plan("kill-rank,kill-everything", clean=False, clean_runs=0)


def test_ray_has_the_faults_that_need_no_network_of_a_node_and_its_own():
    tried = plan("", clean=False, clean_runs=len(PROFILES), backend=Backend.RAY)
    names = {row.name for row in tried.rows}
    assert names == {row.name for row in (*ROWS, *RAY_ROWS) if not row.injection.placed}
    assert {"kill-rank", "bit-flip", "kill-machine", "drain-machine"} <= names
    assert (tried.profiles, tried.overhead) == ([], False)
    with pytest.raises(typer.BadParameter, match="kill-actor"):
        plan("kill-actor", clean=False, clean_runs=0)


def test_all_that_can_be_tried_is_listed_once():
    names = [*(row.name for row in (*ROWS, *RAY_ROWS)), *PROFILES]
    assert list(listed().columns[0].cells) == names
    assert len(set(names)) == len(names)
