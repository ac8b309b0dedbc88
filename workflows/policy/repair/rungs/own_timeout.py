"""Stops the job where the command has bounded its own time by `timeout`: a restart would grant the same time again."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from perdure.contract import NewWorld, Stop
from perdure.workflows.policy.behavior import Behavior
from perdure.workflows.policy.repair.case import Case, Rejected, Verdict

_NAMES = frozenset({"timeout", "gtimeout"})
_WITH_VALUE = frozenset({"-k", "--kill-after", "-s", "--signal"})
_DURATION = re.compile(r"\d*\.?\d+[smhd]?")


def decide(case: Case) -> Verdict | None:
    if case.state.behavior < Behavior.RELEASE_0_4 or not any(failure.as_of_timeout for failure in case.causes):
        return None
    duration = duration_of_timeout(case.job.roles[case.state.role].command)
    if not duration:
        return None
    reason = (
        f"the command's own `timeout {duration}` has ended it, by exit code 124; limits.active_deadline bounds a job "
        "with all its restarts"
    )
    rejected = (Rejected(NewWorld(), f"the command would be given {duration} again"),)
    rule = 'own-timeout/1 "the command bounds its own time"'
    return case.blame(rule, Stop(reason=reason, exit_code=5), rejected=rejected, title=reason)


def duration_of_timeout(command: Sequence[str]) -> str:
    """Returns the time that a command gives itself by `timeout`, also within a shell's text; empty where it gives none.

    Words after a script are its own arguments.
    """
    words = iter(part for word in command for part in word.split())
    for word in words:
        if word.endswith(".py"):
            break
        if PurePosixPath(word.lstrip("(")).name in _NAMES and (duration := _duration(words)):
            return duration
    return ""


def _duration(words: Iterator[str]) -> str:
    for word in words:
        if word in _WITH_VALUE:
            next(words, None)
        elif not word.startswith("-"):
            return word if _DURATION.fullmatch(word) else ""
    return ""
