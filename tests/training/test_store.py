"""Tests of `JobStore`: what torch's own tests of its stores say must hold, and what a durable store adds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from perdure_training import store_calls
from perdure_training.node_api.agent_client import Agent
from perdure_training.store import JobStore, StoreError, StoreSuperseded, StoreTimeout
from tests.support.waiting import wait_for
from tests.training.agent_in_thread import AgentInThread, agent_in_thread

dist: Any = distributed
"""It does not declare all that it offers."""
SOON = timedelta(seconds=0.25)


@pytest.fixture
def agent() -> Iterator[AgentInThread]:
    with agent_in_thread() as agent:
        yield agent


def store_of(agent: AgentInThread, monkeypatch: pytest.MonkeyPatch, *, rank: int = 0, **options: Any) -> JobStore:
    monkeypatch.setenv("PERDURE_GENERATION", str(options.pop("generation", 1)))
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(options.pop("world_size", 2)))
    return JobStore(agent=Agent(agent.path), **options)


@pytest.fixture(params=["by itself", "in a PrefixStore"])
def store(request: pytest.FixtureRequest, agent: AgentInThread, monkeypatch: pytest.MonkeyPatch) -> Any:
    store = store_of(agent, monkeypatch)
    return store if request.param == "by itself" else dist.PrefixStore("prefix", store)


# What torch's tests of its stores say


def test_sums_and_values_are_kept(store: Any):
    for key, amount in (("key", 1), ("key", 2), ("key", 3), ("key3", 1), ("key3", 2), ("key3", 3)):
        store.add(key, amount)
    for number in range(3):
        store.set(f"key{number}", f"value{number}")
    for amount in (4, 5, 6):
        store.add("key3", amount)
    assert store.num_keys() == 5
    assert [store.get(key) for key in ("key", "key0", "key1", "key2", "key3")] == [
        b"6",
        b"value0",
        b"value1",
        b"value2",
        b"21",
    ]
    store.set("-key3", "7")
    assert store.get("-key3") == b"7"
    store.delete_key("-key3")
    assert store.num_keys() == 5


def test_compare_set(store: Any):
    assert store.compare_set("cs_key0", "wrong_old_value", "new_value0") == b"wrong_old_value"
    store.set("cs_key0", "value0")
    assert store.compare_set("cs_key0", "wrong_old_value", "new_value0") == b"value0"
    assert store.get("cs_key0") == b"value0"
    assert store.compare_set("cs_key0", "value0", "new_value0") == b"new_value0"
    assert store.get("cs_key0") == b"new_value0"
    assert store.compare_set("cs_key1", "", "new_value1") == b"new_value1"
    assert store.get("cs_key1") == b"new_value1"


def test_a_wait_ends_with_a_timeout_or_with_the_key(store: Any):
    with pytest.raises(RuntimeError, match=r"[tT]imeout"):
        store.wait(["bad_key"], SOON)
    store.add("good_key", 1)
    store.wait(["good_key"])


def test_a_key_that_is_set_is_found_however_short_the_timeout(store: Any):
    store.set("key", "value")
    store.wait(["key"], timedelta(milliseconds=1))


def test_keys_are_counted_deleted_and_missed(store: Any):
    store.set("key", "value")
    store.set("key1", "value1")
    assert store.num_keys() == 2
    assert store.delete_key("key")
    assert not store.delete_key("key")
    assert store.num_keys() == 1
    assert store.check(["key1"])
    assert not store.check(["key", "key1"])
    assert store.get("key1") == b"value1"


def test_the_extended_api(store: Any):
    assert store.has_extended_api()
    store.multi_set(["foo", "bar"], ["po", "tato"])
    assert store.multi_get(["foo", "bar"]) == [b"po", b"tato"]
    store.append("foo", "ta")
    store.append("new", b"to")
    assert (store.get("foo"), store.get("new")) == (b"pota", b"to")


@pytest.mark.timeout(60)
def test_a_timeout_that_was_set_is_the_one_that_counts_and_breaks_nothing(store: Any):
    assert store.timeout == timedelta(seconds=300)
    store.set_timeout(SOON)
    assert store.timeout == SOON
    for wait in (store.get, lambda key: store.wait([key]), lambda key: store.multi_get([key])):
        with pytest.raises(dist.DistStoreError, match=r"wait timeout after 250ms, keys: (prefix/)?the_key"):
            wait("the_key")
    store.set("the_key", "x")
    assert store.get("the_key") == b"x"


def test_the_timeout_of_a_deleted_key_is_the_one_that_was_set(store: Any):
    store.add("key", 3)
    store.set("key1", "value1")
    store.delete_key("key")
    store.set_timeout(SOON)
    with pytest.raises(RuntimeError):
        store.get("key")
    store.set("key4", "value4")
    assert store.num_keys() == 2


def test_keys_may_look_like_options(store: Any):
    store.set("-key3", "7")
    assert store.check(["-key3"])
    assert store.delete_key("-key3")


def test_a_store_in_prefix_stores_is_found_again(agent: AgentInThread, monkeypatch: pytest.MonkeyPatch):
    store = store_of(agent, monkeypatch)
    prefixed = dist.PrefixStore("outer", dist.PrefixStore("inner", store))
    assert prefixed._underlying_non_prefix_store is store
    prefixed.multi_set(["a", "b"], [b"c", b"d"])
    assert store.multi_get(["inner/outer/a", "inner/outer/b"]) == [b"c", b"d"]


def test_a_key_of_another_thread_ends_a_wait_in_time(store: Any):
    store.set_timeout(timedelta(seconds=30))
    with ThreadPoolExecutor(1) as threads:
        wait = threads.submit(store.wait, ["key"])
        store.set("key", "value")
        wait.result(30)
    assert store.get("key") == b"value"


def test_a_signal_does_not_break_a_wait(agent: AgentInThread, store: Any):
    arrived = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: arrived.set())
    try:
        with ThreadPoolExecutor(1) as threads:
            thread = threads.submit(threading.get_ident).result(30)
            wait = threads.submit(store.wait, ["key"], timedelta(seconds=60))
            wait_for(lambda: agent.calls >= 1)
            signal.pthread_kill(thread, signal.SIGUSR1)
            # The handler runs in this thread, which such a signal does not wake.
            wait_for(arrived.is_set)
            store.set("key", "value")
            wait.result(60)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_queues_are_refused_as_by_torchs_stores_without_them(store: Any):
    with pytest.raises(NotImplementedError):
        store.queue_push("queue", "1")


def test_torch_reaches_it_through_its_own_calls(agent: AgentInThread, monkeypatch: pytest.MonkeyPatch):
    """What torch itself calls from C++: a store in a PrefixStore, its clone, and a barrier of torch's."""
    store = store_of(agent, monkeypatch)
    dist._test_python_store(store)
    prefixed = dist.PrefixStore("p", store)
    prefixed.set("k", "v")
    assert store.get("p/k") == b"v"
    assert prefixed.underlying_store is store
    assert prefixed.clone().get("k") == b"v"


# What a durable store adds


def test_binary_values_come_back_as_they_were(agent: AgentInThread, monkeypatch: pytest.MonkeyPatch):
    store = store_of(agent, monkeypatch)
    value = bytes(range(256)) * 256
    store.set("k", value)
    assert store.get("k") == value


def test_a_call_whose_answer_is_lost_counts_once(agent: AgentInThread, monkeypatch: pytest.MonkeyPatch):
    store = store_of(agent, monkeypatch)
    for _ in range(3):
        agent.lost_answers = 2
        store.add("n", 1)
        store.append("text", "x")
    assert store.get("n") == b"3"
    assert store.get("text") == b"xxx"
    assert agent.calls > 8


def test_threads_share_a_store_and_wait_side_by_side(agent: AgentInThread, monkeypatch: pytest.MonkeyPatch):
    store = store_of(agent, monkeypatch)
    with ThreadPoolExecutor(9) as threads:
        waits = [threads.submit(store.get, f"k{number}") for number in range(8)]
        sums = list(threads.map(lambda _: store.add("n", 1), range(20)))
        assert sorted(sums) == list(range(1, 21))
        assert not any(wait.done() for wait in waits)
        for number in range(8):
            store.set(f"k{number}", str(number))
        assert [wait.result(60) for wait in waits] == [str(number).encode() for number in range(8)]


def test_ranks_meet_at_a_barrier_again_and_again(agent: AgentInThread, monkeypatch: pytest.MonkeyPatch):
    stores = [store_of(agent, monkeypatch, rank=rank) for rank in range(2)]
    passed = [0, 0]

    def run(rank: int) -> None:
        for number in range(5):
            stores[rank].barrier("epoch", timeout=timedelta(seconds=60))
            # No rank is more than one round ahead.
            assert passed[1 - rank] in (number, number + 1)
            passed[rank] += 1

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(run, range(2)))
    assert passed == [5, 5]
    assert stores[0].num_keys() == 0


def test_a_barrier_names_the_ranks_that_have_not_arrived(agent: AgentInThread, monkeypatch: pytest.MonkeyPatch):
    first, second, third = (store_of(agent, monkeypatch, rank=rank, world_size=3) for rank in range(3))
    assert not first.join("b")
    with pytest.raises(StoreTimeout, match=r"barrier 'b' these ranks have not arrived: 1, 2$"):
        first.barrier("b", timeout=SOON)
    assert not second.join("b")
    with pytest.raises(StoreTimeout, match=r"not arrived: 2$"):
        first.barrier("b", timeout=SOON)
    assert third.join("b")
    for store in (first, second, third):
        store.barrier("b", timeout=SOON)


def test_a_wait_ends_when_a_newer_generation_begins(agent: AgentInThread, monkeypatch: pytest.MonkeyPatch):
    store = store_of(agent, monkeypatch)
    lasting = store_of(agent, monkeypatch, lasting=True)
    store.set("k", "old")
    lasting.set("k", "lasts")
    with ThreadPoolExecutor(1) as threads:
        wait = threads.submit(store.wait, ["never"])
        wait_for(lambda: agent.calls >= 3)
        agent.begin_generation(2)
        with pytest.raises(StoreSuperseded, match="generation 1"):
            wait.result(60)
    with pytest.raises(StoreSuperseded):
        lasting.set("k", "late")
    newer = store_of(agent, monkeypatch, generation=2)
    assert newer.num_keys() == 0
    assert store_of(agent, monkeypatch, generation=2, lasting=True).get("k") == b"lasts"


def test_a_process_that_continues_while_another_restarts_uses_the_keys_of_the_newer_generation(
    agent: AgentInThread, monkeypatch: pytest.MonkeyPatch
):
    # A call that waits learns of the newer generation when its agent has answered.
    monkeypatch.setattr(store_calls, "_LONGEST_HOLD", 0.5)
    agent.begin_generation(2, keeps_processes=True)
    store = store_of(agent, monkeypatch, generation=2)
    lasting = store_of(agent, monkeypatch, generation=2, lasting=True)
    store.set("k", "old")
    assert lasting.add("n", 1) == 1
    with ThreadPoolExecutor(2) as threads:
        store.barrier("b", 1)
        wait = threads.submit(store.wait, ["later"])
        arrived = threads.submit(store.barrier, "b", timeout=timedelta(seconds=60))
        wait_for(lambda: agent.calls >= 7)
        agent.begin_generation(3, keeps_processes=True)
        restarted = store_of(agent, monkeypatch, rank=1, generation=3)
        restarted.set("later", "now")
        restarted.barrier("b", timeout=timedelta(seconds=60))
        wait.result(60)
        arrived.result(60)
    assert not store.check(["k"])
    assert lasting.add("n", 1) == 2


def test_what_is_refused_says_why(agent: AgentInThread, monkeypatch: pytest.MonkeyPatch):
    store = store_of(agent, monkeypatch)
    store.set("text", "no number")
    with pytest.raises(StoreError, match="not a whole number"):
        store.add("text", 1)
    with pytest.raises(StoreError, match="600001 bytes"):
        store.set("k", bytes(600_000))
    with pytest.raises(StoreError, match=r"call\.keys"):
        store.set("", "v")
    with pytest.raises(ValueError, match="values: expected 2"):
        store.multi_set(["a", "b"], ["1"])


def test_without_an_agent_calls_end_with_a_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PERDURE_GENERATION", "1")
    store = JobStore(agent=Agent(tmp_path / "agent.sock"), timeout=SOON)
    began = time.monotonic()
    with pytest.raises(StoreTimeout, match="the agent does not answer"):
        store.set("k", "v")
    assert time.monotonic() - began >= SOON.total_seconds()


def test_a_process_that_is_no_rank_has_no_store():
    with pytest.raises(StoreError, match="not a rank of a Perdure job"):
        JobStore()


def test_it_works_without_torch_and_in_a_forked_process(agent: AgentInThread):
    program = """
import sys
sys.modules["torch"] = None
import os
from pathlib import Path
from perdure_training.node_api.agent_client import Agent
from perdure_training.store import JobStore
store = JobStore(agent=Agent(Path(sys.argv[1])))
store.add("n", 1)
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
    for _ in range(3):
        store.add("n", 1)
    print(store.get("n").decode())
else:
    for _ in range(3):
        store.add("n", 1)
    os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(agent.path)],
        env={**os.environ, "PERDURE_GENERATION": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("7\n", "")


def test_a_wait_of_one_thread_does_not_delay_another(agent: AgentInThread, monkeypatch: pytest.MonkeyPatch):
    store = store_of(agent, monkeypatch, timeout=timedelta(seconds=60))
    waiting = threading.Thread(target=store.wait, args=(["k"],))
    waiting.start()
    wait_for(lambda: agent.calls >= 1)
    assert store.add("n", 1) == 1
    store.set("k", "")
    waiting.join(60)
    assert not waiting.is_alive()
