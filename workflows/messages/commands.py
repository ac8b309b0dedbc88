"""Commands to agents: activities on the node's own queue, the lease among them."""

from __future__ import annotations

from perdure.spec.durations import Duration
from workflows.messages.agents import NodeIdentity
from workflows.messages.base import Message


class LeaseRequest(Message):
    """Argument of `hold_lease`. Returns only when cancelled or superseded."""

    node: NodeIdentity
    epoch: int
    heartbeat: Duration
    signal_interval: Duration
    """How often the agent may send its heartbeat signal: the group's budget, shared."""


class ApplyWorld(Message):
    """Argument of `apply_world`: constant in size, below 500 bytes. The command must run for this generation: the
    agent has it started where it is not, and restarted where it is in an older one."""

    node: NodeIdentity
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
    """The torchrun of the command that the world is for, from 0."""
    restart_command: bool = False
    """The command is started again even where it runs, unless it has entered the world before this one after all."""


class CommandAnswer(Message):
    accepted: bool
    generation: int = 0
    """The newest one that the agent knows."""
    entered: int | None = None
    """The newest one that the node has entered."""
    preparing: bool = False
    """The command works, and has not come to its torchrun yet."""
    detail: str = ""


class CheckConnection(Message):
    """Argument of `check_connection`, which fails while no machine answers this node at that address."""

    node: NodeIdentity
    address: str
    port: int


class CompleteGeneration(Message):
    """Argument of `complete_generation`."""

    node: NodeIdentity
    generation: int
    stages_complete: int = 0
    """How many torchruns of the command the job has finished by then."""


class RestartCommand(Message):
    """Argument of `restart_command`: the command has ended between two worlds, and is started again on its node."""

    node: NodeIdentity
    number: int
    """Counts per incarnation: what was followed once is not followed again."""


class StopNode(Message):
    """Argument of `stop_node`: end the command and leave; sent to an incarnation that is no longer desired."""

    node: NodeIdentity
    grace: Duration
    reason: str
