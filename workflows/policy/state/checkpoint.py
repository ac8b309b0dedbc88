"""What a job knows of its checkpoints in storage: see `perdure.workflows.policy.checkpoints.commits`."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, cast

from pydantic import Field, model_validator

from perdure.contract import (
    CheckpointRef,
    Commit,
    HoldRequest,
    Lookup,
    Message,
    RestoreSource,
    StoredCheckpoint,
    UnsoundSteps,
)
from perdure.contract.base import ShortText


class StoredParts(StoredCheckpoint):
    """A checkpoint of which some nodes have reported that their parts are durable."""

    nodes: tuple[int, ...] = ()
    """The nodes (slots) that have reported."""


class DurableCheckpoint(StoredCheckpoint):
    """A checkpoint that was committed."""

    committed_at: datetime


class LoadedCheckpoint(Message):
    """The stored checkpoint from which the training continued last."""

    checkpoint: CheckpointRef
    failed_after: int | None = None
    """The number of counted steps after which the world failed that loaded it before; None for none."""


class BoundState(Message):
    """A state that only a world of one size can load: see `perdure.workflows.policy.checkpoints.other_size`."""

    step: int
    ranks: int
    """The ranks of the world that saved it."""
    nodes: int | None = None
    """The nodes that have as many ranks; None where no number of them has."""
    problem: ShortText = ""
    """Which of its values cannot be split anew."""


class HeldStep(Message):
    """The answer to a request to wait at a step: see `perdure.workflows.policy.checkpoints.holds`."""

    number: int
    """The request's."""
    step: int
    """The step that all ranks have saved, and at which they wait."""
    problem: ShortText = ""
    """Why it would be lost, so that they train on; empty where it is safe."""
    until: datetime | None = None
    """They wait until then, and train on where they are not ended; None in the state of an earlier release."""


class AwaitedState(Message):
    """A newer state than the ranks of a world can load, for which they wait: see
    `perdure.workflows.policy.checkpoints.state_loss`."""

    generation: int
    since: datetime
    entry: int = 0
    """The number of the observation that shows it."""
    lookup: Lookup
    """What they have found."""
    step: int | None = None
    """The step in memory that they would continue with; None for none."""
    nodes: int = 0
    """The nodes of the last world that trained."""
    excused: timedelta = timedelta()
    """The time for which the wait lasts longer, as it ended while no worker could decide."""


class CheckpointState(Message):
    """What is known of the job's checkpoints in storage: see `perdure.workflows.policy.checkpoints.commits`."""

    parts_of: dict[str, StoredParts] = Field(default={})
    """The checkpoint that is being stored, by its place: each checkpointer of a script has its own."""
    commit: Commit | None = None
    """The decision that one is complete, until it is carried out."""
    next_commits: tuple[Commit, ...] = ()
    """Those of other places that follow it: a node carries one out at a time."""
    durable: DurableCheckpoint | None = None
    """The newest one."""
    requests: int = 0
    """The number of the newest request for a checkpoint."""
    given: int = 0
    """A number that no request of the job has been above before it was reset, be it for a checkpoint or to wait at a
    step: it may have forgotten some. 0 where it was not reset."""
    answered: int = 0
    """The newest of these requests that a durable checkpoint answers."""
    answers_of: dict[str, int] = Field(default={})
    """The newest request that the last complete checkpoint of each place answers; the place of the newest one last."""
    answers_in: int = 0
    """The generation of these checkpoints. What older ones have answered alone counts no more."""
    problem: ShortText = ""
    """Why the last one could not be stored; empty since one was."""
    problem_since: datetime | None = None
    restored_step: int | None = None
    restored_from: RestoreSource | None = None
    restored_generation: int = 0
    """The newest generation that reported with which step it continued."""
    restored_again: int | None = None
    loaded: LoadedCheckpoint | None = None
    failed_at: int = -1
    """The highest reported step at which the job failed by itself."""
    script_failures: tuple[int, ...] = ()
    """The newest generations that the script's own failures have ended."""
    distrusted: tuple[CheckpointRef, ...] = ()
    """Those that are not loaded any more: see `perdure.workflows.policy.checkpoints.trust`."""
    reported_of: dict[str, int] = Field(default={})
    """The newest step whose loss was reported before a checkpoint was saved, by its folder: of the newest ones of a
    script that counts what it saves otherwise than its losses."""
    unsound: UnsoundSteps | None = None
    """Those that are not loaded because the job went back from a loss that was not a number, or from a wrong result."""
    bound: BoundState | None = None
    """The newest state, where only a world of one size can load it; None where any size can, or none is known."""
    hold: HoldRequest | None = None
    """The newest request to have the ranks wait at a step."""
    hold_over: int = 0
    """The number of the newest request whose change was not made."""
    held: HeldStep | None = None
    """The newest answer to one."""
    inherited: tuple[CheckpointRef, ...] = ()
    """The newest one of another run from which this run has continued, for each place in the storage."""
    kept_before: int = 0
    """As in `Commit`, of all places."""
    kept_of: dict[str, int] = Field(default={})
    """The same of single places."""
    stored: dict[str, CheckpointRef] = Field(default={})
    """The newest checkpoint that is known to be in the storage, by its place: of this run, or the one of another run
    from which it continued."""
    places: tuple[str, ...] = ()
    """The places of checkpointers of the script, each of which has a state of its own."""
    nodes: int = 0
    """The nodes of the last world whose ranks said with what they continue."""
    awaited: AwaitedState | None = None
    """What the ranks of the present world wait for, before they continue."""
    gave_up: int | None = None
    """The newest step that is not waited for any longer, until a world has continued; None where none was given up."""
    resizes_to_older: bool = False
    """A user takes an older state in a world of another number of nodes than `nodes`, until there is one."""
    older_because: ShortText = ""
    """Why the ranks are to be restarted, to continue with what they have; empty where they are not."""

    @model_validator(mode="before")
    @classmethod
    def _has_parts_by_place(cls, data: Any) -> Any:
        """Reads the state of a run under release 0.3, which stored the checkpoints of one place at a time."""
        if isinstance(data, dict) and (parts := cast("dict[str, Any]", data).get("parts")):
            place: str = parts["checkpoint"].get("place", "")
            return {"parts_of": {place: parts}, **data}
        return cast("Any", data)
