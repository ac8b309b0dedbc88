"""Decides on a broken world with one verdict: the smallest repair that works, or the reason to stop.

Every verdict names its rule and the options that it did not take. `perdure explain` prints both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta

from perdure.contract import Considered, FailureClass, JobPhase, LossCause, NodePhase, ProgressSource, Suspect
from perdure.spec.capabilities import CAPABILITIES
from perdure.spec.job import JobSpec
from perdure.spec.recovery import CapacityLoss
from perdure.workflows.policy.checkpoints import trust
from perdure.workflows.policy.diagnosis.failures import (
    FAILURE_CLASSES,
    NEED_PROGRESS,
    NODE_FAILURES,
    VICTIMS,
    GiveUp,
    failed_by_themselves,
    precedence,
)
from perdure.workflows.policy.diagnosis.suspicion import names, suspected_again, suspects_of
from perdure.workflows.policy.facts import user_requests
from perdure.workflows.policy.record import incidents
from perdure.workflows.policy.state.budget import follows, made_progress, within_window
from perdure.workflows.policy.state.job import Interruption, JobState, NodeFailure, Outcome
from perdure.workflows.policy.world import stages, succession
from perdure.workflows.policy.world.rendezvous import usable

_WORTH_WAITING = timedelta(milliseconds=100)


@dataclass(frozen=True)
class Verdict:
    """The decision on a broken world."""

    rule: str
    title: str
    action: str
    failure: FailureClass | None = None
    culprit: int | None = None
    suspects: tuple[Suspect, ...] = ()
    considered: tuple[Considered, ...] = ()
    stop: Outcome | None = None
    replace: tuple[int, ...] = field(default=())
    """Nodes (slots) that are given up although nothing proves them gone."""


def waits_until(state: JobState, interruption: Interruption, job: JobSpec) -> datetime | None:
    """The time until which a decision should wait for a culprit's report, for a backend that knows why it ends a node,
    or for the loss of more nodes; None where enough is known."""
    if interruption.requested is not None:
        return None
    certain = {failure.failure for failure in interruption.failures if failure.certain} - VICTIMS
    if certain:
        settles = len(state.members) * job.timing.rendezvous.settle_per_node
        return interruption.since + settles if certain & NODE_FAILURES and settles >= _WORTH_WAITING else None
    reported = {failure.rank for failure in interruption.failures}
    if interruption.ranks_with(FailureClass.NODE_LOST, FailureClass.DISRUPTED):
        # The node's agent reports the end. The backend learns it from a kubelet, and knows of the drain or the
        # deletion.
        return interruption.since + job.timing.lease.timeout
    if all(node.rank in reported for node in state.members if node.alive) and not _may_be_late(interruption):
        return None
    return interruption.since + job.timing.rendezvous.victim_grace


def _may_be_late(interruption: Interruption) -> bool:
    """Whether a report may be outdated: after an outage the report of the step that followed comes a moment later."""
    return bool(interruption.ranks_with(FailureClass.HANG))


def recover(state: JobState, job: JobSpec, now: datetime) -> JobState:
    """Decides on what interrupts the job, and carries that out as far as it concerns the nodes."""
    interruption = state.interruption
    if interruption is None or interruption.decided:
        return state
    verdict = decide_repair(state, interruption, job, now)
    if verdict is None:
        return state
    if not interruption.counted:
        state = trust.judge(state, verdict.failure, now)
    state = record(state, verdict, interruption, job, now)
    for rank in verdict.replace:
        node = state.nodes.get(rank)
        # A replacement that an earlier verdict on the same world requested has not failed.
        if node is not None and node.alive and state.is_member(node):
            state = state.with_node(
                succession.drop(
                    state,
                    node,
                    phase=NodePhase.LOST,
                    since=now,
                    reason=verdict.title,
                    loss_cause=_cause(rank, interruption),
                    # The next incarnation must reach the rendezvous before a world waits for it.
                    failed_starts=max(node.failed_starts, min(node.missed_worlds, 1)),
                )
            )
    return (
        stages.restart_failed_commands(state, interruption) if state.between_stages and state.outcome is None else state
    )


def _cause(rank: int, interruption: Interruption) -> LossCause:
    """The cause of the loss of a node that is given up although it is not known to be gone."""
    if rank in interruption.ranks_with(FailureClass.NODE_UNRESPONSIVE, FailureClass.CANNOT_RUN):
        return LossCause.MACHINE
    # The node itself reports that something ends it. If its machine were the reason, the backend would have reported
    # it.
    ended = interruption.ranks_with(FailureClass.NODE_LOST, FailureClass.DISRUPTED)
    return LossCause.WANTED if rank in ended else LossCause.UNKNOWN


def decide_repair(state: JobState, interruption: Interruption, job: JobSpec, now: datetime) -> Verdict | None:
    """The verdict; None while it is too early for one."""
    if interruption.requested is not None:
        return Verdict(
            rule=user_requests.RULE if interruption.by_user else 'capacity/1 "the best world for the available nodes"',
            title=interruption.requested,
            action=f"new generation: {interruption.requested}",
        )
    until = waits_until(state, interruption, job)
    if until is not None and now < until:
        return None
    culprit = min(
        interruption.failures, key=lambda failure: (precedence(failure.failure), not failure.certain, failure.time)
    )
    return _must_stop(state, interruption, culprit, job, now) or _repair(state, interruption, culprit, job, now)


def _repair(state: JobState, interruption: Interruption, culprit: NodeFailure, job: JobSpec, now: datetime) -> Verdict:
    traits = FAILURE_CLASSES[culprit.failure]
    give_up = traits.give_up
    if give_up is not None and (give_up.at_once or culprit.rank in _to_replace(state, interruption)):
        return _node_gone(state, interruption, culprit, give_up, job, now)
    if culprit.failure is FailureClass.HANG:
        return _no_first_step(state, culprit)
    if culprit.failure is FailureClass.COLLECTIVE_TIMEOUT:
        return _hang(state, interruption, culprit, job)
    if traits.victim:
        return Verdict(
            rule='peers-lost/1 "no culprit reported: restart in place"',
            title=f"connections between ranks broke: {culprit.text}",
            action="restart the ranks of every node in place",
            failure=culprit.failure,
            considered=(Considered(option="replace a node", why_not="no evidence names one, and none is known lost"),),
        )
    if culprit.failure is FailureClass.RENDEZVOUS_TIMEOUT:
        return _blame(
            culprit,
            rule='rendezvous-timeout/1 "start its command again"',
            action="start the command again on its node and restart the other ranks in place",
            considered=(
                Considered(option="wait longer", why_not="timing.rendezvous.enter_timeout is over"),
                Considered(
                    option="replace the node", why_not="its agent is alive; done if the restart fails to enter, too"
                ),
            ),
        )
    if state.world is None:
        return _blame(
            culprit,
            rule='failed-start/1 "replace the node, and try again a few times"',
            action="replace the node and start its command again",
            considered=(
                Considered(
                    option="start it again on its node",
                    why_not="it failed there; another machine may provide what it lacks",
                ),
                Considered(option="stop the job", why_not="retry.no_progress_limit and max_restarts allow another try"),
            ),
        )
    if state.between_stages:
        return _blame(
            culprit,
            rule='command-failure/1 "start it again on its node"',
            action="start the command again on its node; it skips the torchruns that have finished",
            considered=(
                Considered(option="restart the others", why_not="their commands continue"),
                Considered(option="replace the node", why_not="its agent and launcher are alive"),
            ),
        )
    # Where several nodes report it, other machines were tried.
    alone = interruption.ranks_with(FailureClass.CANNOT_RUN) == frozenset({culprit.rank})
    if alone and CAPABILITIES[job.backend].chooses_machines and _may_replace(job):
        return _elsewhere(culprit)
    command = culprit.failure is FailureClass.COMMAND_LOST
    return _blame(
        culprit,
        rule='command-lost/1 "start it again on its node"' if command else 'rank-failure/1 "restart in place"',
        action="start the command again and restart the other ranks in place"
        if command
        else "restart the ranks of every node in place",
        considered=(
            Considered(option="replace the node", why_not="its agent and launcher are alive"),
            Considered(option="continue with fewer nodes", why_not="no capacity is lost"),
        ),
    )


def _elsewhere(culprit: NodeFailure) -> Verdict:
    """The verdict on a script that cannot run on one node: what it lacks there, another machine may have."""
    return _blame(
        culprit,
        rule='cannot-run/1 "one more try, on another machine"',
        action="replace the node, on another machine if one has room, and try once more",
        considered=(
            Considered(option="restart in place", why_not="what is missing there is still missing"),
            Considered(option="stop the job", why_not="another machine may have what this one lacks"),
        ),
        replace=(culprit.rank,),
    )


def _hang(state: JobState, interruption: Interruption, culprit: NodeFailure, job: JobSpec) -> Verdict:
    """The verdict on ranks that waited for another one in vain. Who reports a timeout is not the one that hangs."""
    suspects = suspects_of(state, interruption)
    named = f"{names(suspects)} may hang" if suspects else "no node is known to hang"
    title = f"a collective timed out, {named}: {culprit.text}"
    again = suspected_again(state, suspects) if failures_without_progress(state, culprit) else None
    if again is not None and _may_replace(job):
        request, action = _replacement(job)
        return Verdict(
            rule='collective-timeout/2 "the same node is suspected again, and no step was gained: replace it"',
            title=f"{title}, {request}",
            action=f"give node {again} up although it is only suspected; {action}; restart the other ranks in place",
            failure=culprit.failure,
            suspects=suspects,
            considered=(Considered(option="restart in place", why_not="that was done for the last timeout"),),
            replace=(again,),
        )
    why_not = "it is suspected only: it reported no timeout of its own" if suspects else "no evidence names one"
    return Verdict(
        rule='collective-timeout/1 "a rank did not come: restart in place"',
        title=title,
        action="restart the ranks of every node in place, which ends the one that hangs",
        failure=culprit.failure,
        suspects=suspects,
        considered=(Considered(option="replace a node", why_not=why_not),),
    )


def _no_first_step(state: JobState, culprit: NodeFailure) -> Verdict:
    """The verdict on ranks that are alive and made no first step in time."""
    # Where no node steps, all wait for each other: who reports it first says nothing about who hangs.
    others_step = any(node.stepped >= state.generation for node in state.members)
    return Verdict(
        rule='first-step/1 "no first step in time: restart in place"',
        title=culprit.text,
        action="restart the ranks of every node in place; the next world has twice the time",
        failure=culprit.failure,
        culprit=culprit.rank if others_step else None,
        considered=(
            Considered(option="wait longer", why_not="the time for the first step is over (timing.stall.first_step)"),
            Considered(option="replace a node", why_not="its agent and launcher are alive"),
        ),
    )


def _may_replace(job: JobSpec) -> bool:
    """Whether a node may be replaced that is not known to be lost."""
    return CAPABILITIES[job.backend].creates_nodes and job.recovery.on_capacity_loss is not CapacityLoss.FAIL


def _blame(
    culprit: NodeFailure,
    *,
    rule: str,
    action: str,
    considered: tuple[Considered, ...],
    title: str | None = None,
    stop: Outcome | None = None,
    replace: tuple[int, ...] = (),
) -> Verdict:
    """The verdict about a failure that one node began; its title is that node's failure, unless another is given."""
    return Verdict(
        rule=rule,
        title=title or f"node {culprit.rank}: {culprit.text}",
        action=action,
        failure=culprit.failure,
        culprit=culprit.rank,
        considered=considered,
        stop=stop,
        replace=replace,
    )


def _to_replace(state: JobState, interruption: Interruption) -> tuple[int, ...]:
    """Nodes that are gone, unresponsive, or did not enter their world although their command was restarted for it."""
    missed = interruption.ranks_with(FailureClass.RENDEZVOUS_TIMEOUT)
    again = {rank for rank in missed if state.nodes[rank].missed_worlds > 1}
    return tuple(sorted(interruption.ranks_with(*NODE_FAILURES) | again))


def _node_gone(
    state: JobState, interruption: Interruption, culprit: NodeFailure, give_up: GiveUp, job: JobSpec, now: datetime
) -> Verdict:
    gone = _to_replace(state, interruption)
    survivors = [node for node in state.members if node.alive and node.rank not in gone]
    size = usable(len(survivors), minimum=state.nodes_min, maximum=state.nodes_max, unit=state.unit)
    before = state.world.nodes if state.world else 0
    in_place = Considered(option="restart in place", why_not=give_up.why_not_in_place)
    title = _what_is_gone(interruption, gone)
    request, action = _replacement(job)
    choice = job.recovery.on_capacity_loss
    if choice is CapacityLoss.FAIL:
        reason = f"{title}, and recovery.on_capacity_loss is fail: {culprit.text}"
        return _blame(
            culprit,
            rule='node-loss/4 "on_capacity_loss is fail: stop"',
            title=title,
            action="stop the job",
            considered=(in_place,),
            stop=Outcome(phase=JobPhase.FAILED, exit_code=3, reason=reason, decided_at=now),
        )
    if state.between_stages:
        return _blame(
            culprit,
            rule='node-loss/5 "between two worlds: replace, disturb no other"',
            title=f"{title}, {request}",
            action=f"{action}; its command starts over and skips the torchruns that have finished",
            considered=(in_place, Considered(option="restart the others", why_not="their commands continue")),
            replace=gone,
        )
    if size and choice is CapacityLoss.SHRINK:
        return _blame(
            culprit,
            rule='node-loss/2 "n >= min: shrink"',
            title=f"{title}: {before} to {size} nodes, {request}",
            action=f"continue with {size} of {len(survivors)} survivors; {action}; grow when it is ready",
            considered=(in_place, Considered(option="wait", why_not="recovery.on_capacity_loss is shrink")),
            replace=gone,
        )
    why_not = (
        f"{len(survivors)} survivors are fewer than nodes.min = {state.nodes_min}"
        if not size
        else "recovery.on_capacity_loss is wait"
    )
    return _blame(
        culprit,
        rule='node-loss/1 "replace, then continue"',
        title=f"{title}, {request}",
        action=f"{action} and wait for it, for at most {job.recovery.replace_timeout}",
        considered=(in_place, Considered(option="continue with fewer nodes", why_not=why_not)),
        replace=gone,
    )


def _what_is_gone(interruption: Interruption, gone: tuple[int, ...]) -> str:
    """Lists each node that is given up, once, with its known state."""
    left = set(gone)
    parts: list[str] = []
    for failure, traits in FAILURE_CLASSES.items():
        if traits.give_up is None:
            continue
        ranks = sorted(left & interruption.ranks_with(failure))
        left.difference_update(ranks)
        if ranks:
            parts.append(f"node{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} {traits.give_up.what}")
    return ", ".join(parts)


def _replacement(job: JobSpec) -> tuple[str, str]:
    """The replacement of a lost node: as a fact for the title, and as an action."""
    if not CAPABILITIES[job.backend].creates_nodes:
        return "its place is open", "open the place to a machine that runs `perdure join`"
    return "replacement requested", "ask for a replacement"


def _must_stop(
    state: JobState, interruption: Interruption, culprit: NodeFailure, job: JobSpec, now: datetime
) -> Verdict | None:
    """The verdict to stop the job, if there is a reason not to repair it."""
    traits, retry = FAILURE_CLASSES[culprit.failure], job.retry

    def stop(rule: str, reason: str, exit_code: int) -> Verdict:
        return _blame(
            culprit,
            rule=rule,
            action="stop the job",
            considered=(Considered(option="restart", why_not=reason),),
            stop=Outcome(phase=JobPhase.FAILED, exit_code=exit_code, reason=reason, decided_at=now),
        )

    if traits.stop is not None:
        return stop(traits.stop.rule, culprit.text, traits.stop.exit_code)
    if culprit.exit_code in retry.fatal_exit_codes:
        return stop(
            'fatal-exit-code/1 "retry.fatal_exit_codes"',
            f"{culprit.text}; exit code {culprit.exit_code} is listed in retry.fatal_exit_codes{_why_fatal(culprit)}",
            1,
        )
    if not traits.counts or interruption.counted:
        # The budgets do not limit this restart, or have already allowed it.
        return None
    if _happens_again(state, culprit):
        return stop('same-failure/1 "the same again, and no step gained"', f"it failed again: {culprit.text}", 1)
    futile = failures_without_progress(state, culprit)
    if futile > retry.no_progress_limit:
        return stop(
            'no-progress/1 "restarts make no progress"',
            f"no progress over {retry.no_progress_limit} restarts (retry.no_progress_limit); last: {culprit.text}",
            1 if traits.users_own else 3,
        )
    used = len(within_window(state.restarts, now=now, window=retry.window))
    if used >= retry.max_restarts and not _belongs_to_the_last(state, culprit.failure, job, now):
        return stop(
            'budget/1 "retry.max_restarts"',
            f"{used} restarts within {retry.window} use up retry.max_restarts; last: {culprit.text}",
            1 if traits.users_own else 3,
        )
    return None


def _happens_again(state: JobState, culprit: NodeFailure) -> bool:
    """Whether the last failure has come again although it was tried once more, at the same step."""
    again = FAILURE_CLASSES[culprit.failure].once_more and culprit.failure is state.last_failure
    return again and failures_without_progress(state, culprit) > 0


def _why_fatal(culprit: NodeFailure) -> str:
    return ": programs exit with it when called with wrong arguments" if culprit.exit_code == 2 else ""


def failures_without_progress(state: JobState, culprit: NodeFailure) -> int:
    """The number of failures in a row that need progress in between and made none, including this one."""
    if culprit.failure not in NEED_PROGRESS:
        return state.failures_without_progress
    if made_progress(state.progress, best_step=state.best_step, last_generation_steps=state.last_generation_steps):
        return 0
    return state.failures_without_progress + 1


def _belongs_to_the_last(state: JobState, failure: FailureClass, job: JobSpec, now: datetime) -> bool:
    """Whether a lost node belongs to those that the last restart was for."""
    return failure in NODE_FAILURES and follows(state.restarts, now=now, within=job.retry.same_loss)


def record(state: JobState, verdict: Verdict, interruption: Interruption, job: JobSpec, now: datetime) -> JobState:
    """Applies the verdict: charges the budgets and records the decision in the incident."""
    state = incidents.record_decision(
        state,
        now=now,
        title=verdict.title,
        rule=verdict.rule,
        action=verdict.action,
        failure=verdict.failure,
        culprit=verdict.culprit,
        considered=verdict.considered,
        suspects=verdict.suspects,
        stops=verdict.stop is not None,
        also_failed=failed_by_themselves(interruption.failures) if verdict.failure is not None else (),
    )
    progress = state.progress
    reported = progress is not None and progress.source is ProgressSource.REPORTED
    counts = verdict.failure is None or FAILURE_CLASSES[verdict.failure].counts
    if not counts and not interruption.counted:
        # The next attempt counts its steps anew, and is compared with the last one that failed.
        state = state.replace(progress=progress if reported else None)
    elif verdict.failure is not None and not interruption.counted:
        culprit = next(f for f in interruption.failures if f.failure is verdict.failure and _is(f, verdict))
        futile = failures_without_progress(state, culprit)
        if not verdict.stop and not _belongs_to_the_last(state, verdict.failure, job, now):
            state = state.replace(
                restarts=(*within_window(state.restarts, now=now, window=job.retry.window), now),
                restart_count=state.all_restarts + 1,
            )
        state = state.replace(
            last_failure=verdict.failure,
            failures_without_progress=futile,
            best_step=max(state.best_step, progress.step) if progress is not None and reported else state.best_step,
            last_generation_steps=progress.generation_steps if progress is not None else -1,
            progress=progress if reported else None,
        )
    return state.replace(
        interruption=interruption.model_copy(update={"decided": True, "counted": counts or interruption.counted}),
        outcome=verdict.stop or state.outcome,
    )


def _is(failure: NodeFailure, verdict: Verdict) -> bool:
    return verdict.culprit is None or failure.rank == verdict.culprit
