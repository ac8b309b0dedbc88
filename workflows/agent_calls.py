"""Calls of a group to its agents: to hold a lease, to connect to an address, and to carry out what concerns
checkpoints.

Each call is an activity on the node's own task queue. If an agent does not answer, the group reports that to the job as
a transition of the node; the job decides what follows.
"""

from __future__ import annotations

import asyncio

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, TimeoutError, TimeoutType

with workflow.unsafe.imports_passed_through():
    from perdure.contract import (
        CheckConnection,
        CheckpointFacts,
        CommandAnswer,
        Commit,
        CommitCheckpoint,
        HoldCopies,
        LeaseRequest,
        NodeCredentials,
        OrderCheckpoint,
    )
    from perdure.contract.identity import identity_of
    from perdure.contract.transitions import (
        NodeCommittedCheckpoint,
        NodeUnreachable,
    )
    from perdure.workflows import options
    from perdure.workflows.node_table import NodeTable


async def hold_lease(table: NodeTable, node: NodeCredentials) -> None:
    """Holds one node's lease again and again. Each loss changes the node's state, and the next lease is scheduled at
    once."""
    lease = table.timing.lease
    schedule_to_start = lease.schedule_to_start
    while True:
        record = table.current(node)
        if record is None:
            return
        epoch = record.epoch + 1
        table.put(record.replace(epoch=epoch, renewed=False))
        try:
            await workflow.execute_activity(
                "hold_lease",
                LeaseRequest(node=node, epoch=epoch, heartbeat=lease.heartbeat),
                activity_id=f"lease/{node.rank}/{node.incarnation}/{epoch}",
                task_queue=table.queue(node),
                schedule_to_start_timeout=schedule_to_start,
                start_to_close_timeout=options.FOREVER,
                heartbeat_timeout=lease.timeout,
                retry_policy=options.LEASE_RETRY,
                cancellation_type=workflow.ActivityCancellationType.TRY_CANCEL,
                summary=f"lease of node {node.rank}.{node.incarnation}",
            )
            reason = "its agent released the lease"
        except ActivityError as error:
            reason = _lapse(error)
        record = table.current(node)
        if record is None:
            return
        if record.renewed:
            schedule_to_start = lease.schedule_to_start
            continue
        # An agent that comes back takes this lease, however late, and reports it.
        schedule_to_start = None
        if record.reachable:
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
            task_queue=table.queue(node),
            schedule_to_start_timeout=None if problem else table.timing.commands.schedule_to_start,
            start_to_close_timeout=options.CONNECT_TIMEOUT,
            schedule_to_close_timeout=options.FOREVER,
            retry_policy=options.CONNECT_RETRY if problem else options.CONNECT_ONCE,
            summary=f"query whether node {node.rank} has entered generation {world.generation}",
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


async def commit_checkpoint(table: NodeTable, node: NodeCredentials, commit: Commit) -> None:
    """Has an agent make a checkpoint of a folder whose parts are all durable, for as long as the job wants it to."""
    fields = commit.model_dump(include={"generation", "folder", "interval", "order", "inherited", "kept_before"})
    command = CommitCheckpoint(node=node, **fields)
    reported = ""
    while table.desire.commit is not None and table.desire.commit.number == commit.number and not table.winding_down:
        problem = ""
        try:
            answer = await workflow.execute_activity(
                "commit_checkpoint",
                command,
                result_type=CommandAnswer,
                task_queue=table.queue(node),
                schedule_to_start_timeout=options.PATIENT_COMMAND,
                start_to_close_timeout=options.COMMIT_TIMEOUT,
                retry_policy=options.COMMIT_ONCE,
                summary=f"commit {commit.folder}",
            )
            problem = "" if answer.accepted else answer.detail
        except ActivityError as error:
            problem = str(error.cause or error)
        record = table.current(node)
        if record is None:
            return
        if problem != reported or not problem:
            table.report(
                NodeCommittedCheckpoint(
                    **identity_of(node),
                    time=workflow.now(),
                    generation=commit.generation,
                    checkpoint=CheckpointFacts(step=commit.step, folder=commit.folder, problem=problem),
                )
            )
        reported = problem
        if not problem:
            table.put(record.replace(committed=commit.number))
            return
        if not await _until_reachable(table, node):
            return


async def order_checkpoint(table: NodeTable, node: NodeCredentials, number: int) -> None:
    """Has the ranks make a checkpoint, as soon as the agent can be reached."""
    command = OrderCheckpoint(node=node, number=number)
    while not await _took(table, "order_checkpoint", command, summary="a checkpoint was requested"):
        if not await _until_reachable(table, node):
            return
    record = table.current(node)
    if record is not None:
        table.put(record.replace(checkpoint_orders=number))


async def hold_copies(table: NodeTable, node: NodeCredentials) -> None:
    """Tells a node which other one keeps the copies of what its script saves, as soon as its agent can be reached."""
    while (holder := table.copy_holder(node)) is not None and not table.winding_down:
        before = table.current(node)
        summary = f"node {holder.rank} keeps copies of what node {node.rank} saves"
        if await _took(table, "hold_copies", HoldCopies(node=node, holder=holder), summary=summary):
            record = table.current(node)
            if before is None or record is None:
                return
            if record.holder_started_at == before.holder_started_at:
                table.put(record.replace(copies_place=holder.address_key))
                return
        elif not await _until_reachable(table, node):
            return


async def _took(
    table: NodeTable,
    name: str,
    command: OrderCheckpoint | HoldCopies,
    *,
    summary: str,
) -> bool:
    """Whether the agent has taken a command; it has little time for that."""
    try:
        await workflow.execute_activity(
            name,
            command,
            task_queue=table.queue(command.node),
            schedule_to_start_timeout=table.timing.commands.schedule_to_start,
            start_to_close_timeout=table.timing.commands.start_to_close,
            retry_policy=options.COMMAND_RETRY,
            schedule_to_close_timeout=2 * table.timing.commands.start_to_close,
            summary=summary,
        )
    except ActivityError:
        return False
    return True


async def _until_reachable(table: NodeTable, node: NodeCredentials) -> bool:
    """Waits until a command that was not taken can be sent again; returns False once it is no longer desired."""
    await workflow.sleep(options.COMMAND_PAUSE, summary=f"before the command to node {node.rank} is sent again")
    await workflow.wait_condition(
        lambda: table.winding_down or (record := table.current(node)) is None or record.reachable
    )
    return not table.winding_down and table.current(node) is not None


def _why_cut_off(checked: asyncio.Task[object]) -> str:
    """The reported problem; empty also where the agent did not answer, which its lease will show."""
    error = checked.exception()
    cause = error.cause if isinstance(error, ActivityError) else error
    return cause.message if isinstance(cause, ApplicationError) else ""


def _lapse(error: ActivityError) -> str:
    cause = error.cause
    if isinstance(cause, TimeoutError):
        if cause.type is TimeoutType.SCHEDULE_TO_START:
            return "its agent did not take its lease"
        return "its agent stopped renewing its lease"
    if isinstance(cause, ApplicationError):
        return f"its lease ended: {cause.message}"
    return "its lease ended"
