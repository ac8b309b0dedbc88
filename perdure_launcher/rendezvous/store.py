"""Answers torchrun's own store calls from what this node knows.

torchrun uses a store for two things: to agree on ranks, and to wait at the end for the other nodes. The world already
defines the ranks, and the agent reports when a generation is complete. So no torchrun ever hangs in the store of a node
that died, where it would receive neither signals nor newer worlds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from datetime import timedelta

from perdure_training.node_api.bodies import World

_ASSIGNED = re.compile(r"torchelastic/assigned_ranks/(\d+)")
_ROLE_INFO = re.compile(r"torchelastic/role_info/(\d+)")
_BARRIER_END = "/last_member"
_COMMON_TIMEOUT = timedelta(seconds=300)


class WorldStore:
    """The part of torch's `Store` that torchrun calls."""

    def __init__(self, world: World, *, exit_barrier: Callable[[], None]) -> None:
        """Creates the store of one generation.

        Args:
            world: The generation.
            exit_barrier: Returns when every rank of the job has finished it, or raises to leave in another way.
        """
        self._world = world
        self._exit_barrier = exit_barrier
        self._values: dict[str, bytes] = {}
        self._counts: dict[str, int] = {}
        self.timeout = _COMMON_TIMEOUT

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def get(self, key: str) -> bytes:
        """Returns the value, without ever waiting for another node.

        Raises:
            KeyError: if no process on this node has set it and the world does not define it.
        """
        if (match := _ASSIGNED.fullmatch(key)) and int(match[1]) == self._world.group_rank:
            base, size = self._world.base_rank, self._world.world_size
            return json.dumps([base, size, base, size]).encode()
        if _ROLE_INFO.fullmatch(key) and key not in self._values:
            # The value of another node. Group rank 0 derives all ranks from these, and nothing reads its result.
            return self._values[f"torchelastic/role_info/{self._world.group_rank}"]
        return self._values[key]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Counts on this node only. In a barrier that never reaches all nodes, so `wait` waits for its end."""
        self._counts[key] = self._counts.get(key, 0) + amount
        return 0 if self._is_barrier(key) else self._counts[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits for the end of the exit barrier; returns at once for other keys.

        Raises:
            KeyError: if a key was not set on this node.
        """
        if any(key.endswith(_BARRIER_END) for key in keys):
            self._exit_barrier()
            return
        for key in keys:
            self.get(key)

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    @staticmethod
    def _is_barrier(key: str) -> bool:
        return key.endswith("/num_members")
