"""Tests of real ranks that hang: the others wait for them over gloo, and torch's timeout ends those that wait."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from contextlib import aclosing

import pytest

from perdure.cli.explain import explanation
from perdure.cli.live import line_of
from perdure.client.views import JobSnapshot, longest_idle
from perdure.contract import FailureClass, HangKind, IncidentView, JobPhase
from tests.support.command_line import CommandLine
from tests.system.site import LOOK, PATIENCE, SCRIPT, Job, Site

TIMEOUT = "15"
"""Seconds that a collective waits: longer than a busy machine delays a step, and than `perdure status` needs to show
that none is made."""


REPORT = {"on_hang": "report"}
QUICK = {
    "rendezvous": {"last_call": "2s"},
    "stall": {"after": "6s", "first_look": "2s", "steps": 5, "elsewhere": 2},
}


def signal_rank(job: Job, rank: int, number: signal.Signals) -> None:
    """Signals the rank alone, and not what stands ready to start the next one."""
    os.kill(next(step.pid for step in reversed(job.steps()) if step.rank == rank), number)


async def idle(job: Job) -> JobSnapshot:
    """The first look at the job that shows that no step is made, while it runs."""
    async with asyncio.timeout(PATIENCE), aclosing(job.client.watch(job.name, interval=LOOK)) as snapshots:
        async for snapshot in snapshots:
            if snapshot.status and snapshot.status.phase is JobPhase.RUNNING and longest_idle(snapshot.nodes):
                return snapshot
    raise AssertionError(f"{job.name} has ended")


@pytest.mark.long("silent-faults")
async def test_the_node_that_others_waited_for_is_suspected_and_the_hanging_rank_is_restarted(site: Site):
    job = await site.submit("--timeout", TIMEOUT, nodes="3", recovery=REPORT)
    await job.stepping(generation=1, ranks=3)
    signal_rank(job, 1, signal.SIGSTOP)
    shown = await idle(job)
    assert shown.progress is not None
    assert shown.progress.steps_per_second is None
    assert "no step for" in line_of(shown)
    await job.until(lambda s: s.phase is JobPhase.RUNNING and s.generation >= 2)
    await job.stepping(generation=2, ranks=3)
    (incident,) = await job.incidents()
    assert incident.failure is FailureClass.COLLECTIVE_TIMEOUT
    assert (incident.culprit, [one.rank for one in incident.suspects]) == (None, [1])
    told = explanation(incident, job=job.name, flag="").plain
    assert "suspected: node 1 (rank 1 reported no timeout of its own)" in told
    assert "low confidence" in told
    assert f"perdure logs {job.name} --node 1" in told
    assert {node.incarnation for node in await site.client.nodes(job.name)} == {1}


@pytest.mark.long("silent-faults")
async def test_a_world_whose_rank_hangs_before_its_first_step_is_restarted_in_place(site: Site):
    """Nothing else ends that: the others wait for it for half an hour, which is torch's own limit."""
    timing = {"rendezvous": {"last_call": "2s"}, "stall": {"first_step_least": "8s", "first_steps": 1}}
    job = await site.submit("--hang-in", "2", timing=timing)
    # The limit of the second world's first step is that which the job has seen of the first one.
    await job.until(lambda s: s.phase is JobPhase.RUNNING and "no step was seen" not in s.reason)
    signal_rank(job, 0, signal.SIGKILL)
    await job.until(lambda s: s.generation >= 3)
    await job.stepping(generation=3, ranks=2)
    first, second = await job.incidents()
    assert (first.failure, second.failure) == (FailureClass.KILLED, FailureClass.HANG)
    assert second.culprit is None
    assert "has made a step within" in second.title
    assert {node.incarnation for node in await site.client.nodes(job.name)} == {1}


@pytest.mark.long("silent-faults")
async def test_stacks_show_the_rank_that_is_elsewhere_and_the_ranks_go_on(site: Site):
    job = await site.submit("--hang-in", "1", nodes="3")
    await job.until(lambda s: s.phase is JobPhase.RUNNING)
    perdure = CommandLine.local(site.folder, site.state.path)
    shown = await asyncio.to_thread(perdure.run, "stacks", job.name)
    assert shown.code == 0, shown.err
    assert shown.out.startswith("3 ranks\n")
    together, apart = (shown.out.index(f"{ranks}\n") for ranks in ("ranks 0, 2", "rank 1"))
    assert together < shown.out.index("init_process_group") < apart < shown.out.index("threading.py")
    answer = await asyncio.to_thread(perdure.run, "stacks", job.name, "--rank", "1", "-o", "json")
    (node,) = answer.json
    (rank,) = node["ranks"]
    assert (node["node"], rank["rank"], rank["state"], rank["problem"]) == (1, 1, "S", "")
    assert rank["pid"] in {process.pid for process in job.processes(1)}
    assert (await job.status()).generation == 1


@pytest.mark.long("silent-faults")
async def test_a_stopped_rank_stands_out_from_those_that_wait_for_it(site: Site):
    job = await site.submit(nodes="3", recovery=REPORT)
    await job.stepping(generation=1, ranks=3)
    signal_rank(job, 1, signal.SIGSTOP)
    await idle(job)
    answers = {node.node: node for node in await job.client.stacks(job.name)}
    (stopped,) = answers[1].ranks
    assert (stopped.state, stopped.threads) == ("T", ())
    assert stopped.problem.startswith("it is stopped")
    for node in (0, 2):
        (waiting,) = answers[node].ranks
        assert any("all_reduce" in frame.function for frame in waiting.threads[0].frames)
    signal_rank(job, 1, signal.SIGCONT)
    await job.undisturbed(ranks=3, seconds=1)


async def repaired(job: Job, *, ranks: int = 3) -> IncidentView:
    """The only incident of a job whose ranks hung once, and all step again."""
    await job.until(lambda s: s.phase is JobPhase.RUNNING and s.generation >= 2)
    await job.stepping(generation=2, ranks=ranks)
    (incident,) = [one for one in await job.incidents() if one.observation is None]
    assert {node.incarnation for node in await job.client.nodes(job.name)} == {1}
    return incident


@pytest.mark.long("silent-faults")
async def test_a_stopped_rank_is_found_and_restarted_long_before_torchs_timeout(site: Site):
    # Without torchrun, which would import torch once more on each node.
    out = site.folder / "stopped"
    job = await site.submit(nodes="2", timing=QUICK, out=out, command=[sys.executable, str(SCRIPT), str(out)])
    await job.stepping(generation=1, ranks=2)
    signal_rank(job, 1, signal.SIGSTOP)
    incident = await repaired(job, ranks=2)
    assert incident.hang is not None
    assert (incident.failure, incident.culprit) == (FailureClass.RANK_HANG, 1)
    assert (incident.hang.kind, incident.hang.ranks) == (HangKind.STOPPED, (1,))


@pytest.mark.long("silent-faults")
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("loop", HangKind.LOOP),
        ("lock", HangKind.ASLEEP),
        ("mismatch", HangKind.MISMATCH),
    ],
)
async def test_a_rank_that_does_not_come_is_found_with_its_line_and_restarted(site: Site, fault: str, kind: HangKind):
    job = await site.submit("--fault", fault, nodes="3", timing=QUICK)
    incident = await repaired(job)
    assert incident.hang is not None
    assert (incident.failure, incident.culprit) == (FailureClass.RANK_HANG, 1)
    assert (incident.hang.kind, incident.hang.ranks) == (kind, (1,))
    assert "fail_to_come" in incident.hang.at
    assert incident.hang.waiting == (0, 2)
    told = explanation(incident, job=job.name, flag="").plain
    assert "rank 1 of node 1" in told
    assert "ranks 0, 2 wait in all_reduce" in told
    assert "2 independent signs agree" in told


@pytest.mark.long("silent-faults")
async def test_rank_0_may_be_the_one_that_hangs(site: Site):
    job = await site.submit("--fault", "lock", "--faulty-rank", "0", nodes="3", timing=QUICK)
    incident = await repaired(job)
    assert incident.hang is not None
    assert (incident.failure, incident.culprit) == (FailureClass.RANK_HANG, 0)
    assert (incident.hang.kind, incident.hang.ranks, incident.hang.waiting) == (HangKind.ASLEEP, (0,), (1, 2))


@pytest.mark.long("silent-faults")
async def test_a_rank_that_no_other_waits_for_is_shown_as_a_stall_and_left_alone(site: Site):
    job = await site.submit("--fault", "loop", "--alone", nodes="2", timing=QUICK)
    known = await job.until(lambda s: s.stalled == (1,))
    assert known.phase is JobPhase.RUNNING
    assert "waits for node 1 to step again; nothing is restarted" in known.next_action
    now = time.time()
    await job.undisturbed(ranks=2, seconds=15)
    assert {step.rank for step in job.steps() if step.time > now} == {0}
    assert (await job.status()).generation == 1
    assert not await job.incidents()


@pytest.mark.long("silent-faults")
async def test_different_collectives_of_the_same_number_are_found_at_the_first_look(site: Site):
    timing = {**QUICK, "stall": {**QUICK["stall"], "after": "10m"}}
    job = await site.submit("--fault", "mismatch", nodes="3", timing=timing)
    incident = await repaired(job)
    assert incident.hang is not None
    assert (incident.culprit, incident.hang.kind, incident.hang.ranks) == (1, HangKind.MISMATCH, (1,))
    assert "fail_to_come" in incident.hang.at
    assert incident.hang.collective is not None
    assert (incident.hang.collective.name, incident.hang.collective.elements) == ("gloo:all_reduce", 1)
    told = explanation(incident, job=job.name, flag="").plain
    assert "ranks wait for each other, in all_reduce of 1, number" in told
    assert "and barrier, number" in told


@pytest.mark.long("silent-faults")
async def test_a_skipped_collective_is_found_although_all_ranks_are_in_the_same_line(site: Site):
    job = await site.submit("--fault", "skip", nodes="3", timing=QUICK)
    incident = await repaired(job)
    assert incident.hang is not None
    assert (incident.culprit, incident.hang.kind, incident.hang.ranks) == (1, HangKind.MISMATCH, (1,))
    assert incident.hang.collective is not None
    assert incident.hang.collective.elements == 1
    told = explanation(incident, job=job.name, flag="").plain
    assert "of process group 1" in told
    assert "of process group 0 (default_pg)" in told
    assert "2 independent signs agree" in told


@pytest.mark.long("silent-faults")
@pytest.mark.parametrize("who", ["all", "first"])
async def test_long_evaluations_are_no_hangs_and_are_learned(site: Site, who: str):
    """They take longer than the time after which a stall is reported, the first one too."""
    job = await site.submit("--evaluate", who, nodes="3", timing=QUICK)
    await job.reaching(170)
    assert (await job.status()).generation == 1
    incidents = await job.incidents()
    assert all(one.observation is not None for one in incidents)
    assert len(incidents) <= 2
