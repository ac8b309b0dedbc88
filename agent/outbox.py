"""What the agent must tell, kept until it is told: an outage delays a failure and never loses one.

One outbox per destination, so that a job that cannot be reached does not hold up what the group should hear.
Within an outbox failures go first, and messages that only matter when fresh replace their predecessors. A message
gets its sequence number when it is first sent, and is then sent again under that number until it has arrived: the
order of numbers is the order of sending, and repeats are recognised.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypedDict

from pydantic import BaseModel, ValidationError

from agent.files import KeptFile
from agent.notifier import Notifier
from workflows.messages import (
    AgentMessage,
    Failure,
    Finished,
    GroupMissing,
    Heartbeat,
    Joined,
    LeaseTaken,
    Metrics,
    NodeIdentity,
    Ready,
    Stall,
    Stepping,
)

logger = logging.getLogger(__name__)

SIGNALS: Final[dict[type[AgentMessage], str]] = {
    Joined: "joined",
    Ready: "ready",
    Stepping: "stepping",
    Stall: "stall",
    LeaseTaken: "lease_taken",
    Heartbeat: "heartbeat",
    Metrics: "metrics",
    Failure: "failure",
    Finished: "finished",
    GroupMissing: "group_missing",
}
_MODELS = {name: model for model, name in SIGNALS.items()}

_ONLY_NEWEST = frozenset({"ready", "stepping", "stall", "lease_taken", "heartbeat", "metrics", "group_missing"})
_NOT_JOURNALED = frozenset({"heartbeat", "metrics", "group_missing"})
_FIRST: Final = "failure"

_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 5.0
"""A server that is back is noticed within this time; an hour of outage costs 720 attempts."""

_SPREAD = frozenset({"stepping", "lease_taken"})
"""What all nodes of a world or a group say in the same moment, and no workflow waits for: sent at a random time within
the spread. A server lets one call at a time into a workflow, and refuses what waits for too long (`BusyWorkflow`)."""
_SPREAD_PER_NODE = 0.005
"""Seconds: 200 signals a second are under half of what a Temporal server on two cores takes beside all else."""
_SHORTEST_SPREAD = 0.5
"""Seconds: fewer nodes need none."""


class Envelope(TypedDict):
    """The fields that all messages share."""

    sender: NodeIdentity
    sequence: int
    time: datetime


def envelope(node: NodeIdentity, time: datetime | None = None) -> Envelope:
    """For a message about what happened at `time`, or now; the outbox numbers it when it sends it."""
    return {"sender": node, "sequence": 1, "time": time or datetime.now(UTC)}


def spread_of(nodes: int) -> float:
    """Seconds over which the nodes of a job spread what they would all say at once."""
    spread = nodes * _SPREAD_PER_NODE
    return spread if spread >= _SHORTEST_SPREAD else 0.0


class ControlPlaneBusy(Exception):
    """The control plane did not answer in time, or has no capacity: asking again at once adds to its load."""


class DestinationNotFound(Exception):
    """The workflow does not exist or has closed. That may be passing (a restored database), so messages are kept."""


class _Entry:
    def __init__(self, signal: str, message: AgentMessage, sequence: int | None = None) -> None:
        self.signal = signal
        self.message = message
        self.sequence = sequence
        self.not_before = 0.0
        """By the monotonic clock."""


class _JournalEntry(BaseModel):
    signal: str
    sequence: int | None = None
    message: dict[str, Any]


class _Journal(BaseModel):
    sequence: int = 0
    """The newest number known to be given out."""
    entries: list[Any] = []
    """Each a `_JournalEntry`, as far as the release that wrote it and the one that reads it agree."""


Send = Callable[[str, AgentMessage], Awaitable[None]]
"""Sends one signal by name. Raises `DestinationNotFound`, `ControlPlaneBusy`, or anything else for "try again"."""


class Outbox:
    """The messages for one workflow, in order, and the task that sends them.

    Invariants:
        - `joined`, `failure` and `finished` leave it only by having arrived.
        - Sequence numbers only grow, over restarts of the agent too.
    """

    def __init__(self, path: Path, *, send: Send, not_found: Callable[[], None], spread: float = 0.0) -> None:
        """Reads what an earlier agent left.

        Args:
            path: The journal.
            send: How one message is sent.
            not_found: Called when the workflow does not exist.
            spread: Seconds over which the agents of one job spread what they would all say at once.
        """
        self._send = send
        self._spread = spread
        self._flushing = False
        self._not_found = not_found
        self._changed = Notifier()
        self._file = KeptFile(path)
        self._hurry = False
        """A message has come that should not wait for the pause between attempts to end."""
        journal = self._read()
        self._entries = self._usable(journal)
        # Counting continues from the clock: telemetry's numbers are not worth a write each, and a full disk remembers
        # none at all. No node sends a message a second for long.
        self._sequence = max(journal.sequence, int(time.time()))

    def put(self, message: AgentMessage, *, first: bool = False) -> None:
        """Keeps the message for sending; when this returns it survives the agent.

        Args:
            message: its sequence number is set later.
            first: to the head of what has not been sent yet; failures always are.
        """
        signal = SIGNALS[type(message)]
        if signal in _ONLY_NEWEST:
            self._entries = [entry for entry in self._entries if entry.signal != signal]
        if signal == _FIRST or first:
            position = sum(entry.sequence is not None or entry.signal == _FIRST for entry in self._entries)
            self._hurry = True
        else:
            position = len(self._entries)
        entry = _Entry(signal, message)
        if signal in _SPREAD:
            entry.not_before = time.monotonic() + random.uniform(0, self._spread)
        self._entries.insert(position, entry)
        if signal not in _NOT_JOURNALED:
            self._save()
        self._changed.fire()

    @property
    def pending(self) -> int:
        """Messages that have not arrived, telemetry aside."""
        return sum(entry.signal not in _NOT_JOURNALED for entry in self._entries)

    def holds(self, signal: str) -> bool:
        """Whether a message of this kind has not arrived yet."""
        return any(entry.signal == signal for entry in self._entries)

    async def flushed(self, *, within: float) -> bool:
        """Waits until nothing that matters is left; False after `within` seconds."""
        self._flushing = True
        self._changed.fire()
        return await self._changed.wait_for(lambda: not self.pending, within=within)

    async def run(self) -> None:
        """Sends until cancelled."""
        pause = _FIRST_PAUSE
        while True:
            await self._changed.wait_for(lambda: bool(self._entries))
            if (delay := self._delay) > 0:
                await self._changed.wait_for(lambda: self._delay <= 0, within=delay)
                continue
            self._hurry = False
            try:
                await self._send_head()
            except Exception as error:
                if isinstance(error, DestinationNotFound):
                    self._not_found()
                    pause = _LONGEST_PAUSE
                # Nodes that failed to get through together must not come again together; and where the server has too
                # much to do, a thousand that come every few seconds are the reason.
                busy = isinstance(error, ControlPlaneBusy) and not self._is_urgent
                longest = _LONGEST_PAUSE + (self._spread if busy else 0.0)
                wait = min(max(pause, self._spread / 2 if busy else 0.0), longest) * random.uniform(0.5, 1.0)
                logger.info("not sent, trying again in %.1f s: %s", wait, error)
                await self._changed.wait_for(lambda: self._hurry, within=wait)
                pause = min(pause * 2, longest)
            else:
                pause = _FIRST_PAUSE

    @property
    def _is_urgent(self) -> bool:
        return any(entry.signal == _FIRST for entry in self._entries)

    @property
    def _delay(self) -> float:
        """Seconds until the first message may be sent; it does not hold up others, which come after it."""
        can_wait = all(entry.signal in _SPREAD | _NOT_JOURNALED for entry in self._entries)
        if self._flushing or self._hurry or not can_wait:
            return 0.0
        return self._entries[0].not_before - time.monotonic()

    async def _send_head(self) -> None:
        entry = self._entries[0]
        # What arrived but was not acknowledged keeps its number, so that the repeat is recognised.
        repeatable = entry.signal in _ONLY_NEWEST
        if entry.sequence is None or repeatable:
            entry.sequence = self._next_sequence()
            if not repeatable:
                self._save()
        try:
            await self._send(entry.signal, entry.message.model_copy(update={"sequence": entry.sequence}))
        except BaseException:
            if repeatable:
                entry.sequence = None
            raise
        # A newer one may have taken its place meanwhile.
        if entry in self._entries:
            self._entries.remove(entry)
        if entry.signal not in _NOT_JOURNALED or self._file.stale:
            self._save()
        self._changed.fire()

    def _next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

    def _read(self) -> _Journal:
        content = self._file.read()
        if content is None:
            return _Journal()
        try:
            journal = _Journal.model_validate_json(content)
        except ValidationError as error:
            aside = self._file.set_aside(content)
            logger.error("the outbox's journal is not one; starting without it, kept as %s: %s", aside, error)
            return _Journal()
        return journal

    def _usable(self, journal: _Journal) -> list[_Entry]:
        """The journal's entries but those that this release cannot read: an agent of another one may have left them."""
        usable: list[_Entry] = []
        rejected: list[Any] = []
        for found in journal.entries:
            try:
                entry = _JournalEntry.model_validate(found)
                usable.append(_Entry(entry.signal, _MODELS[entry.signal].model_validate(entry.message), entry.sequence))
            except (ValidationError, KeyError) as error:
                rejected.append(found)
                logger.error("an entry of the outbox's journal cannot be read, so it is not sent: %s", error)
        if rejected:
            logger.error("kept as %s", self._file.set_aside(json.dumps(rejected, indent=1).encode()))
        return usable

    def _save(self) -> None:
        journal = _Journal(
            sequence=self._sequence,
            entries=[
                _JournalEntry(
                    signal=entry.signal, sequence=entry.sequence, message=entry.message.model_dump(mode="json")
                )
                for entry in self._entries
                if entry.signal not in _NOT_JOURNALED
            ],
        )
        self._file.write(journal.model_dump_json().encode())
