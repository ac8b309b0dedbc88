"""Decides when a checkpoint in storage is complete, and how often one is made.

A checkpoint counts once every node of the world that saved it has reported that its parts are durable: then one agent
gets the command to commit it, which makes it visible. Reports of a world that is over do not count, so of two
generations that save at the same time only the newest commits.
"""

from __future__ import annotations

import math
import re
from datetime import datetime, timedelta

from perdure.contract import (
    CheckpointFacts,
    CheckpointView,
    Commit,
    Considered,
    EvidenceSource,
    JobPhase,
    RestoreSource,
)
from perdure.contract.transitions import (
    NodeCommittedCheckpoint,
    NodeRestoredCheckpoint,
    NodeStoredCheckpoint,
)
from perdure.spec.checkpoint import Checkpoint
from perdure.spec.job import JobSpec
from perdure.workflows.policy.checkpoints import trust
from perdure.workflows.policy.diagnosis import claims
from perdure.workflows.policy.facts.events import CheckpointRequested, Event
from perdure.workflows.policy.record import incidents, observations
from perdure.workflows.policy.state.checkpoint import CheckpointState, DurableCheckpoint, StoredParts
from perdure.workflows.policy.state.job import JobState, NodeState, Outcome

SHORTEST_INTERVAL = timedelta(seconds=30)
LONGEST_INTERVAL = timedelta(hours=1)
"""Limits of the interval that the job chooses."""

_FOLDER = re.compile(r"step-(\d{1,18})-(.+)-\d{1,18}")
_PLACES = 16
"""Places in the storage that are remembered: a job has one for each stage and checkpointer."""

_NO_START_OVER = Considered(
    option="start over", why_not="it would cost the whole training; checkpoint.on_unusable: start_over allows it"
)


def apply(state: JobState, event: Event, job: JobSpec, now: datetime) -> JobState:
    """Takes in what a node reports about a checkpoint, and users' requests for one."""
    if isinstance(event, CheckpointRequested):
        return request(state)
    if not isinstance(event, NodeStoredCheckpoint | NodeCommittedCheckpoint | NodeRestoredCheckpoint):
        return state
    node = state.nodes.get(event.rank)
    if node is None or node.incarnation != event.incarnation or not node.alive:
        return state
    match event:
        case NodeStoredCheckpoint():
            return _stored(state, node, event.checkpoint, event, job, now)
        case NodeCommittedCheckpoint():
            return _committed(state, event.checkpoint, event, now)
        case NodeRestoredCheckpoint():
            return _restored(state, node, event.checkpoint, event, now)


def request(state: JobState) -> JobState:
    """Requests a checkpoint of one of the next steps; its number is `orders` from now on."""
    return state.replace(checkpoints=state.checkpoints.replace(orders=state.checkpoints.orders + 1))


def open_order(state: JobState) -> int:
    """The newest request that no durable checkpoint has answered yet; 0 for none."""
    known = state.checkpoints
    return known.orders if known.orders > known.orders_done else 0


def saves_nothing(state: JobState) -> bool:
    """Whether no checkpoint of the current world can become durable: it needs the parts of all nodes, and the ranks of
    one of them have trained without a `Checkpointer`."""
    return any(0 < state.generation == node.without_checkpoints for node in state.members)


def commit_of(state: JobState) -> Commit | None:
    """The commit that groups receive, with the node that carries it out: one whose agent can be reached."""
    commit = state.checkpoints.commit
    if commit is None:
        return None
    reachable = [node.rank for node in (*state.members, *state.nodes.values()) if node.alive and node.reachable]
    return commit.model_copy(update={"rank": reachable[0]}) if reachable else commit


def interval(state: JobState, checkpoint: Checkpoint, took: timedelta, now: datetime) -> timedelta | None:
    """The time between two checkpoints by Young and Daly: the square root of twice the cost of one and the mean time
    between failures. None where the specification names it.

    The cost is the time until a checkpoint is durable, although training continues meanwhile: it is what the work costs
    the machines, at most, and what a failure in that time loses.

    Args:
        state: The job.
        checkpoint: Its specification.
        took: The time of the last checkpoint.
        now: The present time.
    """
    if checkpoint.every != "auto":
        return None
    between_failures = (now - state.started_at) / (state.all_restarts + 1)
    seconds = math.sqrt(2 * took.total_seconds() * max(between_failures.total_seconds(), 0.0))
    chosen = max(timedelta(seconds=round(seconds)), 2 * took, SHORTEST_INTERVAL)
    return min(chosen, LONGEST_INTERVAL)


def view(state: JobState, job: JobSpec) -> CheckpointView:
    """What `status` shows."""
    known, durable = state.checkpoints, state.checkpoints.durable
    return CheckpointView(
        url=(job.checkpoint.storage or "") if job.checkpoint else "",
        step=durable.step if durable else None,
        folder=durable.folder if durable else "",
        committed_at=durable.committed_at if durable else None,
        size=durable.size if durable else 0,
        took=durable.took if durable else None,
        problem=known.problem,
        problem_since=known.problem_since,
        order=known.orders_done,
        restored_step=known.restored_step,
        restored_from=known.restored_from,
        restored_generation=known.restored_generation,
        restored_again=known.restored_again,
    )


def _stored(
    state: JobState,
    node: NodeState,
    facts: CheckpointFacts,
    transition: NodeStoredCheckpoint,
    job: JobSpec,
    now: datetime,
) -> JobState:
    world, known = state.world, state.checkpoints
    current = world is not None and transition.generation == world.generation and state.is_member(node)
    if world is None or not current or job.stored is None or state.outcome is not None:
        return state
    # The script may begin to save after its first steps.
    state = state.with_node(node.replace(without_checkpoints=0))
    if facts.unusable:
        return _stop(state, node, facts, transition.time, now)
    if facts.problem:
        return _failing(state, facts.problem, transition.time, now)
    if known.commit is not None and known.commit.folder == facts.folder:
        return state
    parts = known.parts
    if parts is None or parts.folder != facts.folder:
        if parts is not None and parts.generation == transition.generation and parts.step > facts.step:
            return state
        parts = StoredParts(folder=facts.folder, step=facts.step, generation=transition.generation)
    parts = parts.replace(
        nodes=tuple(sorted({*parts.nodes, node.rank})),
        size=parts.size + (facts.size if node.rank not in parts.nodes else 0),
        took=max(parts.took, facts.took),
        order=max(parts.order, facts.order),
    )
    if not set(world.members) <= set(parts.nodes):
        return state.replace(checkpoints=known.replace(parts=parts))
    commit = Commit(
        number=known.commits + 1,
        rank=node.rank,
        generation=parts.generation,
        step=parts.step,
        folder=parts.folder,
        interval=interval(state, job.stored, parts.took, now),
        order=parts.order,
        inherited=known.inherited,
        kept_before=known.kept_before,
    )
    return state.replace(checkpoints=known.replace(parts=parts, commit=commit, commits=commit.number))


def _stop(state: JobState, node: NodeState, facts: CheckpointFacts, since: datetime, now: datetime) -> JobState:
    """Stops a job that has checkpoints, none of which can be loaded: to start over would cost the whole training."""
    for text in facts.unusable:
        state = incidents.add_evidence(
            state, now=now, time=since, source=EvidenceSource.AGENT, rank=node.rank, text=text
        )
    title = "no checkpoint in storage can be loaded"
    reason = (
        f"{title}: {'; '.join(facts.unusable)}. Repair them, or remove those that are not needed; or set "
        "checkpoint.on_unusable: start_over"
    )
    state = incidents.record_decision(
        state,
        now=now,
        title=title,
        rule='checkpoints/1 "none can be loaded: stop"',
        action="stop the job",
        considered=(_NO_START_OVER,),
    )
    return state.stop(Outcome(phase=JobPhase.FAILED, exit_code=1, reason=reason, decided_at=now))


def _inherit(known: CheckpointState, uid: str, folder: str) -> CheckpointState:
    """Records that the run has continued from another run's checkpoint, and so continues what that one keeps."""
    place, _, name = folder.rpartition("/")
    step, run = _step_and_run(name)
    before = next((one for one in known.inherited if one.rpartition("/")[0] == place), None)
    if run in ("", uid) or (before is not None and _step_and_run(before.rpartition("/")[2])[0] >= step):
        return known
    return known.replace(inherited=(*(one for one in known.inherited if one != before), folder)[-_PLACES:])


def _step_and_run(name: str) -> tuple[int, str]:
    """The parts of `step-STEP-RUN-GENERATION`; no run where the name is another one."""
    match = _FOLDER.fullmatch(name)
    return (int(match[1]), match[2]) if match else (-1, "")


def _failing(state: JobState, problem: str, since: datetime, now: datetime) -> JobState:
    """Records that a checkpoint cannot be stored now."""
    known = state.checkpoints
    since = known.problem_since or since
    state = state.replace(checkpoints=known.replace(problem=problem, problem_since=since))
    return observations.observe_storage(state, now, over=False)


def _committed(state: JobState, facts: CheckpointFacts, transition: NodeCommittedCheckpoint, now: datetime) -> JobState:
    known, parts = state.checkpoints, state.checkpoints.parts
    if known.commit is None or known.commit.folder != facts.folder:
        return state
    if facts.problem:
        return _failing(state, facts.problem, transition.time, now)
    state = observations.observe_storage(state, now, over=True)
    durable = DurableCheckpoint(
        step=facts.step,
        folder=facts.folder,
        generation=known.commit.generation,
        committed_at=transition.time,
        size=parts.size if parts is not None and parts.folder == facts.folder else 0,
        took=parts.took if parts is not None and parts.folder == facts.folder else timedelta(),
    )
    done = max(known.orders_done, min(known.commit.order, known.orders))
    known = known.replace(commit=None, parts=None, durable=durable, problem="", problem_since=None, orders_done=done)
    return state.replace(checkpoints=known)


def _start_over(
    state: JobState, node: NodeState, facts: CheckpointFacts, transition: NodeRestoredCheckpoint, now: datetime
) -> JobState:
    """Records that the ranks begin anew beside checkpoints none of which can be loaded. What is known of these no
    longer counts, and nothing of them is deleted."""
    state = observations.observe_start_over(state, node, facts.unusable, since=transition.time, now=now)
    return state.replace(
        checkpoints=state.checkpoints.replace(
            durable=None,
            loaded=None,
            failed_at=-1,
            inherited=(),
            kept_before=transition.generation,
            restored_step=None,
            restored_from=None,
            restored_generation=transition.generation,
            restored_again=None,
        )
    )


def _restored(
    state: JobState, node: NodeState, facts: CheckpointFacts, transition: NodeRestoredCheckpoint, now: datetime
) -> JobState:
    known = state.checkpoints
    world = state.world
    if world is None or not state.is_member(node) or transition.generation < known.restored_generation:
        return state
    if not claims.may_report_restore(state, node, transition.generation):
        text = f"node {node.rank} has reported what the ranks of generation {transition.generation} continue with"
        return claims.count(state, f"{text}, and does not have rank 0 of it")
    if facts.unusable:
        return _start_over(state, node, facts, transition, now)
    source = facts.source if facts.source is not RestoreSource.UNKNOWN else None
    state = incidents.record_restore(
        state, facts, generation=transition.generation, rank=node.rank, time=transition.time
    )
    if source is RestoreSource.STORAGE and facts.folder:
        state = trust.load(state, folder=facts.folder, step=facts.step)
        known = _inherit(state.checkpoints, state.uid, facts.folder)
    return state.replace(
        checkpoints=known.replace(
            restored_step=facts.step,
            restored_from=source,
            restored_generation=transition.generation,
            restored_again=facts.again,
        )
    )
