"""NodeGroup: hands and senses for up to 128 nodes of one role.

It realises what its TrainingJob desires (create, command, delete), holds the nodes' leases, folds their telemetry into
its table, and tells the job edges only. It decides nothing.

Invariants:
    - All state is in `_table` and `_desire`, both set in `__init__` and changed by handlers without awaiting, so no
      signal is lost on any boundary.
    - A desire replaces the one before it; acting on one twice is harmless.
    - Leases and the watch end with a run and are taken again in the first task of the next.
    - It outlives its parent's runs. When the job is closed, its watch says so and the group winds down by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from datetime import datetime
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, TimeoutError, TimeoutType

with workflow.unsafe.imports_passed_through():
    from perdure.spec.timing import Timing
    from workflows import options
    from workflows.edges import EdgeBatch
    from workflows.messages import (
        Adopt,
        AgentMessage,
        ApplyWorld,
        CommandAnswer,
        CompleteGeneration,
        CreatedNode,
        EdgeKind,
        EvidenceSource,
        GroupDesire,
        Heartbeat,
        Joined,
        LeaseRequest,
        LeaseTaken,
        Metrics,
        NodeEvent,
        NodeEventKind,
        NodeEvents,
        NodeIdentity,
        NodePhase,
        NodeRef,
        NodeRequest,
        NodeView,
        Ready,
        Stepping,
        StopNode,
        WatchRequest,
    )
    from workflows.names import NODE_GROUP, node_name, node_task_queue, watch_task_queue
    from workflows.node_record import EdgesCarried, GroupInput, GroupTable, NodeRecord

HISTORY_LIMIT = 9_000
"""Events after which a group continues as new although commands are under way: the server refuses all further signals
to a run that was sent 10,000."""


@workflow.defn(name=NODE_GROUP)
class NodeGroup:
    """See the module."""

    @workflow.init
    def __init__(self, group: GroupInput) -> None:
        table = group.table
        self._group = group
        self._desire = group.desire
        self._records: dict[int, NodeRecord] = dict(table.records) if table else {}
        self._retiring: dict[tuple[int, int], NodeRecord] = {
            (record.node.rank, record.node.incarnation): record for record in (table.retiring if table else ())
        }
        self._edges = EdgeBatch(
            job_id=group.job_id,
            uid=group.uid,
            group=group.group,
            gather=self._timing.signals.edge_batch,
            carried=table.edges if table else EdgesCarried(),
        )
        self._tasks: dict[tuple[str, int, int], asyncio.Task[None]] = {}
        self._dirty = True
        self._owner_closed = False

    @property
    def _timing(self) -> Timing:
        return self._group.spec.timing

    @workflow.run
    async def run(self, group: GroupInput) -> None:
        watch = self._start(("watch", 0, 0), self._watch())
        messenger = asyncio.create_task(self._edges.deliver())
        while True:
            self._dirty = False
            self._reconcile()
            if self._is_wound_down():
                break
            await workflow.wait_condition(lambda: self._dirty or self._may_continue())
            if self._may_continue() and not self._dirty:
                self._edges.stop()
                await messenger
                await workflow.wait_condition(workflow.all_handlers_finished)
                workflow.continue_as_new(self._carried())
        watch.cancel()
        self._edges.wound_down()
        await messenger

    # What the job and its agents say

    @workflow.signal(description="All that the job wants of this group now")
    def desire(self, desire: GroupDesire) -> None:
        if desire.version > self._desire.version:
            self._desire = desire
            self._dirty = True

    @workflow.signal(description="A job that starts over takes this group on")
    def adopt(self, adopt: Adopt) -> None:
        # Versions count per run of the job, and the new one begins again.
        self._desire = self._desire.model_copy(update={"version": 0})
        self._edges.adopted(tuple(self._view(record, with_token=True) for record in self._records.values()))

    @workflow.signal(description="An agent's first word, said again when it restarts")
    def joined(self, message: Joined) -> None:
        record = self._hear("joined", message)
        if record is None:
            return
        restarted = record.holder_started_at is not None and record.holder_started_at != message.agent_started_at
        self._put(
            record.changed(
                phase=record.phase if record.phase is NodePhase.READY else NodePhase.JOINED,
                since=record.since if record.phase is NodePhase.READY else message.time,
                joined=True,
                reachable=True,
                reason="",
                address=message.address,
                host=message.host,
                renewed=record.renewed or restarted or not record.reachable,
                holder_started_at=message.agent_started_at,
                generation=max(record.generation, message.generation),
            )
        )
        kind = EdgeKind.REACHABLE if record.joined and not record.reachable else EdgeKind.JOINED
        if not record.joined or not record.reachable:
            self._edge(
                record, kind, message.time, address=message.address, host=message.host, generation=message.generation
            )
        self._dirty = True

    @workflow.signal(description="An agent holds its lease")
    def lease_taken(self, message: LeaseTaken) -> None:
        record = self._hear("lease_taken", message)
        if record is None or message.epoch < record.epoch:
            return
        self._put(record.changed(reachable=True, reason="", holder_started_at=message.agent_started_at))
        if not record.reachable:
            self._edge(record, EdgeKind.REACHABLE, message.time, source=EvidenceSource.LEASE)

    @workflow.signal(description="A node's command waits for a world")
    def ready(self, message: Ready) -> None:
        record = self._hear("ready", message)
        if record is None:
            return
        self._put(
            record.changed(
                phase=NodePhase.READY,
                since=message.time,
                reason="",
                processes=message.processes,
                store_ports=message.store_ports,
            )
        )
        self._edge(
            record,
            EdgeKind.READY,
            message.time,
            generation=message.after_generation,
            store_ports=message.store_ports,
            processes=message.processes,
            command_nodes=message.command_nodes,
        )

    @workflow.signal(description="All ranks of a node made their first step in a generation")
    def stepping(self, message: Stepping) -> None:
        record = self._hear("stepping", message)
        if record is None or message.generation <= record.stepping:
            return
        self._put(record.changed(stepping=message.generation))
        self._edge(
            record, EdgeKind.STEPPING, message.time, generation=message.generation, entered_at=message.entered_at
        )

    @workflow.signal(description="A node's progress")
    def heartbeat(self, message: Heartbeat) -> None:
        record = self._hear("heartbeat", message)
        if record is None:
            return
        ports = message.store_ports or record.store_ports
        self._put(record.changed(progress=message.progress or record.progress, store_ports=ports))
        if ports != record.store_ports:
            self._edge(record, EdgeKind.STORE_PORTS, message.time, store_ports=ports)

    @workflow.signal(description="What a node's training processes use")
    def metrics(self, message: Metrics) -> None:
        record = self._hear("metrics", message)
        if record is not None:
            self._put(record.changed(metrics=message))

    @workflow.signal(description="Facts from the backend's watch")
    def node_events(self, message: NodeEvents) -> None:
        if message.owner_closed:
            self._owner_closed = True
            self._dirty = True
        for event in message.events:
            self._take_event(event)

    @workflow.query(description="The nodes of this group, with their progress and metrics")
    def nodes(self) -> list[NodeView]:
        return [self._view(record) for _, record in sorted(self._records.items())]

    # Making true what is desired

    def _reconcile(self) -> None:
        """Starts what the desire asks for and is not under way; never waits."""
        desired = {} if self._winding_down else self._desire.nodes
        for rank, record in list(self._records.items()):
            want = desired.get(rank)
            if want is None or want.incarnation > record.node.incarnation:
                self._retire(record)
        for rank, want in desired.items():
            if rank not in self._records:
                node = NodeIdentity(
                    uid=self._group.uid,
                    role=self._group.role,
                    rank=rank,
                    incarnation=want.incarnation,
                    token=want.token,
                )
                self._put(NodeRecord(node=node, since=workflow.now()))
        for record in list(self._records.values()):
            if record.phase is NodePhase.REQUESTED:
                self._start(("create", record.node.rank, record.node.incarnation), self._create(record.node))
            elif record.phase is not NodePhase.LOST:
                if record.joined:
                    self._start(("lease", record.node.rank, record.node.incarnation), self._lease(record.node))
                self._command(record)
        for key, record in list(self._retiring.items()):
            self._start(("delete", *key), self._delete(record))

    @property
    def _winding_down(self) -> bool:
        return self._desire.wind_down or self._owner_closed

    def _command(self, record: NodeRecord) -> None:
        world = self._desire.world
        rank = record.node.rank
        member = world.members.get(rank) if world is not None else None
        if world is None or member is None or member.incarnation != record.node.incarnation:
            pass
        elif record.generation < world.generation:
            self._start(("world", rank, world.generation), self._apply_world(record.node, world.generation))
        if self._desire.complete_generation > record.completed and record.joined:
            generation = self._desire.complete_generation
            self._start(("complete", rank, generation), self._complete(record.node, generation))

    def _retire(self, record: NodeRecord) -> None:
        rank, incarnation = record.node.rank, record.node.incarnation
        completing = self._tasks.get(("complete", rank, self._desire.complete_generation))
        waits_for_release = record.joined and record.phase is not NodePhase.LOST
        if self._winding_down and self._desire.complete_generation > record.completed and waits_for_release:
            # Its torchrun still sits in the exit barrier: let it out before the node is deleted.
            if completing is None:
                self._command(record)
            return
        del self._records[rank]
        for kind, task_rank, task_incarnation in list(self._tasks):
            if kind in ("create", "lease") and (task_rank, task_incarnation) == (rank, incarnation):
                self._tasks[(kind, task_rank, task_incarnation)].cancel()
        self._retiring[(rank, incarnation)] = record

    async def _create(self, node: NodeIdentity) -> None:
        group = self._group
        name = self._name(node)
        try:
            created = await workflow.execute_activity(
                "create_node",
                NodeRequest(
                    node=node,
                    name=name,
                    spec=group.spec,
                    job_id=group.job_id,
                    job_first_run_id=group.job_first_run_id,
                    group_id=workflow.info().workflow_id,
                    task_queue=self._queue(node),
                ),
                result_type=CreatedNode,
                start_to_close_timeout=options.SHORT_ACTIVITY,
                retry_policy=options.BACKEND_RETRY,
                summary=f"create node {node.rank}.{node.incarnation}{self._why()}",
            )
        except ActivityError as error:
            record = self._current(node)
            if record is not None:
                reason = str(error.cause or error)
                self._put(record.changed(phase=NodePhase.LOST, reason=reason, since=workflow.now()))
                self._edge(record, EdgeKind.CREATE_FAILED, workflow.now(), source=EvidenceSource.BACKEND, detail=reason)
            return
        record = self._current(node)
        if record is None:
            return
        phase = NodePhase.PENDING if created.pending else NodePhase.CREATED
        if record.phase is NodePhase.REQUESTED:
            record = record.changed(phase=phase, since=workflow.now(), reason=created.pending)
            self._edge(
                record,
                EdgeKind.PENDING if created.pending else EdgeKind.CREATED,
                workflow.now(),
                source=EvidenceSource.BACKEND,
                detail=created.pending,
            )
        self._put(record.changed(created=created, host=record.host or created.host))

    async def _delete(self, record: NodeRecord) -> None:
        node = record.node
        await workflow.execute_activity(
            "delete_node",
            NodeRef(
                name=self._name(node),
                uid=node.uid,
                role=node.role,
                rank=node.rank,
                incarnation=node.incarnation,
                backend=self._group.spec.backend,
                namespace=self._group.spec.namespace,
                grace=self._group.spec.limits.termination_grace_period,
            ),
            start_to_close_timeout=options.SHORT_ACTIVITY + self._group.spec.limits.termination_grace_period,
            retry_policy=options.BACKEND_RETRY,
            summary=f"delete node {node.rank}.{node.incarnation}{self._why()}",
        )
        self._retiring.pop((node.rank, node.incarnation), None)
        self._edge(record, EdgeKind.REMOVED, workflow.now(), source=EvidenceSource.BACKEND)
        self._dirty = True

    async def _apply_world(self, node: NodeIdentity, generation: int) -> None:
        """Tells one agent of the world, for as long as that world is the current one."""
        patience = self._timing.commands.schedule_to_start
        while True:
            world = self._desire.world
            record = self._current(node)
            if record is None or world is None or world.generation != generation or self._winding_down:
                return
            member = world.members[node.rank]
            try:
                answer = await workflow.execute_activity(
                    "apply_world",
                    ApplyWorld(
                        node=node,
                        generation=generation,
                        nodes=self._desire.world_nodes,
                        group_rank=member.group_rank,
                        base_rank=member.base_rank,
                        world_size=self._desire.world_size,
                        store_address=world.store_address,
                        store_port=world.store_port,
                        store_host=world.store_rank == node.rank,
                    ),
                    result_type=CommandAnswer,
                    task_queue=self._queue(node),
                    schedule_to_start_timeout=patience,
                    start_to_close_timeout=self._timing.commands.start_to_close,
                    retry_policy=options.COMMAND_RETRY,
                    summary=f"generation {generation} to node {node.rank}: rank {member.group_rank}"
                    f" of {self._desire.world_nodes}{self._why()}",
                )
            except ActivityError as error:
                if not isinstance(error.cause, TimeoutError):
                    raise
                record = self._current(node)
                if record is None:
                    return
                detail = f"generation {generation} was not taken within {patience}"
                self._edge(
                    record,
                    EdgeKind.UNRESPONSIVE,
                    workflow.now(),
                    source=EvidenceSource.COMMAND,
                    generation=generation,
                    detail=detail,
                )
                patience = options.PATIENT_COMMAND
                continue
            record = self._current(node)
            if record is None:
                return
            self._put(record.changed(generation=max(record.generation, answer.generation)))
            kind = EdgeKind.COMMANDED if answer.accepted else EdgeKind.JOINED
            self._edge(record, kind, workflow.now(), generation=answer.generation, detail=answer.detail)
            return

    async def _complete(self, node: NodeIdentity, generation: int) -> None:
        try:
            await workflow.execute_activity(
                "complete_generation",
                CompleteGeneration(node=node, generation=generation),
                task_queue=self._queue(node),
                schedule_to_start_timeout=self._timing.commands.schedule_to_start,
                start_to_close_timeout=self._timing.commands.start_to_close,
                retry_policy=options.COMMAND_RETRY,
                schedule_to_close_timeout=2 * self._timing.commands.start_to_close,
                summary=f"all ranks finished generation {generation}: let node {node.rank} go",
            )
        except ActivityError:
            workflow.logger.warning("node %s did not hear that its generation is complete", node.rank)
        record = self._current(node)
        if record is not None:
            self._put(record.changed(completed=generation))
        self._dirty = True

    async def _lease(self, node: NodeIdentity) -> None:
        """Holds one node's lease over and over; each loss is a state of the node, and the next lease is out at once."""
        lease = self._timing.lease
        schedule_to_start = lease.schedule_to_start
        while True:
            record = self._current(node)
            if record is None:
                return
            epoch = record.epoch + 1
            self._put(record.changed(epoch=epoch, renewed=False))
            try:
                await workflow.execute_activity(
                    "hold_lease",
                    LeaseRequest(
                        node=node,
                        epoch=epoch,
                        heartbeat=lease.heartbeat,
                        signal_interval=max(
                            self._timing.signals.heartbeat,
                            len(self._records) * self._timing.signals.heartbeat_per_node,
                        ),
                    ),
                    activity_id=f"lease/{node.rank}/{node.incarnation}/{epoch}",
                    task_queue=self._queue(node),
                    schedule_to_start_timeout=schedule_to_start,
                    start_to_close_timeout=options.FOREVER,
                    heartbeat_timeout=lease.timeout,
                    retry_policy=options.LEASE_RETRY,
                    cancellation_type=workflow.ActivityCancellationType.TRY_CANCEL,
                    summary=f"lease of node {node.rank}.{node.incarnation}",
                )
                reason = "its agent let the lease go"
            except ActivityError as error:
                reason = _lapse(error)
            record = self._current(node)
            if record is None:
                return
            if record.renewed:
                schedule_to_start = lease.schedule_to_start
                continue
            # An agent that comes back takes this lease whenever that is, and says so.
            schedule_to_start = None
            if record.reachable:
                self._put(record.changed(reachable=False, reason=reason))
                self._edge(record, EdgeKind.UNREACHABLE, workflow.now(), source=EvidenceSource.LEASE, detail=reason)

    async def _watch(self) -> None:
        group = self._group
        while True:
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
                        owner_check=self._timing.owner_check,
                    ),
                    task_queue=watch_task_queue(workflow.info().task_queue),
                    start_to_close_timeout=options.FOREVER,
                    heartbeat_timeout=options.WATCH_HEARTBEAT,
                    retry_policy=options.BACKEND_RETRY,
                    summary=f"watch the nodes of {group.role}/{group.group}",
                )
            except ActivityError as error:
                workflow.logger.warning("the watch ended and is started again: %s", error)
            await workflow.sleep(options.LOST_SIGNAL_RETRY)

    async def _dismiss(self, node: NodeIdentity, reason: str) -> None:
        """Tells an incarnation that is no longer wanted to end, in case its backend could not."""
        try:
            await workflow.execute_activity(
                "stop_node",
                StopNode(node=node, grace=self._group.spec.limits.termination_grace_period, reason=reason),
                task_queue=self._queue(node),
                schedule_to_start_timeout=self._timing.commands.schedule_to_start,
                start_to_close_timeout=self._timing.commands.start_to_close,
                retry_policy=options.COMMAND_RETRY,
                schedule_to_close_timeout=2 * self._timing.commands.start_to_close,
                summary=f"stop node {node.rank}.{node.incarnation}: {reason}",
            )
        except ActivityError:
            workflow.logger.info("incarnation %s of node %s did not answer", node.incarnation, node.rank)

    # Keeping the table

    def _take_event(self, event: NodeEvent) -> None:
        record = self._records.get(event.rank)
        if record is None or record.node.incarnation != event.incarnation or record.phase is NodePhase.LOST:
            return
        match event.kind:
            case NodeEventKind.GONE:
                self._put(record.changed(phase=NodePhase.LOST, since=event.time, reason=event.reason))
                self._edge(record, EdgeKind.LOST, event.time, source=EvidenceSource.BACKEND, detail=event.reason)
                lease = self._tasks.get(("lease", event.rank, event.incarnation))
                if lease is not None:
                    lease.cancel()
            case NodeEventKind.PENDING:
                if record.phase in (NodePhase.CREATED, NodePhase.PENDING) and record.reason != event.reason:
                    self._put(record.changed(phase=NodePhase.PENDING, since=event.time, reason=event.reason))
                    self._edge(record, EdgeKind.PENDING, event.time, source=EvidenceSource.BACKEND, detail=event.reason)
            case NodeEventKind.RUNNING:
                if record.phase is NodePhase.PENDING:
                    self._put(record.changed(phase=NodePhase.CREATED, since=event.time, reason=""))
                    self._edge(record, EdgeKind.CREATED, event.time, source=EvidenceSource.BACKEND)

    def _hear(self, kind: str, message: AgentMessage) -> NodeRecord | None:
        """The sender's record, with the message counted; None where it is not current, or not new."""
        sender = message.sender
        record = self._records.get(sender.rank)
        if record is None or sender.uid != self._group.uid:
            return None
        if sender.incarnation < record.node.incarnation and kind == "joined":
            self._start(
                ("stop", sender.rank, sender.incarnation), self._dismiss(sender, "a newer incarnation took its place")
            )
        if sender != record.node or message.sequence <= record.heard.get(kind, 0):
            return None
        record = record.changed(heard={**record.heard, kind: message.sequence})
        self._put(record)
        return record

    def _put(self, record: NodeRecord) -> None:
        self._records[record.node.rank] = record

    def _current(self, node: NodeIdentity) -> NodeRecord | None:
        record = self._records.get(node.rank)
        return record if record is not None and record.node == node else None

    def _edge(self, record: NodeRecord, kind: EdgeKind, time: datetime, **facts: Any) -> None:
        self._edges.add(kind=kind, rank=record.node.rank, incarnation=record.node.incarnation, time=time, **facts)

    def _view(self, record: NodeRecord, *, with_token: bool = False) -> NodeView:
        world = self._desire.world
        member = world.members.get(record.node.rank) if world is not None else None
        return record.view(group_rank=member.group_rank if member else None, with_token=with_token)

    def _name(self, node: NodeIdentity) -> str:
        return node_name(self._group.spec.name, node.role, node.rank, node.uid, node.incarnation)

    def _queue(self, node: NodeIdentity) -> str:
        return node_task_queue(node.uid, node.role, node.rank, node.incarnation)

    def _why(self) -> str:
        return f" ({self._desire.reason})"[:160] if self._desire.reason else ""

    # The run

    def _start(self, key: tuple[str, int, int], work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs the work in the background, once at a time per key."""
        if key in self._tasks:
            work.close()
            return self._tasks[key]
        task = asyncio.create_task(work)
        self._tasks[key] = task
        task.add_done_callback(lambda done: self._ended(key, done))
        return task

    def _ended(self, key: tuple[str, int, int], task: asyncio.Task[None]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]
        self._dirty = True
        if not task.cancelled() and (error := task.exception()) is not None:
            workflow.logger.error("%s of node %s failed: %s", key[0], key[1], error)

    def _is_wound_down(self) -> bool:
        return self._winding_down and not self._records and not self._retiring

    def _may_continue(self) -> bool:
        """Whether this is a moment to continue as new: nothing but leases and the watch is under way."""
        info = workflow.info()
        if self._winding_down or not (
            info.is_continue_as_new_suggested() or info.get_current_history_length() > HISTORY_LIMIT
        ):
            return False
        quiet = all(kind in ("lease", "watch") for kind, _, _ in self._tasks)
        return quiet or info.get_current_history_length() > HISTORY_LIMIT

    def _carried(self) -> GroupInput:
        table = GroupTable(records=self._records, retiring=tuple(self._retiring.values()), edges=self._edges.carried)
        return self._group.model_copy(update={"desire": self._desire, "table": table})


def _lapse(error: ActivityError) -> str:
    cause = error.cause
    if isinstance(cause, TimeoutError):
        if cause.type is TimeoutType.SCHEDULE_TO_START:
            return "its agent did not take its lease"
        return "its agent stopped renewing its lease"
    if isinstance(cause, ApplicationError):
        return f"its lease ended: {cause.message}"
    return "its lease ended"
