"""A key-value store for the ranks of a job, and barriers; docs/store.md is the guide.

    from perdure_training.store import JobStore

    store = JobStore()
    if rank == 0:
        store.set("data", path)
    path = store.get("data").decode()
    store.barrier("prepared", timeout=timedelta(minutes=10))

It is durable, and slower than a network: for what users coordinate, not for the traffic of a process group. `JobStore`
is one of torch's stores where torch is installed, and works without it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from perdure_training.node_api.agent_client import Agent, find_agent
from perdure_training.node_api.rank_environment import generation_of
from perdure_training.store_calls import StoreCalls, StoreError, StoreSuperseded, StoreTimeout, values_of

_TIMEOUT = timedelta(seconds=300)
"""The timeout of torch's stores."""


class _WithoutTorch:
    """The part of torch's `Store` that is not overridden."""

    timeout = _TIMEOUT

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout


if TYPE_CHECKING:
    _Base = _WithoutTorch
else:
    try:
        # It keeps the timeout: a store around this one, such as a PrefixStore, sets it there and calls no method.
        from torch.distributed import Store as _Base
    except ImportError:
        _Base = _WithoutTorch


__all__ = ["JobStore", "StoreError", "StoreSuperseded", "StoreTimeout"]

_kept: list[JobStore] = []
"""All stores of this process. torch keeps only the C++ part of a store that it is given, as in a `PrefixStore`, and its
calls fail once the Python part is gone."""


class JobStore(_Base):
    """The store of this rank's job.

    Invariants:
        - A change is carried out once, however often its answer is lost.
        - Keys belong to the generation of the world, so that ranks never read what an earlier attempt has left; lasting
          keys belong to the job.
        - Threads can share a store. A wait of one does not delay the calls of others.
    """

    def __init__(self, *, lasting: bool = False, timeout: timedelta = _TIMEOUT, agent: Agent | None = None) -> None:
        """Creates the store; nothing is sent before the first call.

        Args:
            lasting: Use the keys of the job, which survive restarts of the ranks, instead of the generation's.
            timeout: Time that a call waits for other ranks, or for a control plane that is away.
            agent: The node's agent; by default the one that serves this process.

        Raises:
            StoreError: if Perdure did not start this process as a rank.
        """
        super().__init__()
        agent = agent or find_agent()
        if agent is None:
            raise StoreError(
                "this process is not a rank of a Perdure job; torch.distributed.HashStore is a store without"
            )
        self._agent = agent
        self._lasting = lasting
        self._calls = StoreCalls(agent, generation=generation_of(os.environ), lasting=lasting)
        self._rank = int(os.environ.get("RANK", "0"))
        self._world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self._joined: dict[str, tuple[int, int]] = {}
        """The rounds of barriers that this rank has joined and not waited for, each with the generation in which it has
        joined; 0 where that does not matter."""
        self.set_timeout(timeout)
        _kept.append(self)

    def set(self, key: str, value: str | bytes) -> None:
        """Sets a key."""
        self._call("SET", [key], [_to_bytes(value)])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Sets several keys at once.

        Raises:
            ValueError: if there are not as many values as keys.
        """
        if len(keys) != len(values):
            raise ValueError(f"values: expected {len(keys)}, one for each key, found {len(values)}")
        self._call("SET", keys, [_to_bytes(value) for value in values])

    def get(self, key: str) -> bytes:
        """Returns the value of a key, once it is set."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Returns the values of several keys, once all are set."""
        return values_of(self._call("GET", keys))

    def add(self, key: str, amount: int) -> int:
        """Adds to a number, 0 where the key is not set, and returns the sum."""
        return self._call("ADD", [key], amount=amount)["number"]

    def append(self, key: str, value: str | bytes) -> None:
        """Appends to a value, empty where the key is not set."""
        self._call("APPEND", [key], [_to_bytes(value)])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Sets a key if it has the expected value, or if that is empty and the key is not set.

        Returns:
            The desired value if the key was set, else its value; where it has none, the expected one.
        """
        return values_of(self._call("COMPARE_SET", [key], [_to_bytes(expected), _to_bytes(desired)]))[0]

    def check(self, keys: Sequence[str]) -> bool:
        """Returns whether all keys are set."""
        return bool(self._call("CHECK", keys)["number"])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys are set.

        Raises:
            StoreTimeout: if they are not set in time.
        """
        self._call("WAIT", keys, timeout=timeout)

    def delete_key(self, key: str) -> bool:
        """Deletes a key; returns whether it was set."""
        return bool(self._call("DELETE", [key])["number"])

    def num_keys(self) -> int:
        """Returns the number of keys."""
        return self._call("COUNT")["number"]

    def list_keys(self) -> list[str]:
        """Returns the names of all keys."""
        return list(self._call("LIST")["keys"])

    def has_extended_api(self) -> bool:
        """Returns that `append`, `multi_get` and `multi_set` are there."""
        return True

    def clone(self) -> JobStore:
        """Returns another store with the same keys."""
        return JobStore(lasting=self._lasting, timeout=self.timeout, agent=self._agent)

    def join(self, name: str, world_size: int | None = None) -> bool:
        """Records that this rank has arrived at a barrier, and does not wait.

        Args:
            name: The barrier's name.
            world_size: The number of ranks that it waits for; by default all.

        Returns:
            Whether all ranks have arrived now.
        """
        answer = self._call("JOIN", [name], member=self._rank, size=world_size or self._world_size)
        # An agent of an earlier release does not name the generation.
        self._joined[name] = answer["number"], 0 if self._lasting else answer.get("generation", 0)
        return answer["complete"]

    def barrier(self, name: str, world_size: int | None = None, timeout: timedelta | None = None) -> None:
        """Waits until all ranks have arrived; the same name can be used again and again.

        A rank that has called `join` has arrived already. After a timeout it has still arrived, and can call again.

        Args:
            name: The barrier's name.
            world_size: The number of ranks that it waits for; by default all.
            timeout: Time to wait.

        Raises:
            StoreTimeout: if some do not arrive in time; the message names the first of them.
        """
        if name not in self._joined:
            self.join(name, world_size)
        left = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + left.total_seconds()
        while True:
            number, generation = self._joined[name]
            answer = self._call("AWAIT_JOINS", [name], amount=number, within_generation=generation, timeout=left)
            if not generation or answer["generation"] == generation:
                break
            # This process continues in a newer generation, whose barriers begin empty: it has to arrive there, too.
            self.join(name, world_size)
            left = timedelta(seconds=max(deadline - time.monotonic(), 0.0))
        self._joined.pop(name, None)

    # torch calls these two by the names that they have in C++.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def _call(
        self,
        action: str,
        keys: Sequence[str] = (),
        values: Sequence[bytes] = (),
        *,
        timeout: timedelta | None = None,
        within_generation: int = 0,
        **fields: int,
    ) -> dict[str, Any]:
        seconds = (self.timeout if timeout is None else timeout).total_seconds()
        return self._calls.call(action, keys, values, timeout=seconds, within_generation=within_generation, **fields)


def _to_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
