"""Distrusts a stored checkpoint after whose restore the job failed again before it had passed the failing step.

Its bytes may be as they were stored and its content bad nevertheless: a replica that was corrupt when it was saved, a
loss that turns NaN some steps after each load. So the next restore takes an older one, and the incident names it. Only
failures of the ranks themselves count; the loss of a machine says nothing about a state. Snapshots in memory are
distrusted by the ranks themselves, which are told the worlds that such failures ended (docs/checkpoints.md).

A state from which a loss followed that was not a number is not loaded, either, if the job goes back for that.

How far a world came is known where the script reports its steps. Where they are counted, a number means something only
beside that of an earlier world which loaded the same checkpoint.
"""

from __future__ import annotations

from datetime import datetime

from perdure.base.words import count
from perdure.contract import (
    CheckpointRef,
    Evidence,
    EvidenceSource,
    FailureClass,
    Progress,
    ProgressSource,
    Restore,
    RollBack,
    StoredCheckpoint,
    UnsoundSteps,
)
from perdure.workflows.policy.behavior import Behavior
from perdure.workflows.policy.diagnosis.failures import NEED_PROGRESS, USERS_OWN
from perdure.workflows.policy.record import incidents
from perdure.workflows.policy.state.checkpoint import LoadedCheckpoint
from perdure.workflows.policy.state.job import RoleInJob

REMEMBERED = 16
"""Distrusted checkpoints that are named to the nodes, more than a job has in its storage; and failed worlds, of which
few count for one snapshot."""
_COUNTED_OTHERWISE = 64
"""Checkpoints of which the step of their losses is remembered, where the script counts them otherwise."""


def judge(state: RoleInJob, failure: FailureClass | None, now: datetime) -> RoleInJob:
    """Records how far the world came that a failure ended, and distrusts the checkpoint from which it continued."""
    if failure in NEED_PROGRESS:
        failures = (*state.checkpoints.script_failures, state.generation)[-REMEMBERED:]
        state = state.replace(checkpoints=state.checkpoints.replace(script_failures=failures))
    progress, known = state.progress, state.checkpoints
    if failure not in USERS_OWN or failure is FailureClass.NUMERIC or progress is None:
        return state
    loaded = known.loaded
    reason = _reason(state, loaded, progress) if loaded is not None else ""
    reported = progress.source is ProgressSource.REPORTED
    known = known.replace(failed_at=max(known.failed_at, progress.step) if reported else known.failed_at)
    if loaded is not None and not reported:
        known = known.replace(loaded=loaded.replace(failed_after=progress.generation_steps))
    state = state.replace(checkpoints=known)
    if loaded is None or not reason or loaded.checkpoint in known.distrusted:
        return state
    distrusted = (*known.distrusted, loaded.checkpoint)[-REMEMBERED:]
    text = (
        f"the checkpoint of step {loaded.checkpoint.step:,} in storage is not loaded again, an older one is: {reason}"
    )
    state = state.replace(checkpoints=known.replace(distrusted=distrusted, loaded=None))
    return incidents.add_evidence(state, Evidence(time=now, source=EvidenceSource.AGENT, text=text), now=now)


def distrust_unsound(state: RoleInJob, back: RollBack) -> RoleInJob:
    """Keeps later worlds from what the worlds so far have saved after a step; what later ones save is new, and what an
    earlier decision kept them from stays so."""
    before = state.checkpoints.unsound
    earlier: list[UnsoundSteps] = []
    if before is not None and state.behavior >= Behavior.RELEASE_0_4:
        # One decision may be made again, as for a node that is lost meanwhile.
        earlier = [one for one in before.all if one.generation < state.generation or one.after < back.after]
    unsound = UnsoundSteps(
        generation=state.generation,
        after=back.after,
        found_at=back.found_at,
        earlier=tuple(one.replace(earlier=()) for one in earlier[:REMEMBERED]),
    )
    state = state.replace(checkpoints=state.checkpoints.replace(unsound=unsound))
    # Nodes know a checkpoint in storage by its folder only, which names the step that was saved.
    known = state.checkpoints
    otherwise = (CheckpointRef.parse(folder) for folder in known.reported_of)
    new = [one for one in otherwise if is_unsound(state, one) and one not in known.distrusted]
    return state.replace(checkpoints=known.replace(distrusted=(*known.distrusted, *new)[-REMEMBERED:]))


def is_unsound(state: RoleInJob, checkpoint: CheckpointRef) -> bool:
    """Whether a checkpoint of this run is one that the job went back from."""
    known = state.checkpoints
    step = max(checkpoint.step, known.reported_of.get(checkpoint.folder, -1))
    return known.unsound is not None and known.unsound.has(generation=checkpoint.generation, step=step)


def note_reported(state: RoleInJob, stored: StoredCheckpoint) -> RoleInJob:
    """Remembers at which step of its losses a checkpoint was saved, where the script counts it otherwise."""
    if stored.reported is None or stored.reported <= stored.checkpoint.step:
        return state
    known, folder = state.checkpoints, stored.checkpoint.folder
    others = {name: step for name, step in known.reported_of.items() if name != folder}
    reported = max(stored.reported, known.reported_of.get(folder, 0))
    newest = dict([*others.items(), (folder, reported)][-_COUNTED_OTHERWISE:])
    return state.replace(checkpoints=known.replace(reported_of=newest))


def reported_before(state: RoleInJob, restored: Restore) -> int:
    """The newest step whose loss was reported before a restored state was saved, where the script counts what it saves
    otherwise; below 0 where it counts both the same."""
    if restored.reported is not None or restored.checkpoint is None:
        return -1 if restored.reported is None else restored.reported
    return state.checkpoints.reported_of.get(restored.checkpoint.folder, -1)


def load(state: RoleInJob, checkpoint: CheckpointRef) -> RoleInJob:
    """Records that the world continues from a stored checkpoint."""
    known = state.checkpoints
    if known.loaded is not None and known.loaded.checkpoint == checkpoint:
        return state
    return state.replace(checkpoints=known.replace(loaded=LoadedCheckpoint(checkpoint=checkpoint)))


def _reason(state: RoleInJob, loaded: LoadedCheckpoint, progress: Progress) -> str:
    if progress.diverged:
        return f"the loss was not a finite number at step {progress.step:,} after it was loaded"
    if progress.source is ProgressSource.REPORTED:
        if 0 <= progress.step <= state.checkpoints.failed_at:
            failed_at = state.checkpoints.failed_at
            return f"the job failed again at step {progress.step:,}, and had failed at step {failed_at:,} before"
        return ""
    if loaded.failed_after is not None and progress.generation_steps <= loaded.failed_after:
        steps = count(progress.generation_steps, "step")
        return f"the job failed {steps} after it was loaded, and no later the time before"
    return ""
