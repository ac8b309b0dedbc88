"""Tests of the client of streams, against the policy that decides on leases."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from perdure.contract import DatasetParameters, ShardRequest, Term
from perdure.workflows.policy.services.dataset_views import view
from perdure.workflows.policy.services.datasets import DatasetState, begin, exchange
from perdure_training.shards import ShardBatches, ShardStream, StreamClient
from perdure_training.shards.link import Link, StandaloneLink
from tests.support.waiting import wait_for

Sample = tuple[str, int]


class Stream:
    """Partitions that grow as a test says, and the job's leases of them, with the policy's real decisions."""

    def __init__(self, **ends: int) -> None:
        self.ends = dict[str, float](ends)
        self.complete = False
        self.state: DatasetState | None = None
        self.lock = threading.Lock()

    def now(self) -> tuple[Mapping[str, float], bool]:
        return self.ends, not self.complete

    def exchange(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            parameters = DatasetParameters.model_validate(body["parameters"])
            self.state = self.state or begin(parameters)
            request = ShardRequest.model_validate(body["request"])
            self.state, answer = exchange(self.state, parameters, Term.model_validate(body["term"]), request)
            return answer.model_dump(mode="json")


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Callable[..., StreamClient]:
    def make(stream: Stream, *, generation: int = 1, link: Link | None = None, **changes: Any) -> StreamClient:
        monkeypatch.setenv("PERDURE_GENERATION", str(generation))
        arguments: dict[str, Any] = {"partitions": list(stream.ends), "ends": stream.now, "shard_size": 4}
        return StreamClient("clicks", **(arguments | changes), link=link or stream)

    return make


def read(stream: StreamClient) -> list[Sample]:
    seen: list[Sample] = []
    for shard in stream:
        seen += [(shard.partition, offset) for offset in shard]
        stream.report(shard)
    return seen


def test_what_has_grown_is_read_and_the_rest_once_it_is_there(client: Callable[..., StreamClient]):
    stream = Stream(a=6, b=0)
    shards = client(stream)
    seen: list[Sample] = []
    reading = threading.Thread(target=lambda: seen.extend(read(shards)), daemon=True)
    reading.start()
    wait_for(lambda: stream.state is not None and view(stream.state).done == 6)
    stream.ends.update(a=9, b=5)
    wait_for(lambda: stream.state is not None and view(stream.state).done == 14)
    assert reading.is_alive(), "it may grow"
    stream.complete = True
    reading.join(30)
    assert sorted(seen) == [*(("a", n) for n in range(9)), *(("b", n) for n in range(5))]
    assert stream.state
    assert view(stream.state).total == 14


def test_a_restored_position_is_exact_in_each_partition(client: Callable[..., StreamClient]):
    stream = Stream(a=10, b=7)
    shards = client(stream, partitions={"a": 2, "b": 0})
    first, second, third = (shards.fetch() for _ in range(3))
    assert first
    assert second
    assert third
    shards.report(first)
    shards.report(third)
    shards.step()
    saved = shards.state_dict()
    consumed = [(shard.partition, offset) for shard in (first, third) for offset in shard]
    shards.report(second)
    shards.step()
    assert shards.flush(30)
    assert sorted(saved["partitions"]) == ["a", "b"]
    again = client(stream, generation=2, partitions={"a": 2, "b": 0})
    again.load_state_dict(saved)
    stream.complete = True
    assert again.state_dict() == saved
    whole = [*(("a", n) for n in range(2, 10)), *(("b", n) for n in range(7))]
    assert sorted(consumed + read(again)) == whole
    anew = client(stream, generation=3, partitions={"a": 2, "b": 0})
    anew.start_over()
    assert sorted(read(anew)) == whole


def test_a_new_job_may_have_further_partitions_but_not_fewer(client: Callable[..., StreamClient]):
    stream = Stream(a=3)
    shards = client(stream)
    shard = shards.fetch()
    assert shard
    shards.report(shard)
    shards.step()
    saved = shards.state_dict()
    assert saved["partitions"] == {"a": {"next": 3, "holes": []}}
    other = Stream(a=5, b=2)
    more = client(other)
    more.load_state_dict(saved)
    assert more.fetch()
    other.complete = True
    assert sum(map(len, [*more])) < 4, "and what was fetched before are the four that are left"
    with pytest.raises(ValueError, match="other ones: a"):
        client(Stream(b=2)).load_state_dict(saved)
    with pytest.raises(ValueError, match="other ones: none"):
        client(Stream(b=2)).load_state_dict({"version": 1, "next": 4, "holes": []})


def test_a_source_that_is_away_for_a_while_ends_nothing(client: Callable[..., StreamClient]):
    stream = Stream(a=4)
    away = iter([OSError("no broker"), KeyError("c")])

    def ends() -> tuple[Mapping[str, float], bool]:
        if error := next(away, None):
            raise error
        stream.complete = stream.state is not None and view(stream.state).done == 4
        return stream.now()

    assert read(client(stream, ends=ends)) == [("a", n) for n in range(4)]


def test_a_partition_without_an_end_is_read_on_and_on(client: Callable[..., StreamClient]):
    stream = Stream(a=math.inf)  # pyrefly: ignore[bad-argument-type]
    shards = client(stream)
    for number in range(100):
        shard = shards.fetch()
        assert shard
        assert shard.first == 4 * number
        shards.report(shard)
    assert shards.read_arguments() == ("a", [0])


def test_without_perdure_ranks_share_a_stream_by_their_numbers(client: Callable[..., StreamClient]):
    seen: list[Sample] = []
    stream = Stream(a=10, b=9)
    ranks = [client(stream, link=StandaloneLink(rank=rank, world_size=2)) for rank in range(2)]
    ranks[0].load_state_dict({"version": 1, "partitions": {"a": {"next": 6, "holes": [[1, 3]]}}})
    ranks[1].load_state_dict({"version": 1, "partitions": {"a": {"next": 6, "holes": [[1, 3]]}}})
    stream.complete = False
    for shards in ranks:
        shard = shards.fetch()
        assert shard
        seen += [(shard.partition, offset) for offset in shard]
    stream.complete = True
    for shards in ranks:
        seen += [(shard.partition, offset) for shard in shards for offset in shard]
    assert sorted(seen) == [("a", 1), ("a", 2), *(("a", n) for n in range(6, 10)), *(("b", n) for n in range(9))]


def rows(partition: str, offsets: list[int]) -> list[torch.Tensor]:
    return [torch.tensor([ord(partition), offset]) for offset in offsets]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_reads_a_stream(workers: int, client: Callable[..., StreamClient]):
    stream = Stream(a=7, b=6)
    shards = client(stream)
    dataset = ShardStream(shards, read=rows, batch_size=3)
    loader = DataLoader(dataset, batch_size=None, num_workers=workers)
    seen: list[Sample] = []
    for batch, factor in dataset.in_step(loader):
        assert factor == 1.0
        seen += [(chr(partition), offset) for partition, offset in batch.tolist()]
        shards.step()
        stream.complete = True
    assert sorted(seen) == [*(("a", n) for n in range(7)), *(("b", n) for n in range(6))]
    assert shards.state_dict()["partitions"] == {"a": {"next": 7, "holes": []}, "b": {"next": 6, "holes": []}}
    with pytest.raises(TypeError, match="ShardStream reads streams"):
        ShardBatches(shards, batch_size=1)  # pyrefly: ignore[bad-argument-type]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"partitions": []}, "1 to 256, found 0"),
        ({"partitions": {"a": -1}}, "a: expected an offset"),
        ({"shard_size": 0}, "at least 1"),
    ],
)
def test_arguments_are_checked(changed: dict[str, Any], expected: str, client: Callable[..., StreamClient]):
    with pytest.raises(ValueError, match=expected):
        client(Stream(a=1), **changed)
