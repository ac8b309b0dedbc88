"""Reads a dataset in shards that the job leases to its ranks: fast ranks read more, and no sample is read twice.

A background thread keeps shards ahead, so that `fetch` takes microseconds, and reports what is done once a second.
While the agent or Temporal is away, ranks use the shards that they hold, and then wait.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

from perdure_training.node_api.agent_client import AgentAway, AgentRefused, Json, pauses
from perdure_training.node_api.rank_environment import generation_of
from perdure_training.numbers import watch
from perdure_training.shards.holding import Holding, Report
from perdure_training.shards.link import Link, find_link
from perdure_training.shards.shard import Shard, StreamShard, describe
from perdure_training.shards.spans import Span, advance, merge

logger = logging.getLogger(__name__)

REPORT_INTERVAL = 1.0
"""Seconds between two exchanges of a rank that has enough shards: each costs the job's dataset some events."""
AHEAD = 3.0
"""Seconds for which a rank keeps shards ahead, beside four times the time of an exchange."""
_FIRST_SHARDS = 2
_MOST_SHARDS = 200_000
_DESCRIBED = 4
"""Spans of samples that `describe_step` names."""
_pauses = partial(pauses, first=0.1, longest=3.0)
_WARN_INTERVAL = 60.0
_NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9._-]{0,62}")
_STATE_VERSION = 1
_names: set[str] = set()
"""The datasets that this process reads. What one client holds would be granted to a second one, too."""


class ShardsRefused(Exception):
    """The job refuses to lease shards to this rank; the message says why."""


_Leased = TypeVar("_Leased", Shard, StreamShard)


class ShardClient(ABC, Generic[_Leased]):
    """This rank's part of a dataset or a stream.

    Invariants:
        - A shard is held, handed out, or done; what is held and handed out is named in each exchange.
        - `state_dict` is the position at the last `step`: what all ranks had consumed by then.
    """

    def __init__(
        self, name: str, parameters: Json, *, beginning: Json, link: Link | None, most_ahead: int = _MOST_SHARDS
    ) -> None:
        """Creates the client.

        Args:
            name: The dataset's name.
            parameters: What it is, as the job's dataset takes them.
            beginning: The position before anything was consumed.
            link: How it is reached; by default through the node's agent, and without Perdure by itself.
            most_ahead: The most shards that are kept ahead.

        Raises:
            ValueError: if the name is none, or this process has a client of that name already.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(f"name: expected a letter, then up to 62 letters, digits, '.', '_' or '-', found {name!r}")
        if link is None:
            if name in _names:
                raise ValueError(f"name: this process reads {name!r} already; keep its client for as long as it trains")
            _names.add(name)
        self._name = name
        self._parameters = parameters
        self._beginning = beginning
        """The position before anything was consumed."""
        self._rank = int(os.environ.get("RANK", "0"))
        self._world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self._generation = generation_of(os.environ)
        self._link = link or find_link()
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._rewinds = 0
        self._asked = 0
        """How often the program needed an exchange at once."""
        self._answered = 0
        """How many of these a complete exchange has answered."""
        self._count = 0
        """Shards handed out, ever."""
        self._put_back = 0
        self._stepped: list[Span] = []
        """What was consumed in the newest step."""
        self._expected = ""
        """How a loop that has taken samples would report them."""
        watch.name_samples(self.describe_step)
        self._begin(None)
        self._most_ahead = most_ahead
        self._target = _FIRST_SHARDS
        self._rate = 0.0
        """Shards that were handed out per second."""
        self._exchange_s = 0.0

    def _begin(self, loaded: Json | None) -> None:
        """Starts from a loaded position, or from wherever the job is."""
        self._loaded = loaded
        self._base: Json | None = loaded
        """The position that all ranks had agreed on last; None before the first answer."""
        self._acknowledged = False
        """The dataset has answered in this term."""
        self._holding = Holding(self._parameters)
        self._agreed: Json | None = None
        """The position at the last step."""
        self._drained = False
        self._refused = ""
        self._superseded = False
        """Nothing more is leased or reported in this term."""

    def __iter__(self) -> Iterator[_Leased]:
        """Yields shards until the dataset has none left for this rank."""
        while (shard := self.fetch()) is not None:
            yield shard

    def fetch(self, *, timeout: float | None = None) -> _Leased | None:
        """Returns the next shard; None if all are done, or leased to other ranks.

        Blocks while the job cannot be asked. If a rank that holds shards fails, the job starts its ranks again, and
        those that had seen the end read the rest.

        Args:
            timeout: The longest wait in seconds; None waits as long as it takes.

        Raises:
            TimeoutError: if there was none in time.
            ShardsRefused: if the job refuses: other ranks use other parameters, or have loaded another position.
        """
        self._check_process()
        with self._changed:
            self._start()
            if not self._holding:
                self._target = min(2 * self._target, self._most_ahead)
                self._ask()
            asked, put_back = self._asked, self._put_back
            warned = began = time.monotonic()
            while not self._holding or put_back != self._put_back:
                if self._refused:
                    raise ShardsRefused(self._refused)
                if (self._drained and self._answered >= asked) or put_back != self._put_back:
                    return None
                left = math.inf if timeout is None else began + timeout - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"dataset {self._name}: no shard within {timeout} s")
                self._changed.wait(timeout=min(_WARN_INTERVAL, left))
                if time.monotonic() - warned >= _WARN_INTERVAL:
                    warned = time.monotonic()
                    logger.warning("dataset %s: waiting for shards", self._name)
            span = self._holding.hand_out()
            self._count += 1
            if self._holding.shards < self._target / 2:
                self._changed.notify_all()
        return self._shard(span)

    def report(self, shard: _Leased, *, error: str | None = None) -> None:
        """Reports that a shard is done, or that it could not be processed.

        Args:
            shard: As `fetch` returned it.
            error: Why it failed. It is tried again later, by any rank; after three tries between which other shards
                were done it is set aside, and named in the dataset's result.

        Raises:
            ValueError: if the shard is not in progress.
        """
        with self._changed:
            span = self._holding.withdraw([self.span(shard)])
            if error is None:
                self._holding.finish(span)
            else:
                self._holding.fail(span, error)
                self._changed.notify_all()

    def advance(self, samples: int) -> None:
        """Reports that the next samples are done, in the order in which they were fetched.

        Raises:
            ValueError: if fewer are in progress.
        """
        with self._changed:
            self._holding.finish(self._holding.withdraw_next(samples))

    def hand_over(self, batch: int | list[Span]) -> None:
        """Records that the loop was given a batch. The batch before it counts as done.

        Args:
            batch: Its number of samples, in the order in which they were fetched; or the spans that it consists of.

        Raises:
            ValueError: if they are not in progress.
        """
        with self._changed:
            self._holding.hand_over(batch)

    def put_back(self) -> None:
        """Gives what is in progress to the next that fetches: a loop was left that had read ahead of its batches. A
        thread that fetches for that loop gets None."""
        with self._changed:
            self._holding.put_back()
            self._put_back += 1
            self._changed.notify_all()

    def expect_reports(self, remedy: str) -> None:
        """Has `step` refuse a loop that has taken samples and reports none of them, and name the remedy."""
        self._expected = remedy

    def step(self, *, group: Any = None) -> None:
        """Records that an optimizer's step is done: what this rank was given so far belongs to the model's state.

        All ranks call it after the same steps: it is a collective where there are several. From then on `state_dict`
        returns this position.

        Args:
            group: The process group of the ranks; by default that of all.

        Raises:
            RuntimeError: if batches of `ShardBatches` were read past it, so that none would ever count as consumed.
        """
        with self._changed:
            if self._expected and not (self._holding.has_progress or self._stepped):
                raise RuntimeError(f"dataset {self._name}: no sample counts as consumed: {self._expected}")
            self._holding.finish_batch()
            own = self._stepped = self._holding.consumed
            base = self._base
        parts: list[tuple[list[Span], Json | None]] = [(own, base)]
        if self._world_size > 1:
            parts = _gather(parts[0], self._world_size, group)
        known = next((base for _, base in parts if base is not None), None)
        if known is not None:
            with self._changed:
                self._base = self._agreed = advance(known, merge(*(consumed for consumed, _ in parts)))
                self._holding.begin_step()

    def describe_step(self) -> str:
        """Describes the samples that this rank has used in the current step, or else in the newest one."""
        with self._changed:
            spans = self._holding.of_step or self._stepped
        samples = "; ".join(describe(self._shard(span)) for span in spans[:_DESCRIBED])
        return f"{self._name}: {samples}" if samples else ""

    def active_ranks(self, is_active: bool, *, group: Any = None) -> tuple[int, int]:
        """Returns how many ranks are active, and how many there are. A collective, as `step`."""
        if self._world_size == 1:
            return int(is_active), 1
        return sum(_gather(is_active, self._world_size, group)), self._world_size

    def state_dict(self) -> dict[str, Any]:
        """Returns the position at the last `step`, to save with a checkpoint; the same on all ranks.

        Raises:
            RuntimeError: if several ranks read the dataset, and have not agreed on a position by `step`.
        """
        with self._changed:
            position = self._agreed
            if position is None and (self._world_size == 1 or self._holding.is_untouched):
                position = advance(self._base or self._beginning, self._holding.consumed)
            if position is None:
                raise RuntimeError("call step() on all ranks after the optimizer's step, and state_dict() after that")
            return {"version": _STATE_VERSION, **self._to_save(position)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved position: what was consumed after it is read again, by whichever rank.

        All ranks load the same position, equally often, before they fetch what follows.

        Raises:
            ValueError: if the position is of another dataset: of another size, shuffle or seed.
        """
        if state.get("version") != _STATE_VERSION:
            raise ValueError(f"version: expected {_STATE_VERSION}, found {state.get('version')!r}")
        self._rewind(self._validate_state(state))

    def start_over(self) -> None:
        """Reads the dataset from its beginning, as a model that has found no checkpoint does. All ranks call it.

        Otherwise the ranks of a world continue where those before them were, as suits work that outlives its process.
        A `Checkpointer` calls it where it loads nothing.
        """
        self._rewind(self._beginning)

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until all that is done has been reported.

        Returns False after `timeout` seconds, or if a newer world has begun: then it does not count.
        """
        with self._changed:
            if self._thread is None:
                return True
            self._ask()
            self._changed.wait_for(lambda: self._superseded or self._holding.is_reported, timeout)
            return self._holding.is_reported

    # What a dataset and a stream do differently

    @abstractmethod
    def span(self, shard: _Leased) -> Span:
        """Returns the positions of a shard on the line of all positions."""

    @abstractmethod
    def read_arguments(self) -> tuple[Any, ...]:
        """Returns the arguments with which a `ShardStream` reads one sample, whichever it is."""

    @abstractmethod
    def _shard(self, span: Span) -> _Leased:
        """Returns the shard with these positions."""

    @abstractmethod
    def _to_save(self, position: Json) -> dict[str, Any]:
        """Returns a position as it is saved."""

    @abstractmethod
    def _validate_state(self, state: Mapping[str, Any]) -> Json:
        """Returns a saved position.

        Raises:
            ValueError: if it is of another dataset.
        """

    def _look(self) -> None:
        """Finds out how far a stream has grown; called by the background thread before each exchange."""

    def _growth(self) -> Json:
        """Returns what the next request says about that."""
        return {}

    # State under the lock

    def _rewind(self, position: Json) -> None:
        with self._changed:
            self._rewinds += 1
            self._begin(position)
            self._changed.notify_all()

    def _ask(self) -> None:
        self._asked += 1
        self._changed.notify_all()

    # The background thread

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"dataset {self._name}", daemon=True)
            self._thread.start()
            atexit.register(self.flush, 3.0)

    def _run(self) -> None:
        attempts, last, counted = _pauses(), time.monotonic(), 0
        while True:
            with self._changed:
                if not self._is_urgent():
                    self._changed.wait_for(self._is_urgent, timeout=max(REPORT_INTERVAL, 2 * self._exchange_s))
                now = time.monotonic()
                if now - last >= REPORT_INTERVAL:
                    self._rate = max((self._count - counted) / (now - last), self._rate / 2)
                    last, counted = now, self._count
                    ahead = math.ceil(self._rate * (AHEAD + 4 * self._exchange_s))
                    self._target = min(max(ahead, _FIRST_SHARDS), self._most_ahead)
            self._look()
            with self._changed:
                body, report = self._request()
                if body is None:
                    continue
                rewinds, asked = self._rewinds, self._asked
            began = time.monotonic()
            try:
                answer = self._link.exchange(self._name, body)
            except (AgentAway, AgentRefused) as error:
                logger.info("dataset %s, asking again: %s", self._name, error)
                time.sleep(next(attempts))
                continue
            attempts = _pauses()
            with self._changed:
                self._exchange_s = (self._exchange_s + time.monotonic() - began) / 2
                if rewinds == self._rewinds:
                    self._take(answer, report)
                    self._answered = asked
                self._changed.notify_all()

    def _is_urgent(self) -> bool:
        low = bool(self._holding) and self._holding.shards < self._target / 2 and not self._drained
        return not (self._refused or self._superseded) and (
            self._asked > self._answered or low or self._holding.must_report
        )

    def _request(self) -> tuple[Json | None, Report]:
        """Returns the next request, and what it reports; no request if there is nothing to say."""
        report = self._holding.report()
        asks = self._asked > self._answered
        shards = max(0, self._target - self._holding.shards) if asks or not self._drained else 0
        if self._refused or self._superseded or not (report.done or report.failed or shards or asks):
            return None, report
        request = {
            "rank": self._rank,
            "world_size": self._world_size,
            "holds": report.holds,
            "done": report.done,
            "failed": [{"span": one.span, "error": one.error[:1000], "number": one.number} for one in report.failed],
            "shards": shards,
            "position": None if self._acknowledged else self._loaded,
            "needs_base": self._base is None,
            **self._growth(),
        }
        term = {"generation": self._generation, "rewinds": self._rewinds}
        return {"parameters": self._parameters, "term": term, "request": request}, report

    def _take(self, answer: Json, report: Report) -> None:
        self._refused = answer.get("refused", "")
        if answer.get("superseded"):
            # The ranks of an older world are about to be ended, and wait until they are.
            logger.warning("dataset %s: a newer world has begun, or another rank has loaded a position", self._name)
            self._superseded = True
        if self._refused or self._superseded:
            return
        self._acknowledged = True
        if answer.get("not_taken"):
            logger.warning(
                "dataset %s: the position that this process has loaded is not taken: the other processes of its role "
                "have gone on from there, and what they have done stays done",
                self._name,
            )
        if answer.get("base") is not None and self._base is None:
            self._base = answer["base"]
        self._holding.settle(report)
        self._holding.add((first, end) for first, end in answer.get("granted", ()))
        self._drained = bool(answer.get("drained"))

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                "the dataset is read in the process that created its client; worker processes of a DataLoader get "
                "their samples through ShardBatches or ShardStream"
            )


def _gather(part: Any, world_size: int, group: Any) -> list[Any]:
    from torch import distributed

    if not distributed.is_initialized():
        raise RuntimeError("step() of several ranks needs a process group: call torch.distributed.init_process_group()")
    parts: list[Any] = [None] * world_size
    distributed.all_gather_object(parts, part, group=group)
    return parts
