"""Calls of a group to its agents: to hold a lease, and to connect to an address.

Each call is an activity on the node's own task queue. If an agent does not answer, the group reports that to the job as
a transition of the node; the job decides what follows.
"""

from __future__ import annotations

import asyncio

from temporalio import workflow
from temporalio.common import RawValue
from temporalio.exceptions import ActivityError, ApplicationError, TimeoutError, TimeoutType

with workflow.unsafe.imports_passed_through():
    from perdure.contract import (
        CheckConnection,
        LeaseRequest,
        NodeCredentials,
        NodePhase,
    )
    from perdure.contract.identity import identity_of
    from perdure.contract.transitions import NodeUnreachable
    from perdure.workflows import options
    from perdure.workflows.node_record import NodeRecord
    from perdure.workflows.node_table import NodeTable


async def hold_lease(table: NodeTable, node: NodeCredentials) -> None:
    """Holds one node's lease again and again. The next lease is scheduled at once after each loss; one that its agent
    does not take either changes the node's state. An agent that gives each back at once gets the next after a pause."""
    lease = table.timing.lease
    pause = options.LEASE_PAUSE
    while True:
        record = table.current(node)
        if record is None:
            return
        epoch, began = record.epoch + 1, workflow.now()
        table.put(record.replace(epoch=epoch, renewed=False, leased_since=workflow.now()))
        cause: BaseException | None = None
        try:
            await workflow.execute_activity(
                "hold_lease",
                LeaseRequest(node=node, epoch=epoch, heartbeat=lease.heartbeat),
                # None is expected; see `answers`.
                result_type=RawValue,
                activity_id=f"lease/{node.rank}/{node.incarnation}/{epoch}",
                task_queue=table.queue(node),
                # An unreachable agent that comes back takes this lease, however late, and reports it.
                schedule_to_start_timeout=lease.schedule_to_start if record.reachable else None,
                start_to_close_timeout=options.FOREVER,
                heartbeat_timeout=lease.timeout,
                retry_policy=options.LEASE_RETRY,
                cancellation_type=workflow.ActivityCancellationType.TRY_CANCEL,
                summary=f"lease of node {node.rank}.{node.incarnation}",
            )
        except ActivityError as error:
            cause = error.cause or error
        record = table.current(node)
        if record is None or (record.phase is NodePhase.LOST and table.leases_sparingly):
            return
        timed_out = cause.type if isinstance(cause, TimeoutError) else None
        if not record.renewed:
            _note_loss(table, record, cause)
        if timed_out is None and table.leases_sparingly and workflow.now() - began < options.SHORT_LEASE:
            await workflow.sleep(pause, summary=f"before node {node.rank}.{node.incarnation} is leased again")
            pause = min(2 * pause, options.LONGEST_LEASE_PAUSE)
        else:
            pause = options.LEASE_PAUSE


def _note_loss(table: NodeTable, record: NodeRecord, cause: BaseException | None) -> None:
    """Records that a lease has ended which its agent has not renewed since."""
    lease, node = table.timing.lease, record.node
    timed_out = cause.type if isinstance(cause, TimeoutError) else None
    if record.silent_since is None and timed_out is not None:
        waited = lease.timeout if timed_out is TimeoutType.HEARTBEAT else lease.schedule_to_start
        record = record.replace(silent_since=workflow.now() - waited)
        table.put(record)
    if timed_out is not TimeoutType.HEARTBEAT and record.reachable:
        reason = _why_lapsed(cause)
        table.put(record.replace(unreachable_since=workflow.now(), reason=reason))
        table.report(NodeUnreachable(**identity_of(node), time=workflow.now(), detail=reason))


async def check_connection(table: NodeTable, node: NodeCredentials) -> None:
    """Has a ready node prove that it can connect to the world that it would join, before that world stops for it.

    A node that cannot connect is reported at once. It continues to try until it succeeds, or until that world ends.
    """
    record = table.current(node)
    problem = record.cut_off if record is not None else ""
    while (world := table.world_to_join(node)) is not None:
        checking = workflow.start_activity(
            "check_connection",
            CheckConnection(node=node, address=world.store_address, port=world.store_port),
            result_type=RawValue,
            task_queue=table.queue(node),
            schedule_to_start_timeout=None if problem else table.timing.commands.schedule_to_start,
            start_to_close_timeout=options.CONNECT_TIMEOUT,
            schedule_to_close_timeout=options.FOREVER,
            retry_policy=options.CONNECT_RETRY if problem else options.CONNECT_ONCE,
            summary=f"query whether node {node.rank} can connect to generation {world.generation}",
        )
        over = asyncio.create_task(workflow.wait_condition(lambda world=world: table.world_to_join(node) != world))
        try:
            await workflow.wait((checking, over), return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.cancel()
            checking.cancel()
        if not checking.done():
            return
        problem = _why_cut_off(checking)
        table.record_connection(node, problem=problem)


def _why_cut_off(checked: asyncio.Task[object]) -> str:
    """The reported problem; empty also where the agent did not answer, which its lease will show."""
    error = checked.exception()
    cause = error.cause if isinstance(error, ActivityError) else error
    return cause.message if isinstance(cause, ApplicationError) else ""


def _why_lapsed(cause: BaseException | None) -> str:
    if cause is None:
        return "its agent released the lease"
    if isinstance(cause, TimeoutError):
        return "its agent did not take its lease"
    return f"its lease ended: {cause.message}" if isinstance(cause, ApplicationError) else "its lease ended"
