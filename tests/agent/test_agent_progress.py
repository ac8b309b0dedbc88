"""Tests of reading the ranks' progress files."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from perdure.agent.progress import ProgressReader
from perdure.contract import ProgressSource
from perdure.contract.courses import MOST_SAMPLES
from perdure_training.node_api.progress_file import (
    COUNTED,
    REPORTED,
    ProgressFile,
    mark_without_process_group,
    progress_path,
)


class Ranks:
    """Two ranks that write as real ones do."""

    def __init__(self, run_dir: Path, generation: int, source: int, base_rank: int = 0) -> None:
        self.writers = [
            ProgressFile(
                progress_path(run_dir / "progress", base_rank + local), generation=generation, pid=100, source=source
            )
            for local in range(2)
        ]

    def step(self, *steps: int, **details: Any) -> None:
        for writer, step in zip(self.writers, steps, strict=True):
            writer.write(step, time=time.time(), **details)


@pytest.fixture
def reader(tmp_path: Path) -> ProgressReader:
    return ProgressReader(tmp_path)


def sample(reader: ProgressReader, generation: int, now: float, base_rank: int = 0) -> None:
    reader.sample(generation=generation, base_rank=base_rank, processes=2, now=now)


def test_all_ranks_must_step_and_the_slowest_counts(tmp_path: Path, reader: ProgressReader) -> None:
    sample(reader, 1, 0)
    ranks = Ranks(tmp_path, 1, COUNTED)
    ranks.step(0, 3)
    sample(reader, 1, 1)
    assert not reader.all_stepped
    assert reader.newest is None
    ranks.step(1, 3)
    sample(reader, 1, 2)
    assert reader.all_stepped
    assert reader.newest is not None
    assert (reader.newest.step, reader.newest.source) == (1, ProgressSource.COUNTED)


def test_ranks_that_train_apart_are_told_of_in_the_generation_that_they_do_it_in(
    tmp_path: Path, reader: ProgressReader
) -> None:
    Ranks(tmp_path, 1, COUNTED).step(20, 20)
    mark_without_process_group(tmp_path / "progress", generation=1)
    sample(reader, 1, 1)
    assert reader.newest is not None
    assert reader.newest.apart
    Ranks(tmp_path, 2, COUNTED).step(1, 1)
    sample(reader, 2, 2)
    assert not reader.newest.apart


def test_ranks_of_another_generation_do_not_count(tmp_path: Path, reader: ProgressReader) -> None:
    Ranks(tmp_path, 1, COUNTED).step(50, 50)
    sample(reader, 1, 0)
    assert reader.all_stepped
    sample(reader, 2, 1)
    assert reader.newest is not None
    assert (reader.newest.step, reader.newest.generation) == (50, 1)
    Ranks(tmp_path, 2, COUNTED, base_rank=4).step(1, 1)
    sample(reader, 2, 2, base_rank=4)
    assert (reader.newest.step, reader.newest.generation) == (1, 2)
    assert reader.newest.generation_steps == 1


def test_reports_are_absolute_and_a_first_one_is_a_step(tmp_path: Path, reader: ProgressReader) -> None:
    ranks = Ranks(tmp_path, 3, REPORTED)
    sample(reader, 3, 0)
    assert not reader.all_stepped
    ranks.step(1200, 1200, total=2000, loss=1.25)
    sample(reader, 3, 1)
    ranks.step(1210, 1211)
    sample(reader, 3, 2)
    assert reader.newest is not None
    assert (reader.newest.step, reader.newest.total_steps, reader.newest.loss) == (1210, 2000, 1.25)
    assert (reader.newest.generation_steps, reader.newest.source) == (10, ProgressSource.REPORTED)


def test_the_rate_is_of_the_last_minute(tmp_path: Path, reader: ProgressReader) -> None:
    ranks = Ranks(tmp_path, 1, COUNTED)
    ranks.step(1, 1)
    sample(reader, 1, 0)
    assert reader.newest is not None
    assert reader.newest.steps_per_second is None
    for second in range(1, 121):
        ranks.step(second * 10, second * 10)
        sample(reader, 1, second)
    assert reader.newest.steps_per_second == pytest.approx(10, rel=0.05)
    # A stall shows.
    for second in range(121, 151):
        sample(reader, 1, second)
    assert reader.newest.steps_per_second == pytest.approx(5, rel=0.1)


def test_the_jump_from_counted_to_reported_steps_is_no_speed_and_no_step(
    tmp_path: Path, reader: ProgressReader
) -> None:
    """A script that continues from step 500 is counted before its first report."""
    ranks = Ranks(tmp_path, 2, COUNTED)
    ranks.step(1, 1)
    sample(reader, 2, 0)
    reporting = Ranks(tmp_path, 2, REPORTED)
    for now in range(1, 6):
        reporting.step(500 + 2 * now, 500 + 2 * now)
        sample(reader, 2, now)
    assert reader.newest is not None
    assert reader.newest.steps_per_second == 2.0
    assert reader.newest.generation_steps == 1 + 4 * 2, "the counted one, and those between reports"


def test_a_training_after_another_one_adds_steps_at_its_own_speed(tmp_path: Path, reader: ProgressReader) -> None:
    ranks = Ranks(tmp_path, 1, COUNTED)
    for now, step in ((0, 10), (10, 40), (20, 2), (30, 12)):
        ranks.step(step, step)
        sample(reader, 1, now)
        assert reader.newest is not None
        assert (reader.newest.steps_per_second or 0) >= 0
    assert reader.newest is not None
    assert (reader.newest.step, reader.newest.generation_steps, reader.newest.steps_per_second) == (12, 50, 1.0)


def test_half_written_and_foreign_files_are_not_read(tmp_path: Path, reader: ProgressReader) -> None:
    folder = tmp_path / "progress"
    folder.mkdir()
    (folder / "rank-0").write_bytes(b"short")
    (folder / "rank-1").write_bytes(bytes(64))
    sample(reader, 1, 0)


def test_the_node_of_the_first_rank_samples_its_course(tmp_path: Path, reader: ProgressReader) -> None:
    ranks = Ranks(tmp_path, 1, REPORTED)
    for second in range(1_000):
        for writer in ranks.writers:
            writer.write(second, time=10_000 + second, loss=1 / (second + 1))
        sample(reader, 1, second)
    assert reader.newest is not None
    course = reader.newest.course
    assert len(course) <= MOST_SAMPLES
    assert (course[0].at, course[0].step, course[0].loss) == (10_000, 0, 1)
    assert course[-1].step > 980
    apart = {after.at - before.at for before, after in pairwise(course[:-2])}
    assert apart == {8}, "evenly spread"
    # In the next generation the node has another place.
    Ranks(tmp_path, 2, REPORTED, base_rank=2).step(1, 1)
    sample(reader, 2, 1_001, base_rank=2)
    assert reader.newest.generation == 2
    assert reader.newest.course == ()
