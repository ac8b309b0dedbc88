"""Decides what follows where the ranks of a world cannot load the newest state that is known to have existed.

What a job has committed, and what all ranks had in memory, does not vanish because a world does not find it: a storage
that is not mounted looks empty, and a node that is being replaced may bring its memory back. The ranks say what they
look for and what they have found, and wait (`recovery.on_state_loss`), while their nodes stay. The job shows that, and
ends the wait: by a newer world, which a returned node makes possible; by a user, who takes the older state; or when its
time is over. A storage that stays away stops the job, since all of it may be there; memory that does not come back is
lost, and the older state is taken, with the steps that this costs.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta

from perdure.base.words import count
from perdure.contract import (
    Considered,
    Evidence,
    EvidenceSource,
    KnownStates,
    KnownStored,
    Lookup,
    Observation,
    ProgressSource,
    Restore,
    RestoreSource,
    StartOver,
    Stop,
)
from perdure.contract.transitions import NodeRestoredCheckpoint
from perdure.spec.durations import format_duration
from perdure.spec.job import JobSpec
from perdure.spec.recovery import CapacityLoss, StateLoss
from perdure.workflows.policy.behavior import Behavior
from perdure.workflows.policy.checkpoints import trust
from perdure.workflows.policy.record import incidents
from perdure.workflows.policy.record.observed import new_entry, put
from perdure.workflows.policy.repair import actions
from perdure.workflows.policy.repair.case import Rejected, Verdict
from perdure.workflows.policy.state.checkpoint import AwaitedState
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.node import NodeState

REMEDY = "perdure restart JOB --older"
_KEPT_SIGNS = 8
_PLACES = 16
"""Places in the storage that are remembered."""


def known_states(state: RoleInJob, job: JobSpec, members: Collection[int]) -> KnownStates | None:
    """The states that existed, for the ranks of the next world.

    Args:
        state: The job.
        job: Its specification.
        members: The nodes (slots) of that world.
    """
    if state.behavior < Behavior.RELEASE_0_4:
        return None
    known = state.checkpoints
    stored = (
        KnownStored(
            checkpoint=one,
            loads=one not in known.distrusted and not (one.run == state.uid and trust.is_unsound(state, one)),
        )
        for one in known.stored.values()
    )
    return KnownStates(
        stored=tuple(stored) if job.stored is not None else (),
        on_loss=job.recovery.on_state_loss.value,
        accepts_less=(known.gave_up is not None and not known.older_because) or _takes_older(state, len(members)),
        may_return=_may_return(state, job, members),
    )


def _may_return(state: RoleInJob, job: JobSpec, members: Collection[int]) -> bool:
    """Whether a node of the world before may come back with its memory, and the job has not waited for that."""
    world, awaited = state.world, state.checkpoints.awaited
    if (
        world is None
        or state.checkpoints.gave_up is not None
        or _takes_older(state, len(members))
        or job.recovery.on_capacity_loss is not CapacityLoss.SHRINK
    ):
        return False
    before = max(world.nodes, awaited.nodes if awaited is not None else 0)
    return len(members) < min(before, state.nodes_max)


def take(
    state: RoleInJob, node: NodeState, restored: Restore, event: NodeRestoredCheckpoint, now: datetime
) -> RoleInJob:
    """Takes in that ranks wait for a newer state than they have found."""
    lookup = restored.lookup or Lookup()
    before = state.checkpoints.awaited
    awaited = AwaitedState(
        generation=event.generation,
        since=before.since if before is not None else min(event.time, now),
        entry=before.entry if before is not None else state.incident_count + 1,
        lookup=lookup,
        step=restored.step if restored.source is not RestoreSource.NOTHING else None,
        nodes=before.nodes if before is not None else state.checkpoints.nodes,
        excused=before.excused if before is not None else timedelta(),
    )
    known = state.checkpoints.replace(awaited=awaited, places=_with_place(state, restored.place))
    state = state.replace(checkpoints=known)
    sign = Evidence(time=event.time, source=EvidenceSource.AGENT, rank=node.rank, text=_what_is_missing(awaited))
    title = f"the ranks wait for {_sought(lookup)}"
    return _record(state, title, awaited, (sign,), now, over=False)


def settle(state: RoleInJob, restored: Restore | None, now: datetime) -> RoleInJob:
    """Ends the wait: the ranks continue, or their world is over."""
    awaited = state.checkpoints.awaited
    if awaited is None:
        return state
    state = state.replace(checkpoints=state.checkpoints.replace(awaited=None))
    took = format_duration(timedelta(seconds=round((now - awaited.since).total_seconds())))
    if restored is None:
        title = f"the ranks waited for {_sought(awaited.lookup)} for {took}, until their world was over"
    elif restored.step >= awaited.lookup.newest and restored.source is not RestoreSource.NOTHING:
        title = f"the ranks waited for {_sought(awaited.lookup)} for {took}, and have loaded step {restored.step:,}"
    else:
        title = f"the ranks waited for {_sought(awaited.lookup)} for {took} in vain"
    return _record(state, title, awaited, (), now, over=True)


def judge(state: RoleInJob, job: JobSpec, now: datetime) -> RoleInJob:
    """Ends a wait whose world is over, or whose time is."""
    awaited = state.checkpoints.awaited
    if awaited is None:
        return state
    if state.rests:
        return settle(state, None, now)
    if not awaits(state) or state.interruption is not None or now < _until(awaited, job):
        return state
    if awaited.lookup.lacks_stored:
        return _stop(
            state, awaited, now, f"recovery.state_timeout ({format_duration(job.recovery.state_timeout)}) is over"
        )
    text = f"no node that has {_sought(awaited.lookup)} has come back within recovery.replace_timeout"
    known = state.checkpoints.replace(gave_up=awaited.lookup.newest, older_because=text)
    return state.replace(checkpoints=known)


def next_look(state: RoleInJob, job: JobSpec) -> datetime | None:
    """The end of the wait; None where ranks do not wait."""
    awaited = state.checkpoints.awaited
    return _until(awaited, job) if awaited is not None and awaits(state) and state.interruption is None else None


def awaits(state: RoleInJob) -> bool:
    """Whether the ranks of the present world wait for a state."""
    awaited = state.checkpoints.awaited
    return awaited is not None and awaited.generation == state.generation


def describe(state: RoleInJob, job: JobSpec) -> str:
    """What the ranks wait for, until when, and what ends the wait, for people; empty where they do not wait."""
    awaited = state.checkpoints.awaited
    if awaited is None or not awaits(state):
        return ""
    until, then = _until(awaited, job), "the job stops"
    if not awaited.lookup.lacks_stored:
        then = _older(awaited)
    remedy = REMEDY.replace("JOB", state.name)
    if len(job.roles) > 1:
        # Without it, `older` is for each role whose ranks wait.
        remedy += f" --role {state.role}"
    wait = f"{_what_is_missing(awaited)}; the ranks wait until {until:%H:%M:%S} UTC, then {then}"
    return f"{wait}; `{remedy}` continues now: {_older(awaited)}"


def accept_older(state: RoleInJob) -> RoleInJob:
    """Has the next world take what there is, as a user has decided. Nothing of what it does not load is deleted."""
    awaited = state.checkpoints.awaited
    changes: dict[str, object] = {"gave_up": awaited.lookup.newest if awaited is not None else -1}
    if awaited is not None and awaited.lookup.lacks_stored:
        changes |= without_stored(state, state.generation + 1, place=None)
    return state.replace(checkpoints=state.checkpoints.replace(**changes))


def resize(state: RoleInJob, *, older: bool) -> RoleInJob:
    """Has a world of another size take what there is, where a user has decided so with the number of nodes. A world of
    the same size, as after a failure, waits as any other, and a later request has a decision of its own."""
    if older and awaits(state):
        return accept_older(state)
    return state.replace(checkpoints=state.checkpoints.replace(resizes_to_older=older))


def _takes_older(state: RoleInJob, nodes: int) -> bool:
    known = state.checkpoints
    return known.resizes_to_older and nodes != known.nodes


def accepts_older(state: RoleInJob, job: JobSpec) -> bool:
    """Whether a world of another size continues with an older state where it cannot load the newest one."""
    known = state.checkpoints
    return job.recovery.on_state_loss is StateLoss.OLDER or known.gave_up is not None or known.resizes_to_older


def lose(
    state: RoleInJob, node: NodeState, restored: Restore, event: NodeRestoredCheckpoint, now: datetime
) -> RoleInJob:
    """Takes in with what ranks continue, and records what was lost where a newer state existed."""
    state, is_known = settle(state, restored, now), restored.place in state.checkpoints.places
    nodes = state.world.nodes if state.world is not None else 0
    resizes = not _takes_older(state, nodes) and state.checkpoints.resizes_to_older
    places = _with_place(state, restored.place)
    known = state.checkpoints.replace(nodes=nodes, places=places, resizes_to_older=resizes)
    state, lookup = state.replace(checkpoints=known), restored.lookup
    if lookup is None or state.behavior < Behavior.RELEASE_0_4:
        return state
    step = -1 if restored.source is RestoreSource.NOTHING else restored.step
    if lookup.lacks_stored and (lookup.stored or -1) > step:
        changes = without_stored(state, event.generation, place=restored.place)
        state = state.replace(checkpoints=state.checkpoints.replace(**changes))
    given_up = -1 if state.checkpoints.gave_up is None else state.checkpoints.gave_up
    newest = max(lookup.newest, given_up, _reached(state) if step < 0 and is_known else -1)
    if newest <= max(step, 0) or _is_recorded(state, event.generation):
        return state
    signs = [
        Evidence(time=event.time, source=EvidenceSource.AGENT, rank=node.rank, text=text)
        for text in (_found_in_memory(lookup), _found_in_storage(lookup))
    ]
    title = f"{_continued(restored)}, although step {newest:,} existed: {count(newest - max(step, 0), 'step')} lost"
    entry = new_entry(
        state,
        Observation(lost_state=True),
        title,
        at=event.time,
        now=now,
        evidence=signs,
        considered=(_WHY_NOT_WAIT,),
    )
    again = restored.again if restored.again is not None else newest - max(step, 0)
    return put(
        state,
        entry.replace(
            restored_step=restored.step, restored_from=restored.source, steps_again=again, step_before=newest
        ),
    )


def stop(state: RoleInJob, restored: Restore, since: datetime, now: datetime) -> RoleInJob:
    """Stops the job, as `recovery.on_state_loss` is `stop`: the ranks have stopped."""
    lookup = restored.lookup or Lookup()
    step = restored.step if restored.source is not RestoreSource.NOTHING else None
    awaited = AwaitedState(generation=state.generation, since=since, lookup=lookup, step=step)
    return _stop(state, awaited, now, "recovery.on_state_loss is stop")


_WHY_NOT_WAIT = Considered(
    option="wait for the newer state",
    why_not="recovery.on_state_loss is older, a user has decided so, it is damaged, or nothing is left that could "
    "bring it back",
)


def _stop(state: RoleInJob, awaited: AwaitedState, now: datetime, why: str) -> RoleInJob:
    title = f"{_sought(awaited.lookup)} cannot be loaded"
    for text in filter(None, (_found_in_memory(awaited.lookup), _found_in_storage(awaited.lookup))):
        state = incidents.add_evidence(state, Evidence(time=now, source=EvidenceSource.AGENT, text=text), now=now)
    reason = (
        f"{_what_is_missing(awaited)}, and {why}. Nothing was deleted: make it reachable and submit the job again with "
        "the same checkpoint.storage, or set recovery.on_state_loss: older"
    )
    verdict = Verdict(
        rule='state/1 "a newer state existed: stop"',
        title=title,
        actions=(Stop(reason=reason, exit_code=3),),
        rejected=(Rejected(StartOver(), "it would lose steps; recovery.on_state_loss: older allows it"),),
    )
    return settle(actions.apply(state, verdict, now), None, now)


def _until(awaited: AwaitedState, job: JobSpec) -> datetime:
    recovery = job.recovery
    timeout = recovery.state_timeout if awaited.lookup.lacks_stored else recovery.replace_timeout
    return awaited.since + timeout + awaited.excused


def without_stored(state: RoleInJob, generation: int, *, place: str | None) -> dict[str, object]:
    """Changes by which nothing that is stored so far counts, or is deleted, from a generation on.

    Args:
        state: The role.
        generation: The generation.
        place: The place of the checkpointer that continues without it; None for all. The states of the others are
            still there.
    """
    known = state.checkpoints
    if state.behavior < Behavior.RELEASE_0_4:
        place = None
    of_all = place is None
    changes: dict[str, object] = {
        "stored": {} if of_all else {other: one for other, one in known.stored.items() if other != place},
        "inherited": () if of_all else tuple(one for one in known.inherited if one.place != place),
    }
    if of_all:
        changes["kept_before"] = max(known.kept_before, generation)
    else:
        others = [(other, one) for other, one in known.kept_of.items() if other != place]
        changes["kept_of"] = dict([*others, (place, generation)][-_PLACES:])
    if of_all or (known.durable is not None and known.durable.checkpoint.place == place):
        changes["durable"] = None
    if of_all or known.loaded is None or known.loaded.checkpoint.place == place:
        changes |= {"loaded": None, "failed_at": -1}
    return changes


def _record(
    state: RoleInJob, title: str, awaited: AwaitedState, signs: tuple[Evidence, ...], now: datetime, *, over: bool
) -> RoleInJob:
    known = next((one for one in state.own_incidents if one.number == awaited.entry), None)
    if known is None:
        if over:
            return state
        entry = new_entry(
            state, Observation(awaits_state=True), title, at=awaited.since, now=now, evidence=signs, considered=()
        )
        return put(state, entry.replace(number=awaited.entry, closed_at=None))
    texts = {one.text for one in known.evidence}
    evidence = (*known.evidence, *(sign for sign in signs if sign.text not in texts))[-_KEPT_SIGNS:]
    return put(state, known.replace(title=title, evidence=evidence, closed_at=now if over else None))


def _with_place(state: RoleInJob, place: str) -> tuple[str, ...]:
    places = state.checkpoints.places
    return places if place in places else (*places, place)[-_PLACES:]


def _is_recorded(state: RoleInJob, generation: int) -> bool:
    """Whether the loss of a world is recorded: a script may have several checkpointers."""
    return any(
        one.observation is not None and one.observation.lost_state and one.generation_before == generation
        for one in state.own_incidents
    )


def _reached(state: RoleInJob) -> int:
    """The newest step that the job has seen; below 0 for none."""
    progress, known = state.progress, state.checkpoints
    if progress is not None and progress.source is ProgressSource.REPORTED:
        return progress.step
    made = progress.generation_steps if progress is not None else 0
    return (known.restored_step or 0) + made if made or known.restored_step else -1


def _sought(lookup: Lookup) -> str:
    return f"step {lookup.newest:,}" if lookup.newest >= 0 else "the storage of checkpoints"


def _older(awaited: AwaitedState) -> str:
    steps = [one for one in (awaited.step, awaited.lookup.in_storage) if one is not None]
    return f"they continue from step {max(steps):,}" if steps else "they begin at the first step"


def _continued(restored: Restore) -> str:
    if restored.source is RestoreSource.NOTHING:
        return "no saved state was loaded"
    return f"the training continued from step {restored.step:,}"


def _what_is_missing(awaited: AwaitedState) -> str:
    lookup = awaited.lookup
    if lookup.lacks_stored:
        return f"step {lookup.stored:,} is stored: {lookup.problem}" if lookup.stored is not None else lookup.problem
    return f"step {lookup.newest:,} was in the memory of all nodes, and a node that has a part of it is not back"


def _found_in_memory(lookup: Lookup) -> str:
    if lookup.seen_in_memory is None:
        return "the memory of the nodes has no snapshot"
    if lookup.in_memory is None:
        return f"the memory of the nodes has parts of step {lookup.seen_in_memory:,}, and not of all ranks"
    return f"the newest step in memory that all ranks can load is {lookup.in_memory:,}"


def _found_in_storage(lookup: Lookup) -> str:
    if lookup.problem:
        return lookup.problem
    if lookup.in_storage is not None:
        return f"the newest checkpoint in the storage is of step {lookup.in_storage:,}"
    return "the job has no storage for this state" if lookup.storage == "NONE" else "the storage has no checkpoint"
