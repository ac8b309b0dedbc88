"""Snapshots that cannot be read for a moment, as without a free file descriptor: they are not damaged."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure_training.checkpoint import verification
from perdure_training.snapshots.arena import Arena, Header, Slot
from tests.training.ranks_in_threads import RankThreads, rank_threads

RANKS = 2


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[RankThreads]:
    with rank_threads(tmp_path) as ranks:
        yield ranks


def begin(ranks: RankThreads) -> list[int | None]:
    return ranks.begin([{"step": 0, "value": rank} for rank in range(RANKS)], copies=0)


def save(ranks: RankThreads, *steps: int) -> None:
    for step in steps:
        assert ranks.save(step, [{"step": step, "value": rank} for rank in range(RANKS)]) == [True] * RANKS
        for checkpointer in ranks.checkpointers:
            checkpointer.flush()


def hide(monkeypatch: pytest.MonkeyPatch, *, rank: int, step: int) -> None:
    """Has a rank's snapshot of a step not be read."""
    read = verification.is_intact

    def fails(slot: Slot, header: Header) -> bool:
        if (header.rank, header.step) == (rank, step):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return read(slot, header)

    monkeypatch.setattr(verification, "is_intact", fails)


def test_a_snapshot_that_cannot_be_read_now_is_left_for_a_later_world(
    ranks: RankThreads, monkeypatch: pytest.MonkeyPatch
):
    begin(ranks)
    save(ranks, 1)
    with monkeypatch.context() as hiding:
        hide(hiding, rank=1, step=1)
        assert begin(ranks) == [None, None]
    assert begin(ranks) == [1, 1]


def test_the_step_before_is_loaded_where_one_rank_cannot_read_the_newest(
    ranks: RankThreads, monkeypatch: pytest.MonkeyPatch
):
    begin(ranks)
    save(ranks, 1, 2)
    hide(monkeypatch, rank=1, step=2)
    assert begin(ranks) == [1, 1]
    assert {header.step for _, header in Arena(ranks.memory / "stage-0" / "state").snapshots()} == {1}


def test_a_file_that_cannot_be_opened_is_not_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    slot = Arena(tmp_path / "stage-0" / "state").slot(0, 0, world_size=1)
    slot.begin(8)[:] = b"12345678"
    header = Header(
        step=1,
        rank=0,
        world_size=1,
        generation=1,
        replicated=False,
        index_at=0,
        size=8,
        checksum=verification.fingerprint(memoryview(bytearray(b"12345678"))),
    )
    slot.finish(header)
    with monkeypatch.context() as hiding:

        def fails(_: Slot) -> memoryview:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        hiding.setattr(Slot, "read", fails)
        assert verification.problem_of(slot) == verification.UNREADABLE
    assert verification.problem_of(slot) == ""
