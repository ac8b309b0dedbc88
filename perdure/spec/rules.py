"""Rules by which users say what is done about failures that only they can recognize: `retry.rules`."""

from __future__ import annotations

import re
from enum import StrEnum
from importlib import import_module
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from .base import Integer, Section, Text
from .signals import SignalName

_PARSER: Any = import_module("re._parser")
"""The standard library's parser of patterns, which has no public name. Parsing takes linear time; compiling a pattern
may take seconds, and a search forever. Processes that all users share do neither."""

_ASSERTIONS = ("^", "$", "\\b", "\\B", "\\A", "\\Z", "(?=", "(?!", "(?<")
"""Parts of patterns that have no length and may yet not fit."""

_LONGEST_PATTERN = 200
_LONGEST_REASON = 200


class RuleAction(StrEnum):
    """What is done about a failure that a rule is for."""

    RESTART = "restart"
    """Restarts the ranks, or the command, on their nodes."""
    REPLACE = "replace"
    """Replaces the node, on another machine if one has room and the backend chooses machines."""
    STOP = "stop"
    """Stops the job."""


class RuleFailure(StrEnum):
    """The failure classes that rules may name: those of a node that is alive, and two kinds of losses. Each is a member
    of `perdure.contract.FailureClass`, which describes it."""

    CANNOT_RUN = "CANNOT_RUN"
    COLLECTIVE_TIMEOUT = "COLLECTIVE_TIMEOUT"
    COMMAND_LOST = "COMMAND_LOST"
    CORRUPTION = "CORRUPTION"
    CRASH = "CRASH"
    DEVICE_FAULT = "DEVICE_FAULT"
    DEVICE_OUT_OF_MEMORY = "DEVICE_OUT_OF_MEMORY"
    EVICTED = "EVICTED"
    KILLED = "KILLED"
    NETWORK = "NETWORK"
    NUMERIC = "NUMERIC"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    PEER_LOST = "PEER_LOST"
    PREEMPTED = "PREEMPTED"
    RANK_HANG = "RANK_HANG"
    STORAGE = "STORAGE"
    USER_CODE = "USER_CODE"


_LOST = frozenset({RuleFailure.EVICTED, RuleFailure.PREEMPTED})
"""Failures of a node that is gone, where nothing can be restarted in place."""


def _is_pattern(text: str) -> str:
    if len(text) > _LONGEST_PATTERN:
        raise ValueError(f"expected a regular expression of at most {_LONGEST_PATTERN} characters")
    try:
        parsed = _PARSER.parse(text)
        shortest, _ = parsed.getwidth()
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"expected a regular expression as Python's re takes it; {error}") from None
    if shortest == 0 and not any(assertion in text for assertion in _ASSERTIONS):
        raise ValueError("expected a regular expression that does not fit an empty line; this one fits every output")
    return text


LogPattern = Annotated[Text, AfterValidator(_is_pattern)]
"""A regular expression of Python's `re`."""


def _is_short(text: str) -> str:
    if len(text) > _LONGEST_REASON:
        raise ValueError(f"expected at most {_LONGEST_REASON} characters")
    return " ".join(text.split())


class Match(Section):
    """The failures that a rule is for. Each field that is set must fit, and of a list one item."""

    log: LogPattern | None = None
    """A regular expression, as Python's `re.search` takes it, that fits a line which the node has printed since its
    last world ended, or the error of one of its ranks. Of a line the first 1,000 characters count, of the output the
    last 256 KiB."""
    exit_codes: list[Annotated[Integer, Field(ge=0, le=255)]] = Field(default=[])
    """Exit codes of the rank that failed, or of the command."""
    signals: list[SignalName] = Field(default=[])
    """Signals that ended the rank or the command, such as `SIGSEGV`."""
    failures: list[RuleFailure] = Field(default=[])
    """Classes of failures, as `perdure explain -o json` shows them: see docs/failures.md."""

    @model_validator(mode="after")
    def _is_not_empty(self) -> Match:
        if self.log is None and not (self.exit_codes or self.signals or self.failures):
            raise ValueError("expected at least one of log, exit_codes, signals and failures")
        return self


class RetryRule(Section):
    """What is done about some failures instead of what the job does by itself. The first rule that fits decides."""

    match: Match
    """The failures that it is for."""
    action: RuleAction
    """What is done. `restart` restarts the ranks, or the command, in place, `replace` replaces the node, on another
    machine if one has room, and `stop` stops the job. Restarts and replacements count against `max_restarts` and
    `no_progress_limit`."""
    reason: Annotated[Text, AfterValidator(_is_short)] = ""
    """Why, for `perdure explain` and the job's result; at most 200 characters."""

    @model_validator(mode="after")
    def _restarts_what_is_there(self) -> RetryRule:
        lost = sorted(_LOST.intersection(self.match.failures))
        if lost and self.action is RuleAction.RESTART:
            raise ValueError(f"expected replace or stop as action, since a node that is {lost[0]} is gone")
        return self
