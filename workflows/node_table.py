"""The state of a group: its job's desired state, reports of its agents and its backend, and transitions to be sent.

Plain state and plain methods. Nothing here awaits, so every handler or activity that changes it finds it consistent,
and all of it rides through continue-as-new.
"""

from __future__ import annotations

from datetime import datetime

from perdure.contract import (
    Adopt,
    AgentMessage,
    CheckpointRef,
    CopyTarget,
    DatasetNeeded,
    DesiredNode,
    GroupDesire,
    NodeCredentials,
    NodePhase,
    NodeView,
    StoreNeeded,
    World,
    WorldRequest,
)
from perdure.contract.identity import identity_of
from perdure.contract.names import node_name, node_task_queue
from perdure.contract.transitions import (
    AnyTransition,
    NodeCommittedCheckpoint,
    NodePending,
    NodeReady,
)
from perdure.spec.capabilities import CAPABILITIES
from perdure.workflows import options
from perdure.workflows.node_record import GroupInput, GroupTable, NodeRecord, TransitionsCarried
from perdure.workflows.policy.checkpoints.copies import choose_target, copies_token
from perdure.workflows.transitions import TransitionBatch


class NodeTable:
    """The nodes of one group.

    Invariants:
        - A rank has at most one record, of its newest incarnation. Those in `retiring` are older, or not desired.
        - Only the agent of a record's own incarnation changes it, and never with a report older than the last.
        - A transition says what changed; telemetry makes none.
    """

    def __init__(self, group: GroupInput) -> None:
        carried = group.table
        role = group.spec.roles[group.role]
        self.group = group
        self.timing = group.spec.timing.of(role.nodes.max)
        self.desire = group.desire
        self.records: dict[int, NodeRecord] = dict(carried.records) if carried else {}
        self.retiring: dict[tuple[int, int], NodeRecord] = {
            record.node.key: record for record in (carried.retiring if carried else ())
        }
        self.transitions = TransitionBatch(
            job_id=group.job_id,
            uid=group.uid,
            role=group.role,
            group=group.group,
            gather=self.timing.signals.transition_batch,
            carried=carried.transitions if carried else TransitionsCarried(ownership_epoch=group.ownership_epoch),
        )
        self.owner_closed = carried.owner_closed if carried else False
        self.leases_sparingly = False
        """A node that is lost is leased no more, and one that gives its lease back at once after a pause; a run of an
        earlier release that is replayed leases both again at once."""
        self._datasets = carried.datasets if carried else ()
        self._copy_targets = dict(carried.copy_targets) if carried else {}
        self._last_world = carried.last_world if carried else None
        self.dirty = True
        """The group may have work to do because of new information."""

    @property
    def winding_down(self) -> bool:
        return self.desire.wind_down or self.owner_closed

    @property
    def has_unwatched_nodes(self) -> bool:
        """Whether the backend has created nodes that its watch has not reported yet."""
        return not self.adopts and any(
            record.created is not None and not record.watched and record.phase is not NodePhase.LOST
            for record in self.records.values()
        )

    def creation_pending(self, record: NodeRecord) -> bool:
        """Whether the backend has reported an obstacle to creating the node, but not that it created it: the group asks
        until it answers, and the group's next run continues to ask."""
        return record.phase is NodePhase.PENDING and record.created is None and not record.watched

    def memory_to_raise(self, record: NodeRecord) -> int | None:
        """Bytes of memory that a node which runs is to have and has not; None where there is nothing to change."""
        memory = self.memory(record.node.rank)
        runs = record.joined and record.phase is not NodePhase.LOST and not self.winding_down
        resizes = CAPABILITIES[self.group.spec.backend].resizes_nodes
        return memory if runs and resizes and memory != record.memory else None

    @property
    def adopts(self) -> bool:
        """Whether nodes join by themselves, and only their own agents can end them."""
        return not CAPABILITIES[self.group.spec.backend].creates_nodes

    @property
    def ends_by_agents(self) -> bool:
        """Whether agents receive that their nodes are to end, whatever else ends them."""
        return CAPABILITIES[self.group.spec.backend].ends_by_agents

    @property
    def shares(self) -> bool:
        """Whether its backend keeps objects of the job other than nodes: they must be deleted as well, even where no
        node is left whose deletion would include them."""
        return CAPABILITIES[self.group.spec.backend].keeps_shared_objects

    @property
    def is_empty(self) -> bool:
        """Whether no node is left, including nodes that are being deleted."""
        return not self.records and not self.retiring

    def is_replaced(self, node: NodeCredentials) -> bool:
        """Whether a newer incarnation of the node is desired."""
        desired = None if self.winding_down else self.desire.nodes.get(node.rank)
        return desired is not None and desired.incarnation > node.incarnation

    @property
    def why(self) -> str:
        """The reason of the current action, for summaries in the Temporal UI."""
        return f" ({self.desire.reason})"[:160] if self.desire.reason else ""

    def to_carry(self) -> GroupInput:
        """The argument of the group's next run."""
        table = GroupTable(
            records=self.records,
            retiring=tuple(self.retiring.values()),
            transitions=self.transitions.carried,
            owner_closed=self.owner_closed,
            datasets=self._datasets,
            copy_targets=self._copy_targets,
            last_world=self._last_world,
        )
        return self.group.replace(desire=self.desire, table=table)

    # Messages of the job

    def take_desire(self, desire: GroupDesire) -> None:
        if desire.run and self.desire.run not in ("", desire.run, desire.continued_run):
            self._decline(desire)
        elif desire.version > self.desire.version:
            self._last_world = self._newest_world
            self.desire = desire
            self.dirty = True

    def adopt(self, adopt: Adopt) -> None:
        """Sends the whole table to a job that adopts the group."""
        # Versions count per run of the job, and the new one begins again.
        self.desire = self.desire.replace(version=0, run="")
        self.transitions.report_adoption(self._whole(), world=self._newest_world, ownership_epoch=adopt.ownership_epoch)

    def _decline(self, desire: GroupDesire) -> None:
        """Sends the whole table to a job that was reset, instead of following what it desires without that.

        Its versions may be as high as those of the run before it, and for the same incarnations it has other tokens.
        """
        self.desire = self.desire.replace(version=0, run=desire.run)
        self.transitions.report_adoption(self._whole(), world=self._newest_world, declined=True)

    @property
    def _newest_world(self) -> World | None:
        """The newest world that the group was sent, without its members: a job that is suspended has none."""
        world = self.desire.world
        return self._last_world if world is None else world.of({})

    def _whole(self) -> tuple[NodeView, ...]:
        return tuple(self._view(record, with_token=True) for record in self.records.values())

    def begin(self, rank: int, desired: DesiredNode, now: datetime) -> None:
        """Begins the record of an incarnation that the job desires and this group does not know.

        If it is a member of the world, an earlier group knew it and its agent has reported: it is leased at once,
        instead of only after its agent notices that there is another group, and joins again.
        """
        group, world = self.group, self.desire.world
        node = NodeCredentials(
            uid=group.uid, role=group.role, rank=rank, incarnation=desired.incarnation, token=desired.token
        )
        takes_part = world is not None and world.member(node) is not None
        self.records[rank] = NodeRecord(node=node, since=now, joined=takes_part)

    # What messages of agents change

    def copy_target(self, node: NodeCredentials) -> CopyTarget | None:
        """The node that keeps the copies of what this node's script has saved; None where there is none yet, or the
        job has a storage for them."""
        record = self.current(node)
        if record is None or record.copies is None:
            return None
        receivers = {rank: other for rank, other in self.records.items() if other.copies and other.reports}
        racks = {rank: other.copies.rack for rank, other in receivers.items() if other.copies}
        rank = choose_target(node.rank, targets=self._copy_targets, receivers=racks)
        if rank is None:
            return None
        self._copy_targets = {**self._copy_targets, node.rank: rank}
        chosen = receivers[rank]
        assert chosen.copies is not None
        return CopyTarget(
            rank=rank,
            incarnation=chosen.node.incarnation,
            address=chosen.address,
            port=chosen.copies.port,
            folder=chosen.copies.folder,
            token=copies_token(chosen.node.token, role=node.role, rank=node.rank),
        )

    def world_to_join(self, node: NodeCredentials) -> World | None:
        """The training world that this ready node is not a member of; None where there is none."""
        record, world = self.current(node), self.desire.world
        if record is None or record.joining is None or world is None or not self.desire.undisturbed:
            return None
        return None if world.member(node) is not None else world

    def record_connection(self, node: NodeCredentials, *, problem: str = "") -> None:
        """Records that a ready node can connect to the others, or cannot yet."""
        record = self.current(node)
        if record is None or record.joining is None:
            return
        message = record.joining
        self.put(record.replace(reason=problem, joining=message if problem else None, cut_off=problem))
        self.report(
            NodeReady(
                **identity_of(node),
                **message.part(WorldRequest),
                time=message.time,
                detail=problem,
                generation=message.after_generation,
                stage=message.stage,
            )
        )

    def record_commit(
        self, node: NodeCredentials, checkpoint: CheckpointRef, *, time: datetime, problem: str = ""
    ) -> None:
        """Records that an agent has committed a checkpoint, or why it cannot yet. It says so by a message, and once
        more in an answer, in case the message was lost with a group."""
        record = self.current(node)
        if record is None or record.committed_checkpoint == checkpoint:
            return
        if not problem:
            self.put(record.replace(committed_checkpoint=checkpoint))
        self.report(
            NodeCommittedCheckpoint(
                **identity_of(node),
                time=time,
                generation=checkpoint.generation,
                checkpoint=checkpoint,
                problem=problem,
            )
        )

    def admits_dataset(self, message: DatasetNeeded) -> bool:
        """Takes in that a rank uses a dataset; returns whether the group is to start its workflow."""
        if self.current(message.sender) is None or self.winding_down:
            return False
        if message.name not in self._datasets:
            if len(self._datasets) >= options.DATASETS_PER_GROUP:
                return False
            self._datasets = (*self._datasets, message.name)
        return True

    def store_is_needed(self, message: StoreNeeded) -> bool:
        """Takes in that a rank uses the job's store; returns whether the group is to start its workflow."""
        return self.current(message.sender) is not None and not self.winding_down

    def report_obstacle(self, record: NodeRecord) -> None:
        """Repeats the obstacle after a report of the agent: a running agent does not mean that the command can
        start."""
        if record.obstacle and record.phase is NodePhase.PENDING:
            self.report(NodePending(**identity_of(record.node), time=record.since, detail=record.obstacle))

    def is_outdated(self, sender: NodeCredentials) -> bool:
        """Whether a newer incarnation has taken the sender's place, or the place no longer exists."""
        record = self.records.get(sender.rank)
        if record is None:
            # A backend that creates nodes ends them as well.
            return self.adopts and sender.uid == self.group.uid
        return sender.uid == self.group.uid and sender.incarnation < record.node.incarnation

    def accept_message(self, message: AgentMessage) -> NodeRecord | None:
        """Returns the sender's record, with the message counted; None where the sender or the message is stale."""
        record, kind = self.current(message.sender), message.route.name
        if record is None or message.sequence <= record.sequences.get(kind, 0):
            return None
        record = record.replace(sequences={**record.sequences, kind: message.sequence})
        self.put(record)
        return record

    # Keeping records

    def put(self, record: NodeRecord) -> None:
        if record.node.key in self.retiring and self.current(record.node) is None:
            self.retiring[record.node.key] = record
        else:
            self.records[record.node.rank] = record

    def known(self, node: NodeCredentials) -> NodeRecord | None:
        """The record of this incarnation, also while it is being deleted."""
        retiring = self.retiring.get(node.key)
        return self.current(node) or (retiring if retiring is not None and retiring.node == node else None)

    def current(self, node: NodeCredentials) -> NodeRecord | None:
        """The record of this incarnation; None once it is not the desired one."""
        record = self.records.get(node.rank)
        return record if record is not None and record.node == node else None

    def report(self, transition: AnyTransition) -> None:
        """Queues one change to be reported to the job."""
        self.transitions.add(transition)

    def views(self, *, first: int | None = None) -> list[NodeView]:
        """All nodes, or so many of them, in the order of their ranks."""
        return [self._view(record) for _, record in sorted(self.records.items())[:first]]

    def _view(self, record: NodeRecord, *, with_token: bool = False) -> NodeView:
        world = self.desire.world
        member = world.members.get(record.node.rank) if world is not None else None
        return record.view(
            group_rank=member.group_rank if member else None,
            avoids=self.avoids(record.node.rank),
            with_token=with_token,
        )

    def avoids(self, rank: int) -> tuple[str, ...]:
        """Machines that the node should avoid."""
        desired = self.desire.nodes.get(rank)
        return desired.avoids if desired else ()

    def memory(self, rank: int) -> int | None:
        """Bytes of memory that the node requests; None for `resources.memory` of the specification."""
        desired = self.desire.nodes.get(rank)
        return desired.memory if desired else None

    def cpu(self, rank: int) -> str | None:
        """Processors that the node requests; None for `resources.cpu` of the specification."""
        desired = self.desire.nodes.get(rank)
        return desired.cpu if desired else None

    def name(self, node: NodeCredentials) -> str:
        return node_name(self.group.spec.name, node)

    def queue(self, node: NodeCredentials) -> str:
        return node_task_queue(node)
