"""Tests of `retry.rules` as users write them, and of what they are told of a wrong rule."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.spec.errors import SpecError
from perdure.spec.rules import RuleAction
from perdure.spec.validate import parse_spec
from tests.spec.test_spec_errors import text_of, worker

STOP = {"action": "stop"}
LOG = {"log": "port error"}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "nothing to match": (
        {"match": {}, **STOP},
        ".match: got an empty mapping; expected at least one of log, exit_codes, signals and failures",
    ),
    "a pattern that is none": (
        {"match": {"log": "(a"}, **STOP},
        '.match.log: got "(a"; expected a regular expression as Python\'s re takes it; missing ), unterminated',
    ),
    "a pattern that fits everything": (
        {"match": {"log": "a*"}, **STOP},
        '.match.log: got "a*"; expected a regular expression that does not fit an empty line; this one fits every',
    ),
    "a long pattern": (
        {"match": {"log": "a" * 201}, **STOP},
        "expected a regular expression of at most 200 characters",
    ),
    "an unknown signal": (
        {"match": {"signals": ["SIGFOO"]}, **STOP},
        '.match.signals[0]: got "SIGFOO"; expected the name of a signal that ends processes, such as SIGSEGV',
    ),
    "an unknown class": (
        {"match": {"failures": ["CRSH"]}, **STOP},
        '.match.failures[0]: got "CRSH"; expected CANNOT_RUN, COLLECTIVE_TIMEOUT, COMMAND_LOST, CORRUPTION, CRASH',
    ),
    "a restart on a node that is gone": (
        {"match": {"failures": ["CRASH", "PREEMPTED"]}, "action": "restart"},
        "expected replace or stop as action, since a node that is PREEMPTED is gone",
    ),
    "an exit code beyond": (
        {"match": {"exit_codes": [256]}, **STOP},
        ".match.exit_codes[0]: got 256; expected an integer of at most 255",
    ),
    "an unknown action": (
        {"match": LOG, "action": "replce"},
        '.action: got "replce"; expected restart, replace or stop; did you mean "replace"?',
    ),
    "no action": ({"match": LOG}, ".action: missing (what is done); expected restart, replace or stop"),
    "a long reason": ({"match": LOG, "reason": "a" * 201, **STOP}, "expected at most 200 characters"),
}


def with_rules(*rules: Any, **spec: Any) -> dict[str, Any]:
    return worker() | {"retry": {"rules": list(rules)}} | spec


@pytest.mark.parametrize(("rule", "text"), WRONG.values(), ids=WRONG)
def test_a_wrong_rule_is_named_with_its_value_and_what_is_right(rule: dict[str, Any], text: str):
    told = text_of(with_rules(rule))
    assert told.startswith("retry.rules[0]")
    assert text in told


def test_there_are_at_most_thirty_two():
    assert "retry.rules: got a list; expected a list of at most 32" in text_of(
        with_rules(*[{"match": LOG, **STOP}] * 33)
    )


def test_a_job_that_stops_for_a_lost_node_has_no_rule_that_replaces_one():
    told = text_of(with_rules({"match": LOG, "action": "replace"}, recovery={"on_capacity_loss": "fail"}))
    assert "retry.rules[0].action is replace, and recovery.on_capacity_loss is fail" in told


def test_a_rule_is_read_whole():
    match = {"log": "port error", "exit_codes": [1], "signals": ["SIGBUS"], "failures": ["CRASH"]}
    [rule] = parse_spec(with_rules({"match": match, "action": "replace", "reason": " its card\n failed "})).retry.rules
    assert rule.match.model_dump() == match
    assert (rule.action, rule.reason) == (RuleAction.REPLACE, "its card failed")


def test_a_pattern_that_takes_for_ever_is_compiled_and_not_searched():
    with pytest.raises(SpecError):
        parse_spec(with_rules({"match": {"log": "(a*)*"}, **STOP}))
    assert parse_spec(with_rules({"match": {"log": "(a+)+$"}, **STOP}))
