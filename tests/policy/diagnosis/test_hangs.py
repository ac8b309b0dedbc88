"""Tests of how a rank that hangs is found among those that wait for it."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.contract import (
    HangKind,
    Member,
    StackFrame,
)
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
