"""Tests that a node speaks for its own ranks and worlds only, whatever it claims: wrong claims are counted."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.contract import CheckpointRef, JobPhase, Progress, ProgressSource, RankExit, Restore, RestoreSource
from perdure.contract.agents import LARGEST_NUMBER, UNKNOWN_RANK, PrintedLines
from perdure.contract.transitions import (
    AnyTransition,
    NodeJoined,
    NodePortsChanged,
    NodeRestoredCheckpoint,
    NodeStepping,
)
from perdure.workflows.policy.diagnosis.claims import MOST_AHEAD, own_exits
from perdure.workflows.policy.record.projections import warnings_of
from tests.policy.scenario import Scenario


def running(nodes: int = 2, processes: int = 2) -> Scenario:
    """A job that trains, in which node n has ranks 2n and 2n + 1."""
    job = Scenario(str(nodes))
    job.ready(*range(nodes), processes=processes)
    return job.steps()


def warning(job: Scenario) -> str:
    [found] = [one for one in warnings_of(job.state, job.job) if "not theirs" in one]
    return found


def exits(*numbers: tuple[int, int | None]) -> tuple[RankExit, ...]:
    return tuple(
        RankExit(local_rank=local, global_rank=rank, exit_code=1, error="ValueError: no") for local, rank in numbers
    )


@pytest.mark.parametrize(
    ("reported", "kept", "wrong"),
    [
        ([(0, 2), (1, 3)], [(0, 2), (1, 3)], 0),
        ([(1, None)], [(1, None)], 0),
        ([(0, 0)], [(0, None)], 1),
        ([(1, 2)], [(1, None)], 1),
        ([(2, 4)], [(UNKNOWN_RANK, None)], 1),
        ([(-3, -1)], [(UNKNOWN_RANK, None)], 1),
        ([(0, 2), (1, 3), (2, 4), (3, 5)], [(0, 2), (1, 3)], 2),
        # Those of the world before, whose ends may be reported late.
        ([(0, 6), (1, 7)], [(0, 6), (1, 7)], 0),
    ],
)
def test_ranks_of_other_nodes_are_unknown(reported: Any, kept: Any, wrong: int) -> None:
    own, count = own_exits(exits(*reported), first_ranks=(2, 6), processes=2)
    assert [(one.local_rank, one.global_rank) for one in own] == kept
    assert count == wrong


def test_a_failure_counts_whatever_rank_it_names() -> None:
    job = running()
    job.take(job.failure(1, ranks=exits((0, 0))))
    assert job.state.generation == 2
    assert job.state.wrong_claims == 1
    assert "rank (local 0) exit code 1" in job.incident.evidence[0].text
    assert "node 1 has reported the end of ranks that it does not have" in warning(job)


def test_a_failure_of_an_own_rank_is_no_wrong_claim_also_after_the_next_world() -> None:
    job = running(3)
    job.take(job.failure(1, ranks=exits((1, 3))))
    assert "rank 3 exit code 1" in job.incident.evidence[0].text
    job.ready(0, 1, 2, after=1, processes=2)
    assert job.state.generation == 2
    job.take(job.failure(2, ranks=exits((0, 4)), generation=1))
    assert job.state.wrong_claims == 0


@pytest.mark.parametrize("ahead", [MOST_AHEAD + 1, LARGEST_NUMBER, 10**30])
@pytest.mark.parametrize("kind", [NodeRestoredCheckpoint, NodeStepping, NodePortsChanged])
def test_no_node_makes_up_a_generation(kind: type[AnyTransition], ahead: int) -> None:
    """The job would number its next world after it, and no agent accepts so large a number from its ranks."""
    job = running()
    restored = Restore(step=1, source=RestoreSource.MEMORY)
    job.transition(1, kind, generation=1 + ahead, restored=restored)
    assert (job.state.generation, job.state.interruption, job.state.phase) == (1, None, JobPhase.RUNNING)
    assert job.state.wrong_claims >= 1
    assert "node 1 has reported" in warning(job)


def test_a_job_that_was_reset_follows_its_nodes() -> None:
    job = running()
    job.transition(1, NodeJoined, generation=40)
    assert job.state.generation > 40
    assert job.state.wrong_claims == 0


def test_only_the_node_of_rank_0_reports_what_all_ranks_continue_with() -> None:
    job = running()
    checkpoint = CheckpointRef.parse("step-7-0123abcd-1")
    restored = Restore(step=7, source=RestoreSource.STORAGE, checkpoint=checkpoint)
    job.transition(1, NodeRestoredCheckpoint, generation=1, restored=restored)
    assert job.state.checkpoints.restored_step is None
    assert job.state.checkpoints.loaded is None
    assert "does not have rank 0" in warning(job)
    job.transition(0, NodeRestoredCheckpoint, generation=1, restored=restored)
    assert job.state.checkpoints.restored_step == 7
    assert job.state.wrong_claims == 1


@pytest.mark.parametrize("ahead", [2, MOST_AHEAD + 1, 2**60])
def test_progress_of_a_generation_that_is_not_the_jobs_hides_no_later_one(ahead: int) -> None:
    job = running()
    first, second = (Progress(step=step, source=ProgressSource.REPORTED, generation_steps=step) for step in (5, 50))
    job.rank_killed(1, progress=first.replace(generation=job.generation + ahead))
    job.ready(0, 1, after=1).steps().rank_killed(0, progress=second.replace(generation=job.generation))
    assert job.state.progress is not None
    assert job.state.progress.step == 50


def test_lines_of_a_generation_that_is_not_the_jobs_hide_no_others() -> None:
    job = running()
    keys = PrintedLines(generation=1)
    job.rank_killed(1, printed=keys.replace(generation=2**60)).rank_killed(0, generation=1, printed=keys)
    assert [(one.rank, one.printed.generation) for one in job.state.lines] == [(0, 1)]
