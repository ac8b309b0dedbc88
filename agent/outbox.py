"""Keeps the agent's messages until they are delivered: an outage delays a failure report and never loses one.

There is one outbox per destination, so that an unreachable job does not delay messages to the group. Within an outbox
failures come first, and a message of which only the newest matters replaces its predecessor. A message gets its
sequence number when it is first sent, and keeps it in all retries: numbers are in sending order, and the receiver
recognizes repeats.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NotRequired, Protocol, TypedDict

from pydantic import BaseModel, ValidationError

from perdure.agent.files import KeptFile
from perdure.agent.notifier import Notifier
from perdure.contract.agents import AgentMessage, Failure, FailureKind
from perdure.contract.identity import NodeCredentials
from perdure.contract.routes import Destination, Route, routed_to

logger = logging.getLogger(__name__)

_KINDS = {name: kind for to in Destination for name, kind in routed_to(to).items() if issubclass(kind, AgentMessage)}
"""The messages that a journal may hold, by their names."""

MOST_OF_A_KIND = 50
"""Undelivered reports of one kind of which each counts, at most. A node in trouble has a few; more come from a program
that reports in a loop, and push out the oldest of their own kind: no training loop costs a report of the launcher."""

_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 5.0
"""Longest pause in seconds: a server that is back is detected within this time; an outage of an hour costs 720
attempts."""

_SPREAD_PER_NODE = 0.005
"""Seconds per node over which messages with a spread are sent, each at a random time. A server admits one call at a
time to a workflow, and rejects calls that wait too long (`BusyWorkflow`); 200 signals a second are less than half of
the capacity of a Temporal server on two cores."""
_SHORTEST_SPREAD = 0.5
"""Spreads below this number of seconds are not applied: so few nodes do not need any."""


class MessageSink(Protocol):
    """A receiver of messages: an outbox."""

    def put(self, message: AgentMessage, *, first: bool = False) -> None: ...


class Envelope(TypedDict):
    """The fields that all messages share."""

    sender: NodeCredentials
    sequence: int
    time: datetime
    reported_at: NotRequired[datetime]


def envelope(node: NodeCredentials, time: datetime | None = None) -> Envelope:
    """Returns the common fields of a message about an event at `time`, or now. The outbox sets the sequence number."""
    now = datetime.now(UTC)
    fields: Envelope = {"sender": node, "sequence": 1, "time": time or now}
    return fields if time is None else {**fields, "reported_at": now}


def spread_of(nodes: int) -> float:
    """Returns the seconds over which the nodes of a job spread signals that all of them send at once."""
    spread = nodes * _SPREAD_PER_NODE
    return spread if spread >= _SHORTEST_SPREAD else 0.0


class ControlPlaneBusy(Exception):
    """The control plane did not answer in time, or has no capacity: an immediate retry would add to its load."""


class DestinationNotFound(Exception):
    """The workflow does not exist or has closed. That may be temporary (a restored database), so messages are kept."""


_Kind = tuple[Route, FailureKind | None]
"""Reports that a flood of one of them may push out."""


class MessageRefused(Exception):
    """The control plane does not take this message, whatever it does with others: its release may be an older one."""


class _Entry:
    def __init__(self, message: AgentMessage, sequence: int | None = None) -> None:
        self.message = message
        self.sequence = sequence
        self.refusals = 0
        self.not_before = 0.0
        """The monotonic time before which it is not sent."""

    @property
    def route(self) -> Route:
        return self.message.route

    @property
    def kind(self) -> _Kind:
        message = self.message
        return message.route, message.kind if isinstance(message, Failure) else None


class _JournalEntry(BaseModel):
    signal: str
    sequence: int | None = None
    message: dict[str, Any]


class _Journal(BaseModel):
    sequence: int = 0
    """The newest sequence number that is known to be used."""
    entries: list[Any] = []
    """Entries in the format of `_JournalEntry`, unless another release wrote them."""


Send = Callable[[AgentMessage], Awaitable[None]]
"""Sends one message by its route. Raises `DestinationNotFound`, `ControlPlaneBusy`, `MessageRefused`, or any other
error for "retry"."""


class Outbox:
    """The messages for one workflow, in order, and the task that sends them.

    Invariants:
        - A report that counts by itself is removed once it has arrived, or for a newer one of its kind where there are
          `MOST_OF_A_KIND` of it.
        - Sequence numbers only grow, also across restarts of the agent.
        - A message that is refused holds up no other one. It is tried again when there is no other, for as long as the
          agent lives.
    """

    def __init__(self, path: Path, *, send: Send, not_found: Callable[[], None], spread: float = 0.0) -> None:
        """Reads the journal that an earlier agent left.

        Args:
            path: The journal's path.
            send: Sends one message.
            not_found: Called when the workflow does not exist.
            spread: Seconds over which the agents of one job spread signals that all of them send at once.
        """
        self._send = send
        self._spread = spread
        self._flushing = False
        self._not_found = not_found
        self._changed = Notifier()
        self._file = KeptFile(path)
        self._hurry = False
        """A message was added that should not wait for the pause between attempts to end."""
        journal = self._read()
        self._entries = self._usable(journal)
        # Numbering continues from the clock: numbers of telemetry are not written one by one, and a full disk keeps
        # none at all. No node sends a message a second for long.
        self._sequence = max(journal.sequence, int(time.time()))

    def put(self, message: AgentMessage, *, first: bool = False) -> None:
        """Adds a message. When this returns, the message survives the agent.

        Args:
            message: the message; its sequence number is set later.
            first: whether to put it before all unsent messages, as failures always are.
        """
        route = message.route
        if route.newest_only:
            subject = message.subject
            self._entries = [one for one in self._entries if (one.route, one.message.subject) != (route, subject)]
        self._make_room(_Entry(message).kind)
        if route.first or first:
            position = sum(entry.sequence is not None or entry.route.first for entry in self._entries)
            self._hurry = True
        else:
            position = len(self._entries)
        entry = _Entry(message)
        if route.spread:
            entry.not_before = time.monotonic() + random.uniform(0, self._spread)
        self._entries.insert(position, entry)
        if route.journaled:
            self._save()
        self._changed.fire()

    def _make_room(self, kind: _Kind) -> None:
        """Leaves out the oldest report of a kind of which too many wait, unless it may have arrived already."""
        alike = [entry for entry in self._entries if entry.kind == kind]
        oldest = next((entry for entry in alike if entry.sequence is None), None)
        if len(alike) >= MOST_OF_A_KIND and oldest is not None:
            logger.error("%d reports of a kind are not delivered; the oldest is left out: %s", len(alike), kind[0].name)
            self._entries.remove(oldest)

    @property
    def pending(self) -> int:
        """The number of undelivered messages, without telemetry."""
        return sum(entry.route.journaled for entry in self._entries)

    def holds(self, kind: type[AgentMessage]) -> bool:
        """Returns whether a message of this kind has not arrived yet."""
        return any(isinstance(entry.message, kind) for entry in self._entries)

    async def flush(self, *, within: float) -> bool:
        """Waits until all messages except telemetry are delivered or refused, for `within` seconds at most; returns
        whether all are delivered."""
        self._flushing = True
        self._changed.fire()
        await self._changed.wait_for(
            lambda: all(entry.refusals or not entry.route.journaled for entry in self._entries), within=within
        )
        return not self.pending

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
                # Nodes whose sends failed together must not retry together; and if the server is overloaded, a thousand
                # nodes that retry every few seconds are the reason.
                busy = isinstance(error, ControlPlaneBusy) and not self._is_urgent
                longest = _LONGEST_PAUSE + (self._spread if busy else 0.0)
                wait = min(max(pause, self._spread / 2 if busy else 0.0), longest) * random.uniform(0.5, 1.0)
                logger.info("not sent, retrying in %.1f s: %s", wait, error)
                refused = isinstance(error, MessageRefused)
                await self._changed.wait_for(
                    lambda refused=refused: self._hurry or (refused and not self._head.refusals), within=wait
                )
                pause = min(pause * 2, longest)
            else:
                pause = _FIRST_PAUSE

    @property
    def _is_urgent(self) -> bool:
        return any(entry.route.first for entry in self._entries)

    @property
    def _delay(self) -> float:
        """Seconds until the first message may be sent. It does not delay later messages that need no spread."""
        can_wait = all(entry.route.spread or not entry.route.journaled for entry in self._entries if not entry.refusals)
        if self._flushing or self._hurry or not can_wait:
            return 0.0
        return self._head.not_before - time.monotonic()

    @property
    def _head(self) -> _Entry:
        """The message that is sent next: the first one of those that were refused least often."""
        return min(self._entries, key=lambda entry: entry.refusals)

    async def _send_head(self) -> None:
        entry = self._head
        is_new = entry.sequence is None
        # A message that arrived without an acknowledgment keeps its number, so that the repeat is recognized.
        repeatable = entry.route.newest_only
        if entry.sequence is None or repeatable:
            entry.sequence = self._next_sequence()
            if not repeatable:
                self._save()
        try:
            await self._send(entry.message.model_copy(update={"sequence": entry.sequence}))
        except BaseException as error:
            if isinstance(error, MessageRefused):
                if not entry.refusals:
                    logger.error("the control plane does not take a %s: %s", entry.route.name, error)
                entry.refusals += 1
                self._changed.fire()
            if repeatable or (is_new and isinstance(error, MessageRefused)):
                entry.sequence = None
            raise
        # A newer message may have replaced it meanwhile.
        if entry in self._entries:
            self._entries.remove(entry)
        if entry.route.journaled or self._file.stale:
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
            logger.error("the outbox's journal is invalid; starting without it, kept as %s: %s", aside, error)
            return _Journal()
        return journal

    def _usable(self, journal: _Journal) -> list[_Entry]:
        """Returns the journal's entries except those that this release cannot read: an agent of another release may
        have left them."""
        usable: list[_Entry] = []
        rejected: list[Any] = []
        for found in journal.entries:
            try:
                entry = _JournalEntry.model_validate(found)
                usable.append(_Entry(_KINDS[entry.signal].model_validate(entry.message), entry.sequence))
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
                    signal=entry.route.name, sequence=entry.sequence, message=entry.message.model_dump(mode="json")
                )
                for entry in self._entries
                if entry.route.journaled
            ],
        )
        self._file.write(journal.model_dump_json().encode())
