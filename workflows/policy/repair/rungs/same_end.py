"""Pauses before the next restart of a rank that ends the same way soon after each start, or of a command that does so
while it has no ranks, and stops the job in the end.

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
        rule = 'same-end/1 "the same end soon after each start: it is the script"'
        when = "soon after the start and without a step"
        if end.without_ranks:
            rule = 'same-end/3 "the same end of the command, which had no ranks: it is the command"'
            when = "while its command had no ranks"
        again = f"{count(end.times, 'time')} in a row, {when}"
        return stop(case, rule, f"it ended the same way {again}: {case.culprit.text}", 1)
    if case.state.world is None:
        # The node is replaced, after pauses of its own.
        return None
    until = case.interruption.since + backoff(end.times)
    if case.now >= until or case.interruption.unpaused:
        return None
    pause = case.blame('same-end/2 "a pause, which grows while no step is gained"', Wait(until=until), rejected=())
    again = f"ended the same way {count(end.times, 'time')} in a row"
    waits = f"restarts the ranks at {until:%H:%M:%S} UTC: they have {again}, soon after the start"
    if end.without_ranks:
        waits = f"starts the command again at {until:%H:%M:%S} UTC: it has {again}, while it had no ranks"
    return replace(pause, waits=waits)
