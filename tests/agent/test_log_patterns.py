"""Tests of the patterns of `retry.rules` in the output of a node: what they fit, and how long they may take."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from perdure.agent.log_patterns import matches_in
from perdure.contract import Failure, RuleMatch
from perdure_training.node_api.bodies import ReadyReport
from perdure_training.node_api.layout import LOGS, OUTPUT_LOG
from tests.agent.bench import Bench, rank

OUTPUT = """\
step 1 loss 2.31
NET/IB : Got async event : port error on mlx5_2
step 2 loss 2.30
NET/IB : Got async event : port error on mlx5_3

"""
CATASTROPHIC = r"(a+)+$"


def test_the_newest_line_that_fits_is_named():
    assert matches_in(OUTPUT, {0: "port error", 4: r"^step \d+ "}) == (
        RuleMatch(rule=0, line="NET/IB : Got async event : port error on mlx5_3"),
        RuleMatch(rule=4, line="step 2 loss 2.30"),
    )


@pytest.mark.parametrize("pattern", ["port down", "error.*step", "("])
def test_what_fits_no_line_or_is_no_pattern_is_no_match(pattern: str):
    assert matches_in(OUTPUT, {0: pattern}) == ()


def test_of_a_line_without_end_the_beginning_counts():
    assert matches_in("x" * 5_000 + "late", {0: "late", 1: "^x"}) == (RuleMatch(rule=1, line="x" * 1_000),)


def test_a_pattern_that_takes_for_ever_is_given_up_and_the_others_count():
    before = signal.getsignal(signal.SIGVTALRM)
    found = matches_in("a" * 40 + "b\n" + OUTPUT, {0: CATASTROPHIC, 1: "port error"})
    assert [(one.rule, one.too_slow) for one in found] == [(0, True), (1, False)]
    assert signal.getsignal(signal.SIGVTALRM) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_a_failure_says_which_rules_its_own_world_fits(tmp_path: Path):
    bench = Bench(tmp_path, log_patterns={0: "async event", 1: "of an earlier world", 2: "ValueError"})
    log = tmp_path / LOGS / OUTPUT_LOG
    log.parent.mkdir()
    for generation, line in ((1, "of an earlier world"), (2, OUTPUT)):
        bench.apply(generation)
        bench.enter(generation)
        with log.open("a") as file:
            file.write(f"{line}\n")
        ended = rank(pid=generation, error="ValueError: no data")
        bench.node.on_ready(ReadyReport(after_generation=generation, ranks=(ended,)))
    first, second = bench.job.of(Failure)
    assert [match.rule for match in first.matches] == [1, 2]
    assert [match.rule for match in second.matches] == [0, 2]


def test_a_command_that_fails_by_itself_is_compared_with_the_rules_too(tmp_path: Path):
    bench = Bench(tmp_path, log_patterns={0: "licence"})
    bench.apply(1)
    bench.exit(generation=0, code=1, log_tail="no licence is free\n")
    [failure] = bench.job.of(Failure)
    assert failure.matches == (RuleMatch(rule=0, line="no licence is free"),)
