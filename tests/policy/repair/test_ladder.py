"""Tests of the ladder of repairs: its rungs, and that effects and words come from the actions of a verdict."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import pytest

from perdure.contract import Action, FailureClass, FailureKind, NewWorld, RestartCommands, RestartRanks
from perdure.spec.recovery import CapacityLoss
from perdure.workflows.policy.diagnosis.failures import VICTIMS
from perdure.workflows.policy.record.action_words import option, words
from perdure.workflows.policy.repair import actions, ladder, memory, rungs
from perdure.workflows.policy.repair.case import Case, Verdict
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.node import NodeFailure
from perdure.workflows.policy.state.role import Interruption
from tests.policy.scenario import Scenario

ACTIONS: tuple[Any, ...] = get_args(get_args(Action)[0])


def verdict_on(job: Scenario, *failures: tuple[int, FailureClass], after: float = 60.0) -> Verdict:
    since = job.now - timedelta(seconds=after)
    reported = tuple(
        NodeFailure(rank=rank, failure=failure, time=since, text="it failed") for rank, failure in failures
    )
    return ladder.decide(Case(job.state, Interruption(since=since, failures=reported), job.job, job.now))


def test_each_module_of_a_rung_is_in_the_ladder():
    modules = {path.stem for path in Path(rungs.__path__[0]).glob("[!_]*.py")}
    assert {rung.__module__.rpartition(".")[2] for rung in ladder.RUNGS} == modules


@pytest.mark.parametrize("action", ACTIONS)
def test_each_action_has_words(action: Any):
    assert option(action())
    assert words((action(),))


def test_actions_of_a_newer_release_are_left_out_of_a_decision():
    carried = {"since": "2026-01-01T00:00:00Z", "actions": [{"kind": "RESTART_RANKS"}, {"kind": "PAUSE_RANKS"}]}
    assert Interruption.model_validate(carried).actions == (RestartRanks(),)
    assert not Interruption.model_validate(carried | {"actions": [{"kind": "PAUSE_RANKS"}]}).decided


@pytest.mark.parametrize("failure", sorted(VICTIMS))
def test_a_victim_has_the_decision_wait_and_the_ladder_names_the_time(failure: FailureClass):
    job = Scenario("2").running()
    job.take(job.failure(0, kind=FailureKind.RANKS))
    since = job.now
    interruption = Interruption(
        since=since, failures=(NodeFailure(rank=0, failure=failure, time=since, text="it lost its peers"),)
    )
    state = job.state.replace(interruption=interruption)
    grace = job.job.timing.rendezvous.victim_grace
    assert ladder.next_look(state, job.job, job.now) == since + grace
    assert ladder.next_look(state, job.job, since + grace) is None, "then it decides"


def test_a_decision_on_nothing_has_no_next_look():
    job = Scenario("2").running()
    assert ladder.next_look(job.state, job.job, job.now) is None


def test_a_command_that_missed_its_world_starts_over_whatever_is_done_about_the_culprit():
    job = Scenario("3").ready(0, 1, 2).steps(0, 1)
    verdict = verdict_on(job, (0, FailureClass.OUT_OF_MEMORY), (2, FailureClass.RENDEZVOUS_TIMEOUT))
    assert verdict.culprit == 0
    assert verdict.actions == (RestartRanks(nodes=(0,)), RestartCommands(nodes=(2,)))
    assert words(verdict.actions) == words((RestartRanks(),)), "the sentence is about the culprit"
    state = decided(job.state, verdict)
    assert actions.commands_to_restart(state) == {2}


def test_a_command_that_enters_after_all_is_not_started_over():
    job = Scenario("3").ready(0, 1, 2).steps(0, 1)
    state = decided(job.state, verdict_on(job, (2, FailureClass.RENDEZVOUS_TIMEOUT)))
    assert actions.commands_to_restart(state) == {2}
    state = state.with_node(state.nodes[2].replace(stepping=1))
    assert actions.commands_to_restart(state) == set()


def test_a_node_that_misses_two_worlds_is_replaced_and_its_command_is_not_restarted():
    job = Scenario("3").ready(0, 1, 2).steps(0, 1).misses_its_world(2).steps(0, 1)
    assert memory.times(job.state, RestartCommands, job.node(2)) == 1
    verdict = verdict_on(job, (2, FailureClass.RENDEZVOUS_TIMEOUT))
    assert verdict.replaced == {2}
    assert not any(isinstance(action, RestartCommands) for action in verdict.actions)


def test_what_a_verdict_replaces_is_given_up_and_nothing_else():
    job = Scenario("3").running()
    verdict = verdict_on(job, (1, FailureClass.NODE_UNRESPONSIVE))
    state = actions.carry_out(decided(job.state, verdict), verdict, job.now)
    assert [node.rank for node in state.nodes.values() if not node.alive] == [1] == sorted(verdict.replaced)


@pytest.mark.parametrize("choice", CapacityLoss)
def test_a_lost_node_is_replaced_or_ends_the_job(choice: CapacityLoss):
    job = Scenario("2:3", recovery={"on_capacity_loss": choice}).running()
    verdict = verdict_on(job, (1, FailureClass.NODE_LOST))
    state = actions.carry_out(decided(job.state, verdict), verdict, job.now)
    stops = choice is CapacityLoss.FAIL
    assert (verdict.stop is not None, state.outcome is not None, verdict.replaced == {1}) == (stops, stops, not stops)


def test_a_request_forms_a_world_and_waits_for_nothing():
    job = Scenario("2").running()
    interruption = Interruption(since=job.now, requested="more nodes")
    verdict = ladder.decide(Case(job.state, interruption, job.job, job.now))
    assert verdict.actions == (NewWorld(reason="more nodes"),)
    assert words(verdict.actions) == "new generation: more nodes"


def test_rungs_after_the_first_that_decides_are_not_asked(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    def asking(rungs: Iterable[ladder.Rung]) -> tuple[ladder.Rung, ...]:
        def ask(rung: ladder.Rung) -> ladder.Rung:
            def decide(case: Case) -> Verdict | None:
                asked.append(rung.__module__.rpartition(".")[2])
                return rung(case)

            return decide

        return tuple(map(ask, rungs))

    monkeypatch.setattr(ladder, "RUNGS", asking(ladder.RUNGS))
    verdict_on(Scenario("2").running(), (1, FailureClass.LAUNCH))
    assert asked == ["new_world", "await_reports", "permanent_failure"]


def decided(state: RoleInJob, verdict: Verdict) -> RoleInJob:
    failed = NodeFailure(
        rank=verdict.culprit or 0, failure=FailureClass.NODE_UNRESPONSIVE, time=state.started_at, text="it failed"
    )
    return state.replace(interruption=Interruption(since=state.started_at, failures=(failed,), actions=verdict.actions))
