"""Checkpoints in storage where the memory folder is too small for snapshots."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from perdure.agent.checkpoint.storage import Storage
from perdure.contract import RestoreSource
from tests.support.small_disks import small_disk
from tests.support.waiting import wait_for
from tests.training.checkpoint_agent import NODE, checkpoint_agent
from tests.training.ranks import run_ranks
from tests.training.test_durable_checkpoints import Site, durable, trained

NEEDED = "A rank needs 18"
"""Three times the 62 KB of the state, whose description differs by some bytes between processes."""


@pytest.mark.parametrize(("size", "snapshots"), [("96k", 1), ("160k", 2), ("32k", 0)])
def test_what_is_due_is_stored_where_memory_is_too_small_for_snapshots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, size: str, snapshots: int
):
    disk = tmp_path / "disk"
    disk.mkdir()
    with (
        small_disk(tmp_path / "memory", size),
        checkpoint_agent(tmp_path / "storage", every=1000, keep_last=2) as agent,
    ):
        # Nothing is written to disk where one step fits into memory.
        monkeypatch.setattr(tempfile, "tempdir", str(disk if not snapshots else tmp_path / "missing"))
        site = Site(tmp_path, agent, monkeypatch)
        state = trained(steps=5)
        checkpointer, _ = site.begin(state)
        for step in range(1, 5):
            assert checkpointer.save(step, state) == (step <= snapshots)
            checkpointer.flush()
        assert durable(checkpointer, 5, state)
        agent.request_checkpoint(1)
        for step in range(6, 30):
            checkpointer.save(step, state)
        assert checkpointer.wait_until_durable(60)
        requested, first = (one.step for one in Storage(str(site.storage)).saved(""))
        assert 6 < requested < 30
        assert first == 5
        [warning] = [record.message for record in caplog.records if "resources.shm" in record.message]
        assert NEEDED in warning
        assert "checkpoints are stored without snapshots" in warning
        again = trained(seed=2)
        assert site.begin(again)[1] == requested
        assert (again["model"].weight == state["model"].weight).all()
        wait_for(lambda: agent.restores)
        assert agent.restores[-1].source is RestoreSource.STORAGE
        # torch makes a folder for compiled code there, if this test is the first that loads with it.
        assert not [path for path in disk.iterdir() if not path.name.startswith("torchinductor_")]


def test_a_step_that_fits_nowhere_is_a_warning_and_is_stored_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    with (
        small_disk(tmp_path / "memory", "32k"),
        small_disk(tmp_path / "disk", "32k") as disk,
        checkpoint_agent(tmp_path / "storage", every=1000) as agent,
    ):
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        site = Site(tmp_path, agent, monkeypatch)
        state = trained(steps=5)
        checkpointer, _ = site.begin(state)
        for step in (1, 2):
            assert not checkpointer.save(step, state, durable=True)
        [warning] = [record.message for record in caplog.records if "TMPDIR" in record.message]
        assert "step 1 is not stored: 62," in warning
        assert "bytes fit neither into" in warning
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        assert durable(checkpointer, 3, state)


def test_memory_that_others_have_filled_keeps_no_step_from_being_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with (
        small_disk(tmp_path / "memory", "64k") as memory,
        checkpoint_agent(tmp_path / "storage", every=1000) as agent,
    ):
        (memory / "others").write_bytes(bytes(64 * 1024))
        site = Site(tmp_path, agent, monkeypatch)
        state = trained(steps=5)
        checkpointer, _ = site.begin(state)
        assert durable(checkpointer, 1, state)
        assert site.begin(trained(seed=2))[1] == 1


def test_the_newest_snapshot_stays_until_a_newer_step_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with (
        small_disk(tmp_path / "memory", "224k") as memory,
        checkpoint_agent(tmp_path / "storage", every=1000) as agent,
    ):
        site = Site(tmp_path, agent, monkeypatch)
        state = trained(steps=5)
        checkpointer, _ = site.begin(state)
        for step in range(1, 5):
            assert checkpointer.save(step, state)
            checkpointer.flush()
        grown = state | {"more": bytes(30_000)}
        assert not checkpointer.save(5, grown)
        checkpointer, restored = site.begin(trained(seed=2))
        assert restored == 4
        assert [checkpointer.save(step, grown) for step in (5, 6)] == [True, False]
        assert durable(checkpointer, 7, grown)
        assert not checkpointer.save(8, grown)
        assert not [*memory.glob("stage-0/state/rank-0.?")]
        assert site.begin(grown | trained(seed=2))[1] == 7


def test_a_snapshot_is_given_up_for_the_room_of_the_first_step_that_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with (
        small_disk(tmp_path / "memory", "80k"),
        checkpoint_agent(tmp_path / "storage", every=1000) as agent,
    ):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
        site = Site(tmp_path, agent, monkeypatch)
        state = trained(steps=5)
        checkpointer, _ = site.begin(state)
        assert [checkpointer.save(step, state) for step in (1, 2)] == [True, False]
        assert durable(checkpointer, 3, state)


@pytest.mark.long("storage")
@pytest.mark.usefixtures("ranks")
def test_a_rank_without_room_has_all_store_without_snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with (
        small_disk(tmp_path / "small", "32k") as small,
        checkpoint_agent(tmp_path / "storage", ranks=2, every=1000) as agent,
    ):
        (tmp_path / "large").mkdir()
        monkeypatch.setenv("PERDURE_PROGRESS_DIR", agent.environment["PERDURE_PROGRESS_DIR"])
        folders = [str(tmp_path / "large"), str(small)]
        outputs: list[str] = []
        for generation in (1, 2):
            agent.begin(generation)
            run = run_ranks("stores_without_room.py", tmp_path, arguments=[*folders, NODE.uid, str(generation)])
            outputs.append(run.stdout)
            assert run.stderr.count("checkpoints are stored without snapshots") == (generation == 1)
    assert [sorted(output.splitlines()) for output in outputs] == [
        ["rank 0: None, 0", "rank 1: None, 0"],
        ["rank 0: 9, 9", "rank 1: 9, 9"],
    ]
