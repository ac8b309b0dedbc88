"""Tests of what torch's flight recorder shows of ranks that make no step, alone and beside their calls."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from perdure.cli.explain import explanation
from perdure.contract import CollectiveCall, Hang, HangKind
from perdure.contract.transitions import NodeStallLook
from perdure.workflows.policy.diagnosis import collectives, hangs
from tests.policy.diagnosis.stalled_ranks import (
    ALL_REDUCE,
    BARRIER,
    EVALUATION,
    HANDLE,
    LOCK,
    LOOP,
    call,
    computes,
    found,
    look,
    sleeps,
)
from tests.policy.scenario import Scenario

Calls = tuple[CollectiveCall, ...]


def after(number: int, name: str = "all_reduce", size: int = 4, *, group: str = "0 (default_pg)") -> CollectiveCall:
    """A collective that has ended."""
    return call(number, name, size, group=group).model_copy(update={"ended": True})


def over_nccl(*calls: CollectiveCall) -> tuple[CollectiveCall, ...]:
    return tuple(call.model_copy(update={"name": call.name.replace("gloo:", "nccl:")}) for call in calls)


def at(rank: dict[str, Any], *calls: CollectiveCall) -> dict[str, Any]:
    return {**rank, "collectives": calls}


PAIR = "1 (pair)"
WAITS = sleeps(ALL_REDUCE)
WAITING = at(WAITS, call(7))
IN_7 = "all_reduce of 4, number 7 of process group 0 (default_pg)"


@pytest.mark.parametrize(
    ("ranks", "waited_for", "crossed", "apart", "same_number"),
    [
        pytest.param([[call(7)], [after(6)], [call(7)]], {1}, False, (), False, id="one has not come"),
        pytest.param([[call(7)], [after(6)], [after(6)]], {1, 2}, False, (), False, id="two have not come"),
        pytest.param([[call(7)], [call(7)], [call(7)]], (), False, (), False, id="all are in the same one"),
        pytest.param([[call(7)], [call(7, "barrier")], [call(7)]], (), True, {1}, True, id="another collective"),
        pytest.param([[call(7)], [call(7, size=8)], [call(7)]], (), True, {1}, True, id="another size"),
        pytest.param([[call(7)], [call(7, size=8)]], (), True, (), True, id="one against one"),
        pytest.param(
            [[call(7, "all_gather")], [call(7, "all_gather", 8)]], (), False, (), False, id="sizes that may differ"
        ),
        pytest.param(
            [
                [call(7), after(3, group=PAIR)],
                [after(6), call(4, group=PAIR)],
                [call(7), after(3, group=PAIR)],
            ],
            (),
            True,
            {1},
            False,
            id="one has skipped a collective, and waits in the next one of another group",
        ),
        pytest.param(
            # 0 and 2 train together, as 1 and 3 do; 2 waits for 3.
            [
                [call(9, group="dp 0"), after(5, group="tp 0")],
                [call(9, group="dp 1"), after(5, group="tp 0")],
                [after(8, group="dp 0"), call(5, group="tp 1")],
                [after(8, group="dp 1"), after(4, group="tp 1")],
            ],
            {3},
            False,
            (),
            False,
            id="a chain over several groups ends at the one that has not come",
        ),
    ],
)
def test_who_is_waited_for(
    ranks: list[list[CollectiveCall]], waited_for: set[int], crossed: bool, apart: set[int], same_number: bool
):
    compared = collectives.compare(dict(enumerate(ranks)))
    assert compared is not None
    assert (compared.waited_for, compared.apart) == (set(waited_for), set(apart))
    assert (compared.crossed, compared.same_number) == (crossed, same_number)


@pytest.mark.parametrize("ranks", [[], [[call(7)], []], [[after(7)], [after(7)]]])
def test_nothing_is_known_where_a_rank_does_not_tell_or_none_waits(ranks: list[list[CollectiveCall]]):
    assert collectives.compare(dict(enumerate(ranks))) is None


def test_a_collective_is_named_with_its_size_and_number():
    assert (
        collectives.words(call(1234567, size=8)) == "all_reduce of 8, number 1,234,567 of process group 0 (default_pg)"
    )
    assert collectives.words(CollectiveCall(group="0 (g)", sequence=1, name="gloo:barrier")) == (
        "barrier, number 1 of process group 0 (g)"
    )


def outcome(hang: Hang | None) -> tuple[HangKind, tuple[int, ...], int] | None:
    return (hang.kind, hang.ranks, len(hang.signs)) if hang is not None else None


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        pytest.param(
            [WAITING, at(sleeps(LOCK), after(6)), WAITING], (HangKind.ASLEEP, (1,), 2), id="calls and recorder agree"
        ),
        pytest.param(
            [at(sleeps(LOCK), after(6)), WAITING, WAITING], (HangKind.ASLEEP, (0,), 2), id="the first rank hangs"
        ),
        pytest.param(
            [WAITING, at(sleeps(LOCK), call(7)), WAITING],
            (HangKind.ASLEEP, (1,), 1),
            id="the recorder says that it has come",
        ),
        pytest.param(
            [WAITING, at(sleeps(LOCK), after(7)), WAITING, at(WAITS, after(6))],
            (HangKind.ASLEEP, (1,), 1),
            id="the recorder names another one",
        ),
        pytest.param(
            [WAITING, at(computes(EVALUATION), after(6)), WAITING],
            (HangKind.WORKS, (1,), 1),
            id="both agree where it is, which is one sign",
        ),
        pytest.param(
            [
                at(WAITS, call(7), after(3, group=PAIR)),
                at(WAITS, call(4, group=PAIR), after(6)),
                at(WAITS, call(7), after(3, group=PAIR)),
            ],
            (HangKind.MISMATCH, (1,), 2),
            id="a collective was skipped, and all calls are alike",
        ),
        pytest.param(
            [WAITING, at(WAITS, after(6)), WAITING],
            (HangKind.MISMATCH, (1,), 2),
            id="one has not come, and all calls are alike",
        ),
        pytest.param(
            [at(sleeps(HANDLE), call(7)), at(sleeps(HANDLE), after(6)), at(sleeps(HANDLE), call(7))],
            (HangKind.ASLEEP, (1,), 2),
            id="no call has a name",
        ),
        pytest.param([WAITING, at(sleeps(BARRIER), call(7)), WAITING], (HangKind.ALIKE, (), 0), id="only lines differ"),
        pytest.param(
            [WAITING, at(sleeps(BARRIER), after(6)), WAITING],
            (HangKind.MISMATCH, (1,), 2),
            id="a wait without a record",
        ),
        pytest.param(
            [WAITING, at(sleeps(BARRIER), call(7, "barrier")), WAITING], (HangKind.MISMATCH, (1,), 2), id="a mismatch"
        ),
        pytest.param(
            [WAITING, at(sleeps(BARRIER, cpu_percent=90.0), call(7, "barrier")), WAITING],
            (HangKind.MISMATCH, (1,), 1),
            id="a mismatch, and something computes",
        ),
        pytest.param(
            [at(sleeps(LOCK), call(7)), at(sleeps(BARRIER), call(7, "barrier")), WAITING],
            (HangKind.MISMATCH, (1,), 1),
            id="a mismatch, and the calls show another one elsewhere",
        ),
        pytest.param([WAITING, at(computes(LOOP)), WAITING], (HangKind.LOOP, (1,), 2), id="one does not tell"),
    ],
)
def test_the_recorder_is_compared_with_the_calls(
    ranks: list[dict[str, Any]], expected: tuple[HangKind, tuple[int, ...], int]
):
    assert outcome(found(*ranks)) == expected


# What a rank shows that waits for its GPU: it asks the driver all the time, in a line of the script.
SPINS = computes(HANDLE, cpu_percent=100.0)


@pytest.mark.parametrize(
    ("ranks", "fields", "expected"),
    [
        pytest.param(
            [at(SPINS, *over_nccl(call(7))), at(sleeps(LOCK), *over_nccl(after(6))), at(SPINS, *over_nccl(call(7)))],
            {},
            (HangKind.ASLEEP, (1,), 2),
            id="one has not come",
        ),
        pytest.param(
            [
                at(computes(BARRIER, cpu_percent=100.0), *over_nccl(call(7))),
                at(computes(LOOP), *over_nccl(after(6))),
                at(SPINS, *over_nccl(call(7))),
            ],
            {},
            (HangKind.LOOP, (1,), 2),
            id="those that wait are in different calls",
        ),
        pytest.param(
            [
                at(SPINS, *over_nccl(call(7))),
                at(SPINS, *over_nccl(call(7, "broadcast"))),
                at(SPINS, *over_nccl(call(7))),
            ],
            {"long": False},
            (HangKind.MISMATCH, (1,), 2),
            id="different collectives of the same number",
        ),
        pytest.param(
            [
                at(SPINS, *over_nccl(call(7))),
                at(computes(HANDLE, steady=False), *over_nccl(call(7, "broadcast"))),
                at(SPINS, *over_nccl(call(7))),
            ],
            {},
            (HangKind.MISMATCH, (1,), 1),
            id="different collectives, and one has left its calls",
        ),
        pytest.param(
            [
                at(SPINS, *over_nccl(call(7), after(3, group=PAIR))),
                at(SPINS, *over_nccl(call(4, group=PAIR), after(6))),
                at(SPINS, *over_nccl(call(7), after(3, group=PAIR))),
            ],
            {},
            (HangKind.MISMATCH, (1,), 2),
            id="a collective was skipped",
        ),
        pytest.param(
            [
                at(SPINS, *over_nccl(call(7), after(3, group=PAIR))),
                at(SPINS, *over_nccl(call(4, group=PAIR), after(6))),
                at(SPINS, *over_nccl(call(7), after(3, group=PAIR))),
            ],
            {"long": False},
            (HangKind.MISMATCH, (1,), 1),
            id="a collective was skipped, unless a rank computes before it calls it",
        ),
        pytest.param(
            [
                at(SPINS, *over_nccl(call(7), after(3, group=PAIR))),
                at(computes(EVALUATION), *over_nccl(call(4, group=PAIR), after(6))),
                at(SPINS, *over_nccl(call(7), after(3, group=PAIR))),
            ],
            {},
            (HangKind.MISMATCH, (1,), 1),
            id="the rank that others wait for evaluates",
        ),
        pytest.param(
            [
                at(SPINS, *over_nccl(call(8))),
                at(SPINS, *over_nccl(call(7, size=8))),
                at(SPINS, *over_nccl(call(8))),
            ],
            {},
            (HangKind.MISMATCH, (1,), 2),
            id="one has given more than the others, which have ended",
        ),
        pytest.param(
            [
                at(SPINS, *over_nccl(call(8))),
                at(SPINS, *over_nccl(call(7, size=8))),
                at(SPINS, *over_nccl(call(8))),
            ],
            {"long": False},
            (HangKind.MISMATCH, (1,), 1),
            id="one is behind, and may end yet",
        ),
        pytest.param(
            [at(SPINS, *over_nccl(call(8, "broadcast"))), at(SPINS, *over_nccl(call(7, "broadcast")))],
            {},
            (HangKind.ALIKE, (), 0),
            id="a broadcast ends on its source before it has begun elsewhere",
        ),
        pytest.param(
            [at(SPINS, *over_nccl(call(7)), after(9)), at(SPINS, *over_nccl(call(7)), after(3))],
            {},
            (HangKind.ALIKE, (), 0),
            id="each backend of a group has numbers of its own",
        ),
    ],
)
def test_ranks_that_wait_for_their_devices_are_compared_too(
    ranks: list[dict[str, Any]], fields: dict[str, Any], expected: tuple[HangKind, tuple[int, ...], int]
):
    assert outcome(found(*ranks, **fields)) == expected


def test_only_different_collectives_of_the_same_number_mean_something_early():
    mismatch = at(sleeps(BARRIER, steady=False), call(7, "barrier"))
    waiting = at(sleeps(ALL_REDUCE, steady=False), call(7))
    assert outcome(found(waiting, mismatch, waiting, early=True)) == (HangKind.MISMATCH, (1,), 2)
    assert found(waiting, at(sleeps(LOCK), after(6)), waiting, early=True) is None
    apart = [at(WAITS, call(7), after(3, group=PAIR)), at(WAITS, call(4, group=PAIR), after(6))]
    assert found(*apart, early=True) is None


def test_what_was_found_names_the_collective():
    hang = found(WAITING, at(sleeps(LOCK), after(6)), WAITING)
    assert hang is not None
    assert hang.collective == call(7)
    assert hangs.describe(hang).endswith(f"ranks 0, 2 wait in all_reduce, main, /job/train.py:26: {IN_7}")
    assert hang.signs[0] == f"rank 1 has not come to {IN_7}, in which the others wait"


def test_a_mismatch_is_repaired_as_soon_as_all_nodes_were_seen_early():
    job = Scenario("3").running()
    ranks = [WAITING, at(sleeps(BARRIER), call(7, "barrier")), WAITING]
    for node, rank in enumerate(ranks):
        assert job.generation == 1
        seen = look(rank, first=node, early=True, taken_at=job.now)
        job.transition(node, NodeStallLook, generation=1, look=seen)
    assert job.generation == 2
    incident = job.incident
    assert incident.hang is not None
    assert (incident.culprit, incident.hang.kind) == (1, HangKind.MISMATCH)
    text = explanation(incident, job="llama", flag="").plain
    assert "rank 1 of node 1 waits in another call, in main, /job/train.py:44" in text
    assert IN_7 in text
    assert "barrier of 4, number 7" in text


def test_a_recorder_that_contradicts_the_calls_is_shown_and_not_acted_on():
    job = Scenario("3").running()
    ranks = [WAITING, at(sleeps(LOCK), call(7)), WAITING]
    for node, rank in enumerate(ranks):
        job.transition(node, NodeStallLook, generation=1, look=look(rank, first=node, taken_at=job.now))
    job.wait(timedelta(hours=1))
    assert (job.generation, job.state.incidents) == (1, ())
