"""A save that cannot be made is a warning and False: it ends no rank, and the next one is another try."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from perdure_training.checkpoint.generation import GenerationCheckpoints
from perdure_training.checkpoint.slots import Slots
from perdure_training.checkpoint.world import RankIdentity
from perdure_training.snapshots.arena import Arena
from tests.support.waiting import DEADLINE
from tests.training.one_rank import World


@contextmanager
def without_descriptors() -> Iterator[None]:
    """No file of a snapshot can be opened."""
    opened = os.open

    def fail(path: Any, *arguments: Any, **options: Any) -> int:
        if "stage-0" in str(path):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return opened(path, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", fail)
        yield


def test_a_memory_folder_that_is_gone_costs_snapshots_and_not_the_training(
    world: World, caplog: pytest.LogCaptureFixture
):
    state: dict[str, Any] = {"step": 0}
    checkpointer, _ = world.begin(state)
    for step in (1, 2, 3, 4):
        assert checkpointer.save(step, {"step": step})
        checkpointer.flush()
    shutil.rmtree(world.folder)
    world.folder.write_text("not a folder")
    assert not checkpointer.save(5, {"step": 5})
    assert not checkpointer.save(6, {"step": 6})
    assert caplog.text.count("the training continues, and the next one is another try") == 1
    world.folder.unlink()
    for step in (7, 8, 9, 10):
        assert checkpointer.save(step, {"step": step})
        checkpointer.flush()
    folders = (world.folder, world.folder / "stage-0", world.folder / "stage-0" / "state")
    assert [path.stat().st_mode & 0o777 for path in folders] == [0o700] * 3
    assert world.begin(state)[1] == 10


def test_a_memory_folder_that_cannot_be_made_costs_snapshots_and_not_the_training(
    world: World, caplog: pytest.LogCaptureFixture
):
    shutil.rmtree(world.folder, ignore_errors=True)
    world.folder.write_text("not a folder")
    checkpointer, step = world.begin({"step": 0})
    assert step is None
    assert [checkpointer.save(step, {"step": step}) for step in (1, 2)] == [False, False]
    assert caplog.text.count("the training continues, and the next one is another try") == 1
    world.folder.unlink()
    assert checkpointer.save(3, {"step": 3})
    checkpointer.flush()
    assert world.begin({"step": 0})[1] == 3


def test_a_memory_folder_without_inodes_costs_snapshots_and_not_the_training(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    made = Path.mkdir

    def fail(path: Path, *arguments: Any, **options: Any) -> None:
        if "stage-0" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        made(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", fail)
    checkpointer, step = world.begin({"step": 0})
    assert step is None
    assert [checkpointer.save(step, {"step": step}) for step in (1, 2)] == [False, False]
    assert caplog.text.count("no further checkpoints in memory") == 1
    assert "No space left on device" in caplog.text


def test_a_memory_folder_that_is_full_leaves_the_newest_step_that_all_ranks_have(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    checkpointer, _ = world.begin({"step": 0})
    for step in (1, 2, 3, 4):
        assert checkpointer.save(step, {"step": step})
        checkpointer.flush()

    def fail(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    grown = {"step": 5, "more": bytes(100_000)}
    assert [checkpointer.save(step, grown) for step in (5, 6)] == [False, False]
    assert world.begin({"step": 0})[1] == 4


def test_a_rank_without_a_memory_folder_lets_no_other_rank_wait(tmp_path: Path):
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (tmp_path / "node-1").write_text("not a folder")

    def restored(rank: int) -> int | None:
        own = RankIdentity(
            rank=rank,
            world_size=2,
            local_rank=0,
            local_world_size=1,
            generation=1,
            folder=tmp_path / f"node-{rank}" / "stage-0",
            store=("127.0.0.1", served.port),
        )
        return GenerationCheckpoints(own, "state", copies=0, replicated=False).agree().decision.step

    with ThreadPoolExecutor(2) as threads:
        for found in [threads.submit(restored, rank) for rank in range(2)]:
            assert found.result(DEADLINE) is None


def test_a_folder_that_is_gone_while_a_snapshot_is_made_valid_costs_that_step(world: World):
    checkpointer, _ = world.begin({"step": 0})
    assert checkpointer.save(1, {"step": 1})
    shutil.rmtree(world.folder / "stage-0")
    checkpointer.flush()
    assert checkpointer.save(2, {"step": 2})
    checkpointer.flush()
    assert world.begin({"step": 0})[1] == 2


def test_an_error_that_no_one_expects_costs_one_step_and_is_not_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    checkpointer, _ = world.begin({"step": 0})
    with monkeypatch.context() as failing:
        failing.setattr(Slots, "number", {}.__getitem__)
        assert checkpointer.save(1, {"step": 1})
        checkpointer.flush()
    assert "a step is not complete" in caplog.text
    assert checkpointer.save(2, {"step": 2})
    checkpointer.flush()
    assert world.begin({"step": 0})[1] == 2


def test_a_rank_without_a_free_descriptor_goes_on_and_saves_again_later(world: World, caplog: pytest.LogCaptureFixture):
    checkpointer, _ = world.begin({"step": 0})
    assert checkpointer.save(1, {"step": 1})
    checkpointer.flush()
    with without_descriptors():
        assert not checkpointer.save(2, {"step": 2})
        assert not checkpointer.save(3, {"step": 3}, durable=True)
    assert "Too many open files" in caplog.text
    assert checkpointer.save(4, {"step": 4})
    checkpointer.flush()
    assert world.begin({"step": 0})[1] == 4


def test_a_slot_of_which_it_is_not_known_whether_it_is_copied_is_not_taken_for_free(tmp_path: Path):
    slot = Arena(tmp_path / "stage-0" / "state").slot(0, 0)
    slot.begin(100)

    with without_descriptors(), pytest.raises(OSError, match="Too many open files"):
        _ = slot.is_pinned
