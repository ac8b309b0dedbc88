"""Pauses before the next restart of a rank that ends the same way soon after each start, and stops the job in the end.

What kills it from outside, such as a machine's shortage of memory, may pass within a pause. What does not is the
script's own, whatever its exit code says.
"""

from __future__ import annotations

from dataclasses import replace

from perdure.base.words import count
from perdure.contract import Wait
from perdure.workflows.policy.behavior import Behavior
from perdure.workflows.policy.repair import charges
from perdure.workflows.policy.repair.case import Case, Verdict
from perdure.workflows.policy.repair.rungs.permanent_failure import stop
from perdure.workflows.policy.state.budget import backoff


def decide(case: Case) -> Verdict | None:
    if case.state.behavior < Behavior.RELEASE_0_4 or not case.traits.counts or case.interruption.counted:
        return None
    end = charges.early_end(case)
    if end is None or end.times == 1:
        return None
    if end.times > case.job.retry.no_progress_limit:
        again = f"{count(end.times, 'time')} in a row, soon after the start and without a step"
        rule = 'same-end/1 "the same end soon after each start: it is the script"'
        return stop(case, rule, f"it ended the same way {again}: {case.culprit.text}", 1)
    until = case.interruption.since + backoff(end.times)
    if case.now >= until or case.interruption.unpaused:
        return None
    pause = case.blame('same-end/2 "a pause, which grows while no step is gained"', Wait(until=until), rejected=())
    again = f"they have ended the same way {count(end.times, 'time')} in a row, soon after the start"
    return replace(pause, waits=f"restarts the ranks at {until:%H:%M:%S} UTC: {again}")
