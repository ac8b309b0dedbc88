"""Saves the training state into memory, has it stored, and restores it after a failure."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, MutableMapping
from typing import Any, Literal

import torch.distributed as dist

from perdure_training.checkpoint.agreed_step import AgreedStep
from perdure_training.checkpoint.cadence import Cadence
from perdure_training.checkpoint.durable import Metrics
from perdure_training.checkpoint.generation import GenerationCheckpoints
from perdure_training.checkpoint.hidden import check_reachable
from perdure_training.checkpoint.staging import Layout
from perdure_training.checkpoint.values import capture, objects_in
from perdure_training.checkpoint.world import own_identity
from perdure_training.events import TrainerEvents
from perdure_training.node_api.progress_file import SaveStall
from perdure_training.numbers import watch

logger = logging.getLogger(__name__)

_EMITTER = "Checkpointer"
"""Distinguishes its events from those that a script emits around its calls."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class Checkpointer:
    """The snapshots of one training state, in the memory of the nodes that train it, and some of them in storage.

    Invariants:
        - All ranks load the same step, or none of them loads any.
        - A snapshot that is incomplete or changed is never loaded.
        - The newest step that all ranks have is overwritten by none of them.
        - No failure to save ends the training.
    """

    def __init__(
        self,
        *,
        every: int | Literal["auto"] = "auto",
        max_overhead: float = 0.03,
        replicated: bool = False,
        copies: int | None = None,
        name: str = "state",
        storage: bool = True,
    ) -> None:
        """Creates a checkpointer; every rank creates it with the same arguments.

        Args:
            every: Saves each so many steps. "auto" chooses the densest number at which saving costs at most
                `max_overhead` of the time of the steps, by the cost of the last saves; the first ones save every step.
            max_overhead: The share of a step's time that "auto" allows.
            replicated: Every rank's state is the same, as with DistributedDataParallel: a rank on a new node takes
                another rank's. Otherwise a step can be loaded only if a snapshot of each rank's state is left.
            copies: The number of other nodes that keep a copy of each snapshot in their memory. By default one; none if
                the state is replicated.
            name: Distinguishes the states of one script, each with a Checkpointer of its own: letters, digits, ".",
                "_", "-".
            storage: Whether steps are copied to the job's storage, if it has one, and restored from there.

        Raises:
            ValueError: if an argument is out of range.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(f"name: expected up to 64 letters, digits, '.', '_' or '-', found {name!r}")
        if copies is not None and copies < 0:
            raise ValueError(f"copies: expected 0 or more, found {copies}")
        self._replicated = replicated
        self._copies = copies if copies is not None else 0 if replicated else 1
        self._cadence = Cadence(every, max_overhead=max_overhead)
        self._own = own_identity()
        self._world: GenerationCheckpoints | None = None
        self._name = name
        self._storage = storage
        self._restored = False
        self._save_stall = SaveStall(os.environ)
        self._events = TrainerEvents()

    def restore(self, state: MutableMapping[str, Any]) -> int | None:
        """Loads the newest step that all ranks have in memory, else the newest checkpoint in the job's storage. Call it
        on every rank, after `init_process_group` and before the first step.

        Args:
            state: As for `save`. Objects with `load_state_dict` are changed in place, and so are tensors, dictionaries
                and lists; other values are replaced. If nothing is loaded, objects with `start_over`, such as a
                `ShardingClient`, start over.

        Returns:
            The step, or None if nothing was loaded: the script starts, or loads its checkpoint from disk.

        Raises:
            RuntimeError: if several ranks have no process group yet, or if it was called before.
            ValueError: if this rank has another Checkpointer of this name.
            TypeError: if an object without `state_dict` contains one with it, such as a module: that would be lost.
            KeyError: if the snapshot or the checkpoint has other names than `state`.
            StorageAway: if the node's agent, which reads checkpoints, did not answer or could not reach the storage
                within ten minutes.
            StorageProblem: if the storage cannot be read.
            CheckpointsUnusable: if the storage has checkpoints and all of them are damaged, unless the job's
                `checkpoint.on_unusable` is `start_over`.
        """
        if self._restored:
            raise RuntimeError("Checkpointer.restore: called before; a process restores once, when it begins")
        check_reachable(state)
        world = self._begin()
        self._restored = True
        step = None
        if world is not None:
            with self._events.load_checkpoint(by=_EMITTER) as span:
                step = self._load(world, state)
                span.add(loaded_step=step, source=world.source, received_bytes=world.received)
        if step is None:
            for value in objects_in(list(state.values())):
                if callable(start_over := getattr(value, "start_over", None)):
                    start_over()
        return step

    def _load(self, world: GenerationCheckpoints, state: MutableMapping[str, Any]) -> int | None:
        agreed = self._agree(world)
        decision = agreed.decision
        certain = decision.step is not None and decision.former is None and not decision.is_behind
        world.storage.connect(state, stored=self._storage, required=not certain)
        step = self._load_newest(world, state, agreed)
        if step is None and decision.distrusted:
            # To begin anew would cost the whole training.
            last = self._agree(world, last_resort=True)
            step = None if last.decision.step is None else self._load_from_memory(world, state, last)
        if step is None:
            world.begin_anew()
        return step

    def _load_newest(
        self, world: GenerationCheckpoints, state: MutableMapping[str, Any], agreed: AgreedStep
    ) -> int | None:
        """Loads from memory, or from storage where that has a newer step."""
        decision = agreed.decision
        if decision.step is None or decision.is_behind or decision.may_be_old:
            step = world.restore_from_storage(state, agreed)
            if step is not None or decision.step is None:
                return step
        step = self._load_from_memory(world, state, agreed)
        return world.restore_from_storage(state, agreed.without_step()) if step is None else step

    def _load_from_memory(
        self, world: GenerationCheckpoints, state: MutableMapping[str, Any], agreed: AgreedStep
    ) -> int | None:
        if agreed.decision.former is not None:
            return world.restore_from_former(agreed, state)
        return world.restore_from_memory(agreed, state)

    def _agree(self, world: GenerationCheckpoints, *, last_resort: bool = False) -> AgreedStep:
        agreed = world.agree(last_resort=last_resort)
        if world.own.rank == 0 and agreed.decision.reason:
            logger.warning("perdure: %s", agreed.decision.reason)
        return agreed

    def save(self, step: int, state: Mapping[str, Any], *, durable: bool = False, metrics: Metrics = None) -> bool:
        """Copies the state into memory if the step is due, and returns as soon as it is copied.

        Args:
            step: The step that is complete: the same on all ranks, and higher than before. A lower one is not saved.
            state: Names with their values: objects with `state_dict`, tensors, anything that can be pickled, and
                dictionaries, lists and tuples of these.
            durable: Saves the step whether or not it is due, and has it copied to the job's storage afterwards; the
                same on all ranks. Use it for the last step, with `wait_until_durable`.
            metrics: What was measured at this step, for `checkpoint.keep_best`. Those of rank 0 count.

        Returns:
            Whether this rank has saved the step. It counts once all ranks have. A `durable` one waits for up to a
            minute for memory that older ones use, and is stored unless a newer one is requested before that begins.
            With `recovery.on_nan: rollback` a rank that has reported a loss that is not a number saves nothing more.

        Raises:
            RuntimeError: if `restore` was not called before: the first save would replace what can be restored.
        """
        if not self._restored:
            raise RuntimeError("Checkpointer.save: call restore(state) first, on every rank, before the first step")
        world = self._world
        if world is None:
            return False
        if problem := world.made.write(step) or watch.spoiled_by:
            # So that snapshots from before it are not overwritten.
            world.refuse(step, problem, durable=durable, spoiled=bool(watch.spoiled_by))
            return False
        agreed = world.cadence.every(step) if self._cadence.is_auto else None
        hold = world.hold_at(step)
        durable = world.answers(hold, step) or durable
        if not (durable or hold is not None or self._cadence.is_due(step, agreed=agreed)):
            return False
        world.storage.record(step, metrics)
        with (
            self._events.save(step=step, durable=durable, by=_EMITTER) as span,
            self._cadence.measure(step, agreed=agreed, finishing=world.finisher.seconds) as measured,
        ):
            saved = world.save(
                step,
                lambda: Layout(capture(state)),
                durable=durable,
                insists=hold is not None,
                reported=watch.reported_beyond(step),
            )
            measured.saved = saved
            span.add(saved=saved)
        self._save_stall.add(measured.seconds)
        world.announce(step, every=self._cadence.every(agreed=agreed))
        if self._cadence.is_auto:
            world.cadence.look(step)
        if world.own.rank == 0 and measured.every is not None:
            world.cadence.choose(measured.every, step=step)
        if hold is not None:
            world.wait_at(hold, step, state, saved=saved)
        return saved

    def flush(self) -> None:
        """Waits until the snapshots of this rank are complete. A script need not call it."""
        if self._world is not None:
            self._world.flush()

    def wait_until_durable(self, timeout: float) -> bool:
        """Waits until the newest step that was to be copied to storage is durable: a script that ends right after it
        would not have it. Call it on all ranks.

        Args:
            timeout: Seconds. The storage may be away.

        Returns:
            Whether it is durable: the same on all ranks. A warning says why it is not. False also where the job has no
            storage.
        """
        self.flush()
        return self._world is not None and self._world.storage.wait(timeout)

    def close(self) -> None:
        """Waits as `flush` does, and saves nothing from then on; the snapshots stay. A script need not call it."""
        if self._world is not None:
            self._world.close()
            self._world = None

    def _begin(self) -> GenerationCheckpoints | None:
        if self._own is None:
            return None
        if self._own.world_size > 1 and not dist.is_initialized():
            raise RuntimeError("Checkpointer.restore: call torch.distributed.init_process_group first")
        self._world = GenerationCheckpoints(self._own, self._name, copies=self._copies, replicated=self._replicated)
        return self._world
