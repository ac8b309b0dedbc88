"""What one checkpointer of a generation has stored, and what the job learns of its beginning."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch.distributed import Store
from torch.distributed.device_mesh import DeviceMesh

from perdure_training.checkpoint.agreed_step import AgreedStep
from perdure_training.checkpoint.durable import DurableCheckpoints, Metrics
from perdure_training.checkpoint.finishing import SnapshotFinisher
from perdure_training.checkpoint.late_storage import LateStorage, all_reached
from perdure_training.checkpoint.restored_state import of_each_rank
from perdure_training.checkpoint.schedule import Schedule
from perdure_training.checkpoint.staging import meshes_of
from perdure_training.checkpoint.state_search import NONE, PATIENCE, UNUSED, Expected, Found, Lookup, StateSearch
from perdure_training.checkpoint.values import capture
from perdure_training.checkpoint.world import RankIdentity, connect, place_of
from perdure_training.node_api.agent_client import Json
from perdure_training.node_api.storage_link import StorageAway, find_storage
from perdure_training.snapshots.findings import Finding

logger = logging.getLogger(__name__)

_AGENT_PATIENCE = 20.0
"""Seconds for which a world waits to learn whether its job stores checkpoints. Then it trains, and asks again."""


class GenerationStorage:
    """The connection of one checkpointer with the job's storage, in one generation.

    Invariants:
        - A step is stored by all ranks, or by none.
        - The job learns once with which step the training has begun, also from an agent that was away then.
    """

    def __init__(self, own: RankIdentity, name: str, store: Store, finisher: SnapshotFinisher, *, use: Json) -> None:
        """Creates the object, which is not connected yet.

        Args:
            own: This rank.
            name: The checkpointer's name.
            store: A connection to the generation's store for the training's own thread.
            finisher: Makes the snapshots valid of which some are stored.
            use: How the state is kept in memory, which the job learns.
        """
        self._own = own
        self._name = name
        self._store = store
        self._finisher = finisher
        self._use = use
        self.durable: DurableCheckpoints | None = None
        """What is stored; None where the job stores nothing, or not all ranks have reached their agents."""
        self._reached: DurableCheckpoints | None = None
        """The same where this rank has reached its agent, which learns all that the job is to learn."""
        self._late: LateStorage | None = None
        """Set while not all ranks have reached their agents."""
        self._begun: Callable[[DurableCheckpoints], None] | None = None
        """Has the job learn with which step the training has begun."""
        self._made_before: int | None = None
        """As rank 0: the newest step that the last world has made."""
        self._distrusted: tuple[int, ...] = ()
        self._obstacles: Sequence[Finding] = ()
        self._place = place_of(own, name)
        self.expected = Expected.of(own, self._place)
        self._searches = 0
        self._lookup = Lookup(storage=UNUSED)
        """As rank 0: what was looked for, and found."""

    def connect(self, state: Mapping[str, Any], *, stored: bool, required: bool) -> None:
        """Finds out whether the job stores checkpoints, and when.

        Args:
            state: What is saved.
            stored: Whether it may be stored.
            required: Nothing is in memory: to begin anew because the agent is away would cost the whole training.

        Raises:
            StorageAway: if that is required, and the agent does not answer.
        """
        meshes: Sequence[DeviceMesh] = ()

        def reach(*, again: bool) -> DurableCheckpoints | None:
            return connect_storage(
                self._own,
                self._name,
                meshes=lambda: meshes or meshes_of(capture(state)),
                each_rank=of_each_rank(state),
                stored=stored,
                required=required and stored and not again,
                use=self._use,
                again=again,
            )

        durable = self._reached = reach(again=False)
        missing = durable is None and find_storage() is not None
        if all_reached(self._own, self._store, reached=not missing):
            self.durable = self._finisher.durable = durable
            return
        # Taken by the training's own thread, which changes the state later.
        meshes = meshes_of(capture(state))
        self._late = LateStorage(
            self._own,
            connect(self._own, self._name),
            durable,
            connect=lambda: reach(again=True),
            on_reached=self._report_late,
        )

    def remember(self, agreed: AgreedStep, *, last_resort: bool) -> None:
        """Remembers what the ranks have found in memory."""
        self._made_before = agreed.made_before
        if not last_resort:
            self._lookup = Lookup(
                stored=self.expected.stored,
                complete=agreed.complete,
                in_memory=agreed.decision.step,
                seen_in_memory=agreed.seen,
                storage=UNUSED,
            )
        self._distrusted = tuple(agreed.decision.distrusted)
        self._obstacles = agreed.obstacles

    def pass_over_memory(self) -> None:
        """Has the next search take what is in the storage, however old it is."""
        self._lookup = replace(self._lookup, in_memory=None)

    def search(self, agreed: AgreedStep) -> Found:
        """Looks in the storage for what is newer than the memory, and waits for what is known to exist.

        Raises:
            StateLost: if a newer state existed, and the job does not go on without it.
        """
        decision = agreed.decision
        stores = self.durable is not None and self.durable.stores
        self._searches += 1
        source = "nothing" if decision.step is None else "peer" if decision.sources or decision.holders else "memory"
        search = StateSearch(self._own, find_storage(), self._store, place=self._place, number=self._searches)
        lookup = replace(self._lookup, storage=NONE, problem="")
        found = search.find(self.expected, lookup, stores=stores, source=source)
        self._lookup = found.lookup
        return found

    def report(self, step: int, *, source: str, folder: str = "", apart: str = "", reported: int | None = None) -> None:
        """Has the job learn with which step the training has begun, and how that differs from other checkpointers'."""
        if apart and self._own.rank == 0:
            logger.warning("perdure: %s", apart)
        again = None if self._made_before is None else max(self._made_before - step, 0)
        self._begun = partial(
            DurableCheckpoints.begin,
            step=step,
            source=source,
            folder=folder,
            again=again,
            distrusted=self._distrusted,
            obstacles=self._obstacles,
            lookup=self._lookup,
            apart=apart,
            reported=reported,
        )
        if self._reached is not None:
            self._begun(self._reached)

    def _report_late(self, durable: DurableCheckpoints) -> None:
        """Has the job learn with which step the training has begun, from an agent that was away then."""
        if self._begun is not None:
            self._begun(durable)

    def begin_late(self, step: int) -> None:
        """Stores checkpoints from now on, if all ranks do."""
        if self._late is not None and (durable := self._late.begun(step)) is not None:
            self.durable = self._finisher.durable = durable
            self._late = None

    def announce(self, step: int, *, every: int) -> None:
        """Has all ranks store a later step, if one is due."""
        if self.durable is not None:
            self.durable.announce(step, every=every)

    def answer(self, step: int, request: int) -> None:
        """Has a step that all ranks store answer a request for a checkpoint."""
        if self.durable is not None:
            self.durable.answer(step, request)

    def record(self, step: int, metrics: Metrics) -> None:
        """Records that a step is saved next, and what was measured at it: it may be stored."""
        if self.durable is not None:
            self.durable.record(step, metrics)

    def expect(self, step: int) -> None:
        """Records that the script requests to store a step, which is saved next or refused."""
        if self.durable is not None:
            self.durable.expect(step)

    def is_announced(self, step: int) -> bool:
        """Whether all ranks store this step."""
        return self.durable is not None and self.durable.is_announced(step)

    def refuse(self, step: int, problem: str) -> None:
        """Records that this rank does not have a step that is to be stored, so that the others do not wait for it."""
        if self.durable is not None:
            self.durable.refuse(step, problem)

    def wait(self, timeout: float) -> bool:
        """Waits until nothing is being stored."""
        return self.durable is not None and self.durable.wait(timeout)

    def close(self) -> None:
        """Ends the thread that has steps stored, once those that wait are."""
        if self.durable is not None:
            self.durable.close()


def connect_storage(
    own: RankIdentity,
    name: str,
    *,
    meshes: Callable[[], Sequence[DeviceMesh]],
    each_rank: frozenset[str],
    stored: bool,
    required: bool,
    use: Json,
    again: bool = False,
) -> DurableCheckpoints | None:
    """Finds out whether the job stores checkpoints, and when; None where no agent can say.

    Args:
        own: This rank.
        name: The checkpointer's name.
        meshes: Returns the device meshes of the state.
        each_rank: Names in the state of which each rank has its own value, and a new rank keeps its own.
        stored: Whether this state may be stored.
        required: Whether to insist on an answer.
        use: How the checkpointer keeps the state in memory, for the agent.
        again: Whether it was tried before.

    Raises:
        StorageAway: if an answer is required, and there is none.
    """
    link = find_storage()
    if link is None:
        return None
    try:
        request: Json = {"request": "hello", "generation": own.generation, "saves": stored, **use}
        hello = link.insist(request, patience=PATIENCE if required else _AGENT_PATIENCE)
    except StorageAway as error:
        if required:
            raise
        logger.log(
            logging.DEBUG if again else logging.WARNING,
            "perdure: no checkpoints are stored until the agent answers, which is tried again: %s",
            error,
        )
        return None
    if not (stored and hello.get("stores")):
        return DurableCheckpoints(own, name, link, None, meshes=(), each_rank=each_rank)
    schedule = Schedule(every_steps=hello.get("every_steps"), every_seconds=hello.get("every_s"))
    return DurableCheckpoints(own, name, link, schedule, meshes=meshes(), each_rank=each_rank)
