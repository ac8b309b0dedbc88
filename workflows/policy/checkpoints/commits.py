"""Decides when a checkpoint in storage is complete, and how often one is made.

A checkpoint counts once every node of the world that saved it has reported that its parts are durable: then one agent
is to commit it, which makes it visible. Reports of a world that is over do not count, so of two
generations that save at the same time only the newest commits. What the job went back from is not committed either. A
script may have several checkpointers, each with a place of its own in the storage, whose steps say nothing about each
other: what is stored is known for each place, and the commits of all are carried out one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import TypeVar

from perdure.contract import (
    CheckpointRef,
    CheckpointView,
    Commit,
    Evidence,
    EvidenceSource,
    Restore,
    RestoreSource,
    StartOver,
    Stop,
    StoredCheckpoint,
)
from perdure.contract.checkpoints import MOST_PLACES
from perdure.contract.transitions import (
    NodeCommittedCheckpoint,
    NodeRestoredCheckpoint,
    NodeStoredCheckpoint,
)
from perdure.spec.checkpoint import Checkpoint
from perdure.spec.job import JobSpec
from perdure.workflows.policy.behavior import Behavior
from perdure.workflows.policy.checkpoints import holds, other_size, resets, state_loss, trust
from perdure.workflows.policy.diagnosis import claims
from perdure.workflows.policy.facts.events import CheckpointRequested, Event, GroupAdopted
from perdure.workflows.policy.record import incidents, observations
from perdure.workflows.policy.repair import actions, charges
from perdure.workflows.policy.repair.case import Rejected, Verdict
from perdure.workflows.policy.state.checkpoint import CheckpointState, DurableCheckpoint, StoredParts
from perdure.workflows.policy.state.job import JobState, RoleInJob
from perdure.workflows.policy.state.node import NodeState

SHORTEST_INTERVAL = timedelta(seconds=30)
LONGEST_INTERVAL = timedelta(hours=1)
"""Limits of the interval that the job chooses."""

_Known = TypeVar("_Known")

_PLACES = 16
"""Places in the storage that are remembered: a job has one for each stage and checkpointer."""


def apply(state: RoleInJob, event: Event, job: JobSpec, now: datetime) -> RoleInJob:
    """Takes in what a node reports about a checkpoint, and users' requests for one."""
    if isinstance(event, CheckpointRequested):
        return request(state, number=event.number)
    if isinstance(event, GroupAdopted):
        # Where it has not declined, the job was reset to its beginning, and adopts nodes that it had.
        state = resets.take(state, event)
        return renumber(state, now) if event.nodes and not event.declined else state
    if not isinstance(event, NodeStoredCheckpoint | NodeCommittedCheckpoint | NodeRestoredCheckpoint):
        return state
    node = state.nodes.get(event.rank)
    if node is None or node.incarnation != event.incarnation or not node.alive:
        return state
    match event:
        case NodeStoredCheckpoint():
            return _stored(state, node, event, job, now)
        case NodeCommittedCheckpoint():
            return _committed(state, event, now)
        case NodeRestoredCheckpoint():
            return _restored(state, node, event.restored, event, job, now)


def request(state: RoleInJob, *, number: int = 0) -> RoleInJob:
    """Requests a checkpoint of one of the next steps; its number, which is `number` at least, is `requests` from now
    on."""
    known = state.checkpoints
    return state.replace(checkpoints=known.replace(requests=max(_next_request(known), number)))


def request_of_all(state: JobState) -> CheckpointRequested:
    """A user's request for a checkpoint. Its number is the same in all roles, each of which has had others: a client
    that waits for the answer looks at one of them."""
    if state.behavior < Behavior.RELEASE_0_4:
        return CheckpointRequested()
    return CheckpointRequested(number=max(_next_request(role.checkpoints) for role in state.roles.values()))


def _next_request(known: CheckpointState) -> int:
    return max(known.requests, known.given) + 1


def renumber(state: RoleInJob, now: datetime) -> RoleInJob:
    """Gives requests numbers that none had before, as the job was reset and has forgotten some: ranks and agents follow
    each number once. A request that may have been answered since is made again, also one to wait at a step."""
    if state.behavior < Behavior.RELEASE_0_4:
        return state
    known, is_open = state.checkpoints, open_request(state) > 0
    # A job makes less than one request a second.
    known = known.replace(given=max(known.given, int(now.timestamp())))
    state = state.replace(checkpoints=known)
    if is_open:
        number, hold, postponed = _next_request(known), known.hold, state.postponed
        if postponed is not None and postponed.checkpoint_request > known.answered:
            state = state.replace(postponed=postponed.replace(checkpoint_request=number))
        if hold is not None and hold.stores > known.answered:
            hold = hold.replace(stores=number)
        state = state.replace(checkpoints=known.replace(requests=number, hold=hold))
    return holds.renumber(state)


def open_request(state: RoleInJob) -> int:
    """The newest request that no durable checkpoint has answered yet; 0 for none."""
    known = state.checkpoints
    return known.requests if known.requests > known.answered else 0


def saves_nothing(state: RoleInJob) -> bool:
    """Whether no checkpoint of the current world can become durable: it needs the parts of all nodes, and the ranks of
    one of them have trained without a `Checkpointer`."""
    return any(0 < state.generation == node.without_checkpoints for node in state.members)


def commit_of(state: RoleInJob) -> Commit | None:
    """The commit that groups receive, with the node that carries it out: one whose agent can be reached.

    None for what a world saved that is over, or what the job went back from: the storage may have been away meanwhile.
    """
    commits = _commits(state.checkpoints)
    if state.behavior >= Behavior.RELEASE_0_4:
        commits = tuple(one for one in commits if _counts(state, one.checkpoint))
    if not commits:
        return None
    commit = commits[0]
    reachable = [node.rank for node in (*state.members, *state.nodes.values()) if node.alive and node.reachable]
    return commit.replace(rank=reachable[0]) if reachable else commit


def interval(state: RoleInJob, checkpoint: Checkpoint, took: timedelta, now: datetime) -> timedelta | None:
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
    between_failures = (now - state.started_at) / (state.restart_count + 1)
    seconds = math.sqrt(2 * took.total_seconds() * max(between_failures.total_seconds(), 0.0))
    chosen = max(timedelta(seconds=round(seconds)), 2 * took, SHORTEST_INTERVAL)
    return min(chosen, LONGEST_INTERVAL)


def view(state: RoleInJob, job: JobSpec) -> CheckpointView:
    """What `status` shows."""
    known, durable = state.checkpoints, state.checkpoints.durable
    return CheckpointView(
        url=(job.checkpoint.storage or "") if job.checkpoint else "",
        step=durable.checkpoint.step if durable else None,
        folder=durable.checkpoint.folder if durable else "",
        committed_at=durable.committed_at if durable else None,
        size=durable.size if durable else 0,
        took=durable.took if durable else None,
        problem=known.problem,
        problem_since=known.problem_since,
        answered=known.answered,
        restored_step=known.restored_step,
        restored_from=known.restored_from,
        restored_generation=known.restored_generation,
        restored_again=known.restored_again,
    )


def _stored(
    state: RoleInJob, node: NodeState, transition: NodeStoredCheckpoint, job: JobSpec, now: datetime
) -> RoleInJob:
    known, stored, world = state.checkpoints, transition.stored, state.world
    if stored.in_memory:
        is_first = claims.may_report_restore(state, node, stored.checkpoint.generation)
        current = is_first and _is_current(state, node, stored.checkpoint.generation)
        if not current:
            return state
        return holds.take(state, stored, transition.problem, reported_at=transition.time, now=now)
    if world is None or job.stored is None or not _is_current(state, node, stored.checkpoint.generation):
        return state
    if state.behavior >= Behavior.RELEASE_0_4:
        state = trust.note_reported(state, stored)
        known = state.checkpoints
        if trust.is_unsound(state, stored.checkpoint):
            return state
    # The script may begin to save after its first steps.
    state = state.with_node(node.replace(without_checkpoints=0))
    if transition.problem:
        return _failing(state, transition.problem, transition.time, now)
    complete = (known.commit, *known.next_commits, known.durable)
    if any(one is not None and one.checkpoint == stored.checkpoint for one in complete):
        return state
    known = _with_answers_of(state, known)
    before, others = _known_parts(state, stored.checkpoint)
    parts = _add_part(before, node, stored)
    if parts is None:
        return state
    known = known.replace(parts_of={**others, stored.checkpoint.place: parts})
    if not set(world.members) <= set(parts.nodes):
        return state.replace(checkpoints=known)
    answers = min([parts.answers, *_answers_beside(state, known, parts)])
    known = known.replace(answers_of=_with_answers(known, parts))
    commit = Commit(
        checkpoint=parts.checkpoint,
        rank=node.rank,
        interval=interval(state, job.stored, parts.took, now),
        answers=max(answers, known.answered),
        inherited=known.inherited,
        kept_before=max(known.kept_before, known.kept_of.get(stored.checkpoint.place, 0)),
    )
    return state.replace(checkpoints=_with_commit(state, known, commit))


def _known_parts(state: RoleInJob, checkpoint: CheckpointRef) -> tuple[StoredParts | None, dict[str, StoredParts]]:
    """What is stored so far at the place of a checkpoint, and at other places by checkpointers of the same world."""
    known = state.checkpoints.parts_of
    if state.behavior < Behavior.RELEASE_0_4:
        return next(iter(known.values()), None), {}
    of_world = {place: parts for place, parts in known.items() if parts.checkpoint.generation == checkpoint.generation}
    return known.get(checkpoint.place), _of_others(of_world, checkpoint.place)


def _with_answers_of(state: RoleInJob, known: CheckpointState) -> CheckpointState:
    """Begins again to count which request each place has answered, in a newer world: its ranks answer an open request
    again, and the states of two worlds would be of different times."""
    if state.behavior < Behavior.RELEASE_0_4 or known.answers_in == state.generation:
        return known
    answered = {place: min(answers, known.answered) for place, answers in known.answers_of.items()}
    return known.replace(answers_of=answered, answers_in=state.generation)


def _answers_beside(state: RoleInJob, known: CheckpointState, parts: StoredParts) -> list[int]:
    """The requests that checkpointers have answered which save in turn with this one. A request is answered once all of
    them have: what follows it ends the ranks, and their states would be of different times.

    The ranks say which these are: one whose state is large may still be stored for the first time, or for long. Where
    they do not know it yet, one that has stored nothing since this one did so last trains no more.
    """
    if state.behavior < Behavior.RELEASE_0_4:
        return []
    places, place = list(known.answers_of), parts.checkpoint.place
    since = places[places.index(place) + 1 :] if place in places else list(known.parts_of)
    return [known.answers_of.get(one, 0) for one in dict.fromkeys((*since, *parts.beside)) if one != place]


def _with_answers(known: CheckpointState, parts: StoredParts) -> dict[str, int]:
    """Which request each place has answered, with that of a complete checkpoint as the newest."""
    place = parts.checkpoint.place
    return {**_of_others(known.answers_of, place), place: parts.answers}


def _with_commit(state: RoleInJob, known: CheckpointState, commit: Commit) -> CheckpointState:
    """Adds a commit in place of an older one of the same place. Those of other places are carried out first, unless the
    storage does not take them."""
    if state.behavior < Behavior.RELEASE_0_4:
        return known.replace(commit=commit)
    place, first = commit.checkpoint.place, known.commit
    others = tuple(one for one in _commits(known) if one.checkpoint.place != place)
    if first is None or first.checkpoint.place == place or known.problem:
        commits = (commit, *others)
    else:
        commits = (*others, commit)
    return known.replace(commit=commits[0], next_commits=commits[1:_PLACES])


def _commits(known: CheckpointState) -> tuple[Commit, ...]:
    """All that is to be committed, in its order."""
    return known.next_commits if known.commit is None else (known.commit, *known.next_commits)


def _counts(state: RoleInJob, checkpoint: CheckpointRef) -> bool:
    """Whether a stored checkpoint may still take the place of the one before it."""
    return checkpoint.generation == state.generation and not trust.is_unsound(state, checkpoint)


def _is_current(state: RoleInJob, node: NodeState, generation: int) -> bool:
    """Whether what a node reports of stored checkpoints is about the world that trains."""
    is_member = state.world is not None and generation == state.world.generation and state.is_member(node)
    return is_member and state.outcome is None


def _add_part(parts: StoredParts | None, node: NodeState, stored: StoredCheckpoint) -> StoredParts | None:
    """Adds what one more node has stored; None if it is of an older checkpoint than the one that is being stored."""
    checkpoint = stored.checkpoint
    if parts is None or parts.checkpoint != checkpoint:
        if parts is not None and parts.checkpoint.generation == checkpoint.generation and parts.checkpoint > checkpoint:
            return None
        parts = StoredParts(checkpoint=checkpoint)
    return parts.replace(
        nodes=tuple(sorted({*parts.nodes, node.rank})),
        size=parts.size + (stored.size if node.rank not in parts.nodes else 0),
        took=max(parts.took, stored.took),
        answers=max(parts.answers, stored.answers),
        beside=tuple(sorted({*parts.beside, *stored.beside}))[:MOST_PLACES],
    )


def _stop(state: RoleInJob, node: NodeState, restored: Restore, since: datetime, now: datetime) -> RoleInJob:
    """Stops a job that has checkpoints, none of which can be loaded: to start over would cost the whole training."""
    for text in restored.unusable:
        evidence = Evidence(time=since, source=EvidenceSource.AGENT, rank=node.rank, text=text)
        state = incidents.add_evidence(state, evidence, now=now)
    title = "no checkpoint in storage can be loaded"
    reason = (
        f"{title}: {'; '.join(restored.unusable)}. Repair them, or remove those that are not needed; or set "
        "checkpoint.on_unusable: start_over"
    )
    why_not = "it would cost the whole training; checkpoint.on_unusable: start_over allows it"
    verdict = Verdict(
        rule='checkpoints/1 "none can be loaded: stop"',
        title=title,
        actions=(Stop(reason=reason, exit_code=1),),
        rejected=(Rejected(StartOver(), why_not),),
    )
    return actions.apply(state, verdict, now)


def _inherit(known: CheckpointState, uid: str, loaded: CheckpointRef) -> CheckpointState:
    """Records that the run has continued from another run's checkpoint, and so continues what that one keeps."""
    before = next((one for one in known.inherited if one.place == loaded.place), None)
    if loaded.run == uid or (before is not None and before.step >= loaded.step):
        return known
    return known.replace(inherited=(*(one for one in known.inherited if one != before), loaded)[-_PLACES:])


def _failing(state: RoleInJob, problem: str, since: datetime, now: datetime) -> RoleInJob:
    """Records that a checkpoint cannot be stored now."""
    known = state.checkpoints
    since = known.problem_since or since
    state = state.replace(checkpoints=known.replace(problem=problem, problem_since=since))
    return observations.observe_storage(state, now, over=False)


def _committed(state: RoleInJob, transition: NodeCommittedCheckpoint, now: datetime) -> RoleInJob:
    known = state.checkpoints
    commit = next((one for one in _commits(known) if one.checkpoint == transition.checkpoint), None)
    if commit is None:
        return state
    others = tuple(one for one in _commits(known) if one is not commit)
    if transition.problem:
        if others and not known.problem:
            # What one checkpointer has stored may be lost for good, and the others' need not wait for that.
            state = state.replace(checkpoints=known.replace(commit=others[0], next_commits=(*others[1:], commit)))
        return _failing(state, transition.problem, transition.time, now)
    state = observations.observe_storage(state, now, over=True)
    parts = known.parts_of.get(commit.checkpoint.place)
    parts = parts if parts is not None and parts.checkpoint == commit.checkpoint else None
    left = {place: other for place, other in known.parts_of.items() if other is not parts}
    rest = state.checkpoints.replace(
        commit=next(iter(others), None),
        next_commits=others[1:],
        parts_of=left if state.behavior >= Behavior.RELEASE_0_4 else {},
    )
    if trust.is_unsound(state, commit.checkpoint):
        # An agent was faster than the decision to go back. No world loads it.
        return state.replace(checkpoints=rest)
    durable = DurableCheckpoint(
        checkpoint=commit.checkpoint,
        committed_at=transition.time,
        size=parts.size if parts is not None else 0,
        took=parts.took if parts is not None else timedelta(),
    )
    answered = max(known.answered, min(commit.answers, known.requests))
    return state.replace(
        checkpoints=rest.replace(
            durable=durable,
            stored={**_of_others(known.stored, commit.checkpoint.place), commit.checkpoint.place: commit.checkpoint},
            problem="",
            problem_since=None,
            answered=answered,
        )
    )


def _start_over(
    state: RoleInJob, node: NodeState, restored: Restore, transition: NodeRestoredCheckpoint, now: datetime
) -> RoleInJob:
    """Records that the ranks begin anew beside checkpoints none of which can be loaded. What is known of these no
    longer counts, and nothing of them is deleted."""
    state = state_loss.settle(state, restored.replace(source=RestoreSource.NOTHING), now)
    state = observations.observe_start_over(state, node, restored.unusable, since=transition.time, now=now)
    known, generation = state.checkpoints, transition.generation
    known = known.replace(
        **state_loss.without_stored(state, generation, place=restored.place),
        bound=None,
        restored_generation=generation,
        gave_up=None,
        older_because="",
    )
    if state.behavior < Behavior.RELEASE_0_4 or state.checkpoints.restored_generation < generation:
        # Else another checkpointer of the script has loaded its state.
        known = known.replace(restored_step=None, restored_from=None, restored_again=None)
    return state.replace(checkpoints=known)


def _newer(known: CheckpointState, checkpoint: CheckpointRef) -> dict[str, CheckpointRef]:
    """The newest checkpoint at the place of one that is known to be there."""
    before = known.stored.get(checkpoint.place)
    return {checkpoint.place: checkpoint if before is None or before < checkpoint else before}


def _of_others(known: Mapping[str, _Known], place: str) -> dict[str, _Known]:
    """What is known of the latest other places, as many as are remembered with this one."""
    others = [(other, one) for other, one in known.items() if other != place]
    return dict(others[-_PLACES + 1 :])


def _stopped(
    state: RoleInJob,
    node: NodeState,
    restored: Restore,
    transition: NodeRestoredCheckpoint,
    job: JobSpec,
    now: datetime,
) -> RoleInJob:
    """Stops the job because its ranks have stopped: no checkpoint can be loaded, or a newer state is lost."""
    if not _is_current(state, node, transition.generation):
        return state
    if restored.lookup is not None:
        return state_loss.stop(state, restored, transition.time, now)
    return _stop(state, node, restored, transition.time, now) if job.stored is not None else state


def _restored(
    state: RoleInJob,
    node: NodeState,
    restored: Restore,
    transition: NodeRestoredCheckpoint,
    job: JobSpec,
    now: datetime,
) -> RoleInJob:
    known = state.checkpoints
    world = state.world
    if world is None or not state.is_member(node) or transition.generation < known.restored_generation:
        return state
    if not claims.may_report_restore(state, node, transition.generation):
        text = f"node {node.rank} has reported what the ranks of generation {transition.generation} continue with"
        return claims.count(state, f"{text}, and does not have rank 0 of it")
    if restored.stops:
        return _stopped(state, node, restored, transition, job, now)
    if restored.refused:
        if not _is_current(state, node, transition.generation):
            return state
        return other_size.refuse(state, restored, rank=node.rank, time=transition.time, job=job, now=now)
    if restored.waits:
        current = _is_current(state, node, transition.generation)
        return state_loss.take(state, node, restored, transition, now) if current else state
    if restored.unusable:
        return _start_over(state, node, restored, transition, now)
    state = other_size.loaded(state, transition.generation)
    state = state_loss.lose(state, node, restored, transition, now)
    known = state.checkpoints
    if restored.source is RestoreSource.NOTHING and transition.generation == known.restored_generation:
        # Another checkpointer of the script has loaded its state.
        return incidents.record_apart(state, restored, generation=transition.generation, time=transition.time)
    if transition.generation > known.restored_generation:
        # Else another checkpointer of the script, whose step may be another one.
        tries_older = bool(restored.distrusted) or (known.loaded is None and bool(known.distrusted))
        reported = trust.reported_before(state, restored)
        state = charges.continue_from(state, max(restored.step, reported), tries_older=tries_older)
    source = restored.source if restored.source is not RestoreSource.UNKNOWN else None
    state = incidents.record_restore(
        state, restored, generation=transition.generation, rank=node.rank, time=transition.time
    )
    if source is RestoreSource.STORAGE and restored.checkpoint is not None:
        state = trust.load(state, restored.checkpoint)
        known = _inherit(state.checkpoints, state.uid, restored.checkpoint)
        others = _of_others(known.stored, restored.checkpoint.place)
        known = known.replace(stored={**others, **_newer(known, restored.checkpoint)})
    known = known.replace(gave_up=None, older_because="")
    return state.replace(
        checkpoints=known.replace(
            restored_step=restored.step,
            restored_from=source,
            restored_generation=transition.generation,
            restored_again=restored.again,
        )
    )
