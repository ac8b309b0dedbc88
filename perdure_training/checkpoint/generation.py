"""A checkpointer's part in one generation: what it finds in memory and storage, and what it saves there."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from typing import Any

from perdure_training.background import lower_thread_priority
from perdure_training.checkpoint.agreed_step import AgreedStep, agree_on_step
from perdure_training.checkpoint.broadcast_buffers import names_of_rank_0
from perdure_training.checkpoint.cadence import AgreedCadence
from perdure_training.checkpoint.direct import DirectSaves
from perdure_training.checkpoint.finishing import SnapshotFinisher
from perdure_training.checkpoint.former_snapshots import FormerSnapshots
from perdure_training.checkpoint.generation_storage import GenerationStorage
from perdure_training.checkpoint.other_states import OtherStates
from perdure_training.checkpoint.peers import Peers
from perdure_training.checkpoint.planned_hold import HeldState, Hold, PlannedHold
from perdure_training.checkpoint.planned_state import OfAnotherWorld
from perdure_training.checkpoint.refused_restore import await_other_world, takes_older
from perdure_training.checkpoint.resharding import Resharding
from perdure_training.checkpoint.restored_state import RestoredState, of_each_rank
from perdure_training.checkpoint.save_failures import SaveFailures
from perdure_training.checkpoint.save_turns import turns_of, write_of_one_count
from perdure_training.checkpoint.slots import Slots
from perdure_training.checkpoint.staging import Layout, is_split_otherwise
from perdure_training.checkpoint.transfer import exchange
from perdure_training.checkpoint.values import capture, load_snapshot
from perdure_training.checkpoint.world import Completeness, OnlyOne, RankIdentity, connect, snapshot_header
from perdure_training.node_api.agent_client import Json
from perdure_training.node_api.storage_link import find_storage
from perdure_training.snapshots.agreement import Decision
from perdure_training.snapshots.arena import Arena, Header, NoRoom, Slot
from perdure_training.snapshots.made_steps import MadeSteps, newest_complete, newest_made
from perdure_training.snapshots.private_map import PrivateMap

logger = logging.getLogger(__name__)

_ROOM_WITHIN = 60.0
"""Seconds for which a step that the script has stored waits for memory. Steps that are not stored do not wait."""
_ANNOUNCED_WITHIN = 15.0
"""The same for one that the job has stored: longer than a rank keeps a step that others do not have. Ranks that leave
out different steps would have none in common."""
_LOOK = 0.02


class GenerationCheckpoints:
    """A checkpointer's part in one generation."""

    def __init__(self, own: RankIdentity, name: str, *, copies: int, replicated: bool) -> None:
        """Begins to take part; see `Checkpointer` for the arguments."""
        self.own = own
        self._replicated = replicated
        # A rank without a folder takes part in everything else, so that no other rank waits for it.
        self.arena = Arena(own.folder / name, required=False)
        self._store = connect(own, name)
        self._place = OnlyOne(self._store, own, name)
        self._name = name
        self._turns = turns_of(own)
        self._turns.add(name)
        self._others = OtherStates(own, name, self._turns)
        self._complete = Completeness(connect(own, name), own.world_size)
        self._peers = Peers(own, connect(own, name), name=name, copies=copies)
        self.slots = Slots(
            self.arena,
            own.rank,
            world_size=None if replicated else own.world_size,
            is_complete=self._complete.is_complete,
            give_up=self._complete.give_up,
            is_spoiled=self._complete.is_spoiled,
        )
        self._former = FormerSnapshots(own, self.arena, self.slots, self._complete, self._peers)
        self._failures = SaveFailures()
        self.finisher = SnapshotFinisher(self.slots, self._complete, self._peers, self._failures)
        use: Json = {"replicated": replicated, "copies": self._peers.number}
        self.storage = GenerationStorage(own, name, self._store, self.finisher, use=use)
        self._direct: DirectSaves | None = None
        """How steps are stored once this rank makes no snapshots."""
        self._loaded_any = False
        self.cadence = AgreedCadence(self._store)
        first = own.local_rank == 0
        self._last_made = newest_made(self.arena.folder) if first else None
        self._last_complete = newest_complete(self.arena.folder) if first else None
        self.made = MadeSteps(self.arena.folder, own.rank, generation=own.generation)
        self._hold = PlannedHold(own, name, connect(own, ""), find_storage())
        self.source: str | None = None
        """Where the state was loaded from: "memory", "peer" for that of another node, "storage"; None for nowhere."""
        self.received = 0
        """Bytes that other ranks have sent for that."""

    def hold_at(self, step: int) -> Hold | None:
        """The request for which a step is saved, since a change that is planned ends this rank."""
        if self._turns.record(self._name, step) and self.own.local_rank == 0:
            write_of_one_count(self.own.folder, self._turns.of_one_count)
        return self._hold.due(step)

    def answers(self, hold: Hold | None, step: int) -> bool:
        """Whether a step at which this rank waits answers a request for a checkpoint, and is stored for it."""
        if hold is None or not self._hold.is_stored(hold, step):
            return False
        self.storage.answer(step, hold.stores)
        return True

    def announce(self, step: int, *, every: int) -> None:
        """Has all ranks store a later step, if one is due."""
        if self.own.rank == 0 and not self._hold.stores_soon:
            self.storage.announce(step, every=every)

    def wait_at(self, hold: Hold, step: int, state: Mapping[str, Any], *, saved: bool) -> None:
        """Waits at a step until this process is ended, once all checkpointers of the script have saved; returns where
        the training continues."""
        held = HeldState(
            step=step,
            saved=saved,
            replicated=self._replicated,
            arena=self.arena,
            each_rank=of_each_rank(state),
            common=names_of_rank_0(state),
            complete=self._complete,
        )
        self._hold.wait(hold, held)

    def restore_from_storage(self, state: MutableMapping[str, Any], agreed: AgreedStep) -> int | None:
        """Loads the newest undamaged checkpoint that is newer than what all ranks have in memory; returns its step.
        Waits for it where it is known to exist.

        Raises:
            StateLost: if a newer state existed, and the job does not go on without it.
        """
        found, durable = self.storage.search(agreed), self.storage.durable
        if durable is None or not durable.stores:
            return None
        with RestoredState(state, replicated=self._replicated) as room:
            loaded = durable.restore(found, room.target, self._store)
            if loaded is None:
                return None
            step, folder, saved = loaded
            room.fill(saved)
        self.slots.begin_anew()
        self.begin_training(step, source="storage", folder=folder)
        return step

    def begin_anew(self) -> None:
        """Records that nothing was loaded."""
        self.slots.begin_anew()
        self.made.write_complete(0)
        apart = self._others.begin(0)
        durable = self.storage.durable
        if durable is None or not durable.started_over:
            self.storage.report(0, source="nothing", apart=apart)

    def restore_from_former(self, agreed: AgreedStep, state: MutableMapping[str, Any]) -> int | None:
        """Loads a step that a world of another size has in memory; returns it. Where this world cannot have that
        state, of which nothing was changed then, it waits for one that can; None where the job continues with less.

        Raises:
            OfAnotherWorld: if none comes.
        """
        self._count_restore(agreed)
        try:
            return self._split_anew(agreed.decision, state)
        except OfAnotherWorld as error:
            # It speaks against this world, not against what was saved.
            self._count_restore(agreed, -1)
            if takes_older(self.own, self._store):
                if self.own.rank == 0:
                    logger.warning("perdure: step %d in memory is not loaded: %s", agreed.decision.step, error.args[0])
                self.storage.pass_over_memory()
                return None
            await_other_world(self.own, error, step=agreed.decision.step or 0, source="memory")

    def _split_anew(self, decision: Decision, state: MutableMapping[str, Any], *, loaded: Slot | None = None) -> int:
        """Loads a step that is split in another way than the state; `loaded` is this rank's own snapshot of it."""
        assert decision.step is not None
        self._load_parts(decision, state, loaded=loaded)
        self._former.forget_after(decision.step)
        if loaded is not None:
            self.slots.adopt(decision.step, loaded=loaded)
        else:
            # What an earlier world of this size has left here is older, and no rank will have it again.
            self.slots.begin_anew()
        self._loaded_any, self._former.until = True, [decision.step]
        # The others' memory has it as this world splits it, before any of what it was loaded from is deleted.
        self.save(
            decision.step,
            lambda: Layout(capture(state)),
            restores=decision.restores + 1,
            reported=decision.reported,
        )
        self.begin_training(decision.step, source="peer", reported=decision.reported)
        return decision.step

    def _load_parts(self, decision: Decision, state: MutableMapping[str, Any], *, loaded: Slot | None) -> None:
        """Loads a step of former snapshots. Nothing refers to them then: deleting them would free no memory."""
        with RestoredState(state, replicated=False) as room:
            verified = None if loaded is None else self.own.ranks_of_node
            parts = Resharding(self.own, self._store, self.arena, decision, verified=verified)
            room.fill(parts.load(room.target))
        self.received += parts.received

    def restore_from_memory(self, agreed: AgreedStep, state: MutableMapping[str, Any]) -> int:
        """Loads the snapshot that this rank has, or gets from another one; returns its step.

        Raises:
            KeyError: if the state is split in another way, and cannot be what was saved.
        """
        decision, own = agreed.decision, self.own
        assert decision.step is not None
        self._former.forget_after(decision.step)
        self._count_restore(agreed)
        if decision.sources:
            exchange(decision.sources, sent=agreed.sent(own.rank), own=own, room=agreed.room)
            self.received = len(agreed.room.read()) if agreed.room is not None else 0
        loaded = agreed.loaded(own.rank)
        if not self._replicated and self._is_split_otherwise(loaded, state):
            holders = {rank: rank for rank in range(own.world_size)}
            try:
                again = replace(decision, former=own.world_size, holders=holders)
                return self._split_anew(again, state, loaded=loaded)
            except OfAnotherWorld as error:
                self._count_restore(agreed, -1)
                raise KeyError(f"step {decision.step} in memory is split in another way: {error}") from error
        self._load(loaded, state)
        self.slots.adopt(decision.step, loaded=loaded)
        self._loaded_any, self._former.until = True, [decision.step]
        # Other nodes, which may be new ones, get what was loaded.
        for slot, header in self.slots.complete():
            self.finisher.finish(slot, header)
        source = "peer" if decision.sources else "memory"
        self.begin_training(decision.step, source=source, reported=decision.reported)
        return decision.step

    def _is_split_otherwise(self, loaded: Slot, state: Mapping[str, Any]) -> bool:
        """Whether any rank's snapshot is split in another way than its state, as over another device mesh."""
        header, own = loaded.header(), self.own
        assert header is not None, "it was verified, and only this rank writes it"
        mine = is_split_otherwise(loaded.read(), index_at=header.index_at, state=lambda: capture(state))
        self._store.set(f"split-otherwise/{own.rank}", "yes" if mine else "no")
        if own.rank == 0:
            each = [self._store.get(f"split-otherwise/{rank}") for rank in range(own.world_size)]
            self._store.set("split-otherwise", "yes" if b"yes" in each else "no")
        return self._store.get("split-otherwise") == b"yes"

    def _count_restore(self, agreed: AgreedStep, number: int = 1) -> None:
        """Called before anything that can fail: a world that fails each time must come to an older step."""
        for slot in agreed.snapshots.values():
            self.arena.count_restore(slot, number)

    def begin_training(self, step: int, *, source: str, folder: str = "", reported: int | None = None) -> None:
        """Records the step from which the training continues."""
        self.made.write(step)
        self.source = source
        self.made.write_complete(step)
        self.storage.report(step, source=source, folder=folder, apart=self._others.begin(step), reported=reported)

    def agree(self, *, last_resort: bool = False) -> AgreedStep:
        """Finds out which step all ranks load; see `decide` for the arguments."""
        agreed = agree_on_step(
            self.own,
            self.arena,
            self.slots,
            self._store,
            last_made=self._last_made,
            last_complete=self._last_complete,
            stored=self.storage.expected.stored,
            last_resort=last_resort,
            others=self._others,
        )
        self.storage.remember(agreed, last_resort=last_resort)
        return agreed

    def _load(self, slot: Slot, state: MutableMapping[str, Any]) -> None:
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

    def save(
        self,
        step: int,
        plan: Callable[[], Layout],
        *,
        durable: bool = False,
        restores: int = 0,
        insists: bool = False,
        reported: int | None = None,
    ) -> bool:
        """Copies a state into a slot; another thread makes the snapshot valid.

        Args:
            step: The step.
            plan: Returns the state's layout.
            durable: Whether the script requests that it is stored.
            restores: The number of worlds that have loaded this state.
            insists: Whether it waits for a slot that older steps use.
            reported: As in `Header`.
        """
        self.storage.begin_late(step)
        if durable:
            self.storage.expect(step)
        try:
            saved = self._save(step, plan, durable=durable, restores=restores, insists=insists, reported=reported)
        except BaseException as error:
            if durable:
                self.storage.refuse(step, f"{type(error).__name__}: {error}")
            if not isinstance(error, OSError):
                raise
            self._failures.warn(step, error)
            return False
        if saved:
            self._failures.passed()
        return saved

    def refuse(self, step: int, problem: str, *, durable: bool, spoiled: bool) -> None:
        """Records that this rank does not save a step, so that the others do not wait for it; `spoiled` where its state
        may not be sound, so that they overwrite nothing that the job may go back to."""
        if spoiled:
            # The store may have ended with its generation.
            with contextlib.suppress(RuntimeError):
                self._complete.spoil(step)
        if durable:
            self.storage.expect(step)
            self.storage.refuse(step, problem)

    def _save(
        self,
        step: int,
        plan: Callable[[], Layout],
        *,
        durable: bool,
        restores: int,
        insists: bool,
        reported: int | None,
    ) -> bool:
        if self._direct is not None:
            return self._direct.save(step, plan, durable=durable, reported=reported)
        direct = DirectSaves(
            self.own, self.arena, self.slots, self._store, self.storage.durable, replicated=self._replicated
        )
        try:
            if self.finisher.renew(self.arena):
                self.made = MadeSteps(self.arena.folder, self.own.rank, generation=self.own.generation)
        except NoRoom as error:
            direct.announce_need(str(error))
            return self._store_directly(direct).save(step, plan, durable=durable, reported=reported)
        if not self._loaded_any:
            self._loaded_any = True
            # Kept until now as nothing was loaded: the next world may have the ranks that this one lacks.
            self._former.delete()
        self._former.delete_if_copied(step)
        insists = insists or (durable and direct.stores)
        if durable or insists:
            self.flush()
        if insists:
            self._complete.reach(step)
        announced, patience = False, _ROOM_WITHIN if insists else 0.0
        until = time.monotonic() + patience
        while True:
            slot = self.slots.choose()
            if slot is None and insists and self._complete.is_reached(step):
                # Ranks leave out different steps where there is no room, and have no other one in common then.
                slot = self.slots.choose(awaits_others=False)
            if (complete := self.slots.newest_complete) is not None:
                self.made.write_complete(complete)
            if slot is not None:
                layout = plan()
                try:
                    if self._former.made_room:
                        # Copies of other nodes' snapshots would take it: this rank's own serve it at each restart.
                        self.slots.reserve(layout.size)
                        self._former.made_room = False
                    header = snapshot_header(
                        self.own, step, layout, replicated=self._replicated, restores=restores, reported=reported
                    )
                    return self._copy(layout, slot, header, durable=durable)
                except NoRoom as error:
                    if self._complete.is_spoiled():
                        break
                    if self._former.until:
                        # All ranks have loaded what they need of it.
                        self._former.make_room()
                        continue
                    if not self.slots.pinned:
                        size = self.slots.count * layout.size
                        direct.announce_need(f"{error}. A rank needs {size:,} bytes for its three snapshots")
                        directly = self._store_directly(direct)
                        return directly.save(step, lambda layout=layout: layout, durable=durable, reported=reported)
            elif direct.is_needed:
                return self._store_directly(direct).save(step, plan, durable=durable, reported=reported)
            if not insists and self._is_announced(step):
                announced, insists, patience = True, True, _ANNOUNCED_WITHIN
                until = time.monotonic() + patience
                self.flush()
                self._complete.reach(step)
                continue
            if time.monotonic() >= until or self._complete.is_spoiled():
                break
            # Until other ranks have saved what this one has, or the storage has taken what is copied to it.
            time.sleep(_LOOK)
        if durable or announced:
            spoiled = "another rank's state may not be sound, and the job goes back"
            room = f"no room to save it within {patience:.0f} s"
            self.storage.refuse(step, spoiled if self._complete.is_spoiled() else room)
        return False

    def _is_announced(self, step: int) -> bool:
        """Whether all ranks store a step."""
        try:
            return self.storage.is_announced(step)
        except RuntimeError:
            # The store has ended with its generation, and so will this process.
            return False

    def _copy(self, layout: Layout, slot: Slot, header: Header, *, durable: bool) -> bool:
        """Copies a state into a slot; raises NoRoom if it does not fit."""
        room = slot.begin(layout.size)
        layout.copy_into(room)
        self.slots.stage(slot, header.step)
        self.finisher.finish(slot, header, room=room, durable=durable)
        return True

    def _store_directly(self, direct: DirectSaves) -> DirectSaves:
        """Makes no snapshots any more."""
        self._direct = direct
        self.flush()
        direct.begin()
        return direct

    def flush(self) -> None:
        """Waits until all staged snapshots are valid."""
        self.finisher.flush()

    def close(self) -> None:
        """Ends the threads that finish and store snapshots, once all that was saved is."""
        self.finisher.close()
        self._turns.remove(self._name)
        self.storage.close()
        self._place.leave()
