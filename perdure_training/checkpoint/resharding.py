"""Loads a step that a world of another size, or with other device meshes, has in memory: each rank takes the parts that
it needs of the snapshots.

What these snapshots have together is planned as a checkpoint in storage is, by the same planners, so that a state which
could be loaded from there can be loaded from memory, with the same bits. Nothing passes through storage: of what is on
its own node a rank reads the parts in place, and of the rest other ranks send it these alone.
"""

from __future__ import annotations

import io
import math
import pickle
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.distributed import Store
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItemType

from perdure_training.checkpoint.differing import Digest, forget_holders, name_of_rank, of_rank
from perdure_training.checkpoint.distributed_format import RankPlanner, is_object, narrowed, plan_together, planner_of
from perdure_training.checkpoint.part_exchange import Box, PartRequest, boxes, exchange_parts
from perdure_training.checkpoint.planned_state import OfAnotherWorld, PlannedState, StateOfRank, plan_state
from perdure_training.checkpoint.staging import Parts, read_former_parts
from perdure_training.checkpoint.world import RankIdentity
from perdure_training.snapshots.agreement import Decision
from perdure_training.snapshots.arena import Arena, Slot

_PIECE = 4 << 20
"""Bytes of a value in the store: its server takes no large ones."""
_SPARE = 1 << 20
"""Bytes that a value may have as `torch.save` writes it, beyond those of the snapshot that it is in."""

_Planned = tuple[SavePlan, Mapping[MetadataIndex, Digest]]


@dataclass(frozen=True)
class _Place:
    """Where a value is: the same in the snapshots of all these ranks of the former world."""

    index: MetadataIndex
    ranks: tuple[int, ...]


class Resharding:
    """One rank's part in loading what a world of another size saved.

    Invariants:
        - All ranks load the step, or all of them raise the same `OfAnotherWorld`.
        - Nothing of a state is changed before all ranks know that they can load it.
        - No snapshot is changed.
    """

    def __init__(
        self,
        own: RankIdentity,
        store: Store,
        arena: Arena,
        decision: Decision,
        *,
        verified: Collection[int] | None = None,
    ) -> None:
        """Creates the object.

        Args:
            own: This rank.
            store: A connection to the generation's store.
            arena: The snapshots of the node.
            decision: What all ranks load.
            verified: The ranks of whose snapshots those on this node have been verified; None for all.
        """
        assert decision.former is not None
        self._own = own
        self._store = store
        self._size = decision.former
        self._holders = decision.holders
        version = (decision.step, decision.generation, decision.former)
        self._slots: dict[int, Slot] = {
            header.rank: slot
            for slot, header in arena.snapshots()
            if (header.step, header.generation, header.world_size) == version
            and (verified is None or header.rank in verified)
        }
        self._largest = 2 * decision.size + _SPARE
        self._snapshots: dict[int, FormerSnapshot] = {}
        self._each_rank: frozenset[str] = frozenset()
        self._differ: frozenset[str] = frozenset()
        self.received = 0
        """Bytes that other ranks have sent to this one."""

    def load(self, state: StateOfRank) -> dict[str, Any]:
        """Returns the state with what was saved of it. Every rank of the world calls it.

        Args:
            state: What is restored. Its tensors are changed in place.

        Raises:
            OfAnotherWorld: if what was saved is no state that this world can have.
            OSError: if a snapshot on this node cannot be read any more.
            RuntimeError: if another rank ends meanwhile, or parts arrive with other bytes than were sent.
        """
        self._each_rank = state.each_rank
        metadata = self._describe()
        try:
            source = f"what {self._size} ranks have in memory"
            planned = plan_state(metadata, state, own=self._own, share=self._share, source=source)
        except KeyError as error:
            raise OfAnotherWorld(str(error.args[0]), ranks=self._size) from error
        self._take(planned)
        return planned.loaded()

    def _describe(self) -> Metadata:
        """What all snapshots have together."""
        for rank, holder in self._holders.items():
            if holder == self._own.rank:
                self._tell(f"plan/{rank}", self._planned(rank))
        if self._own.rank == 0:
            plans = [self._told(f"plan/{rank}") for rank in range(self._size)]
            self._tell("metadata", _together(plans))
            for rank in range(self._size):
                self._forget(f"plan/{rank}")
        found = self._told("metadata")
        if isinstance(found, str):
            raise OfAnotherWorld(found, ranks=self._size)
        metadata, self._differ = cast("tuple[Metadata, frozenset[str]]", found)
        if self._size == self._own.world_size:
            # Over other meshes a rank may have what another one had before.
            forget_holders(metadata)
        for rank, snapshot in self._snapshots.items():
            self._rename(snapshot, rank)
        return metadata

    def _planned(self, rank: int) -> _Planned | str:
        """The plan of a rank's snapshot; why there is none.

        Raises:
            OSError: if it cannot be read now, which says nothing about its state: this rank ends, and all decide again.
            MemoryError: if there is no memory for it.
        """
        try:
            planner, plan = self._snapshot(rank).planner, self._snapshot(rank).plan
            return plan, planner.digests(plan)
        except (OSError, MemoryError):
            raise
        except Exception as error:
            # Whatever it is, such as a class that the script has no more: the others wait for an answer.
            return f"rank {rank}: {error if isinstance(error, ValueError) else repr(error)}"

    def _snapshot(self, rank: int) -> FormerSnapshot:
        """What a rank of the former world saved, which is on this node."""
        if rank not in self._snapshots:
            if rank not in self._slots:
                raise OSError(f"the snapshot of rank {rank} is not in memory any more")
            self._snapshots[rank] = FormerSnapshot(self._slots[rank], rank, each_rank=self._each_rank)
            self._rename(self._snapshots[rank], rank)
        return self._snapshots[rank]

    def _rename(self, snapshot: FormerSnapshot, rank: int) -> None:
        snapshot.planner.rename({name_of_rank(name, rank=rank, world_size=self._size): name for name in self._differ})

    def _take(self, planned: PlannedState) -> None:
        """Copies all parts into the state: those on this node first."""
        requests: dict[int, list[PartRequest]] = {}
        items: dict[int, list[ReadItem]] = {}
        for item in planned.loading.items:
            place: _Place = planned.loading.place(item)
            here = next((rank for rank in place.ranks if rank in self._slots), None)
            rank = here if here is not None else place.ranks[self._own.rank % len(place.ranks)]
            room = None if is_object(item) else planned.loading.room(item)
            for part in _parts(rank, place.index, item, room):
                if here is not None:
                    self._put(planned, item, part, self._give(part))
                else:
                    requests.setdefault(self._holders[rank], []).append(part)
                    items.setdefault(self._holders[rank], []).append(item)
        arriving = {holder: iter(of_holder) for holder, of_holder in items.items()}

        def take(part: PartRequest, content: memoryview) -> None:
            item = next(arriving[self._holders[part.rank]])
            if part.box is None:
                self._put(planned, item, part, bytes(content))
            else:
                dtype = planned.loading.room(item).dtype
                self._put(planned, item, part, torch.frombuffer(content, dtype=dtype).view(part.box[1]))

        self.received = exchange_parts(
            requests,
            rank=self._own.rank,
            world_size=self._own.world_size,
            largest=self._largest,
            give=self._give,
            take=take,
        )

    def _give(self, part: PartRequest) -> torch.Tensor | bytes:
        snapshot = self._snapshot(part.rank)
        return snapshot.value(part.index) if part.box is None else snapshot.tensor(part.index, part.box)

    def _put(self, planned: PlannedState, item: ReadItem, part: PartRequest, content: torch.Tensor | bytes) -> None:
        loading = planned.loading
        if part.box is None:
            loading.put(item, io.BytesIO(cast("bytes", content)))
            return
        start, lengths = part.box
        begin = [one - of_item for one, of_item in zip(start, item.storage_offsets, strict=True)]
        narrowed(loading.room(item), begin, lengths).copy_(cast("torch.Tensor", content))

    def _share(self, value: object) -> list[Any]:
        self._tell(f"share/{self._own.rank}", value)
        return [self._told(f"share/{rank}") for rank in range(self._own.world_size)]

    def _tell(self, key: str, value: object) -> None:
        content = zlib.compress(pickle.dumps(value), 1)
        pieces = range(0, len(content), _PIECE)
        for number, begin in enumerate(pieces):
            # The type stub of `Store.set` does not list bytes.
            self._store.set(f"reshard/{key}/{number}", cast("Any", content[begin : begin + _PIECE]))
        self._store.set(f"reshard/{key}", str(len(pieces)))

    def _told(self, key: str) -> Any:
        number = int(self._store.get(f"reshard/{key}"))
        content = b"".join(self._store.get(f"reshard/{key}/{piece}") for piece in range(number))
        return pickle.loads(zlib.decompress(content))

    def _forget(self, key: str) -> None:
        """Deletes a value that all ranks concerned have read."""
        for piece in range(int(self._store.get(f"reshard/{key}"))):
            self._store.delete_key(f"reshard/{key}/{piece}")
        self._store.delete_key(f"reshard/{key}")


class FormerSnapshot:
    """What one rank of the former world saved."""

    def __init__(self, slot: Slot, rank: int, *, each_rank: frozenset[str]) -> None:
        header = slot.header()
        if header is None:
            raise OSError(f"{slot.path} is no longer a complete snapshot")
        state = read_former_parts(slot.read(), index_at=header.index_at)
        self.planner: RankPlanner = planner_of(Parts(state, {}), rank=rank, each_rank=each_rank)
        self.plan: SavePlan = self.planner.create_local_plan()

    def whole_values(self) -> dict[MetadataIndex, Digest]:
        """What tells whether another rank has the same values, of those that are not split."""
        items = [item for item in self.plan.items if item.type is not WriteItemType.SHARD]
        return self.planner.digests(replace(self.plan, items=items))

    def tensor(self, index: MetadataIndex, box: Box) -> torch.Tensor:
        """A part of a tensor, or of the part of a split one that the rank had."""
        return narrowed(cast("torch.Tensor", self.planner.lookup_object(index)).detach(), *box)

    def value(self, index: MetadataIndex) -> bytes:
        """A value that is no tensor, as `torch.save` writes it."""
        content = io.BytesIO()
        torch.save(self.planner.lookup_object(index), content)
        return content.getvalue()


def _parts(rank: int, index: MetadataIndex, item: ReadItem, room: torch.Tensor | None) -> Iterator[PartRequest]:
    """What is asked for, to have an item."""
    if is_object(item):
        yield PartRequest(rank, index, None, None)
        return
    assert room is not None
    whole, itemsize = (tuple(item.storage_offsets), tuple(item.lengths)), room.element_size()
    for box in boxes(whole, itemsize=itemsize):
        yield PartRequest(rank, index, box, math.prod(box[1]) * itemsize)


def _together(plans: list[_Planned | str]) -> tuple[Metadata, frozenset[str]] | str:
    """What all snapshots have together, with the names whose values differ between ranks; why that is no state."""
    if problems := [plan for plan in plans if isinstance(plan, str)]:
        return problems[0]
    known = cast("list[_Planned]", plans)
    coordinator = RankPlanner({})
    coordinator.set_up_planner({}, is_coordinator=True)
    try:
        _, metadata, differ = plan_together(coordinator, known)
    except (ValueError, RuntimeError) as error:
        return str(error)
    ranks: dict[MetadataIndex, list[int]] = {}
    for rank, (plan, _) in enumerate(known):
        for item in of_rank(plan, set(differ), rank=rank, world_size=len(known)).items:
            ranks.setdefault(item.index, []).append(rank)
    metadata.storage_data = {index: _Place(index, tuple(holding)) for index, holding in ranks.items()}
    return metadata, differ
