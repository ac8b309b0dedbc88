"""A world of several ranks as threads of this process, each with a `Checkpointer`, on one node with a real agent.

Processes would take seconds to start. What the ranks agree on passes through a real store, and what they store through
a real agent; only collectives of the script's own are left out.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch.distributed as dist
from torch.distributed import HashStore, TCPStore

from perdure.agent.checkpoint.storage import Storage
from perdure_training.checkpoint import Checkpointer
from tests.training.checkpoint_agent import CheckpointAgent, checkpoint_agent

State = dict[str, Any]
Result = TypeVar("Result")


class RankThreads:
    """The ranks of one job, in one generation after another."""

    def __init__(self, folder: Path, agent: CheckpointAgent) -> None:
        self.storage = folder / "storage"
        self.memory = folder / "memory"
        self.agent = agent
        self._store: TCPStore | None = None
        self.checkpointers: list[Checkpointer] = []
        self.variables: dict[str, str] = {}
        """Further variables of all ranks."""

    def begin(self, states: Sequence[State], *, lose_memory: bool = False, **arguments: Any) -> list[int | None]:
        """Begins the next generation with these ranks; returns the step that each of them has restored."""
        self.prepare(len(states), lose_memory=lose_memory, **arguments)
        return self.each(lambda rank: self.checkpointers[rank].restore(states[rank]))

    def prepare(self, world_size: int, *, lose_memory: bool = False, **arguments: Any) -> None:
        """Begins the next generation, whose ranks have not restored yet."""
        if lose_memory:
            shutil.rmtree(self.memory, ignore_errors=True)
        self.agent.ranks = world_size
        self.agent.begin(self.agent.generation + 1)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.checkpointers = [self._create(rank, world_size, arguments) for rank in range(world_size)]

    def each(self, call: Callable[[int], Result]) -> list[Result]:
        """Calls a function for every rank at the same time; returns the results. The first rank's error is raised when
        all have returned."""
        with ThreadPoolExecutor(len(self.checkpointers)) as ranks:
            return list(ranks.map(call, range(len(self.checkpointers))))

    def save(self, step: int, states: Sequence[Mapping[str, Any]], **arguments: Any) -> list[bool]:
        """Saves a step on every rank; returns what each was answered."""
        return self.each(lambda rank: self.checkpointers[rank].save(step, states[rank], **arguments))

    def wait_until_durable(self, timeout: float) -> list[bool]:
        """What each rank was answered."""
        return self.each(lambda rank: self.checkpointers[rank].wait_until_durable(timeout))

    def close(self) -> None:
        """Ends the last generation's store."""
        self._store = None
        self.checkpointers = []

    @property
    def steps(self) -> list[int]:
        """The steps of the committed checkpoints, the latest first."""
        storage = Storage(str(self.storage))
        return [one.step for one in storage.saved("") if storage.is_committed(one)]

    def another(self, rank: int, world_size: int, **arguments: Any) -> Checkpointer:
        """One more checkpointer of a rank."""
        return self._create(rank, world_size, arguments)

    def _create(self, rank: int, world_size: int, arguments: Mapping[str, Any]) -> Checkpointer:
        assert self._store is not None
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world_size),
            "PERDURE_MEMORY_DIR": str(self.memory),
            "PERDURE_STORE": f"127.0.0.1:{self._store.port}",
            "PERDURE_GENERATION": str(self.agent.generation),
            **self.variables,
        }
        with mock.patch.dict(os.environ, variables):
            given: dict[str, Any] = {"every": 1, **arguments}
            return Checkpointer(**given)


@contextmanager
def rank_threads(folder: Path, **checkpoint: Any) -> Iterator[RankThreads]:
    """Ranks whose agent serves until the context ends; `checkpoint` is a part of the job's specification."""
    with checkpoint_agent(folder / "storage", **{"every": 1000, **checkpoint}) as agent:
        identity = {"PERDURE_RUN_ID": "run", "TORCHELASTIC_RUN_ID": "run"}
        with mock.patch.dict(os.environ, identity | agent.environment):
            # Ranks of a world of several refuse to begin without one; no message passes through it.
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
            ranks = RankThreads(folder, agent)
            try:
                yield ranks
            finally:
                ranks.close()
                dist.destroy_process_group()
