"""Keeps each agent at what is desired of it: derives that from the group's table, and sends it until it is taken.

A desired state is sent as a whole whenever it differs from what the agent has taken last. So an agent that was away
needs the newest only, and nothing has to be remembered of what it has missed. What cannot be undone is not taken back:
such parts of a desired state stay as they were taken.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import datetime, timedelta

from temporalio import workflow
from temporalio.common import RawValue
from temporalio.exceptions import ActivityError, ApplicationError, is_cancelled_exception
from temporalio.exceptions import TimeoutError as ActivityTimeout

with workflow.unsafe.imports_passed_through():
    from perdure.contract import (
        ApplyDesired,
        Commit,
        NodeCredentials,
        NodeDesired,
        NodePhase,
        NodeReached,
        StopRequest,
    )
    from perdure.contract.identity import identity_of
    from perdure.contract.transitions import NodeCommanded, NodeJoined, NodeUnresponsive
    from perdure.contract.worlds import unpack_roles
    from perdure.workflows import options
    from perdure.workflows.answers import UnreadableAnswer, read_answer
    from perdure.workflows.node_record import NodeRecord
    from perdure.workflows.node_table import NodeTable

_MOST_VERSIONS = 3
"""Desired states that are sent one after the other because an agent knows newer ones: a group before this one has sent
it these, and no more follow."""


def desired_of(table: NodeTable, record: NodeRecord) -> NodeDesired:
    """What the agent of this node is to reach."""
    node, taken, desire = record.node, record.acknowledged, table.desire
    if table.current(node) is None:
        stop = taken.stop or (_stop_request(table, _why_stopped(table)) if table.ends_by_agents else None)
        return taken.replace(released=taken.released or record.leaving, stop=stop)
    complete = {"complete_generation": desire.complete_generation, "stages_complete": desire.stages_complete}
    if table.winding_down:
        return taken.replace(released=taken.released or record.leaving, **complete)
    target = desire.nodes.get(node.rank)
    if target is None or target.incarnation != node.incarnation:
        return taken
    world, inquiry, request, hold = taken.world, taken.inquiry, taken.checkpoint_request, taken.hold
    if desire.world is not None and (member := desire.world.member(node)) is not None:
        world = desire.world.of({node.rank: member})
        # A node that steps has entered the world.
        inquiry = desire.inquiry if record.stepping < world.generation else inquiry
        request = (desire.checkpoint_request if member.group_rank == 0 else 0) or request
        hold = desire.hold
    return taken.replace(
        world=world,
        inquiry=inquiry,
        command_restarts=target.command_restarts,
        check_runs=target.check_runs,
        checkpoint_request=request,
        hold=hold,
        commit=_commit(table, record),
        copies=table.copy_target(node) or taken.copies,
        **_roles(table, record),
        released=taken.released or target.released,
        **complete,
    )


def _roles(table: NodeTable, record: NodeRecord) -> dict[str, object]:
    """The roles of the job, in a form that the node's agent can read."""
    packed = table.desire.packed_roles
    if packed and record.unpacks_roles:
        return {"roles": {}, "packed_roles": packed}
    return {"roles": unpack_roles(packed) if packed else table.desire.roles, "packed_roles": ""}


def _commit(table: NodeTable, record: NodeRecord) -> Commit | None:
    """The checkpoint that this node is to commit. It is withdrawn from a node that has not and no longer is to."""
    commit, taken = table.desire.commit, record.acknowledged.commit
    if commit is not None and commit.rank == record.node.rank:
        return commit
    return taken if taken is not None and taken.checkpoint == record.committed_checkpoint else None


def differing(table: NodeTable, node: NodeCredentials) -> NodeDesired | None:
    """What is desired of a node and its agent has not taken yet; None where there is nothing."""
    record = table.known(node)
    if record is None or record.phase is NodePhase.LOST:
        return None
    desired = desired_of(table, record)
    # The members of a world are known to have agents, even to a group that has just begun.
    can_take = record.joined or desired.world is not None
    return desired if can_take and desired != record.acknowledged else None


async def converge(table: NodeTable, node: NodeCredentials) -> None:
    """Sends an agent what is desired of it, until there is nothing that it has not taken."""
    patience = table.timing.commands.schedule_to_start
    generation, waited_on, late = 0, False, False
    while (desired := differing(table, node)) is not None and (before := table.known(node)) is not None:
        asks = asks_of_world(desired, before)
        if asks and desired.world is not None and desired.world.generation != generation:
            generation, waited_on, late = desired.world.generation, False, False
            patience = table.timing.commands.schedule_to_start
        late = late and asks
        before = before.replace(version=before.version + 1)
        table.put(before)
        summary = _summary(table, before, desired)
        sending = asyncio.create_task(
            _send(table, node, desired, version=before.version, patience=patience, summary=summary)
        )
        answered = await _is_answered(table, node, sending, late=late)
        record = table.known(node)
        if record is None:
            return
        if not answered and not (late and _is_silent(table, record)):
            continue
        reached = sending.result() if answered else ""
        if isinstance(reached, NodeReached):
            record_answer(table, before, desired, reached, now=workflow.now())
        elif asks and not waited_on and (longer := _longer_wait(table, record)) > timedelta():
            waited_on, late, patience = True, True, longer
        elif asks:
            problem = f"generation {generation} was not taken within {patience}" + (f": {reached}" if reached else "")
            if _is_silent(table, record):
                problem = f"generation {generation} was not taken, and its lease has ended, unlike those of others"
            table.report(
                NodeUnresponsive(**identity_of(node), time=workflow.now(), generation=generation, detail=problem)
            )
            late, patience = False, options.PATIENT_COMMAND
        else:
            await _pause(table, node)
            record = table.current(node)
            if record is not None and table.winding_down and desired == differing(table, node):
                # It is deleted anyway.
                workflow.logger.warning("node %s did not receive that its generation is complete", node.rank)
                table.put(record.replace(acknowledged=desired))


def _longer_wait(table: NodeTable, record: NodeRecord) -> timedelta:
    """How much longer an agent is waited for that took nothing in time: it may work nevertheless.

    A lease that holds lapses soon if the agent does not work. After an outage of the server all leases lapse at once,
    and agents poll for commands later than it is back.
    """
    timeout, since = table.timing.lease.timeout, record.unreachable_since
    if silence := _own_silence(table, record):
        return timeout - silence
    return timeout if since is None or workflow.now() - since < timeout else timedelta()


def _own_silence(table: NodeTable, record: NodeRecord) -> timedelta:
    """For how long this agent has been silent while the server served others: zero where it may be the server's.

    Such another agent has taken the same world, and has held its lease since before the silence began. An outage of the
    server or of its network that is long enough to end one lease ends the others, too.
    """
    since, world = record.silent_since, table.desire.world
    if since is None or world is None:
        return timedelta()
    served = any(
        other.reachable
        and other.generation >= world.generation
        and other.leased_since is not None
        and other.leased_since < since
        for other in table.records.values()
    )
    return workflow.now() - since if served else timedelta()


def _is_silent(table: NodeTable, record: NodeRecord) -> bool:
    return _own_silence(table, record) >= table.timing.lease.timeout


def asks_of_world(desired: NodeDesired, record: NodeRecord) -> bool:
    """Whether the job waits for the agent's answer: to a newer world, or to a question about its world."""
    taken = record.acknowledged
    return desired.world is not None and (desired.world != taken.world or desired.inquiry != taken.inquiry)


def record_answer(
    table: NodeTable, before: NodeRecord, desired: NodeDesired, reached: NodeReached, *, now: datetime
) -> None:
    """Records what an agent has answered.

    Args:
        table: The group's table.
        before: The node's record when the desired state was sent.
        desired: What was sent.
        reached: The answer.
        now: The present time.
    """
    record = table.known(before.node)
    if record is None:
        return
    if desired.commit is not None and desired.commit.checkpoint == reached.committed:
        table.record_commit(record.node, desired.commit.checkpoint, time=now)
        record = table.known(before.node) or record
    changes: dict[str, object] = {
        "version": max(record.version, reached.version),
        "generation": max(record.generation, reached.generation),
    }
    # An agent that was started again meanwhile does not carry on all of it.
    if before.agent_started_at in (None, record.agent_started_at):
        changes["acknowledged"] = desired
    if not asks_of_world(desired, before):
        table.put(record.replace(**changes))
        return
    table.put(record.replace(**changes, joining=None, cut_off=""))
    known, generation, preparing = identity_of(record.node), reached.generation, reached.preparing
    if not reached.accepted:
        table.report(NodeJoined(**known, time=now, generation=generation, preparing=preparing))
        return
    table.report(
        NodeCommanded(
            **known,
            time=now,
            generation=generation,
            detail=reached.detail,
            entered=reached.entered,
            preparing=preparing,
            inquiry=desired.inquiry,
            printed=reached.printed,
        )
    )


async def _send(
    table: NodeTable, node: NodeCredentials, desired: NodeDesired, *, version: int, patience: timedelta, summary: str
) -> NodeReached | str:
    """Sends one desired state. Returns what the agent has reached; if it did not answer in time, the error that it
    raised each time, or nothing."""
    within = table.timing.commands.start_to_close
    versions = unread = 0
    while versions < _MOST_VERSIONS:
        try:
            answer = await workflow.execute_activity(
                "apply_desired",
                ApplyDesired(node=node, version=version, desired=desired),
                result_type=RawValue,
                task_queue=table.queue(node),
                schedule_to_start_timeout=patience,
                start_to_close_timeout=within,
                # An agent that raises each time would be asked for as long as its lease holds.
                schedule_to_close_timeout=patience + within,
                retry_policy=options.COMMAND_RETRY,
                summary=summary,
            )
        except ActivityError as error:
            if is_cancelled_exception(error):
                return ""
            # The end of the time for all attempts has the last one's error as its cause.
            raised = error.cause.cause if isinstance(error.cause, ActivityTimeout) else error.cause
            if isinstance(raised, ApplicationError):
                return f"its agent fails: {raised.message}"
            if isinstance(error.cause, ActivityTimeout):
                return ""
            raise
        try:
            reached = read_answer(answer, NodeReached)
        except UnreadableAnswer as error:
            unread += 1
            if unread * options.UNREADABLE_ANSWER_PAUSE > patience + within:
                return f"its agent fails: {error}"
            await workflow.sleep(options.UNREADABLE_ANSWER_PAUSE, summary=f"node {node.rank}: {error}")
            continue
        if reached.version <= version:
            return reached
        # A group before this one has sent it newer ones.
        version, versions = reached.version + 1, versions + 1
    return "its agent claims ever newer desired states"


async def dismiss(table: NodeTable, node: NodeCredentials, reason: str) -> None:
    """Has an incarnation end that the group has no record of."""
    patience = table.timing.commands.schedule_to_start
    stop = NodeDesired(stop=_stop_request(table, reason))
    summary = f"stop node {node.rank}.{node.incarnation}: {reason}"
    if isinstance(await _send(table, node, stop, version=1, patience=patience, summary=summary), str):
        workflow.logger.info("incarnation %s of node %s did not answer", node.incarnation, node.rank)


def _stop_request(table: NodeTable, reason: str) -> StopRequest:
    """The request to a node to end itself."""
    return StopRequest(reason=reason, grace=table.group.spec.limits.termination_grace_period)


def _why_stopped(table: NodeTable) -> str:
    return table.desire.reason or "the job no longer needs this node"


async def _is_answered(
    table: NodeTable, node: NodeCredentials, sending: asyncio.Task[NodeReached | str], *, late: bool
) -> bool:
    """Waits until a desired state is answered, or not in time; withdraws it, and returns False, if something more
    urgent is desired before, or if it is late already and only this agent turns out to be silent."""
    urgent = _urgent(table, node)

    def is_over() -> bool:
        record = table.known(node)
        return _urgent(table, node) != urgent or (late and record is not None and _is_silent(table, record))

    outdated = asyncio.create_task(workflow.wait_condition(is_over))
    await workflow.wait((sending, outdated), return_when=asyncio.FIRST_COMPLETED)
    outdated.cancel()
    if not sending.done():
        sending.cancel()
        return False
    return True


async def _pause(table: NodeTable, node: NodeCredentials) -> None:
    """Waits until a desired state that was not taken can be sent again, or something more urgent."""
    urgent = _urgent(table, node)

    def is_outdated() -> bool:
        return table.winding_down or _urgent(table, node) != urgent

    with suppress(TimeoutError):
        await workflow.wait_condition(
            is_outdated,
            timeout=options.COMMAND_PAUSE,
            timeout_summary=f"before the desired state is sent to node {node.rank} again",
        )
    await workflow.wait_condition(lambda: is_outdated() or (record := table.known(node)) is None or record.reachable)


def _urgent(table: NodeTable, node: NodeCredentials) -> tuple[object, ...] | None:
    """What an agent is to learn at once, even if it has not answered yet; None for a node that is gone."""
    record, desire = table.known(node), table.desire
    if record is None or record.phase is NodePhase.LOST:
        return None
    world, target = desire.world, desire.nodes.get(node.rank)
    generation = world.generation if world is not None and world.member(node) is not None else 0
    released = record.leaving, target is not None and target.released
    return generation, desire.complete_generation, released, table.winding_down, table.current(node) is None


def _summary(table: NodeTable, record: NodeRecord, desired: NodeDesired) -> str:
    """What is sent to a node, for the Temporal UI."""
    node, taken, world = record.node, record.acknowledged, desired.world
    parts: list[str] = []
    if desired.stop is not None:
        parts.append(f"stop node {node.rank}.{node.incarnation}: {desired.stop.reason}")
    if world is not None and world != taken.world:
        place = f"rank {world.members[node.rank].group_rank} of {world.nodes}"
        parts.append(f"generation {world.generation} to node {node.rank}: {place}{table.why}")
    elif world is not None and desired.inquiry != taken.inquiry:
        parts.append(f"query whether node {node.rank} has entered generation {world.generation}")
    if desired.complete_generation != taken.complete_generation:
        parts.append(f"all ranks finished generation {desired.complete_generation}: release node {node.rank}")
    if desired.command_restarts != taken.command_restarts:
        parts.append(f"start the command again{table.why}")
    if desired.checkpoint_request != taken.checkpoint_request:
        parts.append("a checkpoint was requested")
    if desired.hold is not None and desired.hold != taken.hold:
        parts.append("have the ranks wait at a step, before they are ended")
    if desired.commit is not None and desired.commit != taken.commit:
        parts.append(f"commit {desired.commit.checkpoint.folder}")
    if desired.copies is not None and desired.copies != taken.copies:
        parts.append(f"node {desired.copies.rank} keeps copies of what node {node.rank} saves")
    if (desired.roles, desired.packed_roles) != (taken.roles, taken.packed_roles):
        parts.append("the addresses of the job's roles")
    if desired.released and not taken.released:
        parts.append("need not wait for a checkpoint any longer")
    return "; ".join(parts)
