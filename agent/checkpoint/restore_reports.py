"""Reads what rank 0 reports of a restore. Ranks run the code of users: nothing but numbers and known words passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perdure.agent.checkpoint.connections import Json
from perdure.agent.checkpoint.names import check_place
from perdure.agent.outbox import envelope
from perdure.contract.agents import LARGEST_NUMBER, SnapshotUse
from perdure.contract.checkpoints import (
    MOST_FINDINGS,
    CheckpointRef,
    CheckpointRestored,
    CheckpointStored,
    Lookup,
    MemoryFinding,
    MemoryOrigin,
    MemoryProblem,
    Restore,
    RestoreSource,
    StorageFinding,
    StoredCheckpoint,
)
from perdure.contract.identity import NodeCredentials

_NAMED = 8
"""Steps that are reported of one kind."""


def read_report(node: NodeCredentials, request: Json, *, generation: int) -> CheckpointRestored:
    """Reads the report of a restore.

    Raises:
        ValueError: if it is none.
    """
    memory: Sequence[Json] = request.get("memory") or ()
    restored = Restore(
        step=read_number(request["step"]),
        source=RestoreSource(str(request["source"]).upper()),
        checkpoint=CheckpointRef.parse(str(request["folder"])) if request.get("folder") else None,
        again=None if request.get("again") is None else max(read_number(request["again"]), 0),
        distrusted=_steps(request.get("distrusted")),
        unusable=tuple(str(damage) for damage in request.get("unusable") or ()),
        memory=tuple(_read_finding(one) for one in memory[:MOST_FINDINGS]),
        refused=str(request["refused"]) if request["request"] == "refused" else "",
        of_ranks=max(read_number(request["ranks"]), 1) if request["request"] == "refused" else None,
        place=check_place(str(request.get("place") or "")),
        lookup=_read_lookup(request["lookup"]) if request.get("lookup") else None,
        waits=bool(request.get("waits")),
        stops=bool(request.get("stops")),
        apart=str(request.get("apart") or ""),
        reported=None if request.get("reported") is None else read_number(request["reported"]),
    )
    return CheckpointRestored(**envelope(node), generation=generation, restored=restored)


def read_held(node: NodeCredentials, request: Json) -> CheckpointStored:
    """Reads the report that all ranks wait at a step in memory, or why it would be lost.

    Raises:
        ValueError: if it is none.
    """
    checkpoint = CheckpointRef(
        step=max(read_number(request["step"]), 0), generation=read_number(request["generation"]), run=node.uid
    )
    stored = StoredCheckpoint(checkpoint=checkpoint, answers=read_number(request["number"]), in_memory=True)
    return CheckpointStored(**envelope(node), stored=stored, problem=str(request.get("problem") or ""))


def read_use(request: Json) -> SnapshotUse:
    """Reads how a checkpointer keeps its state in memory.

    Raises:
        ValueError: if that is not said.
    """
    return SnapshotUse(replicated=bool(request.get("replicated")), copies=max(read_number(request["copies"]), 0))


def read_number(value: Any) -> int:
    """Reads a whole number that a rank has sent.

    Raises:
        ValueError: if it is none, or larger than messages carry.
    """
    number = int(value)
    if abs(number) > LARGEST_NUMBER:
        raise ValueError("the number is too large")
    return number


def _read_finding(found: Json) -> MemoryFinding:
    return MemoryFinding(
        rank=read_number(found["rank"]),
        node=None if found.get("node") is None else read_number(found["node"]),
        problem=MemoryProblem(str(found["problem"]).upper()),
        steps=_steps(found.get("steps")),
        origin=MemoryOrigin(str(found["origin"]).upper()) if found.get("origin") else None,
    )


def _read_lookup(found: Json) -> Lookup:
    def step(name: str) -> int | None:
        return None if found.get(name) is None else read_number(found[name])

    return Lookup(
        stored=step("stored"),
        complete=step("complete"),
        in_memory=step("in_memory"),
        seen_in_memory=step("seen_in_memory"),
        storage=StorageFinding(str(found.get("storage")).upper()),
        in_storage=step("in_storage"),
        problem=str(found.get("problem") or ""),
    )


def _steps(found: Any) -> tuple[int, ...]:
    steps: Sequence[Any] = found or ()
    return tuple(read_number(step) for step in steps[:_NAMED])
