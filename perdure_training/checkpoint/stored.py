"""Restores a state from the job's storage: which checkpoint is undamaged, and what each rank loads of it."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, NoReturn

from torch.distributed import Store

from perdure_training.checkpoint.distributed_format import METADATA, read_metadata
from perdure_training.checkpoint.planned_state import OfAnotherWorld, StateOfRank, plan_state
from perdure_training.checkpoint.refused_restore import await_other_world, takes_older
from perdure_training.checkpoint.state_search import AWAY, PATIENCE, REPEATED, WAIT, Found, Lookup
from perdure_training.checkpoint.world import RankIdentity
from perdure_training.node_api.agent_client import Json
from perdure_training.node_api.storage_link import CheckpointsUnusable, StorageAway, StorageLink, StorageProblem

logger = logging.getLogger(__name__)

_TRIED_FOR = 30.0
"""Seconds for which a rank tries to verify its share, where the job waits for what is stored: then all of them try once
more, and the job learns why."""


class StoredCheckpoints:
    """The checkpoints of one state in the job's storage, as one rank of a new world sees them.

    Invariants:
        - All ranks load the same checkpoint, or all of them raise the same error.
        - Nothing of a state is changed before all ranks know that they can load it.
    """

    def __init__(self, own: RankIdentity, link: StorageLink, *, place: str) -> None:
        """Creates the object.

        Args:
            own: This rank.
            link: The node's agent.
            place: The folder of the checkpoints within the storage.
        """
        self._own = own
        self._link = link
        self._place = place
        self.started_over = False
        """All checkpoints were damaged, which the job has learned: the script starts over."""

    def restore(self, found: Found, state: StateOfRank, store: Store) -> tuple[int, str, dict[str, Any]] | None:
        """Loads the newest checkpoint that is complete and undamaged.

        Args:
            found: The checkpoints that the storage has, and that are newer than what is in memory.
            state: What is restored.
            store: The generation's store.

        Returns:
            The step, the checkpoint's folder, and the state; None if there is no checkpoint, or all of them are damaged
            and there is another state.

        Raises:
            StorageAway: if the agent did not answer for long, or could not reach the storage; while the checkpoint is
                verified, only if the job does not wait for that.
            StorageProblem: if the storage cannot be read.
            CheckpointsUnusable: if all checkpoints are damaged, and the job does not start over then.
            OfAnotherWorld: if only a world of another size can have it, and none comes.
            KeyError: if the checkpoint has another state.
        """
        own = self._own
        if found.distrusted and own.rank == 0:
            logger.warning(
                "perdure: checkpoints in storage are not loaded, as the job failed after their restore, or a loss "
                "that is not a number followed: step%s %s",
                "s" if len(found.distrusted) > 1 else "",
                ", ".join(map(str, found.distrusted)),
            )
        unusable: list[str] = []
        for one in found.checkpoints:
            folder, step = str(one["folder"]), int(one["step"])
            damages = self._verify(folder, found.lookup, store)
            if any(damages):
                damage = "; ".join(dict.fromkeys(filter(None, damages)))
                unusable.append(f"{folder}: {damage}")
                if own.rank == 0:
                    logger.warning("perdure: the checkpoint of step %d in storage is not loaded: %s", step, damage)
                continue
            if own.rank == 0 and step in found.distrusted:
                logger.warning("perdure: step %d is loaded nevertheless: the others are damaged", step)
            try:
                return step, folder, self._load(folder, state, store)
            except OfAnotherWorld as error:
                if takes_older(own, store):
                    if own.rank == 0:
                        logger.warning("perdure: step %d in storage is not loaded: %s", step, error.args[0])
                    continue
                await_other_world(own, error, step=step, source="storage", folder=folder)
        if found.lookup.in_memory is not None:
            return None
        if unusable and not found.start_over:
            self._stop(unusable)
        if unusable:
            self.started_over = True
            if own.rank == 0:
                self._report_start_over(unusable)
        return None

    def _stop(self, unusable: Sequence[str]) -> NoReturn:
        """Ends the ranks, and has the control plane stop the job."""
        if self._own.rank == 0:
            report: Json = {"request": "unusable", "generation": self._own.generation, "damages": list(unusable)}
            report |= {"place": self._place}
            self._link.insist(report, patience=PATIENCE)
        raise CheckpointsUnusable(
            f"no checkpoint in storage can be loaded: {'; '.join(unusable)}. Repair them, or remove those that are not"
            " needed; or set checkpoint.on_unusable: start_over"
        )

    def _report_start_over(self, unusable: Sequence[str]) -> None:
        """Has the control plane keep the damaged checkpoints, as rank 0, before any other is stored."""
        report: Json = {
            "request": "restored",
            "generation": self._own.generation,
            "step": 0,
            "source": "unknown",
            "place": self._place,
            "unusable": list(unusable),
        }
        self._link.insist(report, patience=PATIENCE)
        logger.warning("perdure: no checkpoint in storage can be loaded, and the script starts over")

    def _share(self, store: Store, key: str, value: Any) -> list[Any]:
        """Tells all ranks a value; returns those of all."""
        store.set(f"{key}/{self._own.rank}", json.dumps(value))
        return [json.loads(store.get(f"{key}/{rank}")) for rank in range(self._own.world_size)]

    def _verify(self, folder: str, lookup: Lookup, store: Store) -> list[str]:
        """Why a checkpoint cannot be loaded, as far as each rank has looked; empty where it can. Where the job waits
        for states that exist, a storage that has begun to hang is waited for: the job ends that.

        Raises:
            StorageAway: if the job does not wait for it.
        """
        own, told = self._own, 0.0
        waits = own.known is not None and own.known.on_loss == WAIT and not own.known.accepts_less
        for attempt in itertools.count():
            found = self._share(store, f"durable/damage/{folder}/{attempt}", self._damage(folder, waits=waits))
            away = next((str(one["away"]) for one in found if one["away"]), "")
            if not away:
                return [str(one["damage"]) for one in found]
            now = time.monotonic()
            if own.rank == 0 and (not told or now - told >= REPEATED):
                told = now
                logger.warning("perdure: waits for the storage of checkpoints: %s", away)
                self._report_wait(replace(lookup, storage=AWAY, problem=away))
            if own.local_rank == 0:
                self._tell({"request": "waiting", "generation": own.generation})
        raise AssertionError("it is tried until the ranks are ended")

    def _report_wait(self, lookup: Lookup) -> None:
        """Has the job learn, as rank 0, what the ranks wait for."""
        source = "nothing" if lookup.in_memory is None else "memory"
        report: Json = {"request": "restored", "generation": self._own.generation, "step": lookup.in_memory or 0}
        self._tell(report | {"source": source, "place": self._place, "lookup": asdict(lookup), "waits": True})

    def _tell(self, report: Json) -> None:
        with contextlib.suppress(StorageAway, StorageProblem):
            self._link.ask(report, within=5.0)

    def _damage(self, folder: str, *, waits: bool) -> Json:
        """Why a checkpoint cannot be loaded, as far as this rank has looked, and why it could not look; both empty if
        it can."""
        share = {"request": "verify", "folder": folder, "share": [self._own.rank, self._own.world_size]}
        try:
            patience = _TRIED_FOR if waits else PATIENCE
            return {"damage": str(self._link.insist(share, patience=patience)["damage"]), "away": ""}
        except StorageProblem as error:
            return {"damage": str(error), "away": ""}
        except StorageAway as error:
            if not waits:
                raise
            return {"damage": "", "away": f"node {self._own.node}: {error}"}

    def _load(self, folder: str, state: StateOfRank, store: Store) -> dict[str, Any]:
        def read(name: str, offset: int, length: int) -> bytearray:
            request = {"request": "read", "folder": folder, "name": name, "offset": offset, "length": length}
            return self._link.read(request, patience=PATIENCE)

        request = {"request": "read", "folder": folder, "name": METADATA}
        metadata = read_metadata(bytes(self._link.read(request, patience=PATIENCE)))
        planned = plan_state(
            metadata,
            state,
            own=self._own,
            share=lambda value: self._share(store, f"durable/load/{folder}", value),
            source=folder,
        )
        planned.loading.read(read)
        return planned.loaded()
