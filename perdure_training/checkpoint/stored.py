"""Restores a state from the job's storage: which checkpoint is undamaged, and what each rank loads of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from torch.distributed import Store

from perdure_training.checkpoint.differing import OwnView, names_of_others, own_view
from perdure_training.checkpoint.distributed_format import METADATA, Loading, names_in, read_metadata
from perdure_training.checkpoint.saved_structure import Path, as_saved
from perdure_training.checkpoint.world import RankIdentity
from perdure_training.node_api.agent_client import Json
from perdure_training.node_api.storage_link import CheckpointsUnusable, StorageLink, StorageProblem

logger = logging.getLogger(__name__)

PATIENCE = 600.0
"""Seconds for which a restore waits for its agent and the storage: to begin anew would cost the whole training."""


class StoredCheckpoints:
    """The checkpoints of one state in the job's storage, as one rank of a new world sees them.

    Invariants:
        - All ranks load the same checkpoint, or all of them raise the same error.
        - Nothing of a state is changed before all ranks know that they can load it.
    """

    def __init__(
        self, own: RankIdentity, link: StorageLink, *, place: str, each_rank: frozenset[str], replicated: bool
    ) -> None:
        """Creates the object.

        Args:
            own: This rank.
            link: The node's agent.
            place: The folder of the checkpoints within the storage.
            each_rank: Names in the state that a rank which was not there keeps, such as generators.
            replicated: Every rank's state is the same.
        """
        self._own = own
        self._link = link
        self._place = place
        self._each_rank = each_rank
        self._replicated = replicated

    def restore(
        self, state: dict[str, Any], store: Store, *, objects: Collection[str] = ()
    ) -> tuple[int, str, dict[str, Any]] | None:
        """Loads the newest checkpoint that is complete and undamaged.

        Args:
            state: What is restored: values, and the state dicts of objects. Tensors are changed in place.
            objects: Names in the state of objects that judge by themselves what they are given.
            store: The generation's store.

        Returns:
            The step, the checkpoint's folder, and the state; None if there is no checkpoint.

        Raises:
            StorageAway: if the agent did not answer for long, or could not reach the storage.
            StorageProblem: if the storage cannot be read.
            CheckpointsUnusable: if all checkpoints are damaged, and the job does not start over then.
            KeyError: if the checkpoint has another state.
        """
        own = self._own
        answer: Json = {}
        if own.rank == 0:
            request: Json = {"request": "list", "place": self._place}
            answer = self._link.insist(request, patience=PATIENCE)
            if steps := answer.get("distrusted"):
                logger.warning(
                    "perdure: checkpoints in storage are not loaded, as the job failed after their restore, or a loss "
                    "that is not a number followed: step%s %s",
                    "s" if len(steps) > 1 else "",
                    ", ".join(map(str, steps)),
                )
            store.set("durable/found", json.dumps(answer))
        answer = json.loads(store.get("durable/found"))
        unusable: list[str] = []
        for number, found in enumerate(answer["checkpoints"]):
            folder, step = str(found["folder"]), int(found["step"])
            damages = [str(damage) for damage in self._share(store, f"durable/damage/{number}", self._damage(folder))]
            if any(damages):
                damage = "; ".join(dict.fromkeys(filter(None, damages)))
                unusable.append(f"{folder}: {damage}")
                if own.rank == 0:
                    logger.warning("perdure: the checkpoint of step %d in storage is not loaded: %s", step, damage)
                continue
            if own.rank == 0 and step in answer.get("distrusted", ()):
                logger.warning("perdure: step %d is loaded nevertheless: the others are damaged", step)
            return step, folder, self._load(folder, state, store, objects)
        if unusable and not answer.get("start_over"):
            self._stop(unusable)
        if unusable and own.rank == 0:
            self._report_start_over(unusable)
        return None

    def _stop(self, unusable: Sequence[str]) -> NoReturn:
        """Ends the ranks, and has the control plane stop the job."""
        if self._own.rank == 0:
            report: Json = {"request": "unusable", "generation": self._own.generation, "damages": list(unusable)}
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
            "unusable": list(unusable),
        }
        self._link.insist(report, patience=PATIENCE)
        logger.warning("perdure: no checkpoint in storage can be loaded, and the script starts over")

    def _share(self, store: Store, key: str, value: Any) -> list[Any]:
        """Tells all ranks a value; returns those of all."""
        store.set(f"{key}/{self._own.rank}", json.dumps(value))
        return [json.loads(store.get(f"{key}/{rank}")) for rank in range(self._own.world_size)]

    def _damage(self, folder: str) -> str:
        """Why a checkpoint cannot be loaded, as far as this rank has looked; empty if it can."""
        share = {"request": "verify", "folder": folder, "share": [self._own.rank, self._own.world_size]}
        try:
            return str(self._link.insist(share, patience=PATIENCE)["damage"])
        except StorageProblem as error:
            return str(error)

    def _load(self, folder: str, state: dict[str, Any], store: Store, objects: Collection[str]) -> dict[str, Any]:
        def read(name: str, offset: int, length: int) -> bytearray:
            request = {"request": "read", "folder": folder, "name": name, "offset": offset, "length": length}
            return self._link.read(request, patience=PATIENCE)

        own = self._own
        request = {"request": "read", "folder": folder, "name": METADATA}
        metadata = read_metadata(bytes(self._link.read(request, patience=PATIENCE)))
        view = own_view(metadata, rank=own.rank, world_size=own.world_size, replicated=self._replicated)
        saved = names_in(metadata)
        mark = f"rank-{own.rank}"
        # A world with more ranks than were saved leaves the others' generators as they are.
        differs = {name for name in self._each_rank if mark in saved.get(name, ())}
        target = {name: value for name, value in state.items() if name not in self._each_rank}
        target |= {name: {mark: state[name]} for name in differs}
        of_others = names_of_others(metadata, rank=own.rank, world_size=own.world_size)
        places: dict[str, dict[Path, Any]] = {}
        for name in view.own_names:
            if name in of_others and not self._replicated:
                # This rank's optimizer must not grow by what another one keeps.
                continue
            first, *rest = view.paths[name]
            places.setdefault(str(first), {})[tuple(rest)] = view.metadata.state_dict_metadata[name]
        for name, value in target.items():
            if name not in differs:
                target[name] = as_saved(value, places.get(name, {}), is_object=name in objects)
        loading = Loading(target, view.metadata)
        problem = self._of_another_world(view, loading) or loading.problem
        left = [
            name for name in view.own_names if name not in loading.names and name.split(".")[0] not in self._each_rank
        ]
        report = {"names": sorted(state), "problem": problem, "left": left}
        reports = self._share(store, f"durable/load/{folder}", report)
        wanted = {name for report in reports for name in report["names"]}
        if not loading.first_names | (self._each_rank & state.keys()) <= saved.keys() <= wanted:
            raise KeyError(f"the checkpoint has {sorted(saved)}, the state has {sorted(state)}: restore what was saved")
        problems = sorted({report["problem"] for report in reports} - {""})
        lost = set[str](left).intersection(*(report["left"] for report in reports))
        if lost:
            problems.append(f"no rank's state has {', '.join(sorted(lost)[:8])}, which would be lost")
        if problems:
            raise KeyError(f"{folder}: the checkpoint does not have the state that is restored: {'; '.join(problems)}")
        loading.read(read)
        return {name: value[mark] if name in differs else value for name, value in target.items()}

    def _of_another_world(self, view: OwnView, loading: Loading) -> str:
        """Why values that differ between ranks cannot be loaded into a world of this size; empty if they can."""
        names = [name for name in view.others if name in loading.names]
        if not names:
            return ""
        text = _values(names, {name: view.others[name] for name in names})
        if not self._replicated:
            return (
                f"{text}, and a world of {self._own.world_size} cannot split them anew. Continue with as many ranks; or"
                " save split tensors as DTensors, and leave out what each rank can begin anew"
            )
        if self._own.rank == 0:
            logger.warning("perdure: %s, although the state is replicated; new ranks take those of rank 0", text)
        return ""


def _values(names: list[str], sizes: Mapping[str, int]) -> str:
    first = ", ".join(sorted(names)[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    ranks = max(sizes.values())
    return f"{first} {'differ' if len(names) > 1 else 'differs'} between the {ranks} ranks that saved it"
