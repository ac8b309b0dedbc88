"""Looks for the newest state in storage before a world begins, and waits for one that is known to have existed.

Rank 0 looks and decides for all, once every node has found the same in its own storage. What the job has committed and
the storage does not show was not lost by that: the storage is not mounted, or is another one. Nor is a step that a node
has in its memory which is on its way back. A world that began below it would throw away what was trained since, and
delete it later.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch.distributed import PrefixStore, Store

from perdure_training.checkpoint.world import RankIdentity
from perdure_training.node_api.agent_client import Json
from perdure_training.node_api.storage_link import StateLost, StorageAway, StorageLink, StorageProblem

logger = logging.getLogger(__name__)

PATIENCE = 600.0
"""Seconds for which a restore waits for its agent and the storage: to begin anew would cost the whole training."""
SURE = 60.0
"""Seconds after which a checkpoint that the storage does not list is not there: so long may a client of NFS show an
older listing."""
_REPORTED = 3.0
"""Seconds of waiting after which the job learns of it."""
_REWORDED = 60.0
"""Seconds after which it learns of another reason: each report is an event of its history."""
REPEATED = 300.0
"""Seconds after which the job is told again of a wait: it alone ends it, and may have been reset since."""
_LISTED = 30.0
"""Seconds in which a node's agent must say what its storage has. It says after 20 that the storage does not answer."""
_KEPT_ALIVE = 10.0
"""Seconds between two reports to the node's agent that this rank waits."""
_SHORTEST, _LONGEST = 0.05, 1.0
"""Seconds between two looks. To wait in the store would keep a process from ending in an orderly way."""

NONE, FOUND, EMPTY, LACKS, AWAY, UNUSED = "none", "found", "empty", "lacks", "away", "unused"
"""What was found in storage."""
WAIT, OLDER, STOP = "wait", "older", "stop"
"""What follows where the newest state cannot be loaded."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The states of one checkpointer that are known to have existed, as rank 0 knows them, and what follows if they are
    lost."""

    folder: str = ""
    """The newest checkpoint that the job has committed; empty for none."""
    stored: int | None = None
    """Its step, if a world would load it."""
    on_loss: str = OLDER
    """An older release of the job names nothing, and the ranks take what there is."""
    accepts_less: bool = False
    """A user has decided to continue without what is not there."""
    may_return: bool = False
    """What the memory of the nodes lacks may come back with a node."""

    @classmethod
    def of(cls, own: RankIdentity, place: str) -> Expected:
        """Returns what the job knows of the states of one place in the storage."""
        known = own.known
        if known is None:
            return cls()
        found = next((one for one in known.stored if one.folder.rpartition("/")[0] == place), None)
        step = _parts(found.folder)[0] if found is not None else None
        return cls(
            folder=found.folder if found is not None else "",
            stored=step if found is not None and found.loads else None,
            on_loss=known.on_loss,
            accepts_less=known.accepts_less,
            may_return=known.may_return,
        )


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """What was looked for, and what was found where; None for no step. Rank 0 reports it."""

    stored: int | None = None
    complete: int | None = None
    """The newest step that all ranks of an earlier world had in memory."""
    in_memory: int | None = None
    """The newest step in memory that this world can load."""
    seen_in_memory: int | None = None
    """The newest step of which any node has a rank's snapshot."""
    storage: str = NONE
    in_storage: int | None = None
    problem: str = ""
    """Why the storage is of no use."""


@dataclass(frozen=True)
class Found:
    """What all ranks load from."""

    checkpoints: Sequence[Mapping[str, Any]] = ()
    """Folder and step of those in storage that are newer than what is in memory, in the order in which they are
    tried."""
    distrusted: Sequence[int] = ()
    start_over: bool = False
    """The script starts over where none of them can be loaded."""
    lookup: Lookup = field(default_factory=Lookup)


class StateSearch:
    """The search of one world.

    Invariants:
        - All ranks find the same, or all of them raise the same error.
        - Who waits is named to the job, and to the agent of each node, within seconds.
        - Where `wait` holds, no older state is returned while the newer one may come back.
    """

    def __init__(
        self, own: RankIdentity, link: StorageLink | None, store: Store, *, place: str, number: int = 1
    ) -> None:
        """Creates the object.

        Args:
            own: This rank.
            link: The node's agent, where that is known.
            store: The generation's store.
            place: The folder of the state's checkpoints within the storage.
            number: Counts the searches of this world.
        """
        self._own = own
        self._link = link
        self._store = PrefixStore(f"search-{number}/", store)
        self._place = place
        self._begun = time.monotonic()
        self._told_agent = self._begun
        self._told_job: tuple[float, str] | None = None
        self._warned = False
        self._round = 0
        """Counts the questions of rank 0 to other nodes."""
        self._lacking: list[int] = []
        """As rank 0: the ranks whose nodes lacked something when they were last asked."""

    def find(self, expected: Expected, lookup: Lookup, *, stores: bool, source: str) -> Found:
        """Looks in the storage for what is newer than the memory, and waits for what is known to exist.

        Args:
            expected: As rank 0, what is known to have existed.
            lookup: As rank 0, what was found in memory.
            stores: Whether this state is stored.
            source: As rank 0, where what is in memory is loaded from: "memory", "peer" or "nothing".

        Raises:
            StorageAway: if nothing is in memory, the job knows of no checkpoint, and the storage could not be reached
                for long.
            StorageProblem: if the storage cannot be read.
            StateLost: if a newer state existed, and the job does not go on without it.
        """
        if self._own.rank == 0:
            found = self._search(expected, lookup, stores=stores, source=source)
            lost = self._lost(expected, found.lookup)
            if lost and expected.on_loss == STOP and not expected.accepts_less:
                self._report(found.lookup, source, stops=True)
                self._store.set("lost", lost)
                self._store.set("found", "")
                raise StateLost(lost)
            if lost:
                logger.warning("perdure: %s; continues with what there is", lost)
            self._store.set("found", json.dumps(asdict(found)))
            return found
        for _ in self._looks():
            if self._store.check(["found"]):
                break
            self._answer()
        text = self._store.get("found").decode()
        if not text:
            raise StateLost(self._store.get("lost").decode())
        fields: Json = json.loads(text)
        return Found(**fields | {"lookup": Lookup(**fields["lookup"])})

    def _search(self, expected: Expected, lookup: Lookup, *, stores: bool, source: str) -> Found:
        looks = self._looks()
        while True:
            next(looks)
            found = self._on_all_nodes(self._look(expected, lookup, stores=stores))
            waited = time.monotonic() - self._begun
            if not self._awaits(expected, found.lookup, waited):
                return found
            if waited >= _REPORTED:
                self._tell_job(found.lookup, source)
                # It ends with its generation, and the wait with it.
                self._store.check(["found"])

    def _look(self, expected: Expected, lookup: Lookup, *, stores: bool) -> Found:
        """Asks the storage once."""
        if not stores or self._link is None:
            return Found(lookup=lookup)
        try:
            answer = self._link.ask({"request": "list", "place": self._place}, within=_LISTED)
        except StorageAway as error:
            if not self._warned:
                self._warned = True
                logger.warning("perdure: waits for the storage of checkpoints: %s", error)
            return Found(lookup=replace(lookup, storage=AWAY, problem=f"{self._node}: {error}"))
        everything: list[Json] = answer["checkpoints"]
        distrusted = [int(step) for step in answer.get("distrusted", ())]
        steps = [int(one["step"]) for one in everything]
        newest = max((step for step in steps if step not in distrusted), default=max(steps, default=None))
        problem, storage = "", FOUND if everything else EMPTY
        if expected.folder and not any(_follows(str(one["folder"]), expected.folder) for one in everything):
            storage = LACKS
            problem = (
                f"{answer.get('url') or 'the storage'} has no {expected.folder}, which this job has stored: it is not "
                "mounted on this node, or is another one"
            )
        lookup = replace(lookup, storage=storage, in_storage=newest, problem=problem)
        newer = [one for one in everything if lookup.in_memory is None or int(one["step"]) > lookup.in_memory]
        return Found(newer, distrusted, bool(answer.get("start_over")), lookup)

    def _on_all_nodes(self, found: Found) -> Found:
        """What all nodes can load of it: nothing, where the storage of one of them lacks a checkpoint or is away."""
        own = self._own
        if not found.checkpoints or own.local_world_size == own.world_size:
            return found
        folders = [str(one["folder"]) for one in found.checkpoints]
        # Those that had it need not look each second, and are asked again once none lacks it.
        problems = self._ask_nodes(folders, self._lacking) if self._lacking else []
        problems = problems or self._ask_nodes(folders, range(1, own.world_size))
        self._lacking = [rank for rank, _, _ in problems]
        if not problems:
            return found
        _, storage, problem = problems[0]
        if len(problems) > 1:
            problem += f" (and {len(problems) - 1} more)"
        if found.lookup.problem:
            storage, problem = found.lookup.storage, found.lookup.problem
        return Found(lookup=replace(found.lookup, storage=storage, in_storage=None, problem=problem))

    def _ask_nodes(self, folders: Sequence[str], ranks: Sequence[int]) -> list[tuple[int, str, str]]:
        """Asks these ranks whether their nodes have the folders; returns those which have not, with what they found."""
        self._round += 1
        asked = {"node": self._node, "folders": folders, "ranks": list(ranks)}
        self._store.set(f"asked/{self._round}", json.dumps(asked))
        for _ in self._looks():
            if self._store.add(f"answered/{self._round}", 0) >= len(ranks):
                break
        if not self._store.add(f"lacking/{self._round}", 0):
            return []
        keys = {rank: f"lacks/{self._round}/{rank}" for rank in ranks}
        found = [(rank, json.loads(self._store.get(key))) for rank, key in keys.items() if self._store.check([key])]
        return [(rank, storage, problem) for rank, (storage, problem) in found]

    def _answer(self) -> None:
        """Says what the storage of this node lacks, once rank 0 asks it."""
        key, store, own = f"asked/{self._round + 1}", self._store, self._own
        if not store.check([key]):
            return
        self._round += 1
        asked: Json = json.loads(store.get(key))
        if own.rank not in asked["ranks"]:
            return
        # One rank of each node looks.
        if own.local_rank == 0 and (lacks := self._lacks(asked)) is not None:
            store.set(f"lacks/{self._round}/{own.rank}", json.dumps(lacks))
            store.add(f"lacking/{self._round}", 1)
        store.add(f"answered/{self._round}", 1)

    def _lacks(self, asked: Json) -> tuple[str, str] | None:
        """What the storage of this node is, and its problem; None where it has all that rank 0 has found."""
        if self._link is None:
            return None
        try:
            answer = self._link.ask({"request": "list", "place": self._place}, within=_LISTED)
        except (StorageAway, StorageProblem) as error:
            return AWAY, f"{self._node}: {error}"
        listed = {str(one["folder"]) for one in answer["checkpoints"]}
        missing = next((folder for folder in asked["folders"] if folder not in listed), None)
        if missing is None:
            return None
        url = answer.get("url") or "the storage"
        why = "it is not mounted there, or is another one"
        return LACKS, f"{self._node}: {url} has no {missing}, which {asked['node']} has: {why}"

    @property
    def _node(self) -> str:
        own = self._own
        return f"node {own.node}" if own.node is not None else f"the node of rank {own.rank}"

    def _awaits(self, expected: Expected, lookup: Lookup, waited: float) -> bool:
        """Whether to look once more."""
        if lookup.storage in (AWAY, LACKS):
            if expected.accepts_less and (lookup.storage == AWAY or not expected.folder):
                return waited < SURE
            if expected.folder:
                return expected.on_loss == WAIT or waited < SURE
            if lookup.in_memory is None:
                # It may have checkpoints of a job before this one.
                if waited >= PATIENCE:
                    raise StorageAway(lookup.problem)
                return True
        lost = bool(self._lost(expected, lookup))
        return lost and expected.on_loss == WAIT and expected.may_return

    def _lost(self, expected: Expected, lookup: Lookup) -> str:
        """Says which newer state than all that was found has existed; empty for none."""
        there = max((step for step in (lookup.in_memory, lookup.in_storage) if step is not None), default=-1)
        if lookup.storage in (AWAY, LACKS) and expected.stored is not None and expected.stored > there:
            return f"step {expected.stored} is stored and cannot be loaded: {lookup.problem}"
        # 0: the world before had begun without a state.
        if lookup.complete is not None and lookup.complete > max(there, 0):
            return f"step {lookup.complete} was in the memory of the nodes, and is not there any more for all ranks"
        return ""

    def _looks(self) -> Iterator[None]:
        """Yields at each look, and has the agent know that this rank waits."""
        pause = _SHORTEST
        while True:
            yield
            now = time.monotonic()
            if self._own.local_rank == 0 and now - self._told_agent >= _KEPT_ALIVE:
                self._told_agent = now
                self._ask({"request": "waiting", "generation": self._own.generation})
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    def _tell_job(self, lookup: Lookup, source: str) -> None:
        now = time.monotonic()
        if self._told_job is not None:
            at, problem = self._told_job
            if now - at < (REPEATED if problem == lookup.problem else _REWORDED):
                return
        else:
            logger.warning("perdure: waits for the newest state: %s", lookup.problem or "a node that has it is away")
        if self._report(lookup, source, waits=True):
            self._told_job = now, lookup.problem

    def _report(self, lookup: Lookup, source: str, *, waits: bool = False, stops: bool = False) -> bool:
        request: Json = {
            "request": "restored",
            "generation": self._own.generation,
            "step": lookup.in_memory or 0,
            "source": source,
            "place": self._place,
            "lookup": asdict(lookup),
            "waits": waits,
            "stops": stops,
        }
        if stops and self._link is not None:
            self._link.insist(request, patience=PATIENCE)
            return True
        return self._ask(request)

    def _ask(self, request: Json) -> bool:
        if self._link is None:
            return False
        try:
            self._link.ask(request, within=5.0)
        except (StorageAway, StorageProblem) as error:
            logger.debug("the agent does not take the report %r: %s", request["request"], error)
            return False
        return True


def _follows(folder: str, known: str) -> bool:
    """Whether a folder is the known one, or a later one of the same run: the job may not have learned of that yet."""
    (step, run, generation), (its_step, its_run, its_generation) = map(_parts, (folder, known))
    return run == its_run and (step, generation) >= (its_step, its_generation)


def _parts(folder: str) -> tuple[int, str, int]:
    """Step, run and generation of `step-STEP-RUN-GENERATION`."""
    _, step, rest = folder.rpartition("/")[2].split("-", 2)
    run, _, generation = rest.rpartition("-")
    return int(step), run, int(generation)
