"""Commands to agents: arguments and answers of activities on the node's own task queue, including the lease."""

from __future__ import annotations

from pydantic import Field

from perdure.contract.base import Message
from perdure.contract.identity import NodeCredentials
from perdure.spec.durations import Duration

__all__ = [
    "ApplyWorld",
    "CheckConnection",
    "CommandAnswer",
    "CompleteGeneration",
    "CopyHolder",
    "HoldCopies",
    "LeaseRequest",
    "ReleaseNode",
    "RestartCommand",
    "StopNode",
]


class LeaseRequest(Message):
    """Argument of `hold_lease`, which returns only when cancelled or superseded."""

    node: NodeCredentials
    epoch: int
    heartbeat: Duration


class ApplyWorld(Message):
    """Argument of `apply_world`: below 500 bytes, beside what is distrusted. The command must run for this generation:
    the agent starts it if it does not run, and restarts it if it runs in an older generation."""

    node: NodeCredentials
    generation: int
    nodes: int
    group_rank: int
    base_rank: int
    world_size: int
    store_address: str
    store_port: int
    store_host: bool
    """This node hosts the generation's store."""
    stage: int | None = None
    """The torchrun of the command that the world is for, counted from 0."""
    restart_command: bool = False
    """The agent restarts the command even if it runs, unless the command did enter the previous world after all."""
    distrusted_checkpoints: tuple[str, ...] = ()
    """Folders in the job's storage that this world's ranks do not load."""
    first_step: Duration | None = None
    """As in `World`."""


class CommandAnswer(Message):
    accepted: bool
    generation: int = 0
    """The newest one that the agent knows."""
    entered: int | None = None
    """The newest one that the node has entered."""
    preparing: bool = False
    """The command runs, and has not started its torchrun yet."""
    detail: str = ""


class CheckConnection(Message):
    """Argument of `check_connection`, which fails while no machine answers this node at that address."""

    node: NodeCredentials
    address: str
    port: int


class CompleteGeneration(Message):
    """Argument of `complete_generation`."""

    node: NodeCredentials
    generation: int
    stages_complete: int = 0
    """The number of the command's torchruns that the job has finished, including this generation's."""


class ReleaseNode(Message):
    """Argument of `release_node`: a node that is being ended from outside need not wait for a checkpoint any longer."""

    node: NodeCredentials


class RestartCommand(Message):
    """Argument of `restart_command`: start a command that ended between two worlds again on its node."""

    node: NodeCredentials
    number: int
    """Counts the requests to one incarnation: the agent ignores a number that it has already carried out."""


class CopyHolder(Message):
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
        """Distinguishes the place of its copies from all others."""
        return f"{self.rank}/{self.incarnation}/{self.folder}"

    @property
    def address_key(self) -> str:
        """The same, with where its agent is reached, which another one of the node may not be."""
        return f"{self.place} {self.address}:{self.port}"


class HoldCopies(Message):
    """Argument of `hold_copies`: this node's copies are kept by that one."""

    node: NodeCredentials
    holder: CopyHolder


class StopNode(Message):
    """Argument of `stop_node`: end the command and exit; sent to an incarnation that is no longer desired."""

    node: NodeCredentials
    grace: Duration
    reason: str
