"""Worlds of ranks, one after another, over the memories of played nodes, without processes.

What ranks save, agree on, load, copy and delete is the library's own, on files as on a node. The network, the storage
and time are played; what a rank does in a thread of its own happens when a test says so.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.distributed import HashStore, PrefixStore, Store

from perdure_training.checkpoint import Checkpointer, checkpointer, finishing, generation, generation_storage, peers
from perdure_training.checkpoint.agreed_step import AgreedStep
from perdure_training.checkpoint.durable import DurableCheckpoints
from perdure_training.checkpoint.finishing import SnapshotFinisher
from perdure_training.checkpoint.former_snapshots import FormerSnapshots
from perdure_training.checkpoint.generation import GenerationCheckpoints
from perdure_training.checkpoint.peers import RECEIVER_VARIABLE, Peers
from perdure_training.checkpoint.resharding import Resharding
from perdure_training.checkpoint.staging import read_state
from perdure_training.checkpoint.state_search import Found
from perdure_training.checkpoint.verification import is_intact
from perdure_training.checkpoint.world import RankIdentity
from perdure_training.node_api.bodies import UnsoundSteps
from perdure_training.node_api.storage_link import StorageLink
from perdure_training.snapshots.agreement import Decision
from perdure_training.snapshots.arena import Arena, Header, Slot
from tests.training.played_nodes import STAGE, Killed, Network, PlayedNode, PlayedSender

_AGREED_WITHIN = 60.0
"""Seconds in which the threads of a world meet."""


class Moment(Enum):
    """Where a rank can be killed while it loads."""

    BEFORE_COUNT = "before it counts the load"
    BEFORE_FORGETTING = "before it deletes newer steps"
    AFTER_FORGETTING = "after it has deleted newer steps"
    BEFORE_LOADING = "before it reads the snapshot"


class Saved(NamedTuple):
    """What a state says of itself."""

    step: int
    made_in: int
    """The generation that has made the step."""


class PlayedFinisher(SnapshotFinisher):
    """Finishes a snapshot when a test says so."""

    @property
    def waits(self) -> bool:
        """Whether a snapshot is to be finished."""
        return not self._staged.empty()

    def advance(self) -> int | None:
        """Finishes the snapshot that was staged first; returns its step."""
        staged = self._staged.get_nowait()
        if staged is None:
            return None
        try:
            self._finish(*staged)
        finally:
            self._staged.task_done()
        return staged[2].step

    def flush(self) -> None:
        while self.waits:
            self.advance()


class PlayedGeneration(GenerationCheckpoints):
    """A rank that can be killed at each moment of a restore, and whose agreement is known."""

    agreed: AgreedStep | None = None
    """The first agreement."""

    def agree(self, **arguments: Any) -> AgreedStep:
        agreed = super().agree(**arguments)
        self.agreed = self.agreed or agreed
        return agreed

    def _count_restore(self, agreed: AgreedStep, number: int = 1) -> None:
        _world().pass_by(self.own.rank, Moment.BEFORE_COUNT)
        super()._count_restore(agreed, number)

    def _is_split_otherwise(self, loaded: Slot, state: Mapping[str, Any]) -> bool:
        # Ranks that wait for one that is killed end, too.
        _world().meet()
        return super()._is_split_otherwise(loaded, state)

    def _load(self, slot: Slot, state: Any) -> None:
        _world().pass_by(self.own.rank, Moment.BEFORE_LOADING)
        super()._load(slot, state)


class PlayedFormerSnapshots(FormerSnapshots):
    """A rank that can be killed when it deletes what was saved after the step that it loads."""

    def forget_after(self, step: int) -> None:
        world = _world()
        world.pass_by(self._own.rank, Moment.BEFORE_FORGETTING)
        super().forget_after(step)
        world.pass_by(self._own.rank, Moment.AFTER_FORGETTING)


class PlayedResharding(Resharding):
    """Looks whether each part of the former world's state can be read where it is said to be."""

    def load(self, state: Any) -> dict[str, Any]:
        if "saved" not in state.values:
            return super().load(state)
        world = _world()
        found: list[dict[str, Any]] = []
        for rank, holder in sorted(self._holders.items()):
            arena = world.ranks[holder].node.arena(self._arena.folder.name)
            version = (self._decision.step, self._decision.generation, self._decision.former, rank)
            [(slot, header), *_] = [
                (slot, header)
                for slot, header in arena.snapshots()
                if (header.step, header.generation, header.world_size, header.rank) == version
            ]
            assert is_intact(slot, header)
            content = slot.read()
            found.append(
                read_state(
                    lambda at, size, content=content: content[at : at + size],
                    index_at=header.index_at,
                    size=header.size,
                )
            )
        assert [one["part"] for one in found] == list(range(self._size))
        [saved] = {one["saved"] for one in found}
        world.meet()
        return {"saved": saved, "part": self._own.rank, "weight": found[0]["weight"]}

    def __init__(self, own: RankIdentity, store: Store, arena: Arena, decision: Decision, **options: Any) -> None:
        super().__init__(own, store, arena, decision, **options)
        self._decision = decision
        self._arena = arena


class PlayedStorage(DurableCheckpoints):
    """The checkpoints that a test says are there."""

    found: Saved | None = None
    """The newest one."""

    @property
    def stores(self) -> bool:
        return self.found is not None

    def restore(self, found: Found, state: Any, store: Store) -> tuple[int, str, dict[str, Any]] | None:
        saved, in_memory = self.found, found.lookup.in_memory
        if saved is None or (in_memory is not None and saved.step <= in_memory):
            return None
        content: dict[str, Any] = {"saved": saved, "weight": weight(saved)}
        if "part" in state.values:
            content["part"] = self._own.rank
        return saved.step, "folder", content


def weight(saved: Saved) -> torch.Tensor:
    return torch.tensor([float(saved.step), float(saved.made_in)])


class PlayedRank:
    """One rank of a world: its part of the training, and what it keeps."""

    def __init__(
        self, own: RankIdentity, node: PlayedNode, *, replicated: bool, copies: int, name: str, storage: bool = True
    ) -> None:
        self.own = own
        self.node = node
        self.is_dead = False
        self.checkpointer = Checkpointer(every=1, replicated=replicated, copies=copies, name=name, storage=storage)
        self.checkpointer._own = own
        begun = Saved(0, own.generation)
        self.state: dict[str, Any] = {"saved": begun, "weight": weight(begun)}
        if not replicated:
            self.state["part"] = own.rank
        self.is_spoiled = False
        """Its loss was not a number."""
        self.losses = 0
        """The losses that it reports before each save; 0 where it counts both the same."""
        self.loaded: int | None = None
        self.finished: list[int] = []
        """The steps of this generation that it has reported to the others."""

    @property
    def at(self) -> int:
        return self.state["saved"].step

    @property
    def lives(self) -> bool:
        return not self.is_dead and not self.node.is_lost

    @property
    def memory(self) -> PlayedGeneration:
        memory = self.checkpointer._world
        assert isinstance(memory, PlayedGeneration)
        return memory

    @property
    def finisher(self) -> PlayedFinisher:
        assert isinstance(self.memory.finisher, PlayedFinisher)
        return self.memory.finisher

    def restore(self) -> None:
        self.loaded = self.checkpointer.restore(self.state)

    def step(self) -> bool:
        """Makes a step, and saves it; returns whether it was saved."""
        self.state["saved"] = Saved(self.at + 1, self.own.generation)
        self.state["weight"] = weight(self.state["saved"])
        spoiled_by = "the loss was not a number" if self.is_spoiled else ""
        watch = SimpleNamespace(spoiled_by=spoiled_by, reported_beyond=lambda step: step * self.losses or None)
        with mock.patch.object(checkpointer, "watch", watch):
            return self.checkpointer.save(self.at, self.state)

    def end(self) -> None:
        """Gives up what the process has mapped, each with a descriptor."""
        if isinstance(memory := self.checkpointer._world, PlayedGeneration):
            memory.finisher._staged.queue.clear()
            memory.made._map.close()
            memory.agreed = None
            for slot in memory.slots._slots:
                slot._map = None
        self.state = {}

    def finish(self) -> None:
        """Finishes the snapshot that was staged first."""
        try:
            step = self.finisher.advance()
        except Killed:
            self.is_dead = True
        else:
            assert step is not None
            self.finished.append(step)


class PlayedWorld:
    """The ranks of one generation."""

    def __init__(self, site: PlayedSite, ranks: Sequence[PlayedRank], kills: Mapping[int, Moment]) -> None:
        self.site = site
        self.ranks = ranks
        self._kills = kills
        self._together = threading.Barrier(len(ranks))
        self._sent: dict[int, tuple[Header, bytes]] = {}
        self.store = HashStore()

    def begin(self) -> None:
        """Has all ranks restore at the same time."""

        def run(rank: PlayedRank) -> None:
            try:
                rank.restore()
            except Killed:
                rank.is_dead = True
                self._together.abort()
            except threading.BrokenBarrierError:
                # A message to a rank that is killed ends the other one, too.
                rank.is_dead = True

        with ThreadPoolExecutor(len(self.ranks)) as threads:
            list(threads.map(run, self.ranks))

    def pass_by(self, rank: int, moment: Moment) -> None:
        """Ends a rank that is to be killed now."""
        if self._kills.get(rank) is moment:
            raise Killed

    def meet(self) -> None:
        """Waits for all ranks."""
        self._together.wait(_AGREED_WITHIN)

    def exchange(
        self, sources: Mapping[int, int], *, sent: Mapping[int, Slot], own: RankIdentity, room: Slot | None
    ) -> None:
        """Brings each rank of `sources` its snapshot, as the library does over gloo."""
        for receiver, slot in sent.items():
            header = slot.header()
            assert header is not None
            self._sent[receiver] = header, bytes(slot.read())
        self.meet()
        if own.rank in sources:
            assert room is not None
            header, content = self._sent[own.rank]
            room.begin(header.size)[:] = content
            room.finish(replace(header, rank=own.rank, world_size=own.world_size))
        self.meet()


class PlayedSite:
    """What outlives a world: the nodes, and the storage."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.network = Network()
        self.left: list[Path] = []
        """The folders of launchers that were killed."""
        self.world: PlayedWorld | None = None
        self._begun: list[PlayedWorld] = []
        """Those of all checkpointers."""
        self.generation = 0
        self.stored: dict[str, Saved] = {}
        """The newest checkpoint in storage, of each checkpointer."""
        self.now = 0.0
        self.detaching: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def node(self, *, left: Path | None = None) -> PlayedNode:
        """Returns a new node: one that takes over a folder, or begins with an empty memory."""
        folder = self._folder / f"node-{len(self.network.nodes)}"
        node = PlayedNode(folder)
        if left is not None:
            folder.rmdir()
            left.rename(folder)
        self.network.nodes[folder.name] = node
        return node

    def lose(self, node: PlayedNode, *, leaves_folder: bool = False) -> None:
        """Ends a node."""
        node.is_lost = True
        if leaves_folder:
            left = node.folder.with_suffix(".left")
            node.folder.rename(left)
            self.left.append(left)
        else:
            shutil.rmtree(node.folder)

    def end(self) -> None:
        """Ends all ranks."""
        for world in self._begun:
            for rank in world.ranks:
                rank.end()
        self._begun.clear()
        self.detaching.clear()
        self.world = None

    def begin(
        self,
        nodes: Sequence[PlayedNode],
        *,
        ranks_of_node: int,
        replicated: bool,
        copies: int,
        kills: Mapping[int, Moment] = {},
        unsound: UnsoundSteps | None = None,
        script_failures: Sequence[int] = (),
        name: str = "state",
        again: bool = False,
        rank_type: type[PlayedRank] = PlayedRank,
    ) -> PlayedWorld:
        """Begins the next generation on these nodes; with `again`, another checkpointer of the present one."""
        if not again:
            self.end()
            self.generation += 1
        size = len(nodes) * ranks_of_node
        ranks = [
            rank_type(
                RankIdentity(
                    rank=rank,
                    world_size=size,
                    local_rank=rank % ranks_of_node,
                    local_world_size=ranks_of_node,
                    generation=self.generation,
                    folder=nodes[rank // ranks_of_node].folder / STAGE,
                    store=("", 0),
                    node=rank // ranks_of_node,
                    unsound=unsound,
                    script_failures=tuple(script_failures),
                ),
                nodes[rank // ranks_of_node],
                replicated=replicated,
                copies=copies,
                name=name,
            )
            for rank in range(size)
        ]
        self.world = PlayedWorld(self, ranks, kills)
        self._begun.append(self.world)
        self.world.begin()
        for rank in ranks:
            if rank.lives:
                rank.memory.slots._clock = lambda: self.now
        return self.world


_sites: list[PlayedSite] = []


def _world() -> PlayedWorld:
    world = _sites[-1].world
    assert world is not None
    return world


@contextmanager
def played_site(folder: Path) -> Iterator[PlayedSite]:
    """A site; until the context ends, checkpointers of this process are ranks of its worlds."""
    site = PlayedSite(folder)
    creating = threading.Lock()

    class ToldPeers(Peers):
        """Takes the address of its node's receiver, as if it were in the rank's environment."""

        def __init__(self, own: RankIdentity, *arguments: Any, **options: Any) -> None:
            node = site.network.nodes[own.folder.parent.name]
            with creating, mock.patch.dict(os.environ, {RECEIVER_VARIABLE: node.receiver.address.dump()}):
                super().__init__(own, *arguments, **options)

    class Thread:
        """Does nothing until a test has it."""

        def __init__(self, *, target: Callable[..., None], args: tuple[Any, ...] = (), name: str, daemon: bool) -> None:
            self._does = target, args
            self._name = name

        def start(self) -> None:
            if self._name == "perdure-restored":
                site.detaching.append(self._does)

    def connected(own: RankIdentity, name: str, **_: Any) -> Store:
        return PrefixStore(f"{name}/", _world().store)

    def storage(own: RankIdentity, name: str, *, stored: bool, **_: Any) -> DurableCheckpoints:
        played = PlayedStorage(own, name, StorageLink(own.folder), None, meshes=(), each_rank=frozenset())
        played.found = site.stored.get(name) if stored else None
        return played

    played = {
        "connect": connected,
        "Peers": ToldPeers,
        "SnapshotFinisher": PlayedFinisher,
        "exchange": lambda *arguments, **options: _world().exchange(*arguments, **options),
        "FormerSnapshots": PlayedFormerSnapshots,
        "Resharding": PlayedResharding,
        "connect_storage": storage,
        "threading": SimpleNamespace(Thread=Thread),
    }
    with ExitStack() as patches:
        for name, value in played.items():
            for module in (generation, generation_storage):
                if hasattr(module, name):
                    patches.enter_context(mock.patch.object(module, name, value))
        patches.enter_context(mock.patch.object(finishing, "threading", SimpleNamespace(Thread=Thread)))
        patches.enter_context(mock.patch.object(checkpointer, "GenerationCheckpoints", PlayedGeneration))
        patches.enter_context(mock.patch.object(checkpointer, "dist", SimpleNamespace(is_initialized=lambda: True)))
        patches.enter_context(
            mock.patch.object(
                peers, "CopySender", lambda address, *, folder: PlayedSender(site.network, address, folder=folder)
            )
        )
        _sites.append(site)
        try:
            yield site
        finally:
            site.end()
            _sites.remove(site)
