"""Keeps the checkpoints of a node: stores its ranks' parts, reports when all are durable, commits, and reads back."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain

from pydantic import ValidationError

from perdure.agent.checkpoint import names
from perdure.agent.checkpoint.answering_storage import AnsweringStorage
from perdure.agent.checkpoint.commits import CheckpointedNode, Commits
from perdure.agent.checkpoint.connections import Answer, CheckpointSocket, Content, Json, Refused
from perdure.agent.checkpoint.desired_file import desired_of, write_desired
from perdure.agent.checkpoint.listing import Listing
from perdure.agent.checkpoint.part import Part, PartRequest, SnapshotChanged
from perdure.agent.checkpoint.peer_copies import PeerCopies, WatchedOnNodes
from perdure.agent.checkpoint.reads import CheckedReads
from perdure.agent.checkpoint.records import FileRecord, NodeFiles, damage
from perdure.agent.checkpoint.restore_reports import read_held, read_number, read_report, read_use
from perdure.agent.checkpoint.retention import Retention
from perdure.agent.checkpoint.stalled_writes import StalledWrites, WriteTurns, hangs
from perdure.agent.checkpoint.storage import Storage
from perdure.agent.checkpoint.upload_state import UploadState, UploadStateFile
from perdure.agent.checkpoint.watched import WatchedFiles
from perdure.agent.config import AgentConfig
from perdure.agent.outbox import envelope
from perdure.agent.protocol import bounded_wait
from perdure.base.backoff import Backoff
from perdure.contract.agents import AgentMessage, CopyReceiver
from perdure.contract.checkpoints import (
    CheckpointCommitted,
    CheckpointRef,
    CheckpointRestored,
    CheckpointStored,
    Commit,
    Restore,
    RestoreSource,
    StoredCheckpoint,
)
from perdure.contract.commands import CopyTarget
from perdure_training.background import lower_thread_priority
from perdure_training.node_api.layout import CHECKPOINT_SOCKET

logger = logging.getLogger(__name__)

_TRIES_WITHIN = 600.0
"""Seconds for which a part is tried again. Then the rank gives it up, and the next checkpoint is the next try."""
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 30.0
_REMEMBERED = 8
"""Checkpoints of one place whose progress is remembered. Each place stores one at a time."""
_PLACES = 16
"""Places of which any is: those of checkpointers that are stored at the same time. Ranks choose their names."""


@dataclass(frozen=True, kw_only=True)
class NewestPart:
    """This node's part of a checkpoint, which is durable."""

    step: int
    time: float
    """When it became durable, in seconds since the epoch."""
    took: float
    """Seconds."""
    size: int
    """Bytes."""


class CheckpointService:
    """The checkpoints of one node.

    Invariants:
        - Only a commit that the control plane desires makes a folder a checkpoint.
        - No failure of the storage ends the agent, or delays its other work.
    """

    def __init__(
        self, config: AgentConfig, node: CheckpointedNode, *, to_group: Callable[[AgentMessage], None]
    ) -> None:
        """Creates the object.

        Args:
            config: The agent's configuration.
            node: The node; it is called in the event loop only.
            to_group: Sends a message to the node's group; called in the event loop.
        """
        self._config = config
        self._node = node
        self._to_group = to_group
        self._spec = config.stored
        self._storage: Storage | None = None
        self._answering: AnsweringStorage | None = None
        """The storage for what ranks read."""
        self._reads: CheckedReads | None = None
        self._listing: Listing | None = None
        self._commits: Commits | None = None
        self._peers: PeerCopies | None = None
        self._watched: WatchedFiles | None = None
        if (spec := config.checkpoint) is not None and spec.storage is not None:
            self._storage = Storage(spec.storage, contained=config.is_another_user)
            self._answering = AnsweringStorage(spec.storage, contained=config.is_another_user)
            self._reads = CheckedReads(self._answering)
            self._listing = Listing(self._storage, is_sound=self._is_sound, is_trusted=self._is_trusted)
            self._commits = Commits(
                self._storage,
                Retention(self._storage, spec, is_trusted=self._is_trusted),
                node,
                report=self._report_commit,
                give_up=self._give_up_commit,
            )
            url = self._storage.url if config.awaits_state else ""
            self._watched = WatchedFiles(self._answering, config.node, keep_last=spec.keep_last, url=url)
        elif spec is not None:
            self._peers = PeerCopies(config)
            self._watched = WatchedOnNodes(self._peers, config, keep_last=spec.keep_last)
        self._socket = CheckpointSocket(config.run_dir / CHECKPOINT_SOCKET, self._handle)
        self._changed = threading.Condition()
        self._kept = UploadStateFile(config.private_dir)
        self._progress: dict[str, UploadState] = self._kept.read()
        self._writing = WriteTurns()
        self._followed: tuple[dict[str, float], CopyTarget | None] = {}, None
        """The desired state that ranks and the launcher know."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self.newest: NewestPart | None = None
        """What was stored last."""
        self.failures = 0
        """Checkpoints whose part could not be stored at once."""

    def start(self) -> None:
        """Starts to answer ranks. Called in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._socket.start()
        if self._peers is not None:
            self._peers.start()

    def close(self) -> None:
        """Deletes what is kept for other nodes: this node ends for good."""
        if self._peers is not None:
            self._peers.close()

    @property
    def receiver(self) -> CopyReceiver | None:
        """Where copies of what other nodes save are taken; None where none are."""
        return self._peers.receiver if self._peers is not None else None

    # What the group desires

    async def run(self) -> None:
        """Does what the group desires, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_followed())
            if self._commits is not None:
                tasks.create_task(self._commits.run())

    async def _keep_followed(self) -> None:
        backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        while True:
            await self._node.changed.wait_for(lambda: self._desired != self._followed)
            try:
                self.follow()
            except OSError as error:
                logger.warning("the ranks cannot be told what is desired, retrying: %s", error)
                await asyncio.sleep(backoff.next_pause())
            else:
                backoff.reset()

    def follow(self) -> None:
        """Has ranks and the launcher learn what is desired: of a new place of copies the latter copies all again.

        Raises:
            OSError: if they cannot be told.
        """
        content, copies = desired = self._desired
        if copies is not None and self._peers is not None and self._peers.hold(copies) and self._watched is not None:
            self._watched.forget()
        if content != self._followed[0]:
            write_desired(self._config.run_dir, content)
        self._followed = desired

    @property
    def _desired(self) -> tuple[dict[str, float], CopyTarget | None]:
        state = self._node.state
        return desired_of(state), state.copies

    def _report_commit(self, commit: Commit, problem: str) -> None:
        """Reports that a checkpoint is committed, and answers the ranks that wait for it; or why it is not yet."""
        self._to_group(
            CheckpointCommitted(**envelope(self._config.node), checkpoint=commit.checkpoint, problem=problem)
        )
        if not problem:
            with self._changed:
                self._of(commit.checkpoint.folder).committed = True
                self._changed.notify_all()

    def _give_up_commit(self, commit: Commit, problem: str) -> None:
        """Answers the ranks that wait for a checkpoint which cannot be committed: the next one is another try."""
        with self._changed:
            self._of(commit.checkpoint.folder).given_up = problem
            self._changed.notify_all()

    # Requests of ranks, each in a thread of its own

    def _handle(self, request: Json, files: Sequence[int]) -> Answer:
        kind = request.get("request")
        if kind == "hello":
            return self._hello(request)
        if kind in ("restored", "refused"):
            return self._restored(request)
        if kind == "held":
            message = read_held(self._config.node, request)
            self._check_received(message.stored.checkpoint.generation)
            self._send(message)
            return {}
        if kind == "waiting":
            return self._waiting(request)
        if kind == "watched" and self._watched is not None:
            lower_thread_priority()
            with self._writing.take():
                answer = self._watched.handle(request, files)
            return answer if isinstance(answer, dict) else Content(*answer)
        storage, answering = self._storage, self._answering
        if storage is None or answering is None or self._reads is None or self._listing is None:
            raise Refused("this job has no storage for checkpoints: set checkpoint.storage")
        match kind:
            case "store":
                return self._store(storage, request, files)
            case "await":
                return self._await(answering, request)
            case "failed":
                return self._failed(request)
            case "unusable":
                return self._unusable(request)
            case "list":
                start_over = self._spec is not None and self._spec.on_unusable == "start_over"
                return self._listing.get(names.check_place(str(request["place"]))) | {"start_over": start_over}
            case "verify":
                number, shares = (int(one) for one in request["share"])
                saved = CheckpointRef.parse(str(request["folder"]))
                if not answering.names(saved.folder):
                    # Rank 0 has listed it: this says nothing about what is stored.
                    raise OSError(
                        f"{storage.url} has no {saved.folder} on this node: it is not mounted here, or another one"
                    )
                return {"damage": damage(answering, saved, share=(number, max(shares, 1)))}
            case "read":
                saved = CheckpointRef.parse(str(request["folder"]))
                name = names.check_file(str(request["name"]))
                offset, length = max(int(request.get("offset", 0)), 0), request.get("length")
                length = None if length is None else int(length)
                return Content(*self._reads.read(saved, name, offset=offset, length=length))
            case _:
                raise Refused(f"request: {str(kind)[:40]!r} is unknown")

    def _is_trusted(self, saved: CheckpointRef) -> bool:
        """Whether the job has not failed after the checkpoint was loaded, and its state is sound."""
        return self._is_sound(saved) and saved not in self._node.state.distrusted_checkpoints

    def _is_sound(self, saved: CheckpointRef) -> bool:
        world = self._node.state.world
        unsound = world.unsound if world is not None and saved.run == self._config.node.uid else None
        return unsound is None or not unsound.has(generation=saved.generation, step=saved.step)

    def _hello(self, request: Json) -> Json:
        if self._loop is not None and "copies" in request:
            of = read_number(request["generation"])
            self._check_received(of)
            self._loop.call_soon_threadsafe(self._node.on_snapshots, of, read_use(request))
        if self._spec is None:
            return {"stores": False}
        if self._loop is not None and request.get("saves", True):
            generation = read_number(request.get("generation", self._node.state.generation))
            self._check_received(generation)
            self._loop.call_soon_threadsafe(self._node.on_saving, generation)
        every = self._spec.every
        return {
            "stores": True,
            "every_steps": every if isinstance(every, int) else None,
            "every_s": every.total_seconds() if isinstance(every, timedelta) else None,
        }

    def _waiting(self, request: Json) -> Json:
        self._check_received(read_number(request["generation"]))
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._node.on_awaiting_state)
        return {}

    def _restored(self, request: Json) -> Json:
        generation = read_number(request["generation"])
        self._check_received(generation)
        message = read_report(self._config.node, request, generation=generation)
        self._send(message)
        if self._reads is not None:
            self._reads.forget()
        return {}

    def _await(self, storage: AnsweringStorage, request: Json) -> Json:
        """Answers whether a checkpoint is committed, as soon as that is known."""
        unknown = ""
        saved = CheckpointRef.parse(str(request["folder"]))
        with self._changed:
            progress = self._of(saved.folder)
            self._changed.wait_for(
                lambda: progress.committed or progress.given_up, bounded_wait(float(request.get("within", 0)))
            )
        if not progress.committed and not progress.given_up:
            # Another node's agent may have committed it, or this node's before it was started again.
            try:
                progress.committed = storage.is_committed(saved)
            except OSError as error:
                unknown = str(error)
        delayed_by = progress.problem or unknown
        return {"committed": progress.committed, "given_up": progress.given_up, "delayed_by": delayed_by}

    def _failed(self, request: Json) -> Json:
        """Reports that the ranks could not store a checkpoint together."""
        saved = CheckpointRef.parse(str(request["folder"]))
        self._check_generation(saved.generation)
        self._fail(saved, str(request["problem"]), final=True)
        return {}

    def _unusable(self, request: Json) -> Json:
        """Reports that no stored checkpoint can be loaded."""
        generation = read_number(request["generation"])
        self._check_generation(generation)
        damages = tuple(str(damage) for damage in request["damages"])
        place = names.check_place(str(request.get("place") or ""))
        restored = Restore(step=0, source=RestoreSource.STORAGE, unusable=damages, stops=True, place=place)
        self._send(CheckpointRestored(**envelope(self._config.node), generation=generation, restored=restored))
        return {}

    def _store(self, storage: Storage, request: Json, files: Sequence[int]) -> Json:
        try:
            wanted = PartRequest.model_validate(request)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise Refused(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        saved = CheckpointRef.parse(wanted.folder)
        self._check_own(wanted, saved)
        self._check_generation(saved.generation)
        with self._changed:
            self._of(saved.folder)
        with self._writing.take() as end_turn:
            part = Part(wanted, files)
            lower_thread_priority()
            try:
                self._insist(storage, saved, part, end_turn)
            except SnapshotChanged as error:
                self._fail(saved, str(error), final=True)
                raise Refused(str(error)) from error
            finally:
                # Also where a process that the rank forked still has the file open.
                fcntl.flock(files[0], fcntl.LOCK_UN)
        return {}

    def _insist(self, storage: Storage, saved: CheckpointRef, part: Part, end_turn: Callable[[], None]) -> None:
        """Stores a part, again and again for some minutes."""
        part.verify()
        until, pause = time.monotonic() + _TRIES_WITHIN, _FIRST_PAUSE

        def stall() -> None:
            end_turn()
            self._fail(saved, hangs(storage.url), final=False)

        while True:
            writes = StalledWrites(stall)
            try:
                with writes.watching():
                    self._write(storage, saved, part, writes)
                return
            except SnapshotChanged:
                raise
            except Exception as error:
                problem = f"{storage.url}: {getattr(error, 'strerror', None) or error or type(error).__name__}"
                self._check_generation(saved.generation)
                if time.monotonic() + pause >= until:
                    self._fail(saved, problem, final=True)
                    raise Refused(problem) from error
                self._fail(saved, problem, final=False)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _write(self, storage: Storage, saved: CheckpointRef, part: Part, writes: StalledWrites) -> None:
        request, records = part.request, dict[str, FileRecord]()
        if part.has_metadata:
            size, checksum = storage.write(f"{saved.folder}/{names.UNCOMMITTED}", writes.noted(part.metadata()))
            records[names.METADATA] = FileRecord(size=size, checksum=checksum)
        size, checksum = storage.write(f"{saved.folder}/{request.name}", writes.noted(part.content()))
        records[request.name] = FileRecord(size=size, checksum=checksum)
        with self._changed:
            progress = self._of(saved.folder)
            progress.parts |= records
            progress.answers = max(progress.answers, request.answers)
            progress.beside = tuple(sorted({*progress.beside, *request.beside}))
            if request.reported is not None:
                progress.reported = max(progress.reported or 0, request.reported)
            progress.metrics |= {name: value for name, value in request.metrics.items() if math.isfinite(value)}
            self._kept.write(self._progress)
            stored = sum(name != names.METADATA for name in progress.parts)
            complete = stored >= (self._node.state.processes or 1)
            files = dict(progress.parts)
        if complete:
            self._complete(storage, saved, request, files)

    def _complete(
        self, storage: Storage, saved: CheckpointRef, request: PartRequest, files: dict[str, FileRecord]
    ) -> None:
        """Records and reports that all parts of this node are durable."""
        world = self._node.state.world
        first = world.base_rank if world is not None else request.rank
        with self._changed:
            metrics = dict(self._of(saved.folder).metrics)
        record = NodeFiles(ranks=request.ranks, files=files, metrics=metrics)
        storage.write(f"{saved.folder}/{names.record_name(first)}", [record.model_dump_json().encode()])
        with self._changed:
            progress = self._of(saved.folder)
        took = time.monotonic() - progress.begun
        self.newest = NewestPart(step=saved.step, time=time.time(), took=took, size=progress.size)
        logger.info("%s: stored %s bytes in %.1f s", saved.folder, f"{progress.size:,}", took)
        self._send(
            CheckpointStored(
                **envelope(self._config.node),
                stored=StoredCheckpoint(
                    checkpoint=saved,
                    size=progress.size,
                    took=timedelta(seconds=took),
                    answers=progress.answers,
                    beside=progress.beside,
                    reported=progress.reported,
                ),
            )
        )

    def _fail(self, saved: CheckpointRef, problem: str, *, final: bool) -> None:
        """Reports a problem, once for each checkpoint."""
        with self._changed:
            progress = self._of(saved.folder)
            known, progress.problem = progress.problem, problem
            self.failures += not known
            if final:
                progress.given_up = problem
                self._changed.notify_all()
        logger.warning("%s cannot be stored%s: %s", saved.folder, "" if final else ", retrying", problem)
        if not known:
            self._send(
                CheckpointStored(
                    **envelope(self._config.node), stored=StoredCheckpoint(checkpoint=saved), problem=problem
                )
            )

    def _check_own(self, wanted: PartRequest, saved: CheckpointRef) -> None:
        """Refuses parts of other nodes' ranks, and those that are stored elsewhere than the request says."""
        world, processes = self._node.state.world, self._node.state.processes or 1
        first = world.base_rank if world is not None else 0
        if not first <= wanted.rank < first + processes:
            raise Refused(f"rank: {wanted.rank} is not a rank of this node")
        if wanted.name != names.part_name(wanted.rank):
            raise Refused(f"name: expected {names.part_name(wanted.rank)}, found {wanted.name[:120]!r}")
        if saved.run != self._config.node.uid:
            raise Refused(f"folder: {wanted.folder[:120]!r} is of another run")

    def _check_generation(self, generation: int) -> None:
        """Refuses what belongs to a world that is over: its checkpoint is not committed any more."""
        current = self._node.state.generation
        if generation < current:
            raise Refused(f"generation {generation} is over: this node is in generation {current}")
        self._check_received(generation)

    def _check_received(self, generation: int) -> None:
        """Refuses what is said of a world that the node has not received; an agent that lost its state knows none."""
        current = self._node.state.generation
        if current and generation > current:
            raise Refused(f"generation {generation} is no world of this node, which is in generation {current}")

    def _of(self, folder: str) -> UploadState:
        """The progress of a checkpoint; `_changed` is held."""
        if folder not in self._progress:
            places: dict[str, list[str]] = {}
            for known in self._progress:
                places.setdefault(known.rpartition("/")[0], []).append(known)
            # One whose parts take long is kept, however often those of other checkpointers are stored meanwhile.
            own = places.pop(folder.rpartition("/")[0], [])
            for old in chain(own[: -_REMEMBERED + 1], *list(places.values())[: -_PLACES + 1]):
                del self._progress[old]
            self._progress[folder] = UploadState(begun=time.monotonic())
        return self._progress[folder]

    def _send(self, message: AgentMessage) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._to_group, message)
