"""Tests of what `perdure status` says about the rendezvous: whether the job controls it, and what contradicts that."""

from __future__ import annotations

import pytest

from perdure.cli import text
from perdure.cli.inspect import facts
from perdure.contract import FailureKind, JobStatus, SetAside, ShardsSetAside, UnprocessedSamples, UnreadableDataset
from perdure.contract.transitions import NodeReady, NodeRemoved
from perdure.workflows.policy.facts.events import CancelRequested, SuspendRequested
from perdure.workflows.policy.record.projections import status_of
from tests.policy.scenario import Scenario


def status(job: Scenario) -> JobStatus:
    return status_of(job.state, job.job, groups=(), phase=job.state.phase, now=job.now)


@pytest.mark.parametrize(
    ("nodes", "asked", "warning"),
    [
        ("2:8", "4:4", "asks for 4 nodes (--nnodes, or --num_machines of accelerate) and the job for 2 to 8 nodes"),
        ("2:8", "1:1", "or scale the job to 1"),
        ("2:8", "2:4", "asks for 2 to 4 nodes"),
        ("2", "4:4", "and the job for 2 nodes: the job decides. Leave the option out of the command, or scale the job"),
        ("2", None, None),
    ],
)
def test_a_commands_own_number_of_nodes_is_a_warning(nodes: str, asked: str | None, warning: str | None):
    job = Scenario(nodes)
    for rank in job.state.nodes:
        job.transition(rank, NodeReady, store_ports=(rank + 1,), command_nodes=asked)
    warnings = status(job).warnings
    assert len(warnings) == (warning is not None), "nodes that ask for the same are one warning"
    if warning is not None:
        assert warning in warnings[0]
        assert ("WARNING", warnings[0]) in facts(status(job), None, (), [])


def test_samples_that_no_rank_will_process_are_a_warning_also_when_the_job_has_ended():
    job = Scenario("2").running()
    lost = UnprocessedSamples(dataset="train", samples=2, shards=(SetAside(epoch=0, first=4, end=6, error="KeyError"),))
    job.take(ShardsSetAside(uid=job.state.uid, unprocessed=lost))
    known = status(job)
    assert known.unprocessed == (lost,)
    assert known.warnings == (lost.summary,)
    ended = known.model_copy(update={"finished_at": job.now})
    assert ("WARNING", lost.summary) in facts(ended, None, (), [])


def test_a_dataset_that_cannot_be_read_is_a_warning_until_it_can_again():
    job = Scenario("2").running()
    none = UnprocessedSamples(dataset="train", samples=0)
    away = UnreadableDataset(dataset="train", since=job.now, error="OSError: stale handle")
    job.take(ShardsSetAside(uid=job.state.uid, unprocessed=none, unreadable=away))
    assert status(job).warnings == (away.summary,)
    assert "nothing of dataset train could be read since 00:00:00 UTC (OSError: stale handle)" in away.summary
    assert status(job).unprocessed == ()
    job.take(ShardsSetAside(uid=job.state.uid, unprocessed=none))
    assert status(job).warnings == ()


def test_a_dataset_that_no_rank_reads_is_no_warning():
    job = Scenario("2").running()
    away = UnreadableDataset(dataset="train", since=job.now)
    none = UnprocessedSamples(dataset="train", samples=0)
    job.take(ShardsSetAside(uid=job.state.uid, unprocessed=none, unreadable=away))
    job.take(SuspendRequested()).removed(0, 1)
    assert status(job).warnings == ()


def test_what_is_left_of_deleted_nodes_is_a_warning_also_when_the_job_has_ended():
    job = Scenario("2").running()
    left = "pod job-1-1 is left to the cluster: its machine gpu-7 does not answer, and it is removed with the machine"
    job.transition(1, NodeRemoved, incarnation=job.node(1).incarnation - 1, left=left)
    assert status(job).left == (), "it is not what is left of its successor"
    job.take(CancelRequested())
    job.transition(1, NodeRemoved, left=left)
    known = status(job)
    assert known.left == known.warnings == (f"node 1: {left}",)
    assert ("WARNING", f"node 1: {left}") in facts(known.model_copy(update={"finished_at": job.now}), None, (), [])


def test_a_warning_goes_when_the_job_is_scaled_to_what_the_command_asks_for():
    job = Scenario("2:3").running()
    job.transition(0, NodeReady, generation=0, command_nodes="3:3")
    assert status(job).warnings
    job.state = job.state.replace(nodes_min=3, nodes_max=3)
    assert not status(job).warnings


def test_status_says_whether_the_rendezvous_is_the_jobs():
    job = Scenario("2")
    assert text.protection(status(job)) == "no rendezvous yet"
    job.running()
    assert text.protection(status(job)) == "rendezvous protected"


def test_an_unprotected_job_is_stopped_and_shown_as_such_for_good():
    job = Scenario("2")
    failure = job.failure(0, kind=FailureKind.UNPROTECTED, message="the deepspeed launcher starts ranks by itself")
    job.take(failure)
    known = status(job)
    assert not known.protected
    assert job.state.outcome is not None
    assert "deepspeed" in job.state.outcome.reason
    shown = dict(facts(known.model_copy(update={"finished_at": job.now}), None, (), []))
    assert shown["CONTROL"] == "rendezvous UNPROTECTED: see `perdure explain job`"
