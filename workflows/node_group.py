"""NodeGroup: carries out what a job decides, for up to 128 nodes of one role, and reports what it observes.

It makes its TrainingJob's desired state true (create, command, delete), holds the nodes' leases, keeps their telemetry
in its table, and sends the job transitions only. It decides nothing.

Invariants:
    - All state is in its `NodeTable`, set in `__init__` and changed by handlers without awaiting, so no signal is lost
    when a run ends.
    - A desired state replaces the one before it; acting on one twice is harmless.
    - Leases and the watch end with a run and are taken again in the first task of the next.
    - It outlives its parent's runs. When the job is closed, its watch reports it and the group winds down by itself.
    - Only its job ends it. A request to cancel it alone changes nothing, or its nodes would train without a keeper.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from perdure.contract import (
        Adopt,
        AgentMessage,
        DatasetNeeded,
        DesiredNode,
        Destination,
        GroupDesire,
        Joined,
        Leaving,
        NodeCredentials,
        NodeEvents,
        NodePhase,
        NodeView,
        RoutedMessage,
        StoreNeeded,
        routed_to,
    )
    from perdure.contract.names import NODE_GROUP
    from perdure.workflows import agent_calls, agent_reports, backend_calls, options
    from perdure.workflows.backend_reports import take_watch_events
    from perdure.workflows.cancellation import uncancelled
    from perdure.workflows.carrying import Packed, pack, unpack
    from perdure.workflows.dataset import start_dataset
    from perdure.workflows.group_page import details_of_group
    from perdure.workflows.node_desired import converge, differing, dismiss
    from perdure.workflows.node_record import GroupInput, NodeRecord
    from perdure.workflows.node_table import NodeTable
    from perdure.workflows.patching import bounds_group_run, may_begin_after_reset, on_reset_of_this_run
    from perdure.workflows.run_length import is_full
    from perdure.workflows.store import start_store


_WATCH = ("watch", 0, 0)
_LOOK = ("look", 0, 0)


_Group = TypeVar("_Group", bound=type)


def _receive_messages_of_agents(group: _Group) -> _Group:
    """Adds the signal handlers of all messages for which the class defines none: they only change the table."""
    for name, kind in routed_to(Destination.GROUP).items():
        if not hasattr(group, name):
            setattr(group, name, _table_handler(name, kind))
    return group


def _table_handler(name: str, kind: type[RoutedMessage]) -> Callable[[NodeGroup, AgentMessage], None]:
    update: Callable[[NodeTable, AgentMessage], None] = getattr(agent_reports, name)

    def handle(self: NodeGroup, message: AgentMessage) -> None:
        self.update_table(update, message)

    # The SDK decodes a signal to the type of the handler's argument.
    handle.__annotations__ = {"message": kind, "return": None}
    description = " ".join((kind.__doc__ or "").split()).partition(". ")[0].removesuffix(".")
    return workflow.signal(name=name, description=description)(handle)


@workflow.defn(name=NODE_GROUP)
@_receive_messages_of_agents
class NodeGroup:
    """The workflow of one group; see the module."""

    @workflow.init
    def __init__(self, group: GroupInput | Packed) -> None:
        self._table = NodeTable(unpack(group, GroupInput))
        self._tasks: dict[tuple[str, int, int], asyncio.Task[object]] = {}
        """Tasks in flight: the kind, the node's rank, and the incarnation or generation."""
        self._cleared = False
        """The backend has confirmed that nothing of the group is left."""
        self._tried_together: set[NodeCredentials] = set()
        """Nodes that were requested together with others; one that was not created is then requested by itself,
        indefinitely."""
        on_reset_of_this_run(self._table.transitions.report_beginning)
        self._bounded = bounds_group_run()
        if self._bounded:
            self._table.transitions.keep_only_newest_telemetry()
            self._table.leases_sparingly = True

    @workflow.run
    async def run(self, group: GroupInput | Packed) -> None:
        table = self._table
        if may_begin_after_reset():
            table.transitions.report_beginning()
        messenger = asyncio.create_task(table.transitions.deliver())
        while not await uncancelled(self._lead_on):
            if self._may_continue() and not table.dirty:
                table.transitions.stop()
                await uncancelled(lambda: workflow.wait_condition(messenger.done))
                await uncancelled(lambda: workflow.wait_condition(workflow.all_handlers_finished))
                workflow.continue_as_new(pack(table.to_carry()))
        self._tasks[_WATCH].cancel()
        table.transitions.report_end()
        await uncancelled(lambda: workflow.wait_condition(messenger.done))

    async def _lead_on(self) -> bool:
        """Reconciles, and waits until that may be due again; returns whether the group has ended."""
        table = self._table
        table.dirty = False
        self._reconcile()
        workflow.set_current_details(details_of_group(table))
        if table.winding_down and table.is_empty:
            if self._cleared or not table.shares:
                return True
            await backend_calls.clear(table)
            # A job may have adopted the group again in the meantime.
            self._cleared = table.winding_down
            table.dirty = True
            return False
        await workflow.wait_condition(lambda: table.dirty or self._may_continue())
        return False

    # Signals of the job, its agents and the backend

    @workflow.signal(description="The desired state of this group")
    def desire(self, desire: GroupDesire) -> None:
        self._table.take_desire(desire)

    @workflow.signal(description="A job that was reset or replaced adopts this group")
    def adopt(self, adopt: Adopt) -> None:
        self._table.adopt(adopt)

    @workflow.signal(description="An agent's first report, repeated when it restarts")
    def joined(self, message: Joined) -> None:
        # An agent that has no lease joins again. It may have been unreachable when it was ordered to end, and only it
        # can end a machine that joined.
        self._dismiss_if_outdated(message.sender)
        agent_reports.joined(self._table, message)

    @workflow.signal(description="A rank uses a dataset whose workflow the server does not know")
    def dataset_needed(self, message: DatasetNeeded) -> None:
        if self._table.admits_dataset(message):
            self._start((f"dataset {message.name}", 0, 0), start_dataset(self._table.group, message))

    @workflow.signal(description="A rank uses the store of the job, which the server does not know")
    def store_needed(self, message: StoreNeeded) -> None:
        if self._table.store_is_needed(message):
            self._start(("store", 0, 0), start_store(self._table.group))

    @workflow.signal(description="A node is being ended from outside, and waits for a checkpoint")
    def leaving(self, message: Leaving) -> None:
        agent_reports.leaving(self._table, message)

    def update_table(self, update: Callable[[NodeTable, AgentMessage], None], message: AgentMessage) -> None:
        """Takes in a message of an agent that starts no work."""
        update(self._table, message)

    @workflow.signal(description="Facts from the backend's watch")
    def node_events(self, message: NodeEvents) -> None:
        for gone in take_watch_events(self._table, message):
            self._cancel(gone, "lease", "connect")

    @workflow.query(description="The nodes of this group")
    def nodes(self) -> list[NodeView]:
        return self._table.views()

    # Reconciling

    def _reconcile(self) -> None:
        """Starts everything that the desired state requires and that is not in flight; never waits."""
        table = self._table
        self._start(_WATCH, backend_calls.watch(table))
        desired: dict[int, DesiredNode] = {} if table.winding_down else table.desire.nodes
        for rank, record in list(table.records.items()):
            target = desired.get(rank)
            if target is None or target.incarnation > record.node.incarnation:
                self._retire(record)
        for rank, target in desired.items():
            if rank not in table.records:
                table.begin(rank, target, workflow.now())
        self._create_together()
        for record in list(table.records.values()):
            node = record.node
            if record.phase is NodePhase.REQUESTED or table.creation_pending(record):
                self._start(("create", *node.key), backend_calls.create(table, node))
            elif record.phase is not NodePhase.LOST:
                if record.joined:
                    self._start(("lease", *node.key), agent_calls.hold_lease(table, node))
                if (memory := table.memory_to_raise(record)) is not None:
                    self._start(("resize", *node.key), backend_calls.raise_memory(table, node, memory))
                if table.world_to_join(node) is not None:
                    self._start(("connect", *node.key), agent_calls.check_connection(table, node))
                elif record.joining is not None and not record.cut_off:
                    table.record_connection(node)
                self._converge(record)
        if table.has_unwatched_nodes and not table.winding_down:
            self._start(_LOOK, self._look_again())
        for record in table.retiring.values():
            self._converge(record)
        # A node that is still being created would outlive a deletion that comes first.
        leaving = [
            record
            for key, record in table.retiring.items()
            if ("delete", *key) not in self._tasks and ("create", *key) not in self._tasks
        ]
        self._start_together("delete", leaving, lambda some: backend_calls.delete(table, some))

    async def _look_again(self) -> None:
        """Begins the watch again, with the known nodes, if it fails to report nodes that exist."""
        if await backend_calls.until_overlooked(self._table):
            self._tasks[_WATCH].cancel()

    def _converge(self, record: NodeRecord) -> None:
        """Sends the node's agent what is desired of it, where it has not taken that."""
        if differing(self._table, record.node) is not None:
            self._start(("desired", *record.node.key), converge(self._table, record.node))

    def _create_together(self) -> None:
        """Requests nodes together if many are desired at once; a few are requested one by one."""
        table = self._table
        new = [
            record
            for record in table.records.values()
            if record.phase is NodePhase.REQUESTED
            and record.node not in self._tried_together
            and ("create", *record.node.key) not in self._tasks
        ]
        if len(new) < options.MANY_NODES:
            return
        # Incarnations that were replaced are never requested again.
        self._tried_together.intersection_update(record.node for record in table.records.values())
        self._tried_together.update(record.node for record in new)
        self._start_together(
            "create", new, lambda some: backend_calls.create_together(table, [record.node for record in some])
        )

    def _retire(self, record: NodeRecord) -> None:
        table, node = self._table, record.node
        if table.winding_down and differing(table, node) is not None:
            # Its torchrun leaves the exit barrier before the node is deleted.
            self._start(("desired", *node.key), converge(table, node))
            return
        del table.records[node.rank]
        self._cancel(record, "create", "lease", "connect", "resize")
        table.retiring[node.key] = record

    def _dismiss_if_outdated(self, node: NodeCredentials) -> None:
        """Has an incarnation end that is no longer desired and does not know it, in case its backend could not."""
        table = self._table
        if table.is_outdated(node):
            self._start(("stop", *node.key), dismiss(table, node, "another node has its place, or the place is gone"))

    # Tasks in flight

    def _start(self, key: tuple[str, int, int], work: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
        """Runs the work in the background, once at a time per key."""
        if key in self._tasks:
            work.close()
            return self._tasks[key]
        return self._follow(key, asyncio.create_task(work))

    def _start_together(
        self,
        kind: str,
        records: Sequence[NodeRecord],
        work: Callable[[Sequence[NodeRecord]], Coroutine[Any, Any, object]],
    ) -> None:
        """Runs the work in the background, for some of the nodes at a time."""
        for first in range(0, len(records), options.NODES_TOGETHER):
            some = records[first : first + options.NODES_TOGETHER]
            task = asyncio.create_task(work(some))
            for record in some:
                self._follow((kind, *record.node.key), task)

    def _follow(self, key: tuple[str, int, int], task: asyncio.Task[Any]) -> asyncio.Task[Any]:
        self._tasks[key] = task
        task.add_done_callback(lambda done: self._end_task(key, done))
        return task

    def _end_task(self, key: tuple[str, int, int], task: asyncio.Task[object]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]
        self._table.dirty = True
        if not task.cancelled() and (error := task.exception()) is not None:
            workflow.logger.error("%s of node %s failed: %s", key[0], key[1], error)

    def _cancel(self, record: NodeRecord, *kinds: str) -> None:
        for kind in kinds:
            task = self._tasks.get((kind, *record.node.key))
            if task is not None:
                task.cancel()

    def _may_continue(self) -> bool:
        """Whether the group can continue as new now: every task in flight is one that the next run restarts."""
        full = is_full(bounded=self._bounded)
        if not (workflow.info().is_continue_as_new_suggested() or full):
            return False
        quiet = all(kind in ("lease", "watch", "look") for kind, _, _ in self._tasks)
        return quiet or full
