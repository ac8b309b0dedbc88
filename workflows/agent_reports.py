"""What agents report about a group's nodes, and its effect on the group's table.

There is one function for each message that the group takes in without starting work, named after its signal.
"""

from __future__ import annotations

from perdure.contract import (
    Checked,
    CheckpointCommitted,
    CheckpointRestored,
    CheckpointStored,
    Joined,
    LeaseTaken,
    Leaving,
    NodeDesired,
    NodePhase,
    PaceReport,
    PollsRefused,
    PortsChanged,
    Ready,
    Stall,
    StallEvidence,
    Stepping,
    StepTimesReport,
    WorldRequest,
    WorldStart,
)
from perdure.contract.identity import identity_of
from perdure.contract.transitions import (
    NodeChecked,
    NodeEnding,
    NodeJoined,
    NodePace,
    NodePollsRefused,
    NodePortsChanged,
    NodeReachable,
    NodeRestoredCheckpoint,
    NodeStalled,
    NodeStallEnded,
    NodeStallLook,
    NodeStepping,
    NodeStepTimes,
    NodeStoredCheckpoint,
)
from perdure.workflows.node_table import NodeTable


def joined(table: NodeTable, message: Joined) -> None:
    record = table.accept_message(message)
    if record is None:
        return
    restarted = record.agent_started_at is not None and record.agent_started_at != message.agent_started_at
    obstructed = bool(record.obstacle) and record.phase is NodePhase.PENDING
    keeps_phase = obstructed or record.phase is NodePhase.READY
    table.put(
        record.replace(
            phase=record.phase if keeps_phase else NodePhase.JOINED,
            since=record.since if keeps_phase else message.time,
            joined=True,
            unreachable_since=None,
            silent_since=None,
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
            unpacks_roles=message.unpacks_roles,
        )
    )
    known = identity_of(record.node)
    came_back = record.joined and not record.reachable
    if message.preparing and not came_back and record.phase is NodePhase.JOINED:
        table.report(NodeJoined(**known, time=message.time, preparing=True))
    elif not record.joined or not record.reachable:
        transition = NodeReachable if came_back else NodeJoined
        table.report(
            transition(
                **known,
                time=message.time,
                generation=message.generation,
                address=message.address,
                host=message.host,
            )
        )
        table.report_obstacle(record)
    if message.waits != record.waits:
        table.report(NodeJoined(**known, time=message.time, waits=message.waits))
    table.dirty = True


def lease_taken(table: NodeTable, message: LeaseTaken) -> None:
    record = table.accept_message(message)
    if record is None or message.epoch < record.epoch:
        return
    heard = {"unreachable_since": None, "silent_since": None, "reason": ""}
    table.put(record.replace(**heard, agent_started_at=message.agent_started_at))
    if not record.reachable:
        table.report(NodeReachable(**identity_of(record.node), time=message.time))
        table.report_obstacle(record)


def polls_refused(table: NodeTable, message: PollsRefused) -> None:
    record = table.accept_message(message)
    if record is not None:
        refused = {"time": message.time, "cause": message.cause, "lasts": message.lasts}
        table.report(NodePollsRefused(**identity_of(record.node), **refused))


def ready(table: NodeTable, message: Ready) -> None:
    record = table.accept_message(message)
    if record is None:
        return
    table.put(
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
    if table.world_to_join(record.node) is None:
        table.record_connection(record.node)
    else:
        table.dirty = True


def stepping(table: NodeTable, message: Stepping) -> None:
    record = table.accept_message(message)
    if record is None or message.generation <= (record.stepped if message.counted else record.stepping):
        return
    stepped = message.generation if message.counted else record.stepped
    table.put(record.replace(stepping=message.generation, stepped=stepped))
    table.report(
        NodeStepping(
            **identity_of(record.node),
            **message.part(WorldStart),
            time=message.time,
            generation=message.generation,
        )
    )


def stall(table: NodeTable, message: Stall) -> None:
    record = table.accept_message(message)
    if record is None:
        return
    before = record.stall
    table.put(record.replace(stall=message))
    was_stalled = before is not None and before.generation == message.generation and before.since is not None
    if was_stalled == (message.since is not None):
        return
    known, generation = identity_of(record.node), message.generation
    if message.since is None:
        table.report(NodeStallEnded(**known, time=message.time, generation=generation))
    else:
        table.report(NodeStalled(**known, time=message.since, generation=generation, at_start=message.at_start))


def step_times(table: NodeTable, message: StepTimesReport) -> None:
    record = table.accept_message(message)
    if record is not None:
        table.report(
            NodeStepTimes(
                **identity_of(record.node), time=message.time, generation=message.generation, ranks=message.ranks
            )
        )


def pace(table: NodeTable, message: PaceReport) -> None:
    record = table.accept_message(message)
    if record is not None:
        table.report(
            NodePace(
                **identity_of(record.node),
                time=message.time,
                generation=message.generation,
                step=message.step,
                spread=message.spread,
                progress=message.progress,
            )
        )


def stall_evidence(table: NodeTable, message: StallEvidence) -> None:
    record, look = table.accept_message(message), message.look
    if record is not None:
        known = identity_of(record.node)
        table.report(NodeStallLook(**known, time=message.time, generation=look.generation, look=look))


def ports_changed(table: NodeTable, message: PortsChanged) -> None:
    record = table.accept_message(message)
    if record is None:
        return
    ports = message.store_ports or record.store_ports
    table.put(record.replace(store_ports=ports))
    if ports != record.store_ports:
        table.report(NodePortsChanged(**identity_of(record.node), time=message.time, store_ports=ports))


def checked(table: NodeTable, message: Checked) -> None:
    record = table.accept_message(message)
    if record is not None:
        known = identity_of(record.node)
        table.report(NodeChecked(**known, time=message.time, run=message.run, checks=message.checks))


def checkpoint_stored(table: NodeTable, message: CheckpointStored) -> None:
    record = table.accept_message(message)
    if record is not None:
        table.report(
            NodeStoredCheckpoint(
                **identity_of(record.node),
                time=message.time,
                generation=message.stored.checkpoint.generation,
                stored=message.stored,
                problem=message.problem,
            )
        )


def checkpoint_committed(table: NodeTable, message: CheckpointCommitted) -> None:
    if table.accept_message(message) is not None:
        table.record_commit(message.sender, message.checkpoint, time=message.time, problem=message.problem)


def checkpoint_restored(table: NodeTable, message: CheckpointRestored) -> None:
    record = table.accept_message(message)
    if record is not None:
        table.report(
            NodeRestoredCheckpoint(
                **identity_of(record.node),
                time=message.time,
                generation=message.generation,
                restored=message.restored,
            )
        )


def leaving(table: NodeTable, message: Leaving) -> None:
    """Takes in that a node is being ended from outside. The job decides how long it waits, if it is not the job
    itself that ends it."""
    record = table.known(message.sender)
    if record is None:
        return
    table.put(record.replace(leaving=True))
    table.dirty = True
    if not table.winding_down and table.accept_message(message) is not None:
        known = identity_of(record.node)
        table.report(NodeEnding(**known, time=message.time, generation=message.generation, detail=message.reason))
