"""Saves the training state into memory, has it stored, and restores it after a failure."""

from __future__ import annotations

import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist

from perdure_training.background import lower_thread_priority
from perdure_training.checkpoint.agreed_step import AgreedStep, agree_on_step
from perdure_training.checkpoint.cadence import AgreedCadence, Cadence
from perdure_training.checkpoint.direct import DirectSaves
from perdure_training.checkpoint.durable import DurableCheckpoints, Metrics, connect_storage
from perdure_training.checkpoint.generators import Generators
from perdure_training.checkpoint.hidden import check_reachable
from perdure_training.checkpoint.optimizers import prepare_optimizer
from perdure_training.checkpoint.peers import Peers
from perdure_training.checkpoint.slots import Slots
from perdure_training.checkpoint.staging import Layout, meshes_of
from perdure_training.checkpoint.transfer import exchange
from perdure_training.checkpoint.values import capture, is_object, load_snapshot, objects_in, own_values, put_into
from perdure_training.checkpoint.verification import fingerprint, verified_crc32
from perdure_training.checkpoint.world import Completeness, RankIdentity, connect, own_identity, snapshot_header
from perdure_training.events import TrainerEvents
from perdure_training.node_api.progress_file import SaveStall
from perdure_training.numbers import watch
from perdure_training.snapshots.arena import Arena, Header, NoRoom, Slot
from perdure_training.snapshots.findings import Finding
from perdure_training.snapshots.made_steps import MadeSteps, newest_made
from perdure_training.snapshots.private_map import PrivateMap

logger = logging.getLogger(__name__)

_EMITTER = "Checkpointer"
"""Distinguishes its events from those that a script emits around its calls."""
_ROOM_WITHIN = 60.0
"""Seconds for which a step that the script has stored waits for memory. Other steps do not wait."""
_LOOK = 0.02
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
            name: Distinguishes several states of one script: letters, digits, ".", "_", "-".
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
        self._world: _World | None = None
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
                span.add(loaded_step=step)
        if step is None:
            for value in objects_in(list(state.values())):
                if callable(start_over := getattr(value, "start_over", None)):
                    start_over()
        return step

    def _load(self, world: _World, state: MutableMapping[str, Any]) -> int | None:
        agreed = world.agree()
        decision = agreed.decision
        if world.own.rank == 0 and decision.reason:
            logger.warning("perdure: %s", decision.reason)
        world.begin_durable(state, stored=self._storage, replicated=self._replicated, required=decision.step is None)
        if decision.step is None:
            world.slots.begin_anew()
            return world.restore_from_storage(state)
        world.forget_after(decision.step)
        for slot in agreed.snapshots.values():
            # Before anything that can fail: a world that fails each time must come to an older step.
            world.arena.count_restore(slot)
        if decision.sources:
            exchange(decision.sources, sent=agreed.sent(world.own.rank), own=world.own, room=agreed.room)
        loaded = agreed.loaded(world.own.rank)
        world.load(loaded, state)
        world.slots.adopt(decision.step, loaded=loaded)
        world.leave_others()
        world.copy_loaded()
        world.begin_training(decision.step, source="peer" if decision.sources else "memory")
        return decision.step

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
            world.refuse(step, problem, durable=durable)
            return False
        agreed = world.cadence.every(step) if self._cadence.is_auto else None
        if not (durable or self._cadence.is_due(step, agreed=agreed)):
            return False
        world.measured(step, metrics)
        with (
            self._events.save(step=step, durable=durable, by=_EMITTER) as span,
            self._cadence.measure(step, agreed=agreed, finishing=world.finishing_seconds) as measured,
        ):
            saved = world.save(step, lambda: Layout(capture(state)), replicated=self._replicated, durable=durable)
            measured.saved = saved
            span.add(saved=saved)
        self._save_stall.add(measured.seconds)
        world.announce(step, every=self._cadence.every(agreed=agreed))
        if self._cadence.is_auto:
            world.cadence.look(step)
        if world.own.rank == 0 and measured.every is not None:
            world.cadence.choose(measured.every, step=step)
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
        return self._world is not None and self._world.wait_until_durable(timeout)

    def close(self) -> None:
        """Waits as `flush` does, and saves nothing from then on; the snapshots stay. A script need not call it."""
        if self._world is not None:
            self._world.close()
            self._world = None

    def _begin(self) -> _World | None:
        if self._own is None:
            return None
        if self._own.world_size > 1 and not dist.is_initialized():
            raise RuntimeError("Checkpointer.restore: call torch.distributed.init_process_group first")
        try:
            self._world = _World(self._own, self._name, copies=self._copies)
        except OSError as error:
            logger.warning("perdure: no checkpoints in memory: %s", error)
        return self._world


class _World:
    """A checkpointer's part in one generation."""

    def __init__(self, own: RankIdentity, name: str, *, copies: int) -> None:
        self.own = own
        self.arena = Arena(own.folder / name)
        self._store = connect(own, name)
        self._complete = Completeness(connect(own, name), own.world_size)
        self._peers = Peers(own, connect(own, name), name=name, copies=copies)
        self.slots = Slots(self.arena, own.rank, is_complete=self._complete.is_complete)
        self._staged: queue.Queue[tuple[Slot, memoryview | None, Header, bool] | None] = queue.Queue()
        self._durable: DurableCheckpoints | None = None
        self._name = name
        self._direct: DirectSaves | None = None
        """How steps are stored once this rank keeps no snapshots."""
        self.finishing_seconds = 0.0
        """Time of a core that the thread which makes snapshots valid has used."""
        self._saved_any = False
        self.cadence = AgreedCadence(self._store)
        self._made_before: int | None = None
        """As rank 0: the newest step that the last world has made."""
        self._distrusted: tuple[int, ...] = ()
        self._obstacles: Sequence[Finding] = ()
        self._last_made = newest_made(self.arena.folder) if own.local_rank == 0 else None
        self.made = MadeSteps(self.arena.folder, own.rank, generation=own.generation)
        threading.Thread(target=self._finish_snapshots, name="perdure-snapshots", daemon=True).start()

    def begin_durable(self, state: Mapping[str, Any], *, stored: bool, replicated: bool, required: bool) -> None:
        """Finds out whether the job stores checkpoints, and when.

        Args:
            state: What is saved.
            stored: Whether it may be stored.
            replicated: Whether it is the same on every rank.
            required: Nothing is in memory: to begin anew because the agent is away would cost the whole training.

        Raises:
            StorageAway: if that is required, and the agent does not answer.
        """
        self._durable = connect_storage(
            self.own,
            self._name,
            meshes=lambda: meshes_of(capture(state)),
            each_rank=frozenset(name for name, value in state.items() if isinstance(value, Generators)),
            replicated=replicated,
            stored=stored,
            required=required and stored,
        )

    def restore_from_storage(self, state: MutableMapping[str, Any]) -> int | None:
        """Loads the newest undamaged checkpoint; returns its step."""
        if self._durable is None or not self._durable.stores:
            return None
        optimizers = [value for value in objects_in(list(state.values())) if isinstance(value, torch.optim.Optimizer)]
        prepared = [optimizer for optimizer in optimizers if prepare_optimizer(optimizer)]
        objects = [name for name, value in state.items() if is_object(value) and not isinstance(value, torch.nn.Module)]
        found = self._durable.restore(capture(state), self._store, objects=objects)
        if found is None:
            for optimizer in prepared:
                optimizer.state.clear()
            return None
        step, folder, saved = found
        put_into(state, own_values(state, saved))
        self.begin_training(step, source="storage", folder=folder)
        return step

    def begin_training(self, step: int, *, source: str, folder: str = "") -> None:
        """Records the step from which the training continues."""
        self.made.write(step)
        if self._durable is not None:
            again = None if self._made_before is None else max(self._made_before - step, 0)
            self._durable.begin(
                step, source, folder=folder, again=again, distrusted=self._distrusted, obstacles=self._obstacles
            )

    def announce(self, step: int, *, every: int) -> None:
        """Has all ranks store a later step, if one is due."""
        if self._durable is not None:
            self._durable.announce(step, every=every)

    def measured(self, step: int, metrics: Metrics) -> None:
        """Remembers what was measured at a step, which may be stored."""
        if self._durable is not None:
            self._durable.measured(step, metrics)

    def wait_until_durable(self, timeout: float) -> bool:
        """Waits until nothing is being stored."""
        return self._durable is not None and self._durable.wait(timeout)

    def agree(self) -> AgreedStep:
        """Finds out which step all ranks load."""
        agreed = agree_on_step(self.own, self.arena, self.slots, self._store, last_made=self._last_made)
        self._made_before = agreed.made_before
        self._distrusted = tuple(agreed.decision.distrusted)
        self._obstacles = agreed.obstacles
        return agreed

    def load(self, slot: Slot, state: MutableMapping[str, Any]) -> None:
        """Loads a snapshot. What the state keeps of it is copied while the training continues; until then it stays."""
        self.slots.hold(slot)
        memory = load_snapshot(slot, state)
        threading.Thread(target=self._detach, args=(memory,), name="perdure-restored", daemon=True).start()

    def _detach(self, memory: PrivateMap) -> None:
        lower_thread_priority()
        try:
            memory.detach()
        except OSError as error:
            # What is not copied is still read from the slot, which therefore stays.
            logger.warning("perdure: the restored snapshot stays in memory: %s", error)
        else:
            self.slots.release()

    def forget_after(self, step: int) -> None:
        """Deletes what was saved after the step that is loaded: the training makes these steps again.

        Other ranks of the node may already save again, so each deletes its own.
        """
        for slot, header in self.arena.snapshots():
            if header.step > step and (header.rank == self.own.rank or self._is_left_by_others(header)):
                slot.clear()
        self.slots.reload()

    def leave_others(self) -> None:
        """Deletes snapshots of ranks that are on other nodes, once these have loaded theirs; not the copies that belong
        here."""
        copied = self._peers.ranks_that_copy_here()
        for slot, header in self.arena.snapshots():
            if self._is_left_by_others(header) and header.rank not in copied:
                slot.clear()

    def _is_left_by_others(self, header: Header) -> bool:
        """Whether this rank disposes of a snapshot: a rank of another node wrote it, before this world began."""
        foreign = header.rank not in self.own.ranks_of_node
        return foreign and self.own.local_rank == 0 and header.generation < self.own.generation

    def copy_loaded(self) -> None:
        """Has the loaded snapshot copied to other nodes, which may be new ones."""
        for slot, header in self.slots.complete():
            self._staged.put((slot, None, header, False))

    def save(self, step: int, plan: Callable[[], Layout], *, replicated: bool, durable: bool = False) -> bool:
        """Copies a state into a slot; another thread makes the snapshot valid."""
        if not durable or self._durable is None:
            return self._save(step, plan, replicated=replicated, durable=durable)
        self._durable.expect(step)
        try:
            return self._save(step, plan, replicated=replicated, durable=durable)
        except BaseException as error:
            self._durable.refuse(step, f"{type(error).__name__}: {error}")
            raise

    def refuse(self, step: int, problem: str, *, durable: bool) -> None:
        """Records that this rank does not save a step, so that the others do not wait for it."""
        if durable and self._durable is not None:
            self._durable.expect(step)
            self._durable.refuse(step, problem)

    def _save(self, step: int, plan: Callable[[], Layout], *, replicated: bool, durable: bool) -> bool:
        if self._direct is not None:
            return self._direct.save(step, plan, replicated=replicated, durable=durable)
        if not self._saved_any:
            self._saved_any = True
            # Kept until now if nothing was loaded: the next world may have the ranks that this one lacks.
            self.leave_others()
        if durable:
            self.flush()
        direct = DirectSaves(self.own, self.arena, self._store, self._durable)
        until = time.monotonic() + (_ROOM_WITHIN if durable and direct.stores else 0.0)
        while True:
            slot = self.slots.choose()
            if slot is not None:
                layout = plan()
                try:
                    return self._copy(layout, slot, step, replicated=replicated, durable=durable)
                except NoRoom as error:
                    if not self.slots.pinned:
                        size = self.slots.count * layout.size
                        direct.announce_need(f"{error}. A rank needs {size:,} bytes for its three snapshots")
                        return self._store_directly(direct).save(
                            step, lambda layout=layout: layout, replicated=replicated, durable=durable
                        )
            elif direct.is_needed:
                return self._store_directly(direct).save(step, plan, replicated=replicated, durable=durable)
            if time.monotonic() >= until:
                break
            # Until other ranks have saved what this one has, or the storage has taken what is copied to it.
            time.sleep(_LOOK)
        if durable and self._durable is not None:
            self._durable.refuse(step, f"no room to save it within {_ROOM_WITHIN:.0f} s")
        return False

    def _copy(self, layout: Layout, slot: Slot, step: int, *, replicated: bool, durable: bool) -> bool:
        """Copies a state into a slot; raises NoRoom if it does not fit."""
        room = slot.begin(layout.size)
        layout.copy_into(room)
        self.slots.stage(slot, step)
        header = snapshot_header(self.own, step, layout, replicated=replicated)
        self._staged.put((slot, room, header, durable))
        return True

    def _store_directly(self, direct: DirectSaves) -> DirectSaves:
        """Gives up the snapshots of this rank."""
        self._direct = direct
        self.flush()
        self.slots.clear()
        direct.begin()
        return direct

    def flush(self) -> None:
        """Waits until all staged snapshots are valid."""
        self._staged.join()

    def close(self) -> None:
        """Ends the threads that finish and store snapshots, once all that was saved is."""
        self.flush()
        self._staged.put(None)
        if self._durable is not None:
            self._durable.close()

    def _finish_snapshots(self) -> None:
        lower_thread_priority()
        while (staged := self._staged.get()) is not None:
            try:
                self._finish(*staged)
            finally:
                # A reference to the room would keep its memory from being given up.
                del staged
                self._staged.task_done()

    def _finish(self, slot: Slot, room: memoryview | None, header: Header, durable: bool) -> None:
        durably: DurableCheckpoints | None = None
        try:
            begun = time.thread_time()
            if room is not None:
                header = replace(header, checksum=fingerprint(room))
                slot.finish(header)
                if self._durable is not None and (durable or self._durable.is_announced(header.step)):
                    durably = self._durable
            content = slot.read() if room is None else room
            crc = verified_crc32(content, header) if durably is not None or self._peers.wanted else 0
            self._peers.copy(slot, header, number=self.slots.number(slot), crc32=crc)
            self._complete.add(header.step)
            # Until `finish` below, no other step is written there.
            if durably is not None:
                durably.store(header, content, slot.pin(), crc32=crc)
            self.finishing_seconds += time.thread_time() - begun
        except (OSError, RuntimeError) as error:
            # The store ends with its generation, and this process with it.
            logger.debug("step %d is not complete: %s", header.step, error)
            if durably is not None:
                durably.refuse(header.step, str(error))
        finally:
            self.slots.finish(slot)
