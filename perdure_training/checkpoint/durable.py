"""Durable checkpoints: has snapshots copied to the job's storage, and restores from there.

The ranks agree on a step that they will all save, keep that snapshot from being overwritten, plan who stores what, and
hand the snapshot to the agents, as open files. Training does not wait for any of this. A checkpoint that cannot be
stored is given up; the next one is another try.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, SupportsFloat, cast

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh

from perdure_training.checkpoint.distributed_format import (
    METADATA,
    load,
    metadata_file,
    names_in,
    plan_file,
    planner_of,
)
from perdure_training.checkpoint.schedule import Schedule
from perdure_training.checkpoint.staging import read_parts
from perdure_training.checkpoint.world import RankIdentity, connect
from perdure_training.snapshots.arena import PAGE, Header, Lease, crc32
from perdure_training.storage_link import Json, StorageAway, StorageLink, StorageProblem, find_storage

logger = logging.getLogger(__name__)

Metrics = Mapping[str, SupportsFloat] | None
"""What was measured, by name."""

_PLANNED_WITHIN = timedelta(minutes=3)
"""Time in which all ranks must have planned a checkpoint: a rank that has not saved the step never does."""
_COMMITTED_WITHIN = 1800.0
"""Seconds after which rank 0 gives up a checkpoint whose parts it cannot know about."""
_LOOK = 5.0
"""Seconds of one request whether a checkpoint is committed."""
_AGENT_RESTARTS = 120.0
"""Seconds for which a part is offered to an agent that is away."""
_RESTORE_PATIENCE = 600.0
"""Seconds for which a restore waits for its agent and the storage: to begin anew would cost the whole training."""
_AGENT_PATIENCE = 60.0
"""Seconds for which a world waits to learn whether its job stores checkpoints."""
_QUEUED = 1
"""Checkpoints that may wait for the one in progress; each keeps a slot from being used."""
_MEASURED = 64
"""Steps whose metrics are remembered: more than are saved while one is stored."""
_ANNOUNCED = "durable/target"
_COMMITTED = "durable/committed"


@dataclass(frozen=True)
class _Snapshot:
    """A snapshot that is to be stored."""

    header: Header
    content: memoryview
    lease: Lease
    crc32: int | None
    """Of the content, for the agent; None if it is not known yet."""


class DurableCheckpoints:
    """One rank's part in the checkpoints of a generation that are stored durably.

    Invariants:
        - No call waits for storage, except for `restore` and `wait`.
        - A snapshot is leased from before it may be overwritten until the agent has copied it.
    """

    def __init__(
        self,
        own: RankIdentity,
        name: str,
        link: StorageLink,
        schedule: Schedule | None,
        *,
        meshes: Sequence[DeviceMesh],
        each_rank: frozenset[str],
    ) -> None:
        """Creates the object, and the thread that stores.

        Args:
            own: This rank.
            name: The checkpointer's name.
            link: The node's agent.
            schedule: When the job's checkpoints are due; None if it stores none.
            meshes: The device meshes of the state.
            each_rank: Names in the state whose values differ between ranks.
        """
        self._own = own
        self._link = link
        self._schedule = schedule
        self._meshes = meshes
        self._each_rank = each_rank
        stage = own.folder.name
        self._place = "/".join([*([stage] if stage != "stage-0" else []), *([name] if name != "state" else [])])
        self._queue: queue.Queue[_Snapshot] = queue.Queue()
        self._unfinished = threading.Condition()
        self._waiting = 0
        self._announced = -1
        self._order = 0
        """The newest request that the announced step answers."""
        self._target = -1
        """The last step whose storing has begun."""
        self._committed = -1
        self._metrics: dict[int, dict[str, float]] = {}
        if schedule is not None:
            self._announcing = connect(own, name)
            self._asking = connect(own, name)
            self._planning = connect(own, name, timeout=_PLANNED_WITHIN)
            threading.Thread(target=self._run, name="perdure-durable", daemon=True).start()

    @property
    def stores(self) -> bool:
        """Whether the job has a storage."""
        return self._schedule is not None

    def begin(
        self,
        step: int,
        source: str,
        *,
        folder: str = "",
        again: int | None = None,
        distrusted: Sequence[int] = (),
    ) -> None:
        """Records, and reports as rank 0, the step that was restored.

        Args:
            step: The step.
            source: "memory", "peer" for the memory of another node, or "storage".
            folder: The checkpoint's folder within the storage.
            again: The number of steps that were made after it and are lost; None where that is unknown.
            distrusted: Newer steps that were not loaded because the job failed again after each load.
        """
        if self._schedule is not None:
            self._schedule.begin(step)
        self._report(step, {"source": source, "folder": folder, "again": again, "distrusted": list(distrusted)})

    def announce(self, step: int, *, every: int) -> None:
        """Announces, as rank 0, the next step that all ranks store, if one is due. Called at each step that is saved.

        The others learn of it before they save it: they have made a step together since.

        Args:
            step: The step that is saved.
            every: The number of steps between two saves.
        """
        schedule = self._schedule
        if schedule is None or self._own.rank or self._waiting or step <= self._announced:
            return
        if (target := schedule.next_target(step, every=every, orders=self._link.orders())) is not None:
            self._announced, self._order = target, schedule.order
            self._announcing.set(_ANNOUNCED, str(target))

    def measured(self, step: int, metrics: Metrics) -> None:
        """Remembers, as rank 0, what the script measured at a step that may be stored."""
        if self._schedule is None or self._own.rank or not metrics:
            return
        self._metrics[step] = {name: float(value) for name, value in metrics.items()}
        for older in sorted(self._metrics)[:-_MEASURED]:
            del self._metrics[older]

    def is_announced(self, step: int) -> bool:
        """Whether all ranks store this step. One thread calls it."""
        if self._schedule is None:
            return False
        return self._asking.check([_ANNOUNCED]) and int(self._asking.get(_ANNOUNCED)) == step

    def store(self, header: Header, content: memoryview, lease: Lease, *, crc32: int | None) -> None:
        """Has a snapshot stored, by another thread."""
        with self._unfinished:
            if self._schedule is None or self._waiting > _QUEUED:
                if self._schedule is not None:
                    logger.warning(
                        "perdure: step %d is not stored: the storage has not taken the last ones", header.step
                    )
                lease.end()
                return
            self._waiting += 1
            self._target = header.step
        self._queue.put(_Snapshot(header, content, lease, crc32))

    def wait_until_taken(self, timeout: float) -> bool:
        """Waits until no snapshot of this rank is being stored; returns whether that is so within `timeout`."""
        with self._unfinished:
            return self._unfinished.wait_for(lambda: not self._waiting, timeout)

    def wait(self, timeout: float) -> bool:
        """Waits until nothing is being stored; returns whether the last checkpoint was committed within `timeout`."""
        if self._schedule is None:
            return False
        until = time.monotonic() + timeout
        done = self.wait_until_taken(timeout)
        while done and self._own.rank and time.monotonic() < until:
            # Only rank 0 asks its agent.
            if self._announcing.check([_COMMITTED]) and int(self._announcing.get(_COMMITTED)) >= self._target:
                return True
            time.sleep(0.1)
        return done and self._committed >= self._target

    # Storing

    def _run(self) -> None:
        while True:
            snapshot = self._queue.get()
            step = snapshot.header.step
            try:
                self._store(snapshot)
            except (StorageAway, StorageProblem) as error:
                logger.warning("perdure: step %d was not stored, and the next one will be tried: %s", step, error)
            except Exception as error:
                # The store ends with its generation. Nothing here may end the training.
                logger.warning("perdure: step %d was not stored: %s: %s", step, type(error).__name__, error)
            finally:
                snapshot.lease.end()
                with self._unfinished:
                    self._waiting -= 1
                    self._unfinished.notify_all()

    def _store(self, snapshot: _Snapshot) -> None:
        own, header = self._own, snapshot.header
        checksum = crc32(snapshot.content) if snapshot.crc32 is None else snapshot.crc32
        order = self._order if header.step == self._announced else 0
        begun = time.monotonic()
        parts = read_parts(snapshot.content, index_at=header.index_at, meshes=self._meshes)
        planner = planner_of(parts, rank=own.rank, each_rank=self._each_rank)
        key = f"durable/{header.step}"
        self._tell(f"{key}/plan/{own.rank}", planner.create_local_plan())
        plans = self._gather(f"{key}/plan")
        metadata: Any = None
        if plans is not None:
            finals, metadata = planner.create_global_plan(plans)
            folder = f"step-{header.step}-{os.environ.get('PERDURE_RUN_ID', 'run')}-{own.generation}"
            folder = f"{self._place}/{folder}" if self._place else folder
            for rank, final in enumerate(finals):
                self._tell(f"{key}/final/{rank}", (folder, final))
        folder, final = self._learn(f"{key}/final/{own.rank}")
        file = plan_file(planner.finish_plan(final), planner, snapshot.content, rank=own.rank)
        self._tell(f"{key}/results/{own.rank}", file.results)
        results = self._gather(f"{key}/results")
        others = [] if results is None else [metadata_file(metadata, results)]
        request: Json = {
            "request": "store",
            "folder": folder,
            "step": header.step,
            "rank": own.rank,
            "ranks": own.world_size,
            "generation": own.generation,
            "name": file.name,
            "size": file.size,
            "order": order,
            "metrics": self._metrics.get(header.step, {}),
            "snapshot": {"offset": PAGE, "size": header.size, "checksum": checksum},
        }
        self._hand_over(request, snapshot.lease, [file.recipe, *others])
        if results is not None:
            self._until_committed(folder, header.step, begun)
            if self._schedule is not None:
                self._schedule.finish(order)
            for kind in ("plan", "final", "results"):
                for rank in range(own.world_size):
                    self._planning.delete_key(f"{key}/{kind}/{rank}")

    def _hand_over(self, request: Json, lease: Lease, contents: Sequence[bytes]) -> None:
        """Has the agent copy this rank's part, and waits until it has."""
        files = [_in_memory(content) for content in contents]
        until = time.monotonic() + _AGENT_RESTARTS
        try:
            while True:
                begun = time.monotonic()
                try:
                    self._link.ask(request, files=[lease.descriptor, *files], within=None)
                    return
                except StorageAway:
                    # An agent that ends loses what it copies; the next one gets it again.
                    now = time.monotonic()
                    if now - begun > _LOOK:
                        until = now + _AGENT_RESTARTS
                    if now >= until:
                        raise
                    time.sleep(1.0)
        finally:
            for file in files:
                os.close(file)

    def _until_committed(self, folder: str, step: int, begun: float) -> None:
        """Waits until the control plane has committed the checkpoint."""
        until = time.monotonic() + _COMMITTED_WITHIN
        while time.monotonic() < until:
            answer = self._link.insist(
                {"request": "await", "folder": folder, "within": _LOOK}, patience=_AGENT_RESTARTS
            )
            if answer.get("committed"):
                self._committed = step
                self._planning.set(_COMMITTED, str(step))
                logger.info("perdure: step %d is durable after %.1f s", step, time.monotonic() - begun)
                return
            if answer.get("given_up"):
                raise StorageProblem(str(answer["given_up"]))
        raise StorageProblem("not all parts were stored and committed in time")

    # Restoring

    def restore(self, state: dict[str, Any], store: Store) -> tuple[int, str, dict[str, Any]] | None:
        """Loads the newest checkpoint that is complete and undamaged.

        Args:
            state: What is restored: values, and the state dicts of objects. Tensors are changed in place.
            store: The generation's store.

        Returns:
            The step, the checkpoint's folder, and the state; None if there is no checkpoint.

        Raises:
            StorageAway: if the agent did not answer for long, or could not reach the storage.
            StorageProblem: if the storage cannot be read.
            KeyError: if the checkpoint has another state.
        """
        own = self._own
        listed: list[Json] = []
        if own.rank == 0:
            request: Json = {"request": "list", "place": self._place}
            answer = self._link.insist(request, patience=_RESTORE_PATIENCE)
            listed = answer["checkpoints"]
            if steps := answer.get("distrusted"):
                logger.warning(
                    "perdure: checkpoints in storage are not loaded, as the job failed after their restore: step%s %s",
                    "s" if len(steps) > 1 else "",
                    ", ".join(map(str, steps)),
                )
            store.set("durable/found", json.dumps(listed))
        listed = json.loads(store.get("durable/found"))
        for number, found in enumerate(listed):
            folder, step = str(found["folder"]), int(found["step"])
            damage = self._damage(folder)
            store.set(f"durable/damage/{number}/{own.rank}", damage)
            damages = [store.get(f"durable/damage/{number}/{rank}").decode() for rank in range(own.world_size)]
            if any(damages):
                if own.rank == 0:
                    logger.warning(
                        "perdure: the checkpoint of step %d in storage is not loaded: %s",
                        step,
                        "; ".join(filter(None, damages)),
                    )
                continue
            return step, folder, self._load(folder, state)
        return None

    def _report(self, step: int, facts: Json) -> None:
        if self._own.rank:
            return
        try:
            self._link.ask(
                {"request": "restored", "step": step, "generation": self._own.generation, **facts}, within=5.0
            )
        except (StorageAway, StorageProblem) as error:
            logger.debug("the restore is not reported: %s", error)

    def _damage(self, folder: str) -> str:
        """Why a checkpoint cannot be loaded, as far as this rank has looked; empty if it can."""
        share = {"request": "verify", "folder": folder, "share": [self._own.rank, self._own.world_size]}
        try:
            return str(self._link.insist(share, patience=_RESTORE_PATIENCE)["damage"])
        except StorageProblem as error:
            return str(error)

    def _load(self, folder: str, state: dict[str, Any]) -> dict[str, Any]:
        def read(name: str, offset: int, length: int) -> bytearray:
            request = {"request": "read", "folder": folder, "name": name, "offset": offset, "length": length}
            return self._link.read(request, patience=_RESTORE_PATIENCE)

        request = {"request": "read", "folder": folder, "name": METADATA}
        metadata = bytes(self._link.read(request, patience=_RESTORE_PATIENCE))
        saved = names_in(metadata)
        if saved.keys() != state.keys():
            raise KeyError(f"the checkpoint has {sorted(saved)}, the state has {sorted(state)}: restore what was saved")
        own = f"rank-{self._own.rank}"
        # A world with more ranks than were saved leaves the others' generators as they are.
        differs = {name for name in self._each_rank if own in saved[name]}
        target = {name: value for name, value in state.items() if name not in self._each_rank}
        target |= {name: {own: state[name]} for name in differs}
        for name, value in target.items():
            if isinstance(value, dict) and value.keys() >= {"state", "param_groups"} and "state" not in saved[name]:
                # An optimizer that had made no step was saved without state, and is new again.
                target[name] = {**value, "state": {}}
        load(target, metadata=metadata, read=read)
        return {name: value[own] if name in differs else value for name, value in target.items()}

    # The ranks' store

    def _tell(self, key: str, value: object) -> None:
        # Its stub lacks bytes.
        self._planning.set(key, cast("Any", pickle.dumps(value)))

    def _learn(self, key: str) -> Any:
        return pickle.loads(self._planning.get(key))

    def _gather(self, key: str) -> list[Any] | None:
        """Returns all ranks' values on rank 0, None elsewhere."""
        if self._own.rank:
            return None
        return [self._learn(f"{key}/{rank}") for rank in range(self._own.world_size)]


def connect_storage(
    own: RankIdentity,
    name: str,
    *,
    meshes: Callable[[], Sequence[DeviceMesh]],
    each_rank: frozenset[str],
    stored: bool,
    required: bool,
) -> DurableCheckpoints | None:
    """Finds out whether the job stores checkpoints, and when; None where no agent can say.

    Args:
        own: This rank.
        name: The checkpointer's name.
        meshes: Returns the device meshes of the state.
        each_rank: Names in the state whose values differ between ranks.
        stored: Whether this state may be stored.
        required: Whether to insist on an answer.

    Raises:
        StorageAway: if an answer is required, and there is none.
    """
    link = find_storage()
    if link is None:
        return None
    try:
        request: Json = {"request": "hello", "generation": own.generation, "saves": stored}
        hello = link.insist(request, patience=_RESTORE_PATIENCE if required else _AGENT_PATIENCE)
    except StorageAway as error:
        if required:
            raise
        logger.warning("perdure: no checkpoints in storage: %s", error)
        return None
    if not (stored and hello.get("stores")):
        return DurableCheckpoints(own, name, link, None, meshes=(), each_rank=each_rank)
    schedule = Schedule(every_steps=hello.get("every_steps"), every_seconds=hello.get("every_s"))
    return DurableCheckpoints(own, name, link, schedule, meshes=meshes(), each_rank=each_rank)


def _in_memory(content: bytes) -> int:
    """Returns an open file with this content, which other processes can read."""
    descriptor = os.memfd_create("perdure-checkpoint", os.MFD_CLOEXEC)
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    return descriptor
