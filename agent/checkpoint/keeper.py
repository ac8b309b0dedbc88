"""Keeps the checkpoints of a node: stores its ranks' parts, reports when all are durable, commits, and reads back."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import math
import os
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from pydantic import ValidationError

from perdure.agent.checkpoint import names
from perdure.agent.checkpoint.connections import Answer, CheckpointSocket, Content, Json, Refused
from perdure.agent.checkpoint.part import Part, PartRequest, SnapshotChanged
from perdure.agent.checkpoint.peer_copies import PeerCopies, WatchedOnNodes
from perdure.agent.checkpoint.records import FileRecord, NodeFiles, damage
from perdure.agent.checkpoint.restore_reports import read_number, read_report
from perdure.agent.checkpoint.retention import Retention
from perdure.agent.checkpoint.storage import Storage
from perdure.agent.checkpoint.upload_state import UploadState, UploadStateFile
from perdure.agent.checkpoint.watched import WatchedFiles
from perdure.agent.config import AgentConfig
from perdure.agent.outbox import envelope
from perdure.agent.protocol import bounded_wait
from perdure.agent.state import AgentState
from perdure.contract import (
    AgentMessage,
    CheckpointStored,
    CommandAnswer,
    CommitCheckpoint,
    CopyReceiver,
    HoldCopies,
    OrderCheckpoint,
)
from perdure_training.node_api.layout import CHECKPOINT_ORDERS, CHECKPOINT_SOCKET
from perdure_training.node_api.untrusted_files import folder_beneath, open_file, read_beneath
from perdure_training.snapshots.copies import lower_thread_priority

logger = logging.getLogger(__name__)

_AT_ONCE = 2
"""Parts that are written at the same time: more would take the network and the disk from the training."""
_TRIES_WITHIN = 600.0
"""Seconds for which a part is tried again. Then the rank gives it up, and the next checkpoint is the next try."""
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 30.0
_REMEMBERED = 8
"""Checkpoints whose progress is remembered."""
_READ_AT_ONCE = 1 << 22
_ORDERS = ("number", "done", "interval_s", "place")
_LONGEST_ORDERS = 1024


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


class Checkpoints:
    """The checkpoints of one node.

    Invariants:
        - Only a commit command of the control plane makes a folder a checkpoint.
        - No failure of the storage ends the agent, or delays its other work.
    """

    def __init__(
        self,
        config: AgentConfig,
        *,
        state: Callable[[], AgentState],
        saving: Callable[[int], None],
        to_group: Callable[[AgentMessage], None],
    ) -> None:
        """Creates the object.

        Args:
            config: The agent's configuration.
            state: Returns the node's present state.
            saving: Takes the generation of a rank that begins to save; called in the event loop.
            to_group: Sends a message to the node's group; called in the event loop.
        """
        self._config = config
        self._state = state
        self._saving = saving
        self._to_group = to_group
        self._spec = config.stored
        self._storage: Storage | None = None
        self._retention: Retention | None = None
        self._peers: PeerCopies | None = None
        self._watched: WatchedFiles | None = None
        if (spec := config.checkpoint) is not None and spec.storage is not None:
            self._storage = Storage(spec.storage, contained=config.is_another_user)
            self._retention = Retention(self._storage, spec)
            self._watched = WatchedFiles(self._storage, config.node, keep_last=spec.keep_last)
        elif spec is not None:
            self._peers = PeerCopies(config)
            self._watched = WatchedOnNodes(self._peers, config, keep_last=spec.keep_last)
        self._socket = CheckpointSocket(config.run_dir / CHECKPOINT_SOCKET, self._handle)
        self._changed = threading.Condition()
        self._kept = UploadStateFile(config.private_dir)
        self._progress: dict[str, UploadState] = self._kept.read()
        self._writing = threading.BoundedSemaphore(_AT_ONCE)
        self._commits = ThreadPoolExecutor(1, thread_name_prefix="commit")
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

    # Commands of the control plane

    async def commit(self, command: CommitCheckpoint) -> CommandAnswer:
        """Makes a checkpoint of a folder whose parts are all durable, and deletes superfluous ones.

        Raises:
            OSError: if the storage does not take it; the libraries of storages raise others.
        """
        storage = self._storage
        if storage is None:
            return CommandAnswer(accepted=False, detail="this job has no storage for checkpoints")
        saved = names.read_folder(command.folder)
        run = partial(asyncio.get_running_loop().run_in_executor, self._commits)
        await run(storage.commit, saved)
        logger.info("%s is a durable checkpoint", saved.folder)
        with self._changed:
            self._of(saved.folder).committed = True
            self._changed.notify_all()
        orders: dict[str, float] = {"done": command.order} if command.order else {}
        if command.interval is not None:
            orders["interval_s"] = command.interval.total_seconds()
        if orders:
            self._write_orders(**orders)
        # Not awaited: there may be much to delete, one by one.
        if self._retention is not None:
            inherited = [names.read_folder(one) for one in command.inherited]
            self._commits.submit(self._retention.apply, saved, inherited, kept_before=command.kept_before)
        return CommandAnswer(accepted=True)

    def order(self, command: OrderCheckpoint) -> CommandAnswer:
        """Has the ranks make a checkpoint now."""
        try:
            self._write_orders(number=command.number)
        except OSError as error:
            return CommandAnswer(accepted=False, detail=f"the ranks cannot be asked: {error}")
        return CommandAnswer(accepted=True)

    def hold_copies(self, command: HoldCopies) -> CommandAnswer:
        """Has another node keep the copies of what the script saves, and the launcher copy all of it if that is a new
        place.

        Raises:
            OSError: if the launcher cannot be told.
        """
        if self._peers is None or self._watched is None:
            return CommandAnswer(accepted=False, detail="the nodes of this job keep no copies for each other")
        if self._peers.hold(command.holder):
            self._watched.forget()
        self._write_orders(place=zlib.crc32(command.holder.place.encode()))
        return CommandAnswer(accepted=True)

    def _write_orders(self, **changes: float) -> None:
        """Changes the orders that rank 0 reads."""
        orders: dict[str, float] = {}
        # Others may write to this folder: nothing but numbers is taken over, and a link leads the agent nowhere.
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
            found: Any = json.loads(read_beneath(self._config.run_dir, CHECKPOINT_ORDERS, limit=_LONGEST_ORDERS))
            orders = {name: found[name] for name in _ORDERS if name in found and isinstance(found[name], int | float)}
        content = json.dumps(orders | changes).encode()
        with folder_beneath(self._config.run_dir) as within:
            draft = f".{secrets.token_hex(4)}"
            with os.fdopen(open_file(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, within), "wb") as file:
                file.write(content)
            os.replace(draft, CHECKPOINT_ORDERS, src_dir_fd=within, dst_dir_fd=within)

    # Requests of ranks, each in a thread of its own

    def _handle(self, request: Json, files: Sequence[int]) -> Answer:
        kind = request.get("request")
        if kind == "hello":
            return self._hello(request)
        if kind == "restored":
            return self._restored(request)
        if kind == "watched" and self._watched is not None:
            lower_thread_priority()
            with self._writing:
                answer = self._watched.handle(request, files)
            return answer if isinstance(answer, dict) else Content(*answer)
        storage = self._storage
        if storage is None:
            raise Refused("this job has no storage for checkpoints: set checkpoint.storage")
        match kind:
            case "store":
                return self._store(storage, request, files)
            case "await":
                return self._await(storage, request)
            case "failed":
                return self._failed(request)
            case "unusable":
                return self._unusable(request)
            case "list":
                return self._list(storage, names.check_place(str(request["place"])))
            case "verify":
                number, shares = (int(one) for one in request["share"])
                saved = names.read_folder(str(request["folder"]))
                return {"damage": damage(storage, saved, share=(number, max(shares, 1)))}
            case "read":
                saved = names.read_folder(str(request["folder"]))
                name = names.check_file(str(request["name"]))
                path, offset = f"{saved.folder}/{name}", max(int(request.get("offset", 0)), 0)
                size = max(storage.size(path) - offset, 0)
                size = min(size, max(int(request.get("length", size)), 0))
                return Content(size, storage.pieces(path, offset=offset, length=size, piece=_READ_AT_ONCE))
            case _:
                raise Refused(f"request: {str(kind)[:40]!r} is unknown")

    def _list(self, storage: Storage, place: str) -> Json:
        """The checkpoints in the order in which they are tried: those that are trusted, the latest first.

        The oldest one is trusted in any case: to begin anew would cost the whole training. Distrusted ones follow, the
        oldest first, for a job whose trusted ones are all damaged. One that has lost its metadata is listed, too: it is
        damaged, and was not left unfinished.
        """
        found = [one for one in storage.saved(place) if storage.is_committed(one) or storage.has_lost_metadata(one)]
        distrusted = set(self._state().distrusted_checkpoints)
        trusted = [one for one in found if one.folder not in distrusted] or found[-1:]
        others = [one for one in found if one not in trusted]
        return {
            "checkpoints": [{"folder": one.folder, "step": one.step} for one in (*trusted, *reversed(others))],
            "distrusted": [one.step for one in others],
            "start_over": self._spec is not None and self._spec.on_unusable == "start_over",
        }

    def _hello(self, request: Json) -> Json:
        if self._spec is None:
            return {"stores": False}
        if self._loop is not None and request.get("saves", True):
            generation = read_number(request.get("generation", self._state().generation))
            self._check_received(generation)
            self._loop.call_soon_threadsafe(self._saving, generation)
        every = self._spec.every
        return {
            "stores": True,
            "every_steps": every if isinstance(every, int) else None,
            "every_s": every.total_seconds() if isinstance(every, timedelta) else None,
        }

    def _restored(self, request: Json) -> Json:
        generation = read_number(request["generation"])
        self._check_received(generation)
        message = read_report(self._config.node, request, generation=generation)
        self._send(message)
        return {}

    def _await(self, storage: Storage, request: Json) -> Json:
        """Answers whether a checkpoint is committed, as soon as that is known."""
        saved = names.read_folder(str(request["folder"]))
        with self._changed:
            progress = self._of(saved.folder)
            self._changed.wait_for(
                lambda: progress.committed or progress.given_up, bounded_wait(float(request.get("within", 0)))
            )
        if not progress.committed and not progress.given_up:
            # Another node's agent may have committed it, or this node's before it was started again.
            progress.committed = storage.is_committed(saved)
        return {"committed": progress.committed, "given_up": progress.given_up, "delayed_by": progress.problem}

    def _failed(self, request: Json) -> Json:
        """Reports that the ranks could not store a checkpoint together."""
        saved, generation = names.read_folder(str(request["folder"])), read_number(request["generation"])
        self._check_generation(generation)
        self._fail(saved, generation, str(request["problem"]), final=True)
        return {}

    def _unusable(self, request: Json) -> Json:
        """Reports that no stored checkpoint can be loaded."""
        generation = read_number(request["generation"])
        self._check_generation(generation)
        damages = tuple(str(damage) for damage in request["damages"])
        message = CheckpointStored(
            **envelope(self._config.node),
            generation=generation,
            step=0,
            folder="",
            problem="no checkpoint in storage can be loaded",
            unusable=damages,
        )
        self._send(message)
        return {}

    def _store(self, storage: Storage, request: Json, files: Sequence[int]) -> Json:
        try:
            wanted = PartRequest.model_validate(request)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise Refused(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        saved = names.read_folder(wanted.folder)
        self._check_own(wanted, saved)
        self._check_generation(wanted.generation)
        with self._changed:
            self._of(saved.folder)
        with self._writing:
            part = Part(wanted, files)
            lower_thread_priority()
            try:
                self._insist(storage, saved, part)
            except SnapshotChanged as error:
                self._fail(saved, wanted.generation, str(error), final=True)
                raise Refused(str(error)) from error
            finally:
                # Also where a process that the rank forked still has the file open.
                fcntl.flock(files[0], fcntl.LOCK_UN)
        return {}

    def _insist(self, storage: Storage, saved: names.Saved, part: Part) -> None:
        """Stores a part, again and again for some minutes."""
        request = part.request
        part.verify()
        until, pause = time.monotonic() + _TRIES_WITHIN, _FIRST_PAUSE
        while True:
            try:
                self._write(storage, saved, part)
                return
            except SnapshotChanged:
                raise
            except Exception as error:
                problem = f"{storage.url}: {getattr(error, 'strerror', None) or error or type(error).__name__}"
                self._check_generation(request.generation)
                if time.monotonic() + pause >= until:
                    self._fail(saved, request.generation, problem, final=True)
                    raise Refused(problem) from error
                self._fail(saved, request.generation, problem, final=False)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _write(self, storage: Storage, saved: names.Saved, part: Part) -> None:
        request, records = part.request, dict[str, FileRecord]()
        if part.has_metadata:
            size, checksum = storage.write(f"{saved.folder}/{names.UNCOMMITTED}", part.metadata())
            records[names.METADATA] = FileRecord(size=size, checksum=checksum)
        size, checksum = storage.write(f"{saved.folder}/{request.name}", part.content())
        records[request.name] = FileRecord(size=size, checksum=checksum)
        with self._changed:
            progress = self._of(saved.folder)
            progress.parts |= records
            progress.sizes[request.name] = size
            progress.order = max(progress.order, request.order)
            progress.metrics |= {name: value for name, value in request.metrics.items() if math.isfinite(value)}
            self._kept.write(self._progress)
            stored = sum(name != names.METADATA for name in progress.parts)
            complete = stored >= (self._state().processes or 1)
            files = dict(progress.parts)
        if complete:
            self._complete(storage, saved, request, files)

    def _complete(
        self, storage: Storage, saved: names.Saved, request: PartRequest, files: dict[str, FileRecord]
    ) -> None:
        """Records and reports that all parts of this node are durable."""
        world = self._state().world
        first = world.base_rank if world is not None else request.rank
        with self._changed:
            metrics = dict(self._of(saved.folder).metrics)
        record = NodeFiles(ranks=request.ranks, files=files, metrics=metrics)
        storage.write(f"{saved.folder}/{names.record_name(first)}", [record.model_dump_json().encode()])
        with self._changed:
            progress = self._of(saved.folder)
        took = time.monotonic() - progress.begun
        self.newest = NewestPart(step=request.step, time=time.time(), took=took, size=progress.size)
        logger.info("%s: stored %s bytes in %.1f s", saved.folder, f"{progress.size:,}", took)
        self._send(
            CheckpointStored(
                **envelope(self._config.node),
                generation=request.generation,
                step=request.step,
                folder=saved.folder,
                size=progress.size,
                took=timedelta(seconds=took),
                order=progress.order,
            )
        )

    def _fail(self, saved: names.Saved, generation: int, problem: str, *, final: bool) -> None:
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
                    **envelope(self._config.node),
                    generation=generation,
                    step=saved.step,
                    folder=saved.folder,
                    problem=problem,
                )
            )

    def _check_own(self, wanted: PartRequest, saved: names.Saved) -> None:
        """Refuses parts of other nodes' ranks, and those that are stored elsewhere than the request says."""
        world, processes = self._state().world, self._state().processes or 1
        first = world.base_rank if world is not None else 0
        if not first <= wanted.rank < first + processes:
            raise Refused(f"rank: {wanted.rank} is not a rank of this node")
        if wanted.name != names.part_name(wanted.rank):
            raise Refused(f"name: expected {names.part_name(wanted.rank)}, found {wanted.name[:120]!r}")
        if (saved.step, saved.run, saved.generation) != (wanted.step, self._config.node.uid, wanted.generation):
            raise Refused(f"folder: {wanted.folder[:120]!r} is of another step, run or generation")

    def _check_generation(self, generation: int) -> None:
        """Refuses what belongs to a world that is over: its checkpoint is not committed any more."""
        current = self._state().generation
        if generation < current:
            raise Refused(f"generation {generation} is over: this node is in generation {current}")
        self._check_received(generation)

    def _check_received(self, generation: int) -> None:
        """Refuses what is said of a world that the node has not received; an agent that lost its state knows none."""
        current = self._state().generation
        if current and generation > current:
            raise Refused(f"generation {generation} is no world of this node, which is in generation {current}")

    def _of(self, folder: str) -> UploadState:
        """The progress of a checkpoint; `_changed` is held."""
        if folder not in self._progress:
            for old in list(self._progress)[: -_REMEMBERED + 1]:
                del self._progress[old]
            self._progress[folder] = UploadState(begun=time.monotonic())
        return self._progress[folder]

    def _send(self, message: AgentMessage) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._to_group, message)
