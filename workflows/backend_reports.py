"""What the backend's watch reports about a group's nodes, and its effect on the group's table.

The watch sees what happens to a node outside of its agent: that it waits for a machine, that its processes have gone.
"""

from __future__ import annotations

from datetime import timedelta

from perdure.contract import (
    Incarnation,
    NodeEvent,
    NodeEventKind,
    NodeEvents,
    NodePhase,
)
from perdure.contract.identity import identity_of
from perdure.contract.transitions import NodeCreated, NodeCreateFailed, NodeJoined, NodeLost, NodePending
from perdure.workflows.node_record import NodeRecord
from perdure.workflows.node_table import NodeTable

REWORDINGS = 8
"""The number of reasons of a pending node that the job is sent at once."""

REWORDED_AGAIN = timedelta(minutes=1)
"""The shortest time before the job is sent another reason after these."""


def begin_watch(table: NodeTable) -> tuple[Incarnation, ...]:
    """Begins a watch. Returns the nodes known to exist, so that the watch reports those that have gone."""
    for record in list(table.records.values()):
        if record.created is not None:
            table.put(record.replace(watched=True))
    return tuple(
        Incarnation(rank=record.node.rank, incarnation=record.node.incarnation)
        for record in (*table.records.values(), *table.retiring.values())
        if (record.watched or record.created is not None) and record.phase is not NodePhase.LOST
    )


def take_watch_events(table: NodeTable, message: NodeEvents) -> list[NodeRecord]:
    """Takes in the watch's events.

    Returns:
        The records of nodes that are gone according to them.
    """
    if message.owner_closed:
        table.owner_closed = True
        table.dirty = True
    return [gone for event in message.events if (gone := _take_event(table, event)) is not None]


def _take_event(table: NodeTable, event: NodeEvent) -> NodeRecord | None:
    key = event.key
    if event.kind is NodeEventKind.GONE and (leaving := table.retiring.get(key)) is not None:
        table.retiring[key] = leaving.replace(phase=NodePhase.LOST, since=event.time, reason=event.reason)
        if leaving.phase is not NodePhase.LOST and not table.winding_down:
            # Its replacement may wait for this, and the deletion returns later.
            table.report(NodeLost(**identity_of(event), time=event.time, detail=event.reason))
    record = table.records.get(event.rank)
    if record is None or record.node.incarnation != event.incarnation or record.phase is NodePhase.LOST:
        return None
    if not record.watched and not event.absent:
        record = record.replace(watched=True)
        table.put(record)
    match event.kind:
        case NodeEventKind.GONE | NodeEventKind.PENDING if event.refused:
            return _refuse(table, record, event)
        case NodeEventKind.GONE:
            table.put(record.replace(phase=NodePhase.LOST, since=event.time, reason=event.reason))
            table.report(
                NodeLost(
                    **identity_of(event),
                    time=event.time,
                    detail=event.reason,
                    cause=event.cause,
                    host=event.host or None,
                    out_of_memory=event.out_of_memory,
                )
            )
            return record
        case NodeEventKind.PENDING:
            _wait_for_backend(table, record, event)
        case NodeEventKind.RUNNING:
            if record.phase is NodePhase.PENDING:
                phase, transition = NodePhase.CREATED, NodeCreated(**identity_of(event), time=event.time)
                if record.joined and record.reachable:
                    phase, transition = NodePhase.JOINED, NodeJoined(**identity_of(event), time=event.time)
                table.put(record.replace(phase=phase, since=event.time, reason="", obstacle=""))
                table.report(transition)
        case NodeEventKind.UNKNOWN:
            pass
    return None


def _wait_for_backend(table: NodeTable, record: NodeRecord, event: NodeEvent) -> None:
    # The event may arrive before the activity that created the node has returned, and arrives only once.
    early = record.phase in (NodePhase.REQUESTED, NodePhase.CREATED, NodePhase.PENDING)
    # The agent is a container of its own and joins while the training container is still being created. A queue's
    # message after that is late: the node has a machine.
    obstacle = "" if event.queued else event.reason
    if early and (record.obstacle or record.reason) != event.reason:
        often = _rewords_often(table, record, event)
        record = record.replace(phase=NodePhase.PENDING, since=event.time, reason=event.reason, obstacle=obstacle)
        if not often:
            record = record.replace(rewordings=record.rewordings + 1, reworded_at=event.time)
            table.report(
                NodePending(
                    **identity_of(event),
                    time=event.time,
                    detail=event.reason,
                    queued=event.queued,
                    absent=event.absent,
                )
            )
        table.put(record)
    elif obstacle and record.phase is NodePhase.JOINED:
        record = record.replace(phase=NodePhase.PENDING, since=event.time, reason=obstacle, obstacle=obstacle)
        table.put(record)
        table.report_obstacle(record)


def _rewords_often(table: NodeTable, record: NodeRecord, event: NodeEvent) -> bool:
    """Whether the reason changes too often: a scheduler that counts its machines again gives a job nothing to
    decide on."""
    return (
        record.phase is NodePhase.PENDING
        and record.rewordings >= REWORDINGS
        and record.reworded_at is not None
        and event.time - record.reworded_at < REWORDED_AGAIN
    )


def _refuse(table: NodeTable, record: NodeRecord, event: NodeEvent) -> NodeRecord:
    table.put(record.replace(phase=NodePhase.LOST, since=event.time, reason=event.reason))
    table.report(NodeCreateFailed(**identity_of(event), time=event.time, detail=event.reason, cause=event.cause))
    return record
