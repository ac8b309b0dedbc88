"""The state of a group: its job's desired state, reports of its agents and its backend, and transitions to be sent.

Plain state and plain methods. Nothing here awaits, so every handler or activity that changes it finds it consistent,
and all of it rides through continue-as-new.
"""

from __future__ import annotations

from datetime import datetime

from perdure.contract import (
    Adopt,
    AgentMessage,
    Checked,
    CheckpointCommitted,
    CheckpointRef,
    CheckpointRestored,
    CheckpointStored,
    CopyTarget,
    DatasetNeeded,
    DesiredNode,
    GroupDesire,
    Joined,
    LeaseTaken,
    Leaving,
    NodeCredentials,
    NodeDesired,
    NodePhase,
    NodeView,
    PortsChanged,
    Ready,
    Stall,
    StallEvidence,
    Stepping,
    StepTimesReport,
    StoreNeeded,
    World,
    WorldRequest,
    WorldStart,
)
from perdure.contract.identity import identity_of
from perdure.contract.names import node_name, node_task_queue
from perdure.contract.transitions import (
    AnyTransition,
    NodeChecked,
    NodeCommittedCheckpoint,
    NodeEnding,
    NodeJoined,
    NodePending,
    NodePortsChanged,
    NodeReachable,
    NodeReady,
    NodeRestoredCheckpoint,
    NodeStalled,
    NodeStallEnded,
    NodeStallLook,
    NodeStepping,
    NodeStepTimes,
    NodeStoredCheckpoint,
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
        _, role = group.spec.role
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
        self._datasets = carried.datasets if carried else ()
        self._copy_targets = dict(carried.copy_targets) if carried else {}
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

    @property
    def adopts(self) -> bool:
        """Whether nodes join by themselves, and only their own agents can end them."""
        return not CAPABILITIES[self.group.spec.backend].creates_nodes

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
        )
        return self.group.replace(desire=self.desire, table=table)

    # Messages of the job

    def take_desire(self, desire: GroupDesire) -> None:
        if desire.version > self.desire.version:
            self.desire = desire
            self.dirty = True

    def adopt(self, adopt: Adopt) -> None:
        """Sends the whole table to a job that adopts the group."""
        # Versions count per run of the job, and the new one begins again.
        self.desire = self.desire.replace(version=0)
        views = tuple(self._view(record, with_token=True) for record in self.records.values())
        self.transitions.report_adoption(views, ownership_epoch=adopt.ownership_epoch)

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

    # Messages of agents

    def joined(self, message: Joined) -> None:
        record = self._accept_message(message)
        if record is None:
            return
        restarted = record.agent_started_at is not None and record.agent_started_at != message.agent_started_at
        obstructed = bool(record.obstacle) and record.phase is NodePhase.PENDING
        keeps_phase = obstructed or record.phase is NodePhase.READY
        self.put(
            record.replace(
                phase=record.phase if keeps_phase else NodePhase.JOINED,
                since=record.since if keeps_phase else message.time,
                joined=True,
                unreachable_since=None,
                reason="",
                waits=message.waits,
                address=message.address,
                host=message.host,
                log_path=message.log_path,
                renewed=record.renewed or restarted or not record.reachable,
                agent_started_at=message.agent_started_at,
                acknowledged=NodeDesired() if restarted else record.acknowledged,
                generation=max(record.generation, message.generation),
                copies=message.copies,
            )
        )
        known = identity_of(record.node)
        came_back = record.joined and not record.reachable
        if message.preparing and not came_back and record.phase is NodePhase.JOINED:
            self.report(NodeJoined(**known, time=message.time, preparing=True))
        elif not record.joined or not record.reachable:
            transition = NodeReachable if came_back else NodeJoined
            self.report(
                transition(
                    **known,
                    time=message.time,
                    generation=message.generation,
                    address=message.address,
                    host=message.host,
                )
            )
            self.report_obstacle(record)
        if message.waits != record.waits:
            self.report(NodeJoined(**known, time=message.time, waits=message.waits))
        self.dirty = True

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

    def lease_taken(self, message: LeaseTaken) -> None:
        record = self._accept_message(message)
        if record is None or message.epoch < record.epoch:
            return
        self.put(record.replace(unreachable_since=None, reason="", agent_started_at=message.agent_started_at))
        if not record.reachable:
            self.report(NodeReachable(**identity_of(record.node), time=message.time))
            self.report_obstacle(record)

    def ready(self, message: Ready) -> None:
        record = self._accept_message(message)
        if record is None:
            return
        self.put(
            record.replace(
                phase=NodePhase.READY,
                since=message.time,
                reason="",
                obstacle="",
                waits="",
                joining=message,
                cut_off="",
                **message.part(WorldRequest),
            )
        )
        if self.world_to_join(record.node) is None:
            self.record_connection(record.node)
        else:
            self.dirty = True

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

    def stepping(self, message: Stepping) -> None:
        record = self._accept_message(message)
        if record is None or message.generation <= (record.stepped if message.counted else record.stepping):
            return
        stepped = message.generation if message.counted else record.stepped
        self.put(record.replace(stepping=message.generation, stepped=stepped))
        self.report(
            NodeStepping(
                **identity_of(record.node),
                **message.part(WorldStart),
                time=message.time,
                generation=message.generation,
            )
        )

    def stall(self, message: Stall) -> None:
        record = self._accept_message(message)
        if record is None:
            return
        before = record.stall
        self.put(record.replace(stall=message))
        was_stalled = before is not None and before.generation == message.generation and before.since is not None
        if was_stalled == (message.since is not None):
            return
        known, generation = identity_of(record.node), message.generation
        if message.since is None:
            self.report(NodeStallEnded(**known, time=message.time, generation=generation))
        else:
            self.report(NodeStalled(**known, time=message.since, generation=generation, at_start=message.at_start))

    def step_times(self, message: StepTimesReport) -> None:
        record = self._accept_message(message)
        if record is not None:
            self.report(
                NodeStepTimes(
                    **identity_of(record.node), time=message.time, generation=message.generation, ranks=message.ranks
                )
            )

    def stall_evidence(self, message: StallEvidence) -> None:
        record, look = self._accept_message(message), message.look
        if record is not None:
            known = identity_of(record.node)
            self.report(NodeStallLook(**known, time=message.time, generation=look.generation, look=look))

    def ports_changed(self, message: PortsChanged) -> None:
        record = self._accept_message(message)
        if record is None:
            return
        ports = message.store_ports or record.store_ports
        self.put(record.replace(store_ports=ports))
        if ports != record.store_ports:
            self.report(NodePortsChanged(**identity_of(record.node), time=message.time, store_ports=ports))

    def checked(self, message: Checked) -> None:
        record = self._accept_message(message)
        if record is not None:
            known = identity_of(record.node)
            self.report(NodeChecked(**known, time=message.time, run=message.run, checks=message.checks))

    def checkpoint_stored(self, message: CheckpointStored) -> None:
        record = self._accept_message(message)
        if record is not None:
            self.report(
                NodeStoredCheckpoint(
                    **identity_of(record.node),
                    time=message.time,
                    generation=message.stored.checkpoint.generation,
                    stored=message.stored,
                    problem=message.problem,
                )
            )

    def checkpoint_committed(self, message: CheckpointCommitted) -> None:
        if self._accept_message(message) is not None:
            self.record_commit(message.sender, message.checkpoint, time=message.time, problem=message.problem)

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

    def checkpoint_restored(self, message: CheckpointRestored) -> None:
        record = self._accept_message(message)
        if record is not None:
            self.report(
                NodeRestoredCheckpoint(
                    **identity_of(record.node),
                    time=message.time,
                    generation=message.generation,
                    restored=message.restored,
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

    def leaving(self, message: Leaving) -> None:
        """Takes in that a node is being ended from outside. The job decides how long it waits, if it is not the job
        itself that ends it."""
        record = self.known(message.sender)
        if record is None:
            return
        self.put(record.replace(leaving=True))
        self.dirty = True
        if not self.winding_down and self._accept_message(message) is not None:
            known = identity_of(record.node)
            self.report(NodeEnding(**known, time=message.time, generation=message.generation, detail=message.reason))

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

    def _accept_message(self, message: AgentMessage) -> NodeRecord | None:
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

    def views(self) -> list[NodeView]:
        return [self._view(record) for _, record in sorted(self.records.items())]

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

    def name(self, node: NodeCredentials) -> str:
        return node_name(self.group.spec.name, node)

    def queue(self, node: NodeCredentials) -> str:
        return node_task_queue(node)
