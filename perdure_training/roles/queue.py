"""A bounded queue between roles whose items are leased like shards, so that none is lost and none is trained on twice.

    # In the role that produces, one in each process:
    producer = Producer(folder)
    producer.put(trajectory)

    # In the role that consumes, one on each rank, as a part of the checkpoint's state:
    consumer = Consumer("trajectories", folder)
    trajectory = consumer.get()
    consumer.step()

Items are files in a folder that the nodes of both roles see. So an item that was put survives its producer, tensors
never pass through the control plane, and the leases are those of a stream (`perdure_training.shards`), whose partitions
are the producers. docs/roles.md is the guide.

    FOLDER/closed               once nothing more is put
    FOLDER/position.json        what is consumed and removed of each producer
    FOLDER/PRODUCER/next        the number of the producer's next item
    FOLDER/PRODUCER/NUMBER      an item, pickled
"""

from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from perdure_training.node_api.rank_environment import ROLE_VARIABLE
from perdure_training.shards.link import Link
from perdure_training.shards.partitions import MOST_PARTITIONS, StreamClient

logger = logging.getLogger(__name__)

_CLOSED = "closed"
_NEXT = "next"
_POSITION = "position.json"
_AHEAD = 8
"""Items that a rank keeps ahead: those that it keeps while it waits for another rank, nobody can learn from."""
_LOOK = 0.05
"""Seconds between two looks at a full queue."""
_OUTAGE = 60.0
"""Seconds for which a producer tolerates a folder that cannot be read: a network file system may be away that long."""
_TRIES = 5
"""Tries to read a file that is replaced while it is read."""


class QueueFull(TimeoutError):
    """The consumers did not make room in time."""


class QueueEmpty(TimeoutError):
    """The producers have put nothing in time."""


class QueueError(RuntimeError):
    """The queue cannot be used in this way; the message says why."""


class QueueClosed(QueueError):
    """Nothing more is put into the queue."""


class Producer:
    """This process's part of a queue.

    Invariants:
        - An item is complete and on disk before it can be leased, and its number belongs to no other.
        - A producer that starts again continues after its last item.
    """

    def __init__(self, folder: str | Path, *, capacity: int = 64, number: int | None = None) -> None:
        """Creates the producer, and the folder if it is missing.

        Args:
            folder: The queue's folder, which the consumers see, too. A new training begins with a new one.
            capacity: Items of this producer that may wait, or be in work, before `put` waits.
            number: Tells this producer from the others; by default the process's rank.

        Raises:
            ValueError: if an argument is out of range.
        """
        number = int(os.environ.get("RANK", "0")) if number is None else number
        if not 0 <= number < MOST_PARTITIONS:
            raise ValueError(f"number: expected 0 to {MOST_PARTITIONS - 1}, found {number}")
        if capacity < 1:
            raise ValueError(f"capacity: expected at least 1, found {capacity}")
        self._folder = Path(folder)
        self._own = self._folder / str(number)
        self._own.mkdir(parents=True, exist_ok=True)
        self._capacity = capacity
        self._number = number
        self._seen = (0, False)
        self._unreadable_since: float | None = None
        for draft in self._own.glob("draft-*"):
            draft.unlink(missing_ok=True)
        written = (int(path.name) + 1 for path in self._own.iterdir() if path.name.isdigit())
        self._next = max(written, default=0)
        # The marker is behind if the process died between an item and its marker, and ahead of items that were removed.
        self._next = max(self._next, _number_in(self._own / _NEXT))
        self._mark()

    @property
    def next(self) -> int:
        """The number of the next item, which is how many this producer has put, in earlier processes, too.

        A producer that takes its random seed from it puts what it would have put without a failure.
        """
        return self._next

    def put(self, item: object, *, timeout: timedelta | None = None) -> int:
        """Puts an item, once there is room, and returns its number.

        Args:
            item: What can be pickled.
            timeout: The longest wait; None waits as long as it takes.

        Raises:
            QueueFull: if there is no room in time; the message says who does not consume.
            QueueClosed: if the queue was closed, meanwhile or before.
            QueueError: if another process has the number of this producer.
            OSError: if the folder cannot be read for a minute, or the item cannot be written.
        """
        end = None if timeout is None else time.monotonic() + timeout.total_seconds()
        consumed, closed = self._look()
        while self._next - consumed >= self._capacity and not closed:
            if end is not None and time.monotonic() >= end:
                raise QueueFull(self._describe_consumers(timeout))
            time.sleep(_LOOK)
            consumed, closed = self._look()
        if closed:
            raise QueueClosed(f"queue {self._folder}: it was closed")
        path = self._own / str(self._next)
        draft = path.with_name(f"draft-{os.getpid()}")
        _write(draft, pickle.dumps(item, protocol=pickle.HIGHEST_PROTOCOL))
        try:
            # Unlike a rename, it fails if another process has put an item of this number.
            os.link(draft, path)
        except FileExistsError:
            # A network file system that has lost its answer makes the link once more.
            if not path.samefile(draft):
                raise QueueError(
                    f"queue {self._folder}: another process puts items as producer {self._number}; each needs a number "
                    "of its own"
                ) from None
        finally:
            draft.unlink()
        self._next += 1
        self._mark()
        return self._next - 1

    def close(self) -> None:
        """Ends the queue for all producers: consumers get what is in it, and then None."""
        (self._folder / _CLOSED).touch()

    def _look(self) -> tuple[int, bool]:
        """Returns how many items of this producer are consumed, and whether the queue is closed, as far as the folder
        could be read lately."""
        try:
            consumed = _position(self._folder).get("next", {}).get(str(self._number), 0)
            self._seen = consumed, _exists(self._folder / _CLOSED)
            self._unreadable_since = None
        except OSError as error:
            if self._unreadable_since is None:
                self._unreadable_since = time.monotonic()
                logger.warning("queue %s cannot be read, trying again: %s", self._folder, error)
            elif time.monotonic() - self._unreadable_since > _OUTAGE:
                raise
        return self._seen

    def _mark(self) -> None:
        _replace(self._own / _NEXT, str(self._next).encode())

    def _describe_consumers(self, timeout: timedelta | None) -> str:
        full = f"queue {self._folder} is full after {timeout}: {self._capacity} items of producer {self._number} wait"
        try:
            position = _position(self._folder)
            since = time.time() - (self._folder / _POSITION).stat().st_mtime if position else 0
        except OSError as error:
            return f"{full}, and who consumes cannot be read: {error}"
        if not position:
            return f"{full}, and no consumer has made a step yet"
        return f"{full}, and {position['consumer']} has made no step for {since:.0f} s"


class Consumer:
    """This rank's part of a queue. A checkpoint holds its position: give it to a `Checkpointer` as a part of the state.

    Invariants:
        - What ranks got since the loaded position is given again, to any rank, and nothing before it.
        - An item is removed only when no position that can still be loaded needs it.
    """

    def __init__(
        self, name: str, folder: str | Path, *, producers: int = 64, keep: int = 1000, link: Link | None = None
    ) -> None:
        """Creates the consumer; all ranks of the role give the same arguments.

        Args:
            name: The queue's name among the job's datasets: a letter, then up to 62 letters, digits, `.`, `_` and `-`.
            folder: The queue's folder.
            producers: More than the highest number of a producer.
            keep: The consumed items of each producer that stay, so that an older checkpoint can be continued from.
            link: How the leases are reached; by default through the node's agent, and without Perdure by itself.

        Raises:
            ValueError: if an argument is out of range, or this process has a consumer of that name already.
        """
        if keep < 0:
            raise ValueError(f"keep: expected at least 0, found {keep}")
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._producers = [str(number) for number in range(producers)]
        self._keep = keep
        self._stream = StreamClient(
            name, partitions=self._producers, ends=self._ends, shard_size=1, link=link, most_ahead=_AHEAD
        )
        self._publishes = os.environ.get("RANK", "0") == "0"
        kept = _position(self._folder).get("kept", {}) if self._publishes else {}
        self._kept: dict[str, int] = dict(kept)
        """The first item of each producer that may still be there."""

    def get(self, *, timeout: timedelta | None = None) -> Any:
        """Returns the next item, once there is one; None if the queue was closed and has none left for this rank.

        Raises:
            QueueEmpty: if there is none in time.
            ShardsRefused: if the job refuses: other ranks use other arguments, or have loaded another position.
            OSError: if the item cannot be read: it is given again by the next call.
        """
        try:
            shard = self._stream.fetch(timeout=None if timeout is None else timeout.total_seconds())
        except TimeoutError:
            raise QueueEmpty(f"queue {self._folder} had no item for this rank for {timeout}") from None
        if shard is None:
            return None
        try:
            content = _until_not_stale((self._folder / shard.partition / str(shard.first)).read_bytes)
        except OSError:
            # What was handed over counts as consumed with the next item.
            self._stream.put_back()
            raise
        self._stream.hand_over(1)
        return pickle.loads(content)

    def step(self, *, group: Any = None) -> None:
        """Records that an optimizer's step is done: what this rank got so far belongs to the model's state.

        All ranks call it after the same steps: it is a collective where there are several.

        Args:
            group: The process group of the ranks; by default that of all.
        """
        self._stream.step(group=group)
        if self._publishes:
            self._publish(_firsts(self.state_dict()))

    def close(self) -> None:
        """Ends the queue: producers put no more."""
        (self._folder / _CLOSED).touch()

    def state_dict(self) -> dict[str, Any]:
        """Returns the position at the last `step`, the same on all ranks."""
        return self._stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved position: what was got after it is given again. All ranks load the same one.

        Raises:
            ValueError: if the position is of another queue.
            QueueError: if items after it were removed.
        """
        self._require(_firsts(state))
        self._stream.load_state_dict(state)

    def start_over(self) -> None:
        """Consumes the queue from its beginning, as a model that has found no checkpoint does. All ranks call it.

        Raises:
            QueueError: if items were removed: the folder is that of a longer training.
        """
        self._require({})
        self._stream.start_over()

    def _require(self, firsts: Mapping[str, int]) -> None:
        ends, _ = self._ends()
        for producer, end in ends.items():
            first = firsts.get(producer, 0)
            if first < end and not _exists(self._folder / producer / str(first)):
                raise QueueError(
                    f"queue {self._folder}: item {first} of producer {producer} was removed, as more than {self._keep} "
                    "later ones were consumed: load a newer checkpoint, or begin with a new folder"
                )

    def _ends(self) -> tuple[dict[str, int], bool]:
        may_grow = not _exists(self._folder / _CLOSED)
        return {name: _number_in(self._folder / name / _NEXT) for name in self._producers}, may_grow

    def _publish(self, firsts: dict[str, int]) -> None:
        consumer = f"role {role}" if (role := os.environ.get(ROLE_VARIABLE)) else "the consumer"
        position = {"consumer": consumer, "next": firsts, "kept": self._kept}
        _replace(self._folder / _POSITION, json.dumps(position).encode())
        for producer, first in firsts.items():
            keep_from = first - self._keep
            for number in range(self._kept.get(producer, 0), keep_from):
                (self._folder / producer / str(number)).unlink(missing_ok=True)
            self._kept[producer] = max(self._kept.get(producer, 0), keep_from)


def _firsts(state: Mapping[str, Any]) -> dict[str, int]:
    """Returns the first item of each producer that is not consumed at a position."""
    return {
        producer: position["holes"][0][0] if position["holes"] else position["next"]
        for producer, position in state["partitions"].items()
    }


def _position(folder: Path) -> dict[str, Any]:
    content = _read(folder / _POSITION)
    return {} if content is None else json.loads(content)


def _number_in(path: Path) -> int:
    return int(_read(path) or 0)


def _read(path: Path) -> bytes | None:
    """Returns the content of a file that others replace; None if there is none."""
    try:
        return _until_not_stale(path.read_bytes)
    except FileNotFoundError:
        return None


def _until_not_stale(read: Callable[[], bytes]) -> bytes:
    tries = 0
    while True:
        try:
            return read()
        except OSError as error:
            tries += 1
            # A network file system no longer has what was opened: opened again, it is the new file.
            if error.errno != errno.ESTALE or tries == _TRIES:
                raise


def _exists(path: Path) -> bool:
    """Returns whether there is such a file. Unlike for `Path.exists`, an error of the storage does not mean that there
    is none."""
    try:
        path.stat()
    except FileNotFoundError:
        return False
    return True


def _replace(path: Path, content: bytes) -> None:
    draft = path.with_name(f"{path.name}-{os.getpid()}")
    _write(draft, content)
    draft.replace(path)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
