"""Calls of a group to its backend: to create nodes, to delete some, and to watch all of them.

Each call is an activity of the worker, and its result goes into the group's table. A call is retried indefinitely,
because a backend may later do what it cannot do now; only a permanent refusal becomes a transition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from perdure.contract import (
        CreatedNode,
        GroupRef,
        NodeCredentials,
        NodePhase,
        NodeRef,
        NodeRequest,
        NodeResize,
        NodeResized,
        NodesCreated,
        NodesDeleted,
        NodesRef,
        NodesRequest,
        RequestedNode,
        WatchRequest,
    )
    from perdure.contract.base import shorten
    from perdure.contract.identity import identity_of
    from perdure.contract.names import REMOVAL_DENIED, watch_task_queue
    from perdure.contract.transitions import NodeCreated, NodeCreateFailed, NodeMemoryRaised, NodePending, NodeRemoved
    from perdure.workflows import options
    from perdure.workflows.backend_reports import begin_watch
    from perdure.workflows.node_record import NodeRecord
    from perdure.workflows.node_table import NodeTable

_ResultT = TypeVar("_ResultT")


async def create(table: NodeTable, node: NodeCredentials) -> None:
    """Has one incarnation created."""
    [request] = _request(table, [node]).each
    _note_memory(table, node)
    try:
        created = await _execute_creation(table, "create_node", request, CreatedNode, [node])
    except ActivityError as error:
        _record_refusal(table, node, _words_of(error))
    else:
        _record_creation(table, node, created)


async def create_together(table: NodeTable, nodes: Sequence[NodeCredentials]) -> None:
    """Has many incarnations created at once; the table shows which of them still lack a result."""
    for node in nodes:
        _note_memory(table, node)
    try:
        result = await _execute_creation(table, "create_nodes", _request(table, nodes), NodesCreated, nodes)
    except ActivityError as error:
        workflow.logger.warning("%s nodes were not created together: %s", len(nodes), error.cause or error)
        return
    for node in nodes:
        if created := result.created.get(node.rank):
            _record_creation(table, node, created)
        elif refusal := result.refused.get(node.rank):
            _record_refusal(table, node, refusal)


async def _execute_creation(
    table: NodeTable,
    activity: str,
    request: NodeRequest | NodesRequest,
    result_type: type[_ResultT],
    nodes: Sequence[NodeCredentials],
) -> _ResultT:
    return await workflow.execute_activity(
        activity,
        request,
        result_type=result_type,
        start_to_close_timeout=options.SHORT_ACTIVITY,
        heartbeat_timeout=_heartbeat_timeout(table),
        retry_policy=options.BACKEND_RETRY,
        cancellation_type=options.CREATE_CANCELLATION,
        summary=f"create {_text(nodes)}{table.why}",
    )


def _request(table: NodeTable, nodes: Sequence[NodeCredentials]) -> NodesRequest:
    group = table.group
    return NodesRequest(
        nodes=tuple(
            RequestedNode(
                node=node,
                name=table.name(node),
                task_queue=table.queue(node),
                avoids=table.avoids(node.rank),
                memory=table.memory(node.rank),
                cpu=table.cpu(node.rank),
            )
            for node in nodes
        ),
        spec=group.spec,
        job_id=group.job_id,
        job_first_run_id=group.job_first_run_id,
        group_id=workflow.info().workflow_id,
        nodes_min=table.desire.nodes_min,
    )


def _note_memory(table: NodeTable, node: NodeCredentials) -> None:
    """Records what a node is about to be created with."""
    record, memory = table.current(node), table.memory(node.rank)
    if record is not None and record.memory != memory:
        table.put(record.replace(memory=memory))


def _record_refusal(table: NodeTable, node: NodeCredentials, reason: str) -> None:
    record = table.current(node)
    if record is not None:
        table.put(record.replace(phase=NodePhase.LOST, reason=reason, since=workflow.now()))
        table.report(NodeCreateFailed(**identity_of(node), time=workflow.now(), detail=reason))


def _record_creation(table: NodeTable, node: NodeCredentials, created: CreatedNode) -> None:
    record = table.current(node)
    if record is None:
        return
    if record.phase is NodePhase.REQUESTED:
        now = workflow.now()
        phase = NodePhase.PENDING if created.pending else NodePhase.CREATED
        record = record.replace(phase=phase, since=now, reason=created.pending)
        if created.pending:
            table.report(NodePending(**identity_of(node), time=now, detail=created.pending))
        else:
            table.report(NodeCreated(**identity_of(node), time=now))
    table.put(record.replace(created=created, host=record.host or created.host))


async def raise_memory(table: NodeTable, node: NodeCredentials, memory: int) -> None:
    """Has the memory of a node that runs raised; reports whether it was, within a bounded time."""
    try:
        resized = await workflow.execute_activity(
            "resize_node",
            NodeResize(**dict(_ref(table, node)), memory=memory),
            result_type=NodeResized,
            schedule_to_close_timeout=options.RESIZE_PATIENCE,
            start_to_close_timeout=options.RESIZE_ATTEMPT,
            heartbeat_timeout=_heartbeat_timeout(table),
            retry_policy=options.BACKEND_RETRY,
            summary=f"raise the memory of {_text([node])}{table.why}",
        )
        problem = resized.problem
    except ActivityError as error:
        if is_cancelled_exception(error):
            return
        problem = f"it was not raised within {options.RESIZE_PATIENCE.total_seconds():.0f} s: {error.cause or error}"
    record = table.current(node)
    if record is not None:
        table.put(record.replace(memory=memory))
        table.report(
            NodeMemoryRaised(**identity_of(node), time=workflow.now(), memory=memory, problem=shorten(problem))
        )


def _words_of(error: ActivityError) -> str:
    """What failed, for people; its type is for programs."""
    cause = error.cause
    return cause.message if isinstance(cause, ApplicationError) else str(cause or error)


def _ref(table: NodeTable, node: NodeCredentials) -> NodeRef:
    spec = table.group.spec
    return NodeRef(
        **dict(node),
        name=table.name(node),
        backend=spec.backend,
        namespace=spec.namespace,
        grace=spec.limits.termination_grace_period,
        winding_down=table.winding_down,
        replaced=table.is_replaced(node),
    )


async def delete(table: NodeTable, records: Sequence[NodeRecord]) -> None:
    """Has incarnations deleted that are retiring."""
    spec = table.group.spec
    ended = [True] * len(records)
    if table.adopts:
        ended = await asyncio.gather(*(_release(table, record) for record in records))
    nodes = tuple(_ref(table, record.node) for record in records)
    left: Mapping[str, str] = {}
    try:
        deleted = await workflow.execute_activity(
            "delete_nodes",
            NodesRef(nodes=nodes),
            start_to_close_timeout=options.SHORT_ACTIVITY + spec.limits.termination_grace_period,
            heartbeat_timeout=_heartbeat_timeout(table),
            retry_policy=options.BACKEND_RETRY,
            summary=f"delete {_text([record.node for record in records])}{table.why}",
        )
    except ActivityError as error:
        if not _is_denied(error):
            raise
        workflow.logger.warning("%s could not be deleted: %s", _text([one.node for one in records]), error.cause)
        if not table.winding_down:
            # They stay in `retiring`, so the group requests their deletion again.
            return
        # Agents of a job that has closed end their nodes, and the backend removes what is left of it.
        ended = [record.phase is NodePhase.LOST for record in records]
        left = {node.name: f"{node.name} is left, as its deletion is denied: {_words_of(error)}" for node in nodes}
    else:
        # A worker of an earlier release returns nothing.
        left = NodesDeleted.model_validate(deleted or {}).left
    for node, record, certain in zip(nodes, records, ended, strict=True):
        table.retiring.pop(record.node.key, None)
        identity, now = identity_of(record.node), workflow.now()
        table.report(NodeRemoved(**identity, time=now, certain=certain, left=left.get(node.name, "")))
    table.dirty = True


async def clear(table: NodeTable) -> None:
    """Has the backend confirm that nothing of the group is left, including objects that this group does not know.

    If it is denied that for long, the group closes nevertheless: its job must end, and the backend removes what is left
    of closed jobs once it may.
    """
    group = table.group
    grace = group.spec.limits.termination_grace_period
    try:
        await workflow.execute_activity(
            "clear_group",
            GroupRef(
                uid=group.uid,
                role=group.role,
                group=group.group,
                backend=group.spec.backend,
                namespace=group.spec.namespace,
                job=group.spec.name,
                grace=grace,
            ),
            start_to_close_timeout=options.SHORT_ACTIVITY + grace,
            heartbeat_timeout=_heartbeat_timeout(table),
            retry_policy=options.BACKEND_RETRY,
            summary=f"nothing is left of {group.role}/{group.group}{table.why}",
        )
    except ActivityError as error:
        if not _is_denied(error):
            raise
        workflow.logger.warning("%s/%s leaves objects behind: %s", group.role, group.group, error.cause)


def _is_denied(error: ActivityError) -> bool:
    return isinstance(error.cause, ApplicationError) and error.cause.type == REMOVAL_DENIED


def _heartbeat_timeout(table: NodeTable) -> timedelta:
    """The timeout, as long as the job's leases: the worker of a thousand nodes may be late, and a watch that begins
    again for that lists everything anew."""
    return max(options.BACKEND_HEARTBEAT, table.timing.lease.timeout)


def _text(nodes: Sequence[NodeCredentials]) -> str:
    """Names the nodes, for summaries in the Temporal UI."""
    if len(nodes) == 1:
        return f"node {nodes[0].rank}.{nodes[0].incarnation}"
    return f"{len(nodes)} nodes, {nodes[0].rank} to {nodes[-1].rank}"


async def _release(table: NodeTable, record: NodeRecord) -> bool:
    """Waits until an adopted node has ended itself, as is desired of it; a node that does not answer is left to its
    owner.

    Returns:
        Whether all its processes have ended.
    """
    key, commands = record.node.key, table.timing.commands

    def gone() -> bool:
        return not record.joined or table.retiring[key].phase is NodePhase.LOST

    def answered() -> bool:
        return gone() or table.retiring[key].acknowledged.stop is not None

    with suppress(TimeoutError):
        await workflow.wait_condition(
            answered,
            timeout=commands.schedule_to_start + commands.start_to_close,
            timeout_summary=f"node {record.node.rank}.{record.node.incarnation} learns that it is not desired",
        )
        await workflow.wait_condition(
            gone,
            timeout=table.group.spec.limits.termination_grace_period + options.SHUTDOWN_REPORT_TIMEOUT,
            timeout_summary=f"node {record.node.rank}.{record.node.incarnation} ends itself",
        )
    return gone()


async def watch(table: NodeTable) -> None:
    """Has the backend watched until this is cancelled; the watch sends what it sees as signals."""
    group = table.group
    pause = options.WATCH_PAUSE
    while True:
        began = workflow.now()
        try:
            await workflow.execute_activity(
                "watch_nodes",
                WatchRequest(
                    group_id=workflow.info().workflow_id,
                    job_id=group.job_id,
                    job_first_run_id=group.job_first_run_id,
                    uid=group.uid,
                    role=group.role,
                    group=group.group,
                    backend=group.spec.backend,
                    namespace=group.spec.namespace,
                    owner_check=table.timing.owner_check,
                    known=begin_watch(table),
                ),
                task_queue=watch_task_queue(workflow.info().task_queue),
                start_to_close_timeout=options.FOREVER,
                heartbeat_timeout=_heartbeat_timeout(table),
                retry_policy=options.WATCH_ONCE,
                summary=f"watch the nodes of {group.role}/{group.group}",
            )
        except ActivityError as error:
            if is_cancelled_exception(error):
                return
            workflow.logger.warning("the watch ended and is begun again: %s", error.cause or error)
        if workflow.now() - began > options.LONGEST_WATCH_PAUSE:
            pause = options.WATCH_PAUSE
        await workflow.sleep(pause)
        pause = min(2 * pause, options.LONGEST_WATCH_PAUSE)


async def until_overlooked(table: NodeTable) -> bool:
    """Whether the watch fails to report a node that was created, because it came and went unseen."""
    try:
        await workflow.wait_condition(
            lambda: not table.has_unwatched_nodes or table.winding_down,
            timeout=options.OVERLOOKED,
            timeout_summary="the watch reports every node that was created",
        )
    except TimeoutError:
        return True
    return False
