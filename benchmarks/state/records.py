"""The result of one trial of `make bench-state`, read from the ranks' own logs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict

from benchmarks.recovery.steps import Step, WorldStart, passed_at

from .lacking import bytes_lacked

Loss = tuple[int, int, int]
"""A step, the rank, and the size of its world."""


class Way(StrEnum):
    """How the state outlives a world."""

    MEMORY = "memory"
    """Snapshots, with a copy in another node's memory."""
    STORAGE = "storage"
    """Snapshots without copies, and checkpoints in the job's storage: a folder on the local disk."""
    DCP = "dcp"
    """`torch.distributed.checkpoint` alone, into a folder on the local disk, in a job of Perdure."""

    @property
    def title(self) -> str:
        return {
            Way.MEMORY: "memory",
            Way.STORAGE: "Perdure's storage",
            Way.DCP: "dcp.save and load",
        }[self]


class Record(BaseModel):
    model_config = ConfigDict(frozen=True)


class Moved(Record):
    """The bytes that a rank of a new world received of other nodes' memory."""

    rank: int
    lacked: int
    """Bytes of its part that its node did not have."""
    received: int
    """Bytes that it has received from other nodes."""


class Change(Record):
    """A world of another size that followed."""

    former: int
    size: int
    again: float
    """Seconds until all its ranks had made a step: from the kill, or from the last step of the world before."""
    new: float
    """... a step that the world before had not made."""
    lost: int
    """Steps that were made again."""
    first_step: int
    moved: tuple[Moved, ...] = ()
    """Empty where the state came from a disk."""


class TrialRecord(Record):
    """One job whose node is killed, and that grows again."""

    way: Way
    nodes: int
    megabytes: float
    number: int
    shrunk: Change | None = None
    grown: Change | None = None
    bitwise: bool | None = None
    """Whether all losses are those of an unbroken run; None if it was not compared."""
    error: str = ""


def newest_common_step(steps: Iterable[Step], pids: Collection[int]) -> int:
    """The newest step that all these ranks have made; 0 for none."""
    newest = dict.fromkeys(pids, 0)
    for made in steps:
        if made.pid in newest:
            newest[made.pid] = max(newest[made.pid], made.step)
    return min(newest.values(), default=0)


def change(
    steps: Sequence[Step],
    loads: Iterable[dict[str, Any]],
    *,
    former: WorldStart,
    world: WorldStart,
    since: float | None,
    parameters: Sequence[tuple[int, int]],
) -> Change | None:
    """Returns the cost of the change to a world; None if not all its ranks are beyond the world before yet.

    Args:
        steps: All that was made.
        loads: The ranks' reports of what they have loaded.
        former: The world before.
        world: The world that followed.
        since: When the former one was hit, in seconds since the epoch; None if it was not: its last step counts.
        parameters: Rows, and bytes of a row, of each.
    """
    pids, made = set(former.pids.values()), set(world.pids.values())
    before = [step for step in steps if step.pid in pids]
    last = max(step.step for step in before)
    passed = passed_at(steps, world, step=last)
    if passed is None:
        return None
    begin = since if since is not None else max(step.time for step in before)
    found = [load for load in loads if load["pid"] in made]
    return Change(
        former=len(former.pids),
        size=len(world.pids),
        again=world.time - begin,
        new=passed - begin,
        lost=max(last + 1 - world.first_step, 0),
        first_step=world.first_step,
        moved=tuple(moved for load in found if (moved := moved_by(load, len(former.pids), parameters)) is not None),
    )


def moved_by(load: dict[str, Any], former: int, parameters: Sequence[tuple[int, int]]) -> Moved | None:
    """The bytes that a rank received and lacked; None if its state was not in memory."""
    if load.get("source") != "peer":
        return None
    rank, world_size = load["rank"], load["world_size"]
    of_step = [entry for entry in load["here"] if entry[0] == load["loaded_step"] and entry[2] == former]
    newest = max((generation for _, generation, _, _ in of_step), default=0)
    here = [of_rank for _, generation, _, of_rank in of_step if generation == newest]
    lacked = bytes_lacked(parameters, rank=rank, world_size=world_size, former=former, here=here)
    return Moved(rank=rank, lacked=lacked, received=load["received_bytes"])


def parse_losses(text: str) -> dict[Loss, set[str]]:
    """The losses by step, rank and size of the world: several where a step was made again with another result."""
    found: dict[Loss, set[str]] = {}
    for line in text.splitlines():
        step, rank, world_size, loss = line.split()
        found.setdefault((int(step), int(rank), int(world_size)), set()).add(loss)
    return found


def differing(losses: dict[Loss, set[str]], unbroken: dict[Loss, set[str]]) -> list[Loss]:
    """The losses of the unbroken run that the other did not have, or with other bits."""
    return sorted(key for key, values in unbroken.items() if losses.get(key) != values)
