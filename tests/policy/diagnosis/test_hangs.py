"""Tests of how a rank that hangs is found among those that wait for it, and of what a job does about it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from perdure.cli.explain import explanation
from perdure.contract import (
    FailureClass,
    HangKind,
    JobPhase,
    Member,
    NodePhase,
    StackFrame,
)
from perdure.contract.transitions import NodeStalled, NodeStallEnded, NodeStallLook, NodeUnreachable
from perdure.workflows.policy.diagnosis import hangs
from tests.policy.diagnosis.stalled_ranks import (
    ALL_REDUCE,
    BACKWARD,
    BARRIER,
    CHILD,
    EVALUATION,
    HANDLE,
    IN_KERNEL,
    LOADER,
    LOCK,
    LOOP,
    MAIN,
    REDUCES,
    SITE,
    STOPPED,
    WAITS,
    call,
    computes,
    found,
    frame,
    look,
    sleeps,
)
from tests.policy.scenario import Scenario, reported


@pytest.mark.parametrize(
    ("ranks", "kind", "culprits", "signs"),
    [
        ([WAITS, STOPPED, WAITS], HangKind.STOPPED, (1,), 3),
        ([STOPPED], HangKind.STOPPED, (0,), 2),
        # Whoever stops every process does so on purpose.
        ([STOPPED, STOPPED, STOPPED], HangKind.STOPPED, (0, 1, 2), 0),
        ([WAITS, IN_KERNEL, WAITS], HangKind.KERNEL, (1,), 2),
        # All may wait for one file server: no rank shows that the others wait for it.
        ([IN_KERNEL, IN_KERNEL, sleeps(HANDLE)], HangKind.KERNEL, (0, 1), 1),
        ([WAITS, sleeps(LOCK), WAITS], HangKind.ASLEEP, (1,), 2),
        ([sleeps(BACKWARD), sleeps(LOCK), sleeps(BACKWARD)], HangKind.ASLEEP, (1,), 2),
        ([sleeps(HANDLE), sleeps(LOCK), sleeps(HANDLE)], HangKind.ASLEEP, (1,), 2),
        ([WAITS, sleeps(LOADER, moved=True)], HangKind.DATA_LOADER, (1,), 2),
        ([WAITS, sleeps(BARRIER), WAITS], HangKind.MISMATCH, (1,), 2),
        ([WAITS, sleeps(BARRIER)], HangKind.MISMATCH, (), 2),
        # One of those that wait uses a processor: it may still send or receive.
        ([WAITS, sleeps(BARRIER), sleeps(ALL_REDUCE, cpu_percent=60.0)], HangKind.MISMATCH, (1,), 1),
        ([WAITS, WAITS, WAITS], HangKind.ALIKE, (), 0),
        # Work, or what may be work.
        ([WAITS, computes(LOOP), WAITS], HangKind.LOOP, (1,), 2),
        ([WAITS, sleeps(LOOP, cpu_percent=100.0), WAITS], HangKind.INTERPRETER, (1,), 2),
        ([WAITS, computes(EVALUATION)], HangKind.WORKS, (1,), 1),
        ([WAITS, sleeps(CHILD)], HangKind.WORKS, (1,), 1),
        ([WAITS, computes(LOOP, runs=False)], HangKind.WORKS, (1,), 1),
        ([WAITS, computes(LOOP, steady=False)], HangKind.WORKS, (1,), 1),
        ([WAITS, sleeps(LOCK, moved=True)], HangKind.WORKS, (1,), 1),
        ([WAITS, sleeps(LOCK, cpu_percent=40.0)], HangKind.WORKS, (1,), 1),
        ([WAITS, sleeps(LOADER, cpu_percent=40.0)], HangKind.WORKS, (1,), 1),
        ([WAITS, sleeps(LOCK, transfers=True)], HangKind.WORKS, (1,), 1),
        ([WAITS, computes(LOOP, transfers=True)], HangKind.WORKS, (1,), 1),
        ([WAITS, sleeps(LOADER, transfers=True)], HangKind.WORKS, (1,), 1),
        ([WAITS, sleeps(EVALUATION)], HangKind.WORKS, (1,), 1),
        ([WAITS, IN_KERNEL | {"moved": True}], None, (), 0),
        ([WAITS, WAITS, sleeps(LOCK), computes(LOOP, steady=False)], HangKind.WORKS, (3,), 1),
        ([WAITS, {**STOPPED, "state": "t"}], HangKind.DEBUGGED, (), 0),
        # Most are elsewhere: the one that waits may only be early.
        ([WAITS, sleeps(LOCK), sleeps(LOCK)], None, (), 0),
        ([computes(LOOP), computes(LOOP), computes(LOOP)], None, (), 0),
        ([computes(BACKWARD), computes(BACKWARD), sleeps(LOCK)], None, (), 0),
        ([sleeps(LOCK)], None, (), 0),
        # One has not answered.
        ([WAITS, {"calls": (), "state": "S", "steady": False}], None, (), 0),
    ],
)
def test_who_hangs(ranks: list[dict[str, Any]], kind: HangKind | None, culprits: tuple[int, ...], signs: int):
    hang = found(*ranks)
    assert (hang.kind if hang else None) is kind
    assert hang is None or (hang.ranks, len(hang.signs)) == (culprits, signs)


@pytest.mark.parametrize("rank", [sleeps(LOCK), computes(LOOP), sleeps(LOOP, cpu_percent=100.0)])
def test_a_rank_in_calls_of_its_own_may_work_until_that_lasts_longer_than_any_pause(rank: dict[str, Any]):
    hang = found(WAITS, rank, WAITS, long=False)
    assert hang is not None
    assert (hang.kind, len(hang.signs)) == (HangKind.WORKS, 1)


SILENT = {"moved": True, "silent": True, "cpu_percent": 40.0}
"""Another thread keeps the interpreter, on a busy machine."""


STARTS_A_THREAD = (frame("wait", 355, "/usr/lib/python3.11/threading.py"), *LOOP)


@pytest.mark.parametrize(
    "rank",
    [sleeps(LOOP, **SILENT), computes(LOOP, runs=False, **SILENT), sleeps(STARTS_A_THREAD, **SILENT)],
    ids=["in-its-own-call", "runs", "in-the-standard-library"],
)
def test_a_rank_that_alone_does_not_tell_its_collectives_has_a_blocked_interpreter(rank: dict[str, Any]):
    tells = {**WAITS, "collectives": (call(57),)}
    hang = found(tells, rank, tells)
    assert hang is not None
    assert (hang.kind, hang.ranks, len(hang.signs)) == (HangKind.INTERPRETER, (1,), 2)
    # No rank tells them: its torch may not record them.
    assert (other := found(WAITS, rank, WAITS)) is not None
    assert other.kind is HangKind.WORKS


@pytest.mark.parametrize("rank", [sleeps(BARRIER), IN_KERNEL])
def test_what_no_work_explains_hangs_as_soon_as_a_stall_is_reported(rank: dict[str, Any]):
    hang = found(WAITS, rank, WAITS, long=False)
    assert hang is not None
    assert (hang.ranks, len(hang.signs)) == ((1,), 2)


def test_an_unusual_pause_is_no_reason_to_replace_a_node_whose_storage_may_answer():
    assert found(WAITS, IN_KERNEL, WAITS, long=False, unusual=True) is None
    hang = found(WAITS, sleeps(BARRIER), WAITS, long=False, unusual=True)
    assert hang is not None
    assert (hang.ranks, len(hang.signs)) == ((1,), 2)
    for rank in (sleeps(LOCK), sleeps(LOADER, moved=True)):
        works = found(WAITS, rank, WAITS, long=False, unusual=True)
        assert works is not None
        assert works.kind is HangKind.WORKS


@pytest.mark.parametrize(
    "inner",
    [
        pytest.param((frame("computeIoU", 195, f"{SITE}/pycocotools/cocoeval.py"),), id="a metric of a package"),
        pytest.param((frame("_fit", 1, f"{SITE}/sklearn/linear_model/_logistic.py"),), id="a probe of a package"),
        pytest.param((frame("find_longest_match", 1, "/usr/lib/python3.11/difflib.py"),), id="the standard library"),
        pytest.param((frame("write", 1, f"{SITE}/safetensors/torch.py"),), id="a file of a package"),
    ],
)
def test_one_long_call_of_a_library_is_work(inner: tuple[StackFrame, ...]):
    hang = found(computes((*inner, frame("main", 70))), WAITS, WAITS)
    assert hang is not None
    assert (hang.kind, len(hang.signs)) == (HangKind.WORKS, 1)


def test_a_rank_that_waits_in_a_package_is_left_alone_and_one_that_waits_in_a_lock_of_its_own_is_not():
    upload = (frame("wait", 355, "/usr/lib/python3.11/threading.py"), frame("wait", 1, f"{SITE}/wandb/artifact.py"))
    hang = found(sleeps((*upload, frame("main", 70)), cpu_percent=4.0), WAITS, WAITS)
    assert hang is not None
    assert (hang.kind, len(hang.signs)) == (HangKind.WORKS, 1)
    # A framework that has called the script explains nothing of what the script does.
    trainer = (*LOCK[:2], frame("training_step", 12), frame("fit", 1, f"{SITE}/lightning/pytorch/trainer.py"))
    hang = found(sleeps(trainer), WAITS, WAITS)
    assert hang is not None
    assert (hang.kind, len(hang.signs)) == (HangKind.ASLEEP, 2)


PDB = "/usr/lib/python3.11/pdb.py"


@pytest.mark.parametrize(
    "prompt",
    [
        pytest.param((frame("cmdloop", 126, "/usr/lib/python3.11/cmd.py"), frame("interaction", 1, PDB)), id="pdb"),
        pytest.param((frame("wait_for_client", 9, f"{SITE}/debugpy/server/api.py"),), id="debugpy"),
        pytest.param((frame("readline", 1, f"{SITE}/remote_pdb.py"),), id="remote_pdb"),
        pytest.param((frame("interact", 1, "/usr/lib/python3.11/code.py"),), id="an interpreter's prompt"),
        pytest.param((frame("mainloop", 1, f"{SITE}/IPython/terminal/embed.py"),), id="IPython"),
    ],
)
@pytest.mark.parametrize("others", [WAITS, sleeps(BARRIER)], ids=["in a step", "in breakpoint's barrier"])
def test_a_rank_at_a_prompt_is_debugged(prompt: tuple[StackFrame, ...], others: dict[str, Any]):
    hang = found(sleeps((*prompt, MAIN)), others, others)
    assert hang is not None
    assert (hang.kind, hang.signs) == (HangKind.DEBUGGED, ())


def test_a_script_that_is_called_like_a_debugger_is_none():
    hang = found(sleeps((*LOCK[:1], frame("exchange", 12, "/job/pdb.py"), MAIN)), WAITS, WAITS)
    assert hang is not None
    assert hang.kind is HangKind.ASLEEP


def test_an_early_look_means_something_only_for_a_process_that_is_stopped():
    assert found(WAITS, sleeps(LOCK), early=True) is None
    stopped = found(WAITS, STOPPED, early=True)
    assert stopped is not None
    assert stopped.ranks == (1,)
    slow = found(STOPPED, sleeps(LOCK), early=True, usual_steps=2)
    assert slow is not None
    assert len(slow.signs) == 1


def test_a_node_that_was_not_seen_may_be_the_one_that_is_waited_for():
    members = {rank: Member(incarnation=1, group_rank=rank, base_rank=rank, processes=1) for rank in range(3)}
    looks = {0: look(WAITS), 1: look(sleeps(LOCK), first=1)}
    assert hangs.find(looks, members) is None
    looks[2] = look(WAITS, first=2)
    assert hangs.find(looks, members) is not None


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (
            [WAITS, STOPPED, WAITS],
            "rank 1 of node 1 is stopped (SIGSTOP); ranks 0, 2 wait in all_reduce, main, /job/train.py:26",
        ),
        (
            [WAITS, sleeps(LOCK)],
            "rank 1 of node 1 sleeps outside of any collective, in exchange, /job/train.py:12; rank 0 waits in "
            + REDUCES,
        ),
        (
            [WAITS, sleeps(BARRIER), WAITS],
            "rank 1 of node 1 waits in another call, in main, /job/train.py:44; ranks 0, 2 wait in " + REDUCES,
        ),
        ([WAITS, WAITS], "all ranks wait in all_reduce, main, /job/train.py:26"),
    ],
)
def test_what_was_found_is_one_sentence(ranks: list[dict[str, Any]], text: str):
    hang = found(*ranks)
    assert hang is not None
    assert hangs.describe(hang) == text


def test_a_thousand_ranks_are_compared_and_a_few_are_named():
    hang = found(*[WAITS] * 999, sleeps(LOCK))
    assert hang is not None
    assert (hang.ranks, hang.waits, len(hang.waiting)) == ((999,), 999, 64)
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 991 more wait in" in hangs.describe(hang)


# What a job does


def seen(job: Scenario, *ranks: dict[str, Any], **fields: Any) -> Scenario:
    """All nodes stall, and report where their only rank is."""
    assert job.state.world is not None
    generation = job.generation
    for node, member in sorted(job.state.world.members.items()):
        told = {"generation": generation, "taken_at": job.now, **fields}
        job.transition(node, NodeStalled, generation=generation)
        shown = look(ranks[node], first=member.base_rank, **told)
        job.transition(node, NodeStallLook, generation=generation, look=shown)
    return job


def told(job: Scenario) -> str:
    return explanation(job.incident, job="llama", flag="").plain


def test_a_rank_that_hangs_is_restarted_in_place_and_the_story_names_it():
    job = Scenario("3").running()
    seen(job, WAITS, sleeps(LOCK), WAITS, progress=reported(120))
    assert job.generation == 2
    assert job.incarnations == {0: 1, 1: 1, 2: 1}
    incident = job.incident
    assert (incident.failure, incident.culprit, incident.step_before) == (FailureClass.RANK_HANG, 1, 120)
    assert incident.hang is not None
    assert (incident.hang.kind, incident.hang.ranks) == (HangKind.ASLEEP, (1,))
    text = told(job)
    assert "rank 1 of node 1 sleeps outside of any collective, in exchange, /job/train.py:12" in text
    assert "ranks 0, 2 wait in all_reduce, main, /job/train.py:26" in text
    assert "culprit: node 1; high confidence: 2 independent signs agree" in text
    assert 'rule hang/1 "a rank hangs: restart in place"' in text
    assert "      exchange  /job/train.py:12" in text
    assert all(node.look is None for node in job.state.nodes.values())


def test_an_incident_begins_with_the_last_step_although_no_stall_was_reported():
    job = Scenario("2").running()
    last = job.now
    job.wait(timedelta(seconds=15))
    ranks = ({**WAITS, "collectives": (call(57),)}, {**sleeps(BARRIER), "collectives": (call(57, name="barrier"),)})
    for node, rank in enumerate(ranks):
        seen = look(rank, first=node, early=True, since=last, taken_at=job.now)
        job.transition(node, NodeStallLook, generation=1, look=seen)
    assert (job.incident.started_at, job.incident.noticed_at) == (last, last + timedelta(seconds=15))
    assert [one.text for one in job.incident.evidence][:2] == [
        f"node {node} stepped for the last time" for node in range(2)
    ]


def test_a_stopped_rank_is_restarted_before_the_other_nodes_have_said_anything():
    job = Scenario("3").running()
    job.transition(1, NodeStallLook, generation=1, look=look(STOPPED, first=1, early=True, taken_at=job.now))
    assert job.generation == 2
    assert job.incident.hang is not None
    assert job.incident.hang.kind is HangKind.STOPPED


@pytest.mark.parametrize(
    "ranks",
    [[WAITS, sleeps(EVALUATION), WAITS], [WAITS, WAITS, WAITS], [computes(LOOP), computes(LOOP), computes(LOOP)]],
)
def test_what_may_be_work_is_shown_and_left_alone(ranks: list[dict[str, Any]]):
    job = seen(Scenario("3").running(), *ranks)
    job.wait(timedelta(days=1))
    assert (job.generation, job.state.incidents) == (1, ())
    assert job.state.phase is JobPhase.RUNNING


def test_what_was_seen_is_in_the_status_and_in_the_observation_of_the_pause():
    job = seen(Scenario("2").running(), WAITS, sleeps(EVALUATION))
    text = "rank 1 of node 1 does something else, in sleep_like, /job/train.py:3"
    assert text in job.state.reason
    job.wait(100)
    for node in range(2):
        job.transition(node, NodeStallEnded, generation=1)
    assert job.incident.observation is not None
    assert [one.text for one in job.incident.evidence if text in one.text] == [
        f"{text}; rank 0 waits in all_reduce, main, /job/train.py:26"
    ]
    assert text not in job.state.reason


def unusual(job: Scenario, *ranks: dict[str, Any]) -> Scenario:
    """Each node has one rank, and tells where it is before there is a stall."""
    since = job.now - timedelta(seconds=15)
    for node, rank in enumerate(ranks):
        told = look(rank, first=node, since=since, taken_at=job.now, unusual=True, long=False)
        job.transition(node, NodeStallLook, generation=1, look=told)
    return job


def test_a_hang_that_no_work_explains_is_repaired_before_there_is_a_stall():
    job = unusual(Scenario("3").running(), WAITS, sleeps(BARRIER), WAITS)
    assert (job.generation, job.incident.culprit) == (2, 1)
    assert job.incident.hang is not None
    assert job.incident.hang.kind is HangKind.MISMATCH


def test_a_loader_that_waits_for_one_item_is_left_alone_until_no_pause_is_as_long():
    job = unusual(Scenario("3").running(), WAITS, sleeps(LOADER), WAITS)
    assert (job.generation, job.state.incidents) == (1, ())
    hang = found(WAITS, sleeps(LOADER, moved=True), WAITS)
    assert hang is not None
    assert (hang.kind, hang.ranks, len(hang.signs)) == (HangKind.DATA_LOADER, (1,), 2)


def test_work_in_an_unusual_pause_is_no_entry_and_not_in_the_status():
    job = unusual(Scenario("3").running(), WAITS, sleeps(EVALUATION), WAITS)
    assert (job.generation, job.state.incidents) == (1, ())
    assert "does something else" not in job.state.reason


def test_a_job_that_only_reports_hangs_does_nothing_about_them():
    job = seen(Scenario("2", recovery={"on_hang": "report"}).running(), WAITS, sleeps(LOCK))
    assert job.generation == 1
    assert "rank 1 of node 1 sleeps outside of any collective" in job.state.reason


def test_ranks_that_step_again_before_all_nodes_were_seen_are_left_alone():
    job = Scenario("2").running()
    for node in range(2):
        job.transition(node, NodeStalled, generation=1)
    job.transition(0, NodeStallLook, generation=1, look=look(WAITS, taken_at=job.now))
    job.transition(0, NodeStallEnded, generation=1)
    job.transition(1, NodeStallLook, generation=1, look=look(sleeps(LOCK), first=1, taken_at=job.now))
    assert job.generation == 1


def test_looks_that_come_late_are_not_acted_on():
    """They were held up by an outage of the control plane, and say nothing of now."""
    job = Scenario("2").running()
    taken = job.now
    job.wait(timedelta(minutes=10))
    seen(job, WAITS, sleeps(LOCK), taken_at=taken)
    assert job.generation == 1


def test_a_node_that_cannot_be_reached_may_step_again():
    job = Scenario("2").running().transition(0, NodeUnreachable, generation=1)
    seen(job, WAITS, sleeps(LOCK))
    assert job.generation == 1


def test_a_node_tells_nothing_of_ranks_that_are_not_its_own():
    job = Scenario("2").running()
    job.transition(0, NodeStallLook, generation=1, look=look(WAITS, STOPPED, early=True, taken_at=job.now))
    assert job.generation == 1


def test_a_node_that_hangs_again_is_replaced():
    job = Scenario("3").running()
    for step in (100, 200):
        seen(job, WAITS, STOPPED, WAITS, progress=reported(step))
        if step == 100:
            job.steps()
            job.wait(60)
    assert job.incident.rule == 'hang/2 "the same node again: replace the node"'
    assert (job.node(1).incarnation, job.node(1).phase) == (2, NodePhase.REQUESTED)
    assert job.incarnations[0] == 1


def test_hangs_that_are_far_apart_replace_no_node():
    job = Scenario("3").running()
    for step in (100, 200):
        seen(job, WAITS, STOPPED, WAITS, progress=reported(step))
        job.steps()
        job.wait(timedelta(hours=2))
    assert job.incarnations == {0: 1, 1: 1, 2: 1}


@pytest.mark.parametrize(
    ("on_hang", "rank"), [("replace", STOPPED), ("restart", IN_KERNEL)], ids=["by request", "no signal ends it"]
)
def test_a_node_is_replaced_at_once(on_hang: str, rank: dict[str, Any]):
    job = seen(Scenario("3", recovery={"on_hang": on_hang}).running(), WAITS, rank, WAITS)
    assert (job.node(1).incarnation, job.node(1).phase) == (2, NodePhase.REQUESTED)


def test_ranks_that_wait_for_each_other_are_restarted_although_no_node_is_named():
    job = seen(Scenario("2").running(), WAITS, sleeps(BARRIER))
    assert job.generation == 2
    assert job.incident.culprit is None
    assert "ranks wait for each other in different calls" in job.incident.title


def test_the_same_line_on_another_node_stops_the_job_with_the_line():
    job = Scenario("3").running()
    seen(job, WAITS, sleeps(LOCK), WAITS, progress=reported(100))
    job.steps()
    job.wait(60)
    seen(job, WAITS, WAITS, sleeps(LOCK), progress=reported(100))
    assert job.state.outcome is not None
    assert job.state.outcome.exit_code == 1
    assert "the script hangs on several nodes, in exchange, /job/train.py:12" in job.state.outcome.reason


def test_hangs_that_gain_no_step_use_up_the_budget():
    job = Scenario("2", recovery={"on_capacity_loss": "fail"}).running()
    for _ in range(5):
        if job.state.outcome is None:
            seen(job, WAITS, STOPPED, progress=reported(100))
            job.wait(60)
        if job.state.outcome is None:
            job.steps()
    assert job.state.outcome is not None
    assert job.state.outcome.reason.startswith("no progress over 3 restarts")


@pytest.mark.parametrize(("action", "incarnations"), [("restart", {0: 1, 1: 1, 2: 1}), ("replace", {0: 1, 1: 2, 2: 1})])
def test_a_rule_of_the_job_says_what_is_done_about_a_rank_that_hangs(action: str, incarnations: dict[int, int]):
    rule = {"match": {"failures": ["RANK_HANG"]}, "action": action}
    job = Scenario("3", retry={"rules": [rule]}, recovery={"on_hang": "restart"}).running()
    for step in (100, 200)[: 1 if action == "replace" else 2]:
        seen(job, WAITS, STOPPED, WAITS, progress=reported(step))
        job.steps()
        job.wait(60)
    assert job.incident.rule == 'retry-rule/1 "retry.rules[0]"'
    assert (job.incident.culprit, job.incident.failure) == (1, FailureClass.RANK_HANG)
    assert job.incident.hang is not None
    assert job.incarnations == incarnations


def test_a_rule_replaces_no_node_where_none_is_known_to_hang():
    rule = {"match": {"failures": ["RANK_HANG"]}, "action": "replace"}
    job = seen(Scenario("2", retry={"rules": [rule]}).running(), WAITS, sleeps(BARRIER))
    assert (job.generation, job.incarnations, job.incident.culprit) == (2, {0: 1, 1: 1}, None)


def test_ranks_that_were_restarted_for_another_reason_are_restarted_when_one_hangs():
    job = Scenario("3").running().rank_raised(1)
    job.steps()
    job.wait(60)
    seen(job, WAITS, STOPPED, WAITS, progress=reported(200))
    assert job.incident.rule == 'hang/1 "a rank hangs: restart in place"'


def test_a_hang_that_is_seen_during_a_repair_is_that_of_the_world_which_is_over():
    job = Scenario("3").running().lost(2)
    over = job.generation
    assert job.state.interruption is not None
    for node, rank in enumerate([WAITS, sleeps(LOCK)]):
        job.transition(node, NodeStallLook, generation=over, look=look(rank, first=node, generation=over))
    assert (job.generation, job.state.interruption.hang) == (over, None)
    job.ready(0, 1, 2)
    assert job.generation == over + 1
    job.steps()
    assert all(node.look is None or node.look.generation < job.generation for node in job.state.nodes.values())
    assert job.incident.failure is FailureClass.NODE_LOST


def test_a_rank_that_hangs_again_in_the_world_after_a_repair_is_found_there():
    job = Scenario("3").running().rank_killed(2)
    assert job.generation == 2
    job.ready(0, 1, 2).steps()
    seen(job, WAITS, sleeps(LOCK), WAITS)
    assert job.generation == 3
    assert [one.failure for one in job.state.incidents] == [FailureClass.KILLED, FailureClass.RANK_HANG]
