"""What a checkpointer knows about its world, and the store on which the ranks agree.

The store is the generation's own, which serves the process group too: a connection of its own, with keys that begin
with the checkpointer's name. Nothing in it outlives the generation.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import PrefixStore, Store, TCPStore

from perdure_training.checkpoint.staging import Layout
from perdure_training.node_api.addresses import split_address
from perdure_training.node_api.bodies import KnownStates, UnsoundSteps
from perdure_training.node_api.local_rank import local_rank_of
from perdure_training.node_api.rank_environment import (
    generation_of,
    has_job_rank,
    known_states_of,
    script_failures_of,
    unsound_steps_of,
)
from perdure_training.snapshots.arena import Header

FOLDER_VARIABLE = "PERDURE_MEMORY_DIR"
"""Variable with the node's memory folder, which the launcher sets."""

ORIGIN_VARIABLE = "PERDURE_MEMORY_ORIGIN"
"""Variable with where that folder comes from."""
NODE_VARIABLE = "PERDURE_NODE"
"""Variable with the node's job, role, rank and incarnation."""
_NODE = re.compile(r"[^/]+/[^/]+-(\d+)/\d+")

_SPOILED = -(1 << 40)
"""What is added to the count of a step that a rank does not save, since its state may not be sound."""
_REFUSED = "copies/refused"
"""Key in the ranks' store, set once a node has not taken a copy."""
AGREEMENT_TIMEOUT = timedelta(minutes=30)
"""Time in which all ranks of a world must reach `restore`: they load data and build models before that."""


@dataclass(frozen=True)
class RankIdentity:
    """This rank, as torchrun and the launcher describe it in the environment."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    generation: int
    folder: Path
    """The folder for this stage's snapshots of the node."""
    store: tuple[str, int]
    """Address and port of the generation's store."""
    node: int | None = None
    """The node (slot), which a rank may share with others; None where that is unknown."""
    memory_origin: str = ""
    """Where the node's memory folder comes from, as the launcher says."""
    unsound: UnsoundSteps | None = None
    """The saved states that this world does not load; None for none."""
    script_failures: tuple[int, ...] | None = None
    """The newest generations that the script's own failures have ended; None where that is not known."""
    known: KnownStates | None = None
    """The saved states of which the job knows; None where that is not known."""

    @property
    def ranks_of_node(self) -> range:
        """The ranks of this node."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_world_size)


def identity(environment: Mapping[str, str]) -> RankIdentity | None:
    """Returns this rank; None if Perdure did not start it, or keeps no memory folder for it."""
    folder = environment.get(FOLDER_VARIABLE)
    if not folder or not has_job_rank(environment):
        return None
    store = environment.get("PERDURE_STORE")
    if not store:
        return None
    return RankIdentity(
        rank=int(environment["RANK"]),
        world_size=int(environment["WORLD_SIZE"]),
        local_rank=local_rank_of(environment),
        local_world_size=int(environment.get("LOCAL_WORLD_SIZE", "1")),
        generation=generation_of(environment),
        folder=Path(folder) / f"stage-{environment.get('PERDURE_STAGE', '0')}",
        store=split_address(store),
        node=int(node[1]) if (node := _NODE.fullmatch(environment.get(NODE_VARIABLE, ""))) else None,
        memory_origin=environment.get(ORIGIN_VARIABLE, ""),
        unsound=unsound_steps_of(environment),
        script_failures=script_failures_of(environment),
        known=known_states_of(environment),
    )


def own_identity() -> RankIdentity | None:
    """Returns this process's rank."""
    return identity(os.environ)


def connect(own: RankIdentity, name: str, *, timeout: timedelta = AGREEMENT_TIMEOUT) -> Store:
    """Connects to the generation's store, whose calls wait no longer than `timeout`. A connection serves one thread at
    a time."""
    address, port = own.store
    store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
    return PrefixStore(f"perdure/checkpoint/{name}/", store)


class OnlyOne:
    """The place of a checkpointer among those of its rank, also in processes that the rank has started."""

    def __init__(self, store: Store, own: RankIdentity, name: str) -> None:
        """Takes the place.

        Raises:
            ValueError: if another one of this name and rank has it: this one would load the other's state, and each
                would overwrite the other's snapshots.
        """
        self._store = store
        self._key = f"checkpointers/{own.folder.name}/{own.generation}/{own.rank}"
        if store.add(self._key, 1) > 1:
            store.add(self._key, -1)
            raise ValueError(
                f"Checkpointer: rank {own.rank} has another one of the name {name!r}, whose state this one would load. "
                "Save both states with one Checkpointer, give each a name of its own: Checkpointer(name=...), or close "
                "the first one"
            )

    def leave(self) -> None:
        """Leaves it to another one."""
        # The store may have ended before.
        with contextlib.suppress(RuntimeError):
            self._store.add(self._key, -1)


def place_of(own: RankIdentity, name: str) -> str:
    """Returns the folder of a checkpointer's checkpoints within the storage."""
    stage = own.folder.name
    return "/".join([*([stage] if stage != "stage-0" else []), *([name] if name != "state" else [])])


def snapshot_header(
    own: RankIdentity,
    step: int,
    layout: Layout,
    *,
    replicated: bool,
    restores: int = 0,
    reported: int | None = None,
) -> Header:
    """Returns the header of a step's snapshot whose checksum is not known yet."""
    return Header(
        step=step,
        rank=own.rank,
        world_size=own.world_size,
        generation=own.generation,
        replicated=replicated,
        index_at=layout.index_at,
        size=layout.size,
        checksum=0,
        restores=restores,
        reported=reported,
    )


class Completeness:
    """Finds out which steps all ranks have in memory: each adds one to the step's count.

    Asked rarely: the count of a step is read only when this rank needs to know.
    """

    def __init__(self, store: Store, world_size: int) -> None:
        self._store = store
        self._world_size = world_size
        self._lock = threading.Lock()
        self._newest = -1
        """The newest step that was reported; none is lower than the one before."""
        self._reached = -1
        """The newest step that was reported as reached."""
        self._spoiled = False

    def add(self, step: int, *, copied: bool) -> None:
        """Reports that this rank has the step, and whether the nodes that keep copies have theirs. A script may save
        one several times, which counts once."""
        with self._lock:
            if step > self._newest:
                if copied:
                    self._store.add(f"copied/{step}", 1)
                self._store.add(f"saved/{step}", 1)
                self._newest = step

    def is_complete(self, step: int) -> bool:
        """Whether all ranks have it."""
        with self._lock:
            return self._count(step) >= self._world_size

    def spoil(self, step: int) -> None:
        """Reports that this rank does not save the step, as its state may not be sound: the job goes back, and none of
        the others may overwrite what it goes back to. They learn of it when they look whether the step is complete."""
        with self._lock:
            self._spoiled = True
            self._store.add(f"saved/{step}", _SPOILED)

    def is_spoiled(self) -> bool:
        """Whether a rank is known to save nothing more, since its state may not be sound."""
        return self._spoiled

    def _count(self, step: int, change: int = 0) -> int:
        count = self._store.add(f"saved/{step}", change)
        self._spoiled = self._spoiled or count < _SPOILED / 2
        return count

    def reach(self, step: int) -> None:
        """Reports that this rank, which saves the step next, adds no earlier one any more. A script may save one
        several times, which counts once."""
        with self._lock:
            if step > self._reached:
                self._store.add(f"reached/{step}", 1)
                self._reached = step

    def is_reached(self, step: int) -> bool:
        """Whether no rank adds an earlier step: one that is not complete by now never will be."""
        with self._lock:
            return self._store.add(f"reached/{step}", 0) >= self._world_size

    def give_up(self, step: int) -> bool:
        """Withdraws that this rank has a step, which it overwrites: no rank may take it for complete from now on.

        Returns:
            Whether that is so. Nothing is withdrawn if all ranks have it.
        """
        with self._lock:
            if self._count(step, -1) + 1 < self._world_size and not self._spoiled:
                return True
            self._store.add(f"saved/{step}", 1)
            return False

    def refuse_copies(self) -> None:
        """Reports that a node does not take this rank's copy."""
        with self._lock:
            self._store.set(_REFUSED, "")

    def is_copied(self, step: int) -> bool:
        """Whether all ranks have it, with all its copies."""
        with self._lock:
            return self._store.add(f"copied/{step}", 0) >= self._world_size

    def are_copies_refused(self) -> bool:
        """Whether a node does not take a rank's copy."""
        with self._lock:
            return self._store.check([_REFUSED])

    def is_settled(self, step: int) -> bool:
        """Whether nothing that former worlds left is needed beside this step: all ranks have it and its copies."""
        with self._lock:
            # A rank may have given it up since it had its copies.
            counts = (self._store.add(f"{kind}/{step}", 0) for kind in ("copied", "saved"))
            return all(count >= self._world_size for count in counts)
