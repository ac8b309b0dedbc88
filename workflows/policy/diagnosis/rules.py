"""Compares failures with the rules of `retry.rules`: the first rule that fits one of them decides.

An agent has looked for the patterns where the output is, so a rule is judged by what reports say, and a replay needs no
output and no matcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from perdure.contract.base import shorten
from perdure.spec.rules import Match, RetryRule
from perdure.spec.signals import signal_name
from perdure.workflows.policy.diagnosis.failures import NODE_FAILURES, VICTIMS
from perdure.workflows.policy.state.node import NodeFailure

_NAMED = 3
"""Matches of one node that are evidence."""

_LINE = 300


class Ruled(NamedTuple):
    """A rule, and the failure that it decides on."""

    number: int
    rule: RetryRule
    failure: NodeFailure

    @property
    def name(self) -> str:
        """The rule's place in the specification, and its reason."""
        return f"{name_of(self.number)}: {self.rule.reason}" if self.rule.reason else name_of(self.number)


def name_of(number: int) -> str:
    """The place of a rule in the specification."""
    return f"retry.rules[{number}]"


def deciding(rules: Sequence[RetryRule], failures: Sequence[NodeFailure]) -> Ruled | None:
    """Returns the first rule that fits one of these failures, which are in the order of their causes.

    Where a node is gone, only a rule that names how it was lost decides. Victims are compared only where no cause is
    known.
    """
    lost = [one for one in failures if one.failure in NODE_FAILURES]
    causes = lost or [one for one in failures if one.failure not in VICTIMS] or failures
    fitting = (
        Ruled(number, rule, failure)
        for number, rule in enumerate(rules)
        for failure in causes
        if _fits(number, rule.match, failure) and (not lost or failure.failure in rule.match.failures)
    )
    return next(fitting, None)


def evidence(failure: NodeFailure) -> tuple[str, ...]:
    """What the node's output says to the rules, for an incident."""
    return tuple(
        f"whether its output fits {name_of(match.rule)} is not known: the pattern takes too long"
        if match.too_slow
        else f"its output fits {name_of(match.rule)}: {shorten(match.line, _LINE)}"
        for match in failure.matches[:_NAMED]
    )


def _fits(number: int, match: Match, failure: NodeFailure) -> bool:
    logged = any(one.rule == number and not one.too_slow for one in failure.matches)
    ended_by = None if failure.signal is None else signal_name(failure.signal)
    return (
        (match.log is None or logged)
        and (not match.exit_codes or failure.exit_code in match.exit_codes)
        and (not match.signals or ended_by in match.signals)
        and (not match.failures or failure.failure in match.failures)
    )
