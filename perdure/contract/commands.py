"""Commands to agents: arguments and answers of activities on the node's own task queue, including the lease."""

from __future__ import annotations

from pydantic import Field

from perdure.contract.agents import PrintedLines
from perdure.contract.base import Message
from perdure.contract.checkpoints import CheckpointRef, Commit, HoldRequest
from perdure.contract.identity import NodeCredentials
from perdure.contract.worlds import RoleAddresses, World, unpack_roles
from perdure.spec.durations import Duration

__all__ = [
    "ApplyDesired",
    "CheckConnection",
    "CopyTarget",
    "LeaseRequest",
    "NodeDesired",
    "NodeReached",
    "StopRequest",
]


class LeaseRequest(Message):
    """Argument of `hold_lease`, which returns only when cancelled or superseded."""

    node: NodeCredentials
    epoch: int
    heartbeat: Duration


class StopRequest(Message):
    """The request to end a node's command for good, and its agent with it."""

    reason: str
    """The reason, for users."""
    grace: Duration
    """The time from SIGTERM to SIGKILL; a later request can only shorten it."""


class CopyTarget(Message):
    """The node that keeps copies of what another node's script has saved."""

    rank: int
    incarnation: int
    address: str
    port: int
    folder: str
    token: str = Field(repr=False)
    """What it asks for: `policy.copies.copies_token`."""

    @property
    def place(self) -> str:
        """Distinguishes the place of its copies from all others. Its agent may be reached elsewhere than before."""
        return f"{self.rank}/{self.incarnation}/{self.folder}"


class NodeDesired(Message):
    """Everything that a group desires of one node's agent. It is sent as a whole, and the agent acts on what differs
    from what it has reached: one that has missed some of them lacks nothing once it has the newest."""

    world: World | None = None
    """The newest world that the node is a member of, without the other members. The command must run for this
    generation: the agent starts it if it does not run, and restarts it if it runs in an older generation."""
    inquiry: int = 0
    """The newest question of the job whether the node has entered that world; the answer says it."""
    complete_generation: int = 0
    """The newest generation that every rank of the job has finished: torchrun may leave its exit barrier."""
    stages_complete: int = 0
    """The number of the command's torchruns that the job has finished; they need no world any more."""
    command_restarts: int = 0
    """The number of times that the command was to be started again on its node after it had ended between two
    worlds."""
    check_runs: int = 0
    """The number of runs of the checks of its machine that the job has requested."""
    checkpoint_request: int = 0
    """The newest request for a checkpoint, of which the node of rank 0 has its ranks make one; 0 for none."""
    hold: HoldRequest | None = None
    """The newest request to have the ranks of the world wait at a step; None once they need not."""
    commit: Commit | None = None
    """The checkpoint that this node is to commit: it tries again until its storage takes it."""
    copies: CopyTarget | None = None
    """The node that keeps the copies of what this node's script saves; None where there is none."""
    roles: dict[str, RoleAddresses] = Field(default={})
    """All roles of a job that has several, by name; empty where they are packed."""
    packed_roles: str = ""
    """The same as `pack_roles` returns it, where they are large and the agent can read that."""
    released: bool = False
    """A node that is being ended from outside need not wait for a checkpoint any longer."""
    stop: StopRequest | None = None
    """The incarnation is no longer desired: it ends its command, and exits."""

    @property
    def all_roles(self) -> dict[str, RoleAddresses]:
        """All roles of a job that has several, by name."""
        return unpack_roles(self.packed_roles) if self.packed_roles else self.roles


class ApplyDesired(Message):
    """Argument of `apply_desired`: below a kilobyte, beside checkpoints that are distrusted or inherited, and the
    addresses of other roles."""

    node: NodeCredentials
    version: int
    """Grows with each desired state that the node is sent; the agent ignores an older one that arrives late."""
    desired: NodeDesired


class NodeReached(Message):
    """What an agent has reached: its answer to `apply_desired`."""

    accepted: bool
    """The agent follows the desired state, its world included."""
    version: int = 0
    """The newest desired state that the agent knows. If it is newer than the one that it was sent, it has ignored
    that."""
    generation: int = 0
    """The newest one that the agent knows."""
    entered: int | None = None
    """The newest one that the node has entered."""
    preparing: bool = False
    """The command runs, and has not started its torchrun yet."""
    committed: CheckpointRef | None = None
    """The checkpoint that the node has committed last."""
    printed: PrintedLines | None = None
    """What the node has printed in the world that it leaves for a newer one, of a few nodes whose ranks had not
    failed."""
    detail: str = ""
    """Why the agent does not follow; where it does, what the node is doing."""


class CheckConnection(Message):
    """Argument of `check_connection`, which fails while no machine answers this node at that address."""

    node: NodeCredentials
    address: str
    port: int
