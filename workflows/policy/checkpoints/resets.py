"""What a job that was reset learns again of saved states, from its groups.

It has forgotten what it decided since: which states it went back from, after which it failed, and which older ones are
to stay. A world that loaded one of the former would train on a state that the job knew to be unsound.
"""

from __future__ import annotations

from perdure.contract import CheckpointRef, KnownStored, UnsoundSteps
from perdure.workflows.policy.behavior import Behavior
from perdure.workflows.policy.checkpoints.trust import REMEMBERED
from perdure.workflows.policy.facts.events import GroupAdopted
from perdure.workflows.policy.state.job import RoleInJob


def take(state: RoleInJob, event: GroupAdopted) -> RoleInJob:
    """Takes in what the newest world of a group says of saved states, if the job has forgotten that world: what it has
    decided since a world that it knows is newer."""
    has_forgotten = state.generation > (state.world.generation if state.world is not None else 0)
    if not has_forgotten or state.behavior < Behavior.RELEASE_0_4:
        return state
    known, world = state.checkpoints, event.world
    # It does not know which of those that forgotten worlds saved, or began without, are superseded.
    known = known.replace(kept_before=max(known.kept_before, state.generation + 1))
    if world is not None and world.generation == state.generation:
        new = [one for one in world.distrusted_checkpoints if one not in known.distrusted]
        failures = sorted({*known.script_failures, *(world.script_failures or ())})
        known = known.replace(
            distrusted=(*known.distrusted, *new)[-REMEMBERED:],
            unsound=_newer(known.unsound, world.unsound),
            script_failures=tuple(failures[-REMEMBERED:]),
            stored=_stored(known.stored, world.known.stored if world.known is not None else ()),
        )
    return state if known == state.checkpoints else state.replace(checkpoints=known)


def _newer(ours: UnsoundSteps | None, theirs: UnsoundSteps | None) -> UnsoundSteps | None:
    """Each names the earlier ones, too."""
    if ours is None or theirs is None:
        return ours or theirs
    return theirs if theirs.generation > ours.generation else ours


def _stored(ours: dict[str, CheckpointRef], theirs: tuple[KnownStored, ...]) -> dict[str, CheckpointRef]:
    stored = dict(ours)
    for one in theirs:
        place = one.checkpoint.place
        if place not in stored or stored[place] < one.checkpoint:
            stored[place] = one.checkpoint
    return stored
