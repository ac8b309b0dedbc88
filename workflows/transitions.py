"""Sends a group's transitions to its job: the first at once, and those within the next moment together.

A lost node and its replacement that joins a second later must be reported without delay; a thousand nodes that join in
the same minute must not add a thousand signals to the job's history. Whatever waits while a worker is away is sent in
messages of bounded size, and of telemetry only the newest of each node waits.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime, timedelta
from itertools import chain

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from perdure.contract import GroupTransitions, NodeView, World
    from perdure.contract.base import shorten
    from perdure.contract.transitions import (
        AnyTransition,
        NodeCreateFailed,
        NodeEnding,
        NodeJoined,
        NodeLost,
        NodeMemoryRaised,
        NodePace,
        NodePollsRefused,
        NodeReady,
        NodeRemoved,
        NodeStepTimes,
        NodeUnreachable,
        NodeUnresponsive,
    )
    from perdure.workflows import options
    from perdure.workflows.delivery import Delivery, deliver
    from perdure.workflows.node_record import TransitionsCarried
    from perdure.workflows.patching import splits_here

_URGENT = (
    NodeJoined,
    NodeReady,
    NodeUnreachable,
    NodeUnresponsive,
    NodePollsRefused,
    NodeLost,
    NodeCreateFailed,
    NodeMemoryRaised,
    NodeRemoved,
    NodeEnding,
)
"""Transitions that a recovery may wait for. They end the gathering, which waits for a timer of the server that may fire
a second late."""

_TELEMETRY = (NodeStepTimes, NodePace, NodePollsRefused)
"""Transitions of which only the newest of each node means anything."""

_LARGEST = 512 * 1024
"""Bytes of transitions in one message, as JSON; a single one that is larger goes by itself. The server accepts 2 MB of
arguments."""

_TEXTS_OF_LARGE_TABLES = (256, 64)
"""Characters of texts for people in a table of a group's nodes that is larger than that."""
_MOST_AVOIDED = 16

_MOST_AT_ONCE = 8
"""How often in succession urgent transitions end the gathering: enough to recover from a few failures."""

_RUNS = 8
"""Runs of the group that a message names: more than continue as new while the job takes no message."""

_REGAINED = timedelta(seconds=1)
"""The time after which the gathering may be ended once more."""


class TransitionBatch:
    """Collects transitions and delivers them in order.

    Invariants:
        - A transition stays here until the job has accepted it; transitions that could not be delivered go first the
        next time.
        - `carried` rides through continue-as-new: waiting transitions, and sequence numbers that only grow.
        - Each message has a higher sequence number than the one before, and says how many transitions were sent before
        its first. The job recognizes repeated messages by that, and transitions that it accepted although the delivery
        seemed to fail.
        - A message holds transitions up to `_LARGEST`, and the rest goes with the next one.
        - Transitions are numbered once a message has held them. Until then newer telemetry of a node takes the place of
        older: what waits grows with the nodes, and not with the time for which no worker runs.
        - A group that is reset counts from an earlier moment. The job recognizes that by `runs`: a run that replays
        what another one did takes its deliveries for its own.
    """

    def __init__(
        self,
        *,
        job_id: str,
        uid: str,
        role: str,
        group: int,
        gather: timedelta,
        carried: TransitionsCarried,
    ) -> None:
        self._job_id = job_id
        self._uid = uid
        self._role = role
        self._group = group
        self._gather = gather
        self._numbered: list[AnyTransition] = list(carried.waiting)
        """Those that wait and that a message has held, which may have arrived."""
        self._unsent: dict[tuple[object, ...], AnyTransition] = {}
        """The others. A worker that was away takes in thousands of reports within the two seconds of one task."""
        self._added = 0
        self._only_newest = False
        self._adopted: tuple[NodeView, ...] | None = carried.adopted
        self._declined, self._world = carried.declined, carried.world
        self._adoptions = 0
        """Counts adoptions: a message may be in flight while the group is adopted, and one job may adopt it twice
        unchanged."""
        self._wound_down = False
        self._stopped = False
        self._sequence = carried.sequence
        self._delivered = carried.delivered
        """The number of transitions that the job has accepted, which is the number before the first that waits."""
        self._runs = carried.runs
        self._begins = carried.begins
        self._beginnings = 0
        """Counts them: the group may be reset while a message is in flight."""
        self._ownership_epoch = carried.ownership_epoch
        self._at_once: float = _MOST_AT_ONCE
        """How often the gathering may still be ended; a fraction is regained with time."""
        self._counted_at: datetime | None = None

    @property
    def carried(self) -> TransitionsCarried:
        """The state with which the next run begins, once `deliver` has ended."""
        return TransitionsCarried(
            waiting=(*self._numbered, *self._unsent.values()),
            adopted=self._adopted,
            declined=self._declined,
            world=self._world,
            sequence=self._sequence,
            delivered=self._delivered,
            runs=self._runs,
            begins=self._begins,
            ownership_epoch=self._ownership_epoch,
        )

    def keep_only_newest_telemetry(self) -> None:
        """Has telemetry that no message has held make room for newer; a run that begins without this keeps all of it,
        since its job has counted what it sent."""
        self._only_newest = True

    def add(self, transition: AnyTransition) -> None:
        if self._only_newest and isinstance(transition, _TELEMETRY):
            known = (type(transition), transition.key)
            self._unsent.pop(known, None)
        else:
            self._added += 1
            known = (self._added,)
        self._unsent[known] = transition

    def report_adoption(
        self,
        nodes: tuple[NodeView, ...],
        *,
        world: World | None = None,
        ownership_epoch: str | None = None,
        declined: bool = False,
    ) -> None:
        """Sends the whole table with the next message, to the job that has adopted the group or was reset.

        Args:
            nodes: The table.
            world: The newest world that the group was sent, without its members.
            ownership_epoch: The new one; None where it stays.
            declined: Whether it answers a desired state that was not taken.
        """
        self._adopted, self._declined, self._world = _bounded(nodes), declined, world
        self._adoptions += 1
        if ownership_epoch is not None:
            self._ownership_epoch = ownership_epoch

    def report_beginning(self) -> None:
        """Reports to the job that the group was reset, or may have been, even where nothing else is to be reported."""
        self._begins = True
        self._beginnings += 1

    def report_end(self) -> None:
        """Ends `deliver` after reporting that nothing of the group is left."""
        self._wound_down = True

    def stop(self) -> None:
        """Ends `deliver` after the message that is in flight; waiting transitions are in `carried`."""
        self._stopped = True

    async def deliver(self) -> None:
        """Sends messages for as long as the group runs."""
        while True:
            await workflow.wait_condition(lambda: self._has_news or self._wound_down or self._stopped)
            if self._stopped:
                return
            winding_down, adoptions = self._wound_down, self._adoptions
            delivery, reported_end = await self._send()
            if delivery is Delivery.TAKEN and winding_down and not reported_end:
                continue
            if winding_down and delivery is not Delivery.FAILED:
                if self._adoptions != adoptions:
                    # A job has adopted this group meanwhile, and would wait for its nodes forever.
                    continue
                # The job has accepted it, or is closed: no workflow is left to report to.
                return
            pause = self._gather if delivery is Delivery.TAKEN else options.LOST_SIGNAL_RETRY
            gathers = delivery is Delivery.TAKEN and self._may_be_ended()
            with suppress(TimeoutError):
                await workflow.wait_condition(
                    lambda waits=winding_down, gathers=gathers: (
                        self._stopped or (self._wound_down and not waits) or (gathers and self._is_urgent)
                    ),
                    timeout=pause,
                    timeout_summary="gathers transitions for the job",
                )
            if gathers and self._is_urgent:
                self._at_once -= 1

    def _may_be_ended(self) -> bool:
        """Whether urgent transitions may end the gathering that begins now."""
        now = workflow.now()
        if self._counted_at is not None:
            self._at_once = min(self._at_once + (now - self._counted_at) / _REGAINED, _MOST_AT_ONCE)
        self._counted_at = now
        return self._at_once >= 1

    @property
    def _is_urgent(self) -> bool:
        return any(isinstance(transition, _URGENT) for transition in chain(self._numbered, self._unsent.values()))

    @property
    def _has_news(self) -> bool:
        return bool(self._numbered or self._unsent) or self._adopted is not None or self._begins

    async def _send(self) -> tuple[Delivery, bool]:
        """Sends one message; returns what became of it, and whether it reported the group's end."""
        transitions, adopted, adoptions = self._next_transitions(), self._adopted, self._adoptions
        for first in list(self._unsent)[: max(len(transitions) - len(self._numbered), 0)]:
            self._numbered.append(self._unsent.pop(first))
        wound_down = self._wound_down and not self._unsent and len(transitions) == len(self._numbered)
        beginnings = self._beginnings
        run = workflow.info().run_id
        self._sequence += 1
        self._runs = (*(known for known in self._runs if known != run), run)[-_RUNS:]
        message = GroupTransitions(
            uid=self._uid,
            role=self._role,
            group=self._group,
            sequence=self._sequence,
            before=self._delivered,
            runs=self._runs,
            begins=self._begins,
            transitions=transitions,
            adopted=adopted,
            declined=self._declined,
            world=self._world,
            wound_down=wound_down,
            ownership_epoch=self._ownership_epoch,
        )
        delivery = await deliver(self._job_id, "transitions", message)
        if delivery is not Delivery.TAKEN:
            return delivery, wound_down
        self._delivered += len(transitions)
        self._runs = (run,)
        del self._numbered[: len(transitions)]
        if self._adoptions == adoptions:
            self._adopted, self._declined, self._world = None, False, None
        if self._beginnings == beginnings:
            self._begins = False
        return delivery, wound_down

    def _next_transitions(self) -> tuple[AnyTransition, ...]:
        """Returns the first of those that wait, as many as one message may hold."""
        size, waiting = 0, (*self._numbered, *self._unsent.values())
        for count, transition in enumerate(waiting):
            size += len(transition.model_dump_json().encode())
            # A run whose history has a larger message sends it again when it is replayed.
            if size > _LARGEST and count and splits_here():
                return waiting[:count]
        return waiting


def _bounded(nodes: tuple[NodeView, ...]) -> tuple[NodeView, ...]:
    """The table of a group as a part of one message: with shorter texts where it is too large, which are for people."""
    for longest in _TEXTS_OF_LARGE_TABLES:
        if sum(len(node.model_dump_json().encode()) for node in nodes) <= _LARGEST:
            break
        nodes = tuple(
            node.replace(
                reason=shorten(node.reason, longest),
                log_path=node.log_path if len(node.log_path) <= longest else "",
                avoids=tuple(machine for machine in node.avoids[:_MOST_AVOIDED] if len(machine) <= longest),
            )
            for node in nodes
        )
    return nodes
