"""Durable checkpoints: has snapshots copied to the job's storage, and restores from there.

The ranks agree on a step that they all store, keep that snapshot from being overwritten, plan who stores what, and
hand the snapshot to the agents, as open files. Training does not wait for any of this. A checkpoint that cannot be
stored is given up; the next one is another try. Of steps that are requested faster than the storage takes them, the
newest is stored.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, SupportsFloat

from torch.distributed import Store
from torch.distributed.device_mesh import DeviceMesh

from perdure_training.checkpoint.announcements import Announcements
from perdure_training.checkpoint.differing import name_of_rank
from perdure_training.checkpoint.distributed_format import metadata_file, plan_file, plan_together, planner_of
from perdure_training.checkpoint.durable_requests import DurableRequests, Request, Snapshot
from perdure_training.checkpoint.planned_state import StateOfRank
from perdure_training.checkpoint.save_turns import turns_of
from perdure_training.checkpoint.schedule import Schedule
from perdure_training.checkpoint.staging import read_parts
from perdure_training.checkpoint.state_search import Found, Lookup
from perdure_training.checkpoint.store_round import (
    CHOICE,
    FINAL,
    OFFER,
    PLAN,
    RESULTS,
    RankFailed,
    StoreRound,
    Superseded,
)
from perdure_training.checkpoint.stored import StoredCheckpoints
from perdure_training.checkpoint.world import RankIdentity, connect, place_of
from perdure_training.node_api.agent_client import Json
from perdure_training.node_api.storage_link import (
    StorageAway,
    StorageLink,
    StorageProblem,
    open_in_memory,
)
from perdure_training.snapshots.arena import PAGE, Header, SnapshotPin, crc32
from perdure_training.snapshots.findings import Finding

logger = logging.getLogger(__name__)

Metrics = Mapping[str, SupportsFloat] | None
"""What was measured, by name."""

_SAVED_WITHIN = 180.0
"""Seconds in which all ranks must have saved a step that one of them stores: a rank that has not then never does."""
_COMMITTED_WITHIN = 1800.0
"""Seconds after which a rank gives up a checkpoint whose other parts it cannot know about."""
_LOOK = 5.0
"""Seconds of one request whether a checkpoint is committed."""
_AGENT_RESTARTS = 120.0
"""Seconds for which a part is offered to an agent that is away."""
_VERDICT_WITHIN = 10.0
"""Seconds beside its own timeout that a rank waits to learn from rank 0 whether a step is durable."""
_STORED = "durable/stored"
"""Key in the ranks' store: the newest step that is stored."""
_MEASURED = 64
"""Steps whose metrics are remembered: more than are saved while one is stored."""


class DurableCheckpoints:
    """One rank's part in the checkpoints of a generation that are stored durably.

    Invariants:
        - No call waits for storage, except for `restore` and `wait`.
        - A snapshot is pinned from before it may be overwritten until the agent has copied it.
        - All ranks store the same steps: the newest that was requested when the one before it was stored.
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
            each_rank: Names in the state of which each rank has its own value, and a new rank keeps its own.
        """
        self._own = own
        self._link = link
        self._schedule = schedule
        self._meshes = meshes
        self._each_rank = each_rank
        self._name = name
        self._turns = turns_of(own)
        self._place = place_of(own, name)
        self._stored = StoredCheckpoints(own, link, place=self._place)
        self._requests = DurableRequests()
        self._in_progress = ""
        """The folder of the checkpoint that is being stored."""
        self._metrics: dict[int, dict[str, float]] = {}
        self._waits: Counter[int] = Counter()
        """How often the script has waited for a step: all ranks count alike."""
        self._named: frozenset[str] = frozenset()
        """The names of which a warning has said that their values differ between ranks."""
        if schedule is not None:
            self._turns.stored.add(name)
            self._announcing = connect(own, name)
            self._announcements = Announcements(connect(own, name))
            self._has_passed = self._announcements.has_passed
            self._storing = connect(own, name)
            threading.Thread(target=self._run, name="perdure-durable", daemon=True).start()

    @property
    def started_over(self) -> bool:
        """All checkpoints were damaged, which the job has learned: the script starts over."""
        return self._stored.started_over

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
        obstacles: Sequence[Finding] = (),
        lookup: Lookup | None = None,
        apart: str = "",
        reported: int | None = None,
    ) -> None:
        """Records, and reports as rank 0, the step that was restored.

        Args:
            step: The step; 0 where none was.
            source: "memory", "peer" for the memory of another node, "storage", or "nothing".
            folder: The checkpoint's folder within the storage.
            again: The number of steps that were made after it and are lost; None where that is unknown.
            distrusted: Newer steps that were not loaded because the job failed again after each load.
            obstacles: What was in memory, or missing there, and is not loaded.
            lookup: What was looked for and found.
            apart: How the step differs from that of other checkpointers.
            reported: As in `Header`.
        """
        if self._schedule is not None and source != "nothing":
            self._schedule.begin(step)
        facts: Json = {"source": source, "folder": folder, "again": again, "distrusted": list(distrusted)}
        facts |= {"place": self._place, "lookup": None if lookup is None else asdict(lookup), "apart": apart}
        facts |= {"reported": reported}
        self._report(step, facts | {"memory": [asdict(obstacle) for obstacle in obstacles]})

    def announce(self, step: int, *, every: int) -> None:
        """Announces, as rank 0, the next step that all ranks store, if one is due. Called at each step that is saved.

        The others learn of it before they save it: they have made a step together since.

        Args:
            step: The step that is saved.
            every: The number of steps between two saves.
        """
        schedule = self._schedule
        if schedule is None or self._own.rank or self._requests.is_busy or step <= schedule.announced:
            return
        if (target := schedule.next_target(step, every=every, desired=self._link.desired())) is not None:
            self._announcements.make(target)

    def answer(self, step: int, request: int) -> None:
        """Has a step that all ranks store answer a request for a checkpoint."""
        if self._schedule is not None and not self._own.rank:
            self._schedule.answer(request, step)

    def record(self, step: int, metrics: Metrics) -> None:
        """Records that a step is saved next, which may be stored, and as rank 0 what the script measured at it."""
        if self._schedule is None:
            return
        self._announcements.record(step)
        self._schedule.record(step)
        if self._own.rank or not metrics:
            return
        self._metrics[step] = {name: float(value) for name, value in metrics.items()}
        for older in sorted(self._metrics)[:-_MEASURED]:
            del self._metrics[older]

    def is_announced(self, step: int) -> bool:
        """Whether all ranks store this step."""
        return self._schedule is not None and self._announcements.has(step)

    def expect(self, step: int) -> None:
        """Records that the script requests to store a step, which `store` or `refuse` follows."""
        if self._schedule is not None:
            self._announcements.expect(step)
            self._requests.expect(step)

    def store(self, header: Header, content: memoryview, pin: SnapshotPin, *, crc32: int | None) -> None:
        """Has a snapshot stored, by another thread, unless a newer one is to be stored by then."""
        if self._schedule is None:
            pin.release()
            return
        self._requests.add(Request(header.step, Snapshot(header, content, pin, crc32)))

    def refuse(self, step: int, problem: str) -> None:
        """Records that this rank cannot store a step that all ranks are to store, so that the others do not wait."""
        if self._schedule is not None:
            self._requests.add(Request(step, None, problem))

    def newest_stored(self) -> int:
        """The newest step that is stored in this generation, as far as all ranks know; -1 for none."""
        # The store may have ended with its generation.
        with contextlib.suppress(RuntimeError):
            if self._announcing.check([_STORED]):
                return int(self._announcing.get(_STORED))
        return -1

    def wait_until_taken(self, timeout: float) -> bool:
        """Waits until no snapshot of this rank is being stored; returns whether that is so within `timeout`."""
        return self._requests.wait_until_taken(timeout)

    def wait(self, timeout: float) -> bool:
        """Waits until the newest step that was to be stored is durable; returns whether it is within `timeout`, the
        same on all ranks. A warning says why it is not."""
        if self._schedule is None:
            return False
        step = self._requests.requested
        if step < 0:
            return True
        self._waits[step] += 1
        key = f"durable/verdict/{step}/{self._waits[step]}"
        if self._own.rank == 0:
            problem = self._requests.wait_for_outcome(step, timeout)
            if problem is None:
                problem = f"not stored within {timeout:g} s"
            self._announcing.set(key, problem)
        else:
            problem = self._verdict(key, timeout + _VERDICT_WITHIN)
        if problem:
            here = self._problem_here()
            here = f"; on this node: {here}" if here and here not in problem else ""
            logger.warning("perdure: step %d is not durable: %s%s", step, problem, here)
        return not problem

    def close(self) -> None:
        """Ends the thread that has steps stored, once those that wait are."""
        self._requests.close()

    def _verdict(self, key: str, timeout: float) -> str:
        """Why rank 0 says that a step is not durable; empty if it is."""
        until = time.monotonic() + timeout
        while not self._announcing.check([key]):
            if time.monotonic() >= until:
                return f"rank 0 has not said within {timeout:g} s that it is"
            # Not a wait in the store, during which no signal is handled.
            time.sleep(0.05)
        return self._announcing.get(key).decode()

    def _problem_here(self) -> str:
        """Why this node cannot store its part of the checkpoint in progress, as far as its agent knows."""
        if not self._in_progress:
            return ""
        try:
            answer = self._link.ask({"request": "await", "folder": self._in_progress, "within": 0}, within=_LOOK)
        except (StorageAway, StorageProblem) as error:
            return str(error)
        return str(answer.get("given_up") or answer.get("delayed_by") or "")

    # Storing

    def _run(self) -> None:
        own = self._own
        for number in itertools.count():
            if (step := self._requests.offer()) is None:
                return
            ranks = StoreRound(self._storing, number, rank=own.rank, world_size=own.world_size)
            try:
                self._store_together(ranks, step)
            except Exception as error:
                # The store ends with its generation. Nothing here may end the training.
                self._requests.end(f"{type(error).__name__}: {error}")
                logger.debug("no further step of generation %d is stored: %s", own.generation, error)
                return

    def _store_together(self, ranks: StoreRound, offered: int) -> None:
        """Has all ranks store the newest step that one of them has offered."""
        own, requests, step, apart = self._own, self._requests, offered, 0
        begun = time.monotonic()
        try:
            offers = ranks.gather(OFFER, offered, within=_SAVED_WITHIN)
            if offers is not None:
                ranks.tell_all(CHOICE, max(offers))
                apart = max(offers) - min(offers)
            step = ranks.learn(CHOICE, within=None)
            self._store(ranks, requests.take(step, within=_SAVED_WITHIN, has_passed=self._has_passed), begun)
        except Superseded as error:
            logger.debug("step %d is not stored: %s", step, error)
            ranks.fail(error)
        except RankFailed as error:
            self._record(step, str(error), ranks)
        except Exception as error:
            known = isinstance(error, StorageAway | StorageProblem)
            problem = f"rank {own.rank}: {error if known else f'{type(error).__name__}: {error}'}"
            self._record(step, problem, ranks)
        else:
            self._record(step, "", ranks)
        finally:
            if apart and self._schedule is not None and self._requests.wait_for_outcome(step, 0.0):
                self._schedule.lead_by(apart)
            requests.finish(step)

    def _record(self, step: int, problem: str, ranks: StoreRound) -> None:
        """Records what became of a step, and tells it to those who do not know it."""
        if problem:
            ranks.fail(StorageProblem(problem))
        if self._own.rank:
            return
        if problem:
            logger.warning("perdure: step %d was not stored, and the next one will be tried: %s", step, problem)
            self._report_problem(step, problem)
        else:
            with contextlib.suppress(RuntimeError):
                self._storing.set(_STORED, str(step))
        self._requests.conclude(step, problem)

    def _store(self, ranks: StoreRound, request: Request, begun: float) -> None:
        """Stores this rank's part, and as rank 0 waits until the checkpoint is committed."""
        own, snapshot = self._own, request.taken()
        header = snapshot.header
        answers = self._schedule.answers(header.step) if self._schedule is not None else 0
        checksum = crc32(snapshot.content) if snapshot.crc32 is None else snapshot.crc32
        parts = read_parts(snapshot.content, index_at=header.index_at, meshes=self._meshes)
        planner = planner_of(parts, rank=own.rank, each_rank=self._each_rank)
        plan = planner.create_local_plan()
        digests = planner.digests(plan) if own.world_size > 1 else {}
        plans = ranks.gather(PLAN, (plan, digests), within=_COMMITTED_WITHIN)
        metadata: Any = None
        if plans is not None:
            finals, metadata, differ = plan_together(planner, plans)
            self._warn_of(differ)
            folder = self._folder(header.step)
            ranks.tell_each(FINAL, [(folder, final, differ) for final in finals])
        folder, final, differ = ranks.learn(FINAL, own=True, within=_COMMITTED_WITHIN)
        self._in_progress = folder
        planner.rename({name_of_rank(name, rank=own.rank, world_size=own.world_size): name for name in differ})
        file = plan_file(planner.finish_plan(final), planner, snapshot.content, rank=own.rank)
        results = ranks.gather(RESULTS, file.results, within=_COMMITTED_WITHIN)
        others = [] if results is None else [metadata_file(metadata, results)]
        message: Json = {
            "request": "store",
            "folder": folder,
            "rank": own.rank,
            "ranks": own.world_size,
            "name": file.name,
            "size": file.size,
            "answers": answers,
            "beside": [place_of(own, other) for other in sorted(self._turns.stored_beside(self._name))],
            "metrics": self._metrics.get(header.step, {}),
            "reported": header.reported,
            "snapshot": {"offset": PAGE, "size": header.size, "checksum": checksum},
        }
        self._hand_over(message, snapshot.pin, [file.recipe, *others])
        snapshot.pin.release()
        if results is not None:
            self._until_committed(ranks, folder)
            logger.info("perdure: step %d is durable after %.1f s", header.step, time.monotonic() - begun)
            if self._schedule is not None:
                self._schedule.finish(answers)
            ranks.forget()

    def _folder(self, step: int) -> str:
        folder = f"step-{step}-{os.environ.get('PERDURE_RUN_ID', 'run')}-{self._own.generation}"
        return f"{self._place}/{folder}" if self._place else folder

    def _warn_of(self, differ: frozenset[str]) -> None:
        """Warns once of values that only a world of the same size can load."""
        if new := sorted(differ - self._named):
            self._named |= differ
            names = ", ".join(new[:8]) + (f" and {len(new) - 8} more" if len(new) > 8 else "")
            logger.warning(
                "perdure: values differ between ranks, and are stored for each of them, for worlds of %d: %s",
                self._own.world_size,
                names,
            )

    def _hand_over(self, request: Json, pin: SnapshotPin, contents: Sequence[bytes]) -> None:
        """Has the agent copy this rank's part, and waits until it has."""
        files = [open_in_memory(content) for content in contents]
        until = time.monotonic() + _AGENT_RESTARTS
        try:
            while True:
                begun = time.monotonic()
                try:
                    self._link.ask(request, files=[pin.descriptor, *files], within=None)
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

    def _until_committed(self, ranks: StoreRound, folder: str) -> None:
        """Waits until the control plane has committed the checkpoint."""
        until = time.monotonic() + _COMMITTED_WITHIN
        while time.monotonic() < until:
            answer = self._link.insist(
                {"request": "await", "folder": folder, "within": _LOOK}, patience=_AGENT_RESTARTS
            )
            if answer.get("committed"):
                return
            if answer.get("given_up"):
                raise StorageProblem(str(answer["given_up"]))
            ranks.check()
        raise StorageProblem("not all parts were stored and committed in time")

    # Restoring

    def restore(self, found: Found, state: StateOfRank, store: Store) -> tuple[int, str, dict[str, Any]] | None:
        """Loads the newest checkpoint that is complete and undamaged; see `StoredCheckpoints.restore`."""
        return self._stored.restore(found, state, store)

    def _report_problem(self, step: int, problem: str) -> None:
        """Has the control plane learn of a problem that no agent knows."""
        self._tell_agent({"request": "failed", "folder": self._folder(step), "problem": problem})

    def _report(self, step: int, facts: Json) -> None:
        if self._own.rank == 0:
            self._tell_agent({"request": "restored", "generation": self._own.generation, "step": step, **facts})

    def _tell_agent(self, message: Json) -> None:
        try:
            self._link.ask(message, within=5.0)
        except (StorageAway, StorageProblem) as error:
            logger.debug("the agent does not take the report %r: %s", message["request"], error)
