"""Tests of shards with PyTorch's DataLoader."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from perdure_training.shards import ElasticSampler, ShardBatches, ShardingClient, ShardStream
from perdure_training.shards.link import StandaloneLink
from tests.support.waiting import DEADLINE

ROOT = Path(__file__).parents[2]
SIZE = 103
DATA = TensorDataset(torch.arange(SIZE))


def client() -> ShardingClient:
    return ShardingClient("train", size=SIZE, shard_size=8, shuffle=True, link=StandaloneLink(rank=0, world_size=1))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_reads_every_sample_and_a_position_counts_what_the_loop_was_given(workers: int):
    shards = client()
    batches = ShardBatches(shards, batch_size=10)
    loader = DataLoader(DATA, batch_sampler=batches, num_workers=workers)
    seen: list[int] = []
    saved = None
    for step, (samples,) in enumerate(batches.over(loader), start=1):
        seen += samples.tolist()
        shards.step()
        if step == 4:
            saved = shards.state_dict()
    assert sorted(seen) == list(range(SIZE))
    assert saved
    again = client()
    again.load_state_dict(saved)
    batches = ShardBatches(again, batch_size=10)
    loader = DataLoader(DATA, batch_sampler=batches, num_workers=workers)
    assert [index for (samples,) in batches.over(loader) for index in samples.tolist()] == seen[40:]
    assert again.state_dict()["next"] == SIZE
    assert not again.state_dict()["holes"]


@pytest.mark.parametrize("loaded", [False, True])
def test_a_loop_whose_samples_would_never_count_is_refused_at_its_first_step(loaded: bool):
    shards = client()
    batches = ShardBatches(shards, batch_size=10)
    iterated = DataLoader(DATA, batch_sampler=batches) if loaded else batches
    next(iter(iterated))
    with pytest.raises(RuntimeError, match=r"dataset train: no sample counts as consumed: loop over `batches\.over"):
        shards.step()
    shards.advance(10)
    shards.step()
    assert shards.state_dict()["next"] == 10, "a loop may report its samples by itself"


@pytest.mark.parametrize(
    ("kind", "workers"),
    [("batches", 0), ("batches", 2), ("batches of workers that stay", 2), ("stream", 0), ("stream", 2)],
)
def test_a_loop_that_is_left_and_begun_again_trains_every_sample_once(kind: str, workers: int):
    """Its loader had read ahead: the next loop is given these samples, and the position has what the loop was given."""
    if workers:
        # Workers are forked. Of the threads that other tests have left here one may hold what a worker needs.
        alone = f"from {__name__} import leave_and_begin_again; leave_and_begin_again({kind!r}, {workers})"
        subprocess.run([sys.executable, "-c", alone], cwd=ROOT, check=True, timeout=DEADLINE)
    else:
        leave_and_begin_again(kind, workers)


def leave_and_begin_again(kind: str, workers: int) -> None:
    shards = client()
    if kind == "stream":
        source = ShardStream(shards, read=rows, batch_size=10)
        loader: DataLoader[Any] = DataLoader(source, batch_size=None, num_workers=workers)
    else:
        source = ShardBatches(shards, batch_size=10)
        loader = DataLoader(DATA, batch_sampler=source, num_workers=workers, persistent_workers="stay" in kind)
    seen: list[int] = []
    while True:
        before = len(seen)
        for samples in itertools.islice(source.over(loader), 5):
            seen += (samples if kind == "stream" else samples[0]).tolist()
            shards.step()
            again = client()
            again.load_state_dict(shards.state_dict())
            rest = [index for shard in again for index in shard]
            assert sorted(seen + rest) == list(range(SIZE))
        if len(seen) == before:
            break
    assert sorted(seen) == list(range(SIZE))


def test_a_loop_that_goes_on_after_another_has_begun_is_refused():
    batches = ShardBatches(client(), batch_size=10)
    loader = DataLoader(DATA, batch_sampler=batches)
    first = batches.over(loader)
    next(first)
    next(batches.over(loader))
    with pytest.raises(RuntimeError, match="another loop over these batches has begun"):
        next(first)


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_elastic_sampler_has_the_order_of_the_distributed_sampler(shuffle: bool):
    for epoch in range(2):
        for rank in range(3):
            other = DistributedSampler(DATA, num_replicas=3, rank=rank, shuffle=shuffle, seed=5)
            own = ElasticSampler(SIZE, shuffle=shuffle, seed=5, rank=rank, world_size=3)
            own.set_epoch(epoch)
            other.set_epoch(epoch)
            assert list(own) == list(other)
            assert len(own) == len(other)


def test_a_smaller_world_continues_where_a_larger_one_stopped():
    before = [ElasticSampler(SIZE, rank=rank, world_size=3) for rank in range(3)]
    seen: list[int] = []
    for sampler in before:
        sampler.set_epoch(1)
        seen += list(sampler)[:20]
        sampler.advance(20)
    saved = before[0].state_dict()
    assert all(sampler.state_dict() == saved for sampler in before)
    for rank in range(2):
        after = ElasticSampler(SIZE, rank=rank, world_size=2)
        after.load_state_dict(saved)
        after.set_epoch(1)
        assert len(after) == 22
        seen += list(after)
    assert sorted(set(seen)) == list(range(SIZE))
    assert len(seen) == SIZE + 1, "padded to a multiple of the ranks"


def test_a_finished_epoch_has_nothing_left_until_the_next_one():
    sampler = ElasticSampler(SIZE, rank=0, world_size=1)
    sampler.advance(SIZE)
    assert list(sampler) == []
    sampler.set_epoch(1)
    assert len(list(sampler)) == SIZE


def test_a_position_of_another_dataset_is_not_loaded():
    sampler = ElasticSampler(SIZE, rank=0, world_size=1)
    with pytest.raises(ValueError, match="size: the position is of a dataset with 7, not 103"):
        sampler.load_state_dict(ElasticSampler(7, rank=0, world_size=1).state_dict())


def test_a_rank_alone_gets_every_batch_with_the_factor_one():
    shards = client()
    batches = ShardBatches(shards, batch_size=10)
    loader = DataLoader(DATA, batch_sampler=batches)
    seen: list[int] = []
    for (samples,), factor in batches.in_step(loader):
        assert factor == 1
        seen += samples.tolist()
        shards.step()
    assert sorted(seen) == list(range(SIZE))


def rows(indices: list[int]) -> list[torch.Tensor]:
    return [torch.tensor(index) for index in indices]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_reads_every_sample_and_a_position_counts_what_the_loop_was_given(workers: int):
    shards = client()
    stream = ShardStream(shards, read=rows, batch_size=10)
    loader = DataLoader(stream, batch_size=None, num_workers=workers)
    seen: list[int] = []
    saved = None
    for step, (samples, factor) in enumerate(stream.in_step(loader), start=1):
        assert factor == 1
        seen += samples.tolist()
        shards.step()
        if step == 4:
            saved = shards.state_dict()
    assert sorted(seen) == list(range(SIZE))
    assert shards.state_dict()["next"] == SIZE
    assert not shards.state_dict()["holes"]
    assert saved
    again = client()
    again.load_state_dict(saved)
    stream = ShardStream(again, read=rows, batch_size=10)
    loader = DataLoader(stream, batch_size=None, num_workers=workers)
    rest = [index for samples in stream.over(loader) for index in samples.tolist()]
    assert sorted(rest) == sorted(seen[40:])


def test_a_reader_that_leaves_out_samples_is_named():
    stream = ShardStream(client(), read=lambda indices: rows(indices[1:]), batch_size=10)
    with pytest.raises(ValueError, match="returned 7 samples for 8 indices"):
        next(iter(stream))
