"""Tests of the queue between roles: its files, and its leases by the policy that decides on them."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from perdure.contract import DatasetParameters, ShardRequest, Term
from perdure.workflows.policy.services.datasets import DatasetState, begin, exchange
from perdure_training.roles.queue import Consumer, Producer, QueueClosed, QueueEmpty, QueueError, QueueFull

SHORT = timedelta(seconds=0.1)
LONG = timedelta(seconds=60)


class Leases:
    """The job's leases of the queue, with the policy's real decisions."""

    def __init__(self) -> None:
        self.state: DatasetState | None = None
        self.lock = threading.Lock()

    def exchange(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            parameters = DatasetParameters.model_validate(body["parameters"])
            self.state = self.state or begin(parameters)
            request = ShardRequest.model_validate(body["request"])
            self.state, answer = exchange(self.state, parameters, Term.model_validate(body["term"]), request)
            return answer.model_dump(mode="json")


@pytest.fixture
def consumer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Consumer]:
    leases = Leases()

    def make(*, generation: int = 1, **changes: Any) -> Consumer:
        monkeypatch.setenv("PERDURE_GENERATION", str(generation))
        monkeypatch.setenv("PERDURE_ROLE", "trainer")
        return Consumer("trajectories", tmp_path, **dict[str, Any](producers=4, link=leases) | changes)

    return make


def test_items_arrive_once_from_all_producers_until_the_queue_is_closed(
    tmp_path: Path, consumer: Callable[..., Consumer]
):
    first, second = Producer(tmp_path, number=0), Producer(tmp_path, number=3)
    assert [first.put(f"a{item}") for item in range(3)] == [0, 1, 2]
    second.put({"b": [0.5]})
    second.close()
    queue = consumer()
    got = [queue.get() for _ in range(5)]
    assert sorted(map(str, got)) == ["None", "a0", "a1", "a2", "{'b': [0.5]}"]
    with pytest.raises(QueueClosed, match="it was closed"):
        first.put("a3")


def test_what_was_got_after_the_saved_position_is_given_again_and_nothing_before_it(
    tmp_path: Path, consumer: Callable[..., Consumer]
):
    producer = Producer(tmp_path, number=0)
    for item in range(6):
        producer.put(item)
    before = consumer()
    assert [before.get(), before.get()] == [0, 1]
    before.step()
    saved = before.state_dict()
    assert [before.get(), before.get()] == [2, 3]
    before.step()
    assert before.get() == 4

    after = consumer(generation=2)
    after.load_state_dict(saved)
    producer.close()
    assert [after.get() for _ in range(5)] == [2, 3, 4, 5, None]


def test_a_model_without_a_checkpoint_gets_all_again(tmp_path: Path, consumer: Callable[..., Consumer]):
    producer = Producer(tmp_path, number=0)
    producer.put("first")
    before = consumer()
    assert before.get() == "first"
    before.step()
    after = consumer(generation=2)
    after.start_over()
    assert after.get() == "first"


def test_a_producer_that_starts_again_continues_after_its_last_item(tmp_path: Path):
    producer = Producer(tmp_path, number=0)
    producer.put("a")
    producer.put("b")
    # It died after the item, before the marker.
    (tmp_path / "0" / "next").write_text("1")
    assert Producer(tmp_path, number=0).next == 2
    # The items were consumed and removed.
    for item in ("0", "1"):
        (tmp_path / "0" / item).unlink()
    assert Producer(tmp_path, number=0).next == 2


def test_two_processes_cannot_be_one_producer(tmp_path: Path):
    older, newer = Producer(tmp_path, number=0), Producer(tmp_path, number=0)
    newer.put("a")
    with pytest.raises(QueueError, match="another process puts items as producer 0"):
        older.put("again")
    assert sorted(path.name for path in (tmp_path / "0").iterdir()) == ["0", "next"]


def test_a_link_that_a_network_file_system_makes_twice_is_the_producers_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make = os.link

    def answer_is_lost(source: Path, target: Path) -> None:
        make(source, target)
        raise FileExistsError(errno.EEXIST, "File exists", str(target))

    producer = Producer(tmp_path, number=0)
    with monkeypatch.context() as network:
        network.setattr(os, "link", answer_is_lost)
        assert producer.put("first") == 0
    assert producer.put("second") == 1


def test_an_item_that_the_storage_does_not_give_is_given_again_by_the_next_call(
    tmp_path: Path, consumer: Callable[..., Consumer], monkeypatch: pytest.MonkeyPatch
):
    producer = Producer(tmp_path, number=0)
    for item in ("first", "second"):
        producer.put(item)
    queue, read = consumer(), Path.read_bytes

    def fail(path: Path) -> bytes:
        if path.name == "0":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return read(path)

    with monkeypatch.context() as storage:
        storage.setattr(Path, "read_bytes", fail)
        with pytest.raises(OSError, match="Input/output"):
            queue.get()
    assert [queue.get(timeout=LONG), queue.get(timeout=LONG)] == ["first", "second"]


def test_a_flood_waits_for_room_and_names_who_does_not_consume(tmp_path: Path, consumer: Callable[..., Consumer]):
    producer = Producer(tmp_path, number=0, capacity=2)
    producer.put("a")
    producer.put("b")
    with pytest.raises(QueueFull, match=r"full after 0:00:00\.1.*: 2 items of producer 0 wait, and no consumer"):
        producer.put("c", timeout=SHORT)
    queue = consumer()
    assert queue.get() == "a"
    with pytest.raises(QueueFull):
        producer.put("c", timeout=SHORT)
    queue.step()
    assert producer.put("c", timeout=LONG) == 2
    with pytest.raises(QueueFull, match=r"and role trainer has made no step for \d+ s"):
        producer.put("d", timeout=SHORT)
    putting = threading.Thread(target=producer.put, args=("d",), daemon=True)
    putting.start()
    assert queue.get() == "b"
    queue.step()
    putting.join(30)
    assert not putting.is_alive()


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_a_producer_tolerates_a_folder_that_cannot_be_read_for_a_while(
    tmp_path: Path, consumer: Callable[..., Consumer], monkeypatch: pytest.MonkeyPatch, number: int
):
    read, failing = Path.read_bytes, threading.Event()

    def faulty(path: Path) -> bytes:
        if path.name == "position.json" and failing.is_set():
            raise OSError(number, os.strerror(number), str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", faulty)
    producer, queue = Producer(tmp_path, number=0, capacity=2), consumer()
    failing.set()
    producer.put("a")
    producer.put("b")
    with pytest.raises(QueueFull, match=rf"who consumes cannot be read: \[Errno {number}\]"):
        producer.put("c", timeout=SHORT)
    assert queue.get() == "a"
    queue.step()
    putting = threading.Thread(target=producer.put, args=("c",), daemon=True)
    putting.start()
    failing.clear()
    putting.join(30)
    assert not putting.is_alive()
    failing.set()
    monkeypatch.setattr("perdure_training.roles.queue._OUTAGE", 0)
    with pytest.raises(OSError, match="position"):
        producer.put("d")


def test_a_file_that_is_replaced_while_it_is_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    read, stale = Path.read_bytes, [True, True]

    def faulty(path: Path) -> bytes:
        if path.name == "next" and stale and stale.pop():
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return read(path)

    Producer(tmp_path, number=0).put("a")
    monkeypatch.setattr(Path, "read_bytes", faulty)
    assert Producer(tmp_path, number=0).put("b") == 1
    assert not stale


def test_an_item_that_the_storage_does_not_tell_of_is_not_said_to_be_removed(
    tmp_path: Path, consumer: Callable[..., Consumer], monkeypatch: pytest.MonkeyPatch
):
    Producer(tmp_path, number=0).put("a")
    queue, known = consumer(), Path.stat

    def faulty(path: Path, **options: Any) -> os.stat_result:
        if path == tmp_path / "0" / "0":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return known(path, **options)

    monkeypatch.setattr(Path, "stat", faulty)
    with pytest.raises(OSError, match="Input/output error"):
        queue.start_over()


def test_a_consumer_without_producers_waits_no_longer_than_it_says(consumer: Callable[..., Consumer]):
    with pytest.raises(QueueEmpty, match=r"no item for this rank for 0:00:00\.1"):
        consumer().get(timeout=SHORT)


def test_a_rank_that_waits_for_others_keeps_few_items_from_them(
    tmp_path: Path, consumer: Callable[..., Consumer], monkeypatch: pytest.MonkeyPatch
):
    producer = Producer(tmp_path, number=0)
    for item in range(60):
        producer.put(item)
    monkeypatch.setenv("WORLD_SIZE", "2")
    fast = consumer()
    taken = [fast.get() for _ in range(40)]
    monkeypatch.setenv("RANK", "1")
    slow = consumer()
    assert not set(taken) & {slow.get() for _ in range(12)}


def test_consumed_items_are_removed_beyond_those_that_stay(tmp_path: Path, consumer: Callable[..., Consumer]):
    producer = Producer(tmp_path, number=0)
    for item in range(4):
        producer.put(item)
    queue = consumer(keep=1)
    positions: list[dict[str, Any]] = []
    for item in range(3):
        assert queue.get() == item
        queue.step()
        positions.append(queue.state_dict())
    assert sorted(path.name for path in (tmp_path / "0").iterdir()) == ["2", "3", "next"]

    after = consumer(generation=2, keep=1)
    with pytest.raises(QueueError, match="item 1 of producer 0 was removed"):
        after.load_state_dict(positions[0])
    with pytest.raises(QueueError, match="item 0 of producer 0 was removed"):
        after.start_over()
    after.load_state_dict(positions[1])
    assert after.get() == 2


def test_a_consumer_that_starts_again_does_not_remove_again_what_is_removed(
    tmp_path: Path, consumer: Callable[..., Consumer], monkeypatch: pytest.MonkeyPatch
):
    producer = Producer(tmp_path, number=0)
    queue = consumer(keep=1)
    for item in range(10):
        producer.put(item)
        assert queue.get() == item
        queue.step()
    queue.step()
    state, removed, unlink = queue.state_dict(), list[str](), Path.unlink

    def record(path: Path, *arguments: Any, **options: Any) -> None:
        removed.append(path.name)
        unlink(path, *arguments, **options)

    monkeypatch.setattr(Path, "unlink", record)
    again = consumer(generation=2, keep=1)
    again.load_state_dict(state)
    again.step()
    assert removed == []
    producer.put(10)
    assert again.get() == 10
    again.step()
    assert "9" in removed


def test_an_exception_while_an_item_is_pickled_leaves_nothing(tmp_path: Path):
    producer = Producer(tmp_path, number=0)
    with pytest.raises(Exception, match="pickle"):
        producer.put(lambda: None)
    assert producer.put("a") == 0


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda folder: Producer(folder, number=256), "number: expected 0 to 255, found 256"),
        (lambda folder: Producer(folder, capacity=0), "capacity: expected at least 1"),
        (lambda folder: Consumer("q", folder, keep=-1), "keep: expected at least 0"),
        (lambda folder: Consumer("q", folder, producers=257), "expected 1 to 256, found 257"),
    ],
)
def test_arguments_out_of_range_are_refused(tmp_path: Path, make: Callable[[Path], object], problem: str):
    with pytest.raises(ValueError, match=problem):
        make(tmp_path)
