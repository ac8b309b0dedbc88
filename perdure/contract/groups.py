"""Messages between a job and its groups: a job sends its whole desired state, a group sends transitions of nodes."""

from __future__ import annotations

from pydantic import Field

from perdure.contract.base import Message
from perdure.contract.checkpoints import Commit, HoldRequest
from perdure.contract.transitions import AnyTransition
from perdure.contract.views import NodeView
from perdure.contract.worlds import RoleAddresses, World

__all__ = [
    "Adopt",
    "DesiredNode",
    "GroupDesire",
    "GroupTransitions",
]


class GroupTransitions(Message):
    """To the TrainingJob: the changes in one group since its last message."""

    uid: str
    """The job run's uid: a later job of the same name ignores the groups of an earlier one."""
    role: str | None = None
    """The role of the group's nodes; None for the job's only one."""
    group: int
    sequence: int
    """Grows with each message, including a message that repeats an undelivered one."""
    before: int | None = None
    """The number of this group's transitions before the first of these; None from a group that does not count them."""
    runs: tuple[str, ...] = ()
    """The group's runs that may have sent the message before this one, and at last the run that sends this one. The
    message before came from none of them if the group was reset since: it then counts from an earlier moment."""
    begins: bool = False
    """The group was reset, or may have been: it may lack the newest desired state."""
    transitions: tuple[AnyTransition, ...] = ()
    adopted: tuple[NodeView, ...] | None = None
    """The whole table, for a job that was reset or replaced: the answer to `adopt`, or to a desired state that was
    declined."""
    declined: bool = False
    """The desired state of which this is the answer was not taken: it came from a run of the job that does not follow
    the run that the group knows. The job was reset, and does not know what became of its nodes since."""
    world: World | None = None
    """With `adopted`: the newest world that the group was sent, without its members. It names saved states that are not
    loaded, which a job that was reset may have forgotten."""
    wound_down: bool = False
    """The group has deleted all its nodes and closes."""
    ownership_epoch: str = ""
    """Identifies the start or adoption of the group that this message follows. A job that was reset receives its
    earlier run's signals again, and recognizes them as stale by it."""


class DesiredNode(Message):
    incarnation: int
    token: str = Field(repr=False)
    avoids: tuple[str, ...] = ()
    """Machines that the node should avoid."""
    command_restarts: int = 0
    """The number of restarts of its command between two worlds that the job has requested."""
    released: bool = False
    """It is being ended from outside, and need not wait for a checkpoint any longer."""
    check_runs: int = 0
    """The number of runs of its checks that the job has requested, where the first one is not enough."""
    cpu: str | None = None
    """Processors that it requests, as a quantity; None for `resources.cpu` of the specification."""
    memory: int | None = None
    """Bytes of memory that it requests; None for `resources.memory` of the specification."""


class GroupDesire(Message):
    """To a NodeGroup: its whole desired state. A later one replaces an earlier one."""

    version: int
    """Only ever grows; the group ignores an older desired state that arrives late."""
    run: str = ""
    """The run ID of the job's run that sends it."""
    continued_run: str = ""
    """The run that it continues as new. A reset run continues the same one as the run in whose place it is: groups
    recognize it by that."""
    nodes: dict[int, DesiredNode]
    world: World | None = None
    """The current world, with the members that the group keeps."""
    undisturbed: bool = False
    """No fault of the world is known, so a node that joins must not break it."""
    inquiry: int = 0
    """Grows whenever the job asks whether members that have not reported steps have entered the world. The group then
    sends them the world again."""
    nodes_min: int | None = None
    """The minimum number of nodes that the job trains with."""
    complete_generation: int = 0
    """Every rank of the world has finished this generation: torchrun may leave its exit barrier."""
    stages_complete: int = 0
    """The number of the command's torchruns that the job has finished."""
    commit: Commit | None = None
    """The newest checkpoint that is complete, until it is committed."""
    checkpoint_request: int = 0
    """The newest request for a checkpoint that none has answered; 0 for none."""
    hold: HoldRequest | None = None
    """The newest request to have the ranks of the world wait at a step; None once they need not."""
    roles: dict[str, RoleAddresses] = Field(default={})
    """All roles of a job that has several, by name; empty where they are packed."""
    packed_roles: str = ""
    """The same as `pack_roles` returns it, where they are large."""
    wind_down: bool = False
    """Delete everything and close."""
    reason: str = ""
    """Shown in the Temporal UI on what this desire causes."""


class Adopt(Message):
    """To a NodeGroup that already runs: a job that was reset, or that took the place of an earlier one, adopts it."""

    ownership_epoch: str = ""
    """The group repeats it in every `transitions` signal from now on."""
