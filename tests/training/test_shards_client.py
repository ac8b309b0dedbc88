"""Tests of the client of datasets, against the policy that decides on leases."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.contract import DatasetParameters, ShardRequest, Term
from perdure.workflows.policy.services import spans
from perdure.workflows.policy.services.dataset_views import view
from perdure.workflows.policy.services.datasets import begin, exchange
from perdure_training.node_api.agent_client import AgentAway
from perdure_training.shards import MicroBatches, Shard, ShardingClient, ShardsRefused
from perdure_training.shards.link import StandaloneLink
from perdure_training.shards.permutation import Permutation
from perdure_training.shards.spans import gaps, merge
from tests.support.waiting import eventually


class Job:
    """The dataset of a job, with the policy's real decisions."""

    def __init__(self, **parameters: Any) -> None:
        self.state = begin(DatasetParameters(**parameters))
        self.lock = threading.Lock()
        self.away = False
        self.loses: Callable[[], bool] = lambda: False
        """Whether the next answer is lost on its way."""
        self.requests: list[ShardRequest] = []
        self.keeps_processes = False

    def exchange(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            if self.away:
                raise AgentAway("no server")
            parameters = DatasetParameters.model_validate(body["parameters"])
            request = ShardRequest.model_validate(body["request"])
            self.requests.append(request)
            term = Term.model_validate(body["term"])
            self.state, answer = exchange(self.state, parameters, term, request, keeps_processes=self.keeps_processes)
            if self.loses():
                raise AgentAway("the answer was lost")
            return answer.model_dump(mode="json")


def client(job: Job, monkeypatch: pytest.MonkeyPatch, *, rank: int = 0, generation: int = 1) -> ShardingClient:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("PERDURE_GENERATION", str(generation))
    parameters = job.state.parameters.model_dump(exclude={"partitions", "starts"})
    return ShardingClient("train", **parameters, link=job)


def read(shards: ShardingClient) -> list[int]:
    seen: list[int] = []
    for shard in shards:
        seen += shard
        shards.report(shard)
    return seen


@given(st.integers(1, 300), st.integers(0, 2**64 - 1), st.integers(0, 3))
def test_a_permutation_has_every_number_once(size: int, seed: int, epoch: int):
    permutation = Permutation(size, seed=seed, epoch=epoch)
    assert sorted(permutation[number] for number in range(size)) == list(range(size))


def test_a_permutation_is_the_same_in_every_release():
    assert [Permutation(10**9, seed=7, epoch=1)[number] for number in range(4)] == [
        78103337,
        676072047,
        414644226,
        952695010,
    ]


def test_epochs_and_seeds_are_shuffled_differently():
    orders = [
        [Permutation(1000, seed=seed, epoch=epoch)[number] for number in range(1000)]
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        agreeing = sum(left == right for left, right in zip(orders[one], orders[other], strict=True))
        assert agreeing < 10
    assert sum(abs(left - right) for left, right in zip(orders[0], orders[0][1:], strict=False)) / 999 > 250


@given(st.frozensets(st.integers(0, 40)), st.frozensets(st.integers(0, 40)))
def test_both_sides_of_the_socket_calculate_alike(one: frozenset[int], other: frozenset[int]):
    first, second = ([(number, number + 1) for number in sorted(numbers)] for numbers in (one, other))
    assert merge(first, second) == list(spans.union(first, second))
    assert gaps(merge(first), 41) == list(spans.difference(((0, 41),), spans.union(first)))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_rank_reads_every_sample_of_every_epoch_once(shuffle: bool, monkeypatch: pytest.MonkeyPatch):
    job = Job(size=100, shard_size=7, epochs=2, shuffle=shuffle)
    shards = client(job, monkeypatch)
    epochs: dict[int, list[int]] = {0: [], 1: []}
    for shard in shards:
        assert len(shard) <= 7
        epochs[shard.epoch] += shard
        shards.report(shard)
    assert [sorted(seen) for seen in epochs.values()] == [list(range(100))] * 2
    assert (epochs[0] == list(range(100))) is not shuffle
    assert (epochs[0] == epochs[1]) is not shuffle
    assert shards.flush(30)
    assert view(job.state).done == 200


def test_ranks_share_a_dataset_while_answers_are_lost(monkeypatch: pytest.MonkeyPatch):
    job = Job(size=2000, shard_size=5, epochs=1)
    losses = iter([True, False, True, False, False] * 1000)
    job.loses = lambda: next(losses)
    ranks = [client(job, monkeypatch, rank=rank) for rank in range(3)]
    seen: list[list[int]] = [[], [], []]
    threads = [threading.Thread(target=lambda n=n: seen[n].extend(read(ranks[n]))) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(index for part in seen for index in part) == list(range(2000))
    assert all(rank.flush(30) for rank in ranks)
    assert view(job.state).done == 2000


async def test_a_rank_uses_what_it_holds_while_nothing_answers_and_then_waits(monkeypatch: pytest.MonkeyPatch):
    job = Job(size=1000, shard_size=1)
    shards = client(job, monkeypatch)
    assert shards.fetch()
    await eventually(lambda: bool(job.requests))
    with job.lock:
        job.away = True
    held = sum(spans.size(lease) for lease in job.state.leases.values())
    for _ in range(held - 1):
        assert shards.fetch()
    waiting = threading.Thread(target=shards.fetch)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    job.away = False
    waiting.join(30)
    assert not waiting.is_alive()


def test_the_next_world_reads_what_a_dead_rank_had(monkeypatch: pytest.MonkeyPatch):
    job = Job(size=60, shard_size=10)
    dead, survivor = client(job, monkeypatch, rank=0), client(job, monkeypatch, rank=1)
    done = dead.fetch()
    assert done
    dead.report(done)
    assert dead.flush(30)
    lost = dead.fetch()
    assert lost
    first = list(done) + read(survivor)
    again = read(client(job, monkeypatch, rank=0, generation=2))
    assert survivor.flush(30)
    assert sorted(first + again) == list(range(60))
    assert set(lost) <= set(again)


def test_a_shard_that_fails_is_tried_again_and_then_set_aside(monkeypatch: pytest.MonkeyPatch):
    job = Job(size=40, shard_size=10)
    shards = client(job, monkeypatch)
    tries, seen = 0, list[int]()
    for shard in shards:
        if shard.first == 10:
            tries += 1
            shards.report(shard, error="OSError: bad header")
        else:
            seen += shard
            shards.report(shard)
    assert tries == 3
    assert sorted(seen) == [*range(10), *range(20, 40)]
    assert [(one.first, one.end, one.error) for one in view(job.state).set_aside] == [(10, 20, "OSError: bad header")]


def test_a_failure_whose_answers_are_lost_is_one_try(monkeypatch: pytest.MonkeyPatch):
    job, asked = Job(size=40, shard_size=10), count()
    # As while no worker serves the dataset for long: each repeat is carried out when one does.
    job.loses = lambda: bool(job.requests[-1].failed) and next(asked) % 3 < 2
    shards = client(job, monkeypatch)
    tries, seen = 0, list[int]()
    for shard in shards:
        fails = shard.first == 10 and tries < 2
        tries += fails
        shards.report(shard, error="OSError: no route to host" if fails else None)
        seen += () if fails else shard
    assert tries == 2
    assert sorted(seen) == [*range(40)]
    assert shards.flush(30)
    assert not view(job.state).set_aside


def test_a_restored_position_is_exact_within_a_shard(monkeypatch: pytest.MonkeyPatch):
    job = Job(size=50, shard_size=8, shuffle=True)
    shards = client(job, monkeypatch)
    order = [Permutation(50, seed=0, epoch=0)[number] for number in range(50)]
    for _ in range(3):
        assert shards.fetch()
    shards.hand_over(11)
    shards.step()
    saved = shards.state_dict()
    shards.hand_over(8)
    shards.step()
    assert shards.flush(30)
    again = client(job, monkeypatch, generation=2)
    again.load_state_dict(saved)
    assert read(again) == order[11:]
    rewound = client(job, monkeypatch, generation=3)
    assert read(rewound) == [], "all is done"
    rewound.load_state_dict(saved)
    assert read(rewound) == order[11:], "also in the same world"


@pytest.mark.parametrize("starts_over", [True, False])
def test_a_model_that_begins_anew_reads_all_data(starts_over: bool, monkeypatch: pytest.MonkeyPatch):
    job = Job(size=30, shard_size=10)
    before = client(job, monkeypatch)
    shard = before.fetch()
    assert shard
    before.report(shard)
    assert before.flush(30)
    after = client(job, monkeypatch, generation=2)
    if starts_over:
        after.start_over()
    assert read(after) == list(range(0 if starts_over else 10, 30))


def test_without_step_the_position_is_what_was_reported(monkeypatch: pytest.MonkeyPatch):
    job = Job(size=30, shard_size=10)
    shards = client(job, monkeypatch)
    first, second = shards.fetch(), shards.fetch()
    assert first
    assert second
    shards.report(second)
    saved = shards.state_dict()
    assert (saved["next"], saved["holes"]) == (20, [[0, 10]])
    later = client(job, monkeypatch, generation=2)
    later.load_state_dict(saved)
    assert later.state_dict() == saved
    assert read(later) == [*range(10), *range(20, 30)]
    assert later.state_dict()["next"] == 30


def test_a_position_of_another_dataset_is_not_loaded(monkeypatch: pytest.MonkeyPatch):
    shards = client(Job(size=30, shard_size=10), monkeypatch)
    saved = client(Job(size=31, shard_size=10), monkeypatch).state_dict()
    with pytest.raises(ValueError, match="size: the position is of a dataset with 31, not 30"):
        shards.load_state_dict(saved)


def test_several_ranks_must_agree_before_they_save(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    shards = client(Job(size=30, shard_size=10), monkeypatch)
    assert shards.state_dict()["next"] == 0, "nothing was read"
    assert shards.fetch()
    with pytest.raises(RuntimeError, match="call step"):
        shards.state_dict()


def test_refusals_reach_the_program(monkeypatch: pytest.MonkeyPatch):
    job = Job(size=30, shard_size=10)
    other = ShardingClient("train", size=30, shard_size=5, link=job)
    with pytest.raises(ShardsRefused, match="shard_size 5 instead of 10"):
        other.fetch()


def test_what_is_not_in_progress_is_not_reported(monkeypatch: pytest.MonkeyPatch):
    shards = client(Job(size=30, shard_size=10), monkeypatch)
    shard = shards.fetch()
    assert shard
    shards.report(shard)
    with pytest.raises(ValueError, match="not in progress"):
        shards.report(shard)
    with pytest.raises(ValueError, match="not in progress"):
        shards.report(Shard(epoch=0, first=10, end=20, permutation=None))
    with pytest.raises(ValueError, match="fewer are in progress"):
        shards.advance(1)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [({"name": "0"}, "name"), ({"size": 0}, "size"), ({"shard_size": 0}, "shard_size"), ({"epochs": -1}, "epochs")],
)
def test_arguments_are_checked(changed: dict[str, Any], expected: str):
    with pytest.raises(ValueError, match=expected):
        ShardingClient(**dict[str, Any](name="train", size=10) | changed)


def test_a_second_client_of_a_name_is_refused():
    ShardingClient("read-twice", size=10)
    with pytest.raises(ValueError, match="this process reads 'read-twice' already"):
        ShardingClient("read-twice", size=10)


def test_without_perdure_ranks_share_a_dataset_by_their_numbers(monkeypatch: pytest.MonkeyPatch):
    seen: list[int] = []
    for rank in range(3):
        alone = ShardingClient("train", size=100, shard_size=8, epochs=2, link=StandaloneLink(rank=rank, world_size=3))
        seen += read(alone)
    assert sorted(seen) == sorted([*range(100)] * 2)
    shards = ShardingClient("train", size=20, shard_size=4, link=StandaloneLink(rank=0, world_size=1))
    for _ in range(3):
        assert shards.fetch()
    shards.advance(6)
    saved = shards.state_dict()
    again = ShardingClient("train", size=20, shard_size=4, link=StandaloneLink(rank=0, world_size=1))
    again.load_state_dict(saved)
    assert read(again) == list(range(6, 20))


@given(st.integers(1, 9), st.integers(0, 60))
def test_micro_batches_of_all_ranks_are_as_many_in_every_world(world_size: int, further: int):
    total = world_size + further
    parts = [MicroBatches.of(total=total, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert sum(part.count for part in parts) == total
    assert max(part.count for part in parts) - min(part.count for part in parts) <= 1
    # DDP takes the mean over the ranks of what each has summed up.
    assert sum(part.count * part.scale for part in parts) / world_size == pytest.approx(1.0)


def test_fewer_micro_batches_than_ranks_are_refused():
    with pytest.raises(ValueError, match="at least one micro-batch for each of 3 ranks"):
        MicroBatches.of(total=2, rank=0, world_size=3)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # its import raises an error
from perdure_training import roles
from perdure_training.shards import ShardingClient
client = ShardingClient("train", size=10, shard_size=4, epochs=2)
seen = []
for shard in client:
    seen += shard
    client.report(shard)
client.step()
assert seen == [*range(10), *range(10)], seen
assert client.state_dict()
assert roles.known() == {}
"""


def test_an_interpreter_without_torch_reads_a_dataset_to_its_end() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH], check=True, timeout=60)


def test_a_process_says_that_its_position_is_not_taken_where_others_continue(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    job = Job(size=100, shard_size=10)
    job.keeps_processes = True
    other = client(job, monkeypatch, rank=1)
    saved = other.state_dict()
    assert next(iter(other)).first == 0
    began = client(job, monkeypatch, generation=2)
    began.load_state_dict(saved)
    assert next(iter(began)).first > 0
    assert caplog.text.count("is not taken") == 1
