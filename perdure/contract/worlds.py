"""What a job and the agents of its nodes know alike of a world: the nodes that train together, and where roles are
reached. Apart from what only jobs and groups say to each other, which agents need not import."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from functools import lru_cache
from zlib import compress, decompress

from pydantic import ConfigDict, Field, TypeAdapter

from perdure.contract.base import Message
from perdure.contract.checkpoints import CheckpointRef
from perdure.contract.identity import Incarnation
from perdure.spec.durations import Duration

__all__ = [
    "KnownStates",
    "KnownStored",
    "Member",
    "RoleAddresses",
    "UnsoundSteps",
    "World",
    "pack_roles",
    "unpack_roles",
]


class Member(Message):
    incarnation: int
    """A node that takes a lost member's place is not a member before the next generation."""
    group_rank: int
    """The node's rank in the world: torch's GROUP_RANK. In a role that serves it is the slot, and there may be
    holes."""
    base_rank: int
    """The global rank of the node's first process."""
    processes: int
    restart_command: bool = False
    """Its command did not enter the last world; the agent starts it again for this one."""


class UnsoundSteps(Message):
    """Saved states that may not be sound: those that generations up to `generation` saved after the step `after`."""

    generation: int
    after: int
    found_at: int
    """The step whose loss was not a number; below 0 where the job went back for another reason."""
    earlier: tuple[UnsoundSteps, ...] = ()
    """Those from which the job went back before, the latest first; they have none themselves."""

    @property
    def all(self) -> tuple[UnsoundSteps, ...]:
        """These and the earlier ones."""
        return (self, *self.earlier)

    def has(self, *, generation: int, step: int) -> bool:
        """Whether a state that a generation saved at this step is one of them."""
        return any(generation <= one.generation and step > one.after for one in self.all)


class KnownStored(Message):
    """A checkpoint that the job knows to be in its storage."""

    checkpoint: CheckpointRef
    loads: bool = True
    """A world would load it: it is sound, and the job has not failed after its restore."""


class KnownStates(Message):
    """The saved states of which the job knew when it formed a world: its ranks do not begin below them unasked."""

    stored: tuple[KnownStored, ...] = ()
    """The newest checkpoint in the storage, of each place."""
    on_loss: str = "wait"
    """What the ranks do where a newer state existed than they can load: `recovery.on_state_loss`."""
    accepts_less: bool = False
    """A user has decided to continue without what is not there: a storage is not waited for."""
    may_return: bool = False
    """A node that took part in the world before is being replaced, or cannot be reached: what its memory lacks here may
    come back with it."""


class World(Message):
    """One generation: the nodes that train together. The same for all members, except for their own `Member`."""

    generation: int = Field(ge=1)
    members: dict[int, Member]
    """The members, by node rank (slot). A receiver is sent those that concern it."""
    nodes: int
    """The number of all members."""
    processes: int
    """The number of ranks of all members: torch's WORLD_SIZE."""
    store_address: str
    store_port: int
    store_rank: int
    """The node (slot) that hosts the store."""
    stage: int = 0
    """The torchrun of the command that the world is for, counted from 0."""
    first_step: Duration | None = None
    """The time that its ranks have to make their first step; None for no limit."""
    distrusted_checkpoints: tuple[CheckpointRef, ...] = ()
    """Those in the job's storage that its ranks do not load."""
    unsound: UnsoundSteps | None = None
    """The saved states, in memory and in storage, that its ranks do not load; None for none."""
    script_failures: tuple[int, ...] | None = None
    """The newest generations that the script's own failures have ended: they speak against what these have loaded from
    memory. None where an older release has formed the world."""
    known: KnownStates | None = None
    """The saved states of which the job knows; None where an older release has formed the world."""
    measurements: int = 0
    """How many measurements of their steps nodes report in any case; 0: only what changes."""
    pace_over: Duration | None = None
    """The time of steps over which its speed is measured and reported; None where the job does not ask for it."""
    keeps_processes: bool = False
    """Processes that run continue in it: each depends on no other."""

    def of(self, members: Mapping[int, Member]) -> World:
        """The world as those see it who need to know these members only."""
        return self.replace(members=dict(members))

    def member(self, node: Incarnation) -> Member | None:
        """The place of a node's incarnation in the world; None if it has none."""
        member = self.members.get(node.rank)
        return member if member is not None and member.incarnation == node.incarnation else None


class RoleAddresses(Message):
    """Where the nodes of a role are reached, as all roles of its job see it."""

    addresses: tuple[str, ...] = ()
    """The address of each node of its world, by slot, with the port where the role has one; empty where it is not
    known, and in a role that serves also for each slot that is not in its world."""
    generation: int = 0
    """Its newest world; 0 before the first one."""
    processes: int = 0
    """The ranks of that world."""
    ready: bool = False
    """All nodes of that world run in it, or answer."""
    completed: bool = False
    """Its commands have ended with 0."""
    serves: tuple[str, ...] = ()
    """The address at which each node that it is to have serves, by slot, known before the node starts; empty for a role
    without a port, and where addresses are not known in advance."""


_BY_ROLE = TypeAdapter(dict[str, RoleAddresses], config=ConfigDict(defer_build=True))

LARGEST_PLAIN_ROLES = 16 * 1024
"""Bytes of JSON up to which the roles of a job are sent as they are: of one or two hundred nodes, so that a whole group
is sent half of what a task may hold. A worker of an older release cannot read the compressed form."""


def pack_roles(roles: Mapping[str, RoleAddresses]) -> str:
    """Returns the roles of a job in compressed form where they are large; else nothing.

    Each node is sent the addresses of all nodes, and a group commands its nodes in one task, which the server refuses
    above 4 MB. Names of nodes differ by their numbers and shrink to a twentieth.
    """
    if not roles:
        return ""
    content = _BY_ROLE.dump_json(dict(roles))
    return b64encode(compress(content)).decode() if len(content) > LARGEST_PLAIN_ROLES else ""


@lru_cache(maxsize=8)
def unpack_roles(packed: str) -> dict[str, RoleAddresses]:
    """Returns what was given to `pack_roles`."""
    return _BY_ROLE.validate_json(decompress(b64decode(packed)))
