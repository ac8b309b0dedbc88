"""Snapshots in memory for scripts that call `torch.distributed.checkpoint` (DCP) themselves.

    from torch.distributed import checkpoint as dcp
    from perdure_training.checkpoint import dcp_writer

    memory = dcp_writer()
    if memory.step is not None:
        dcp.load(state, storage_reader=memory.reader())
    ...
    dcp.save(state, storage_writer=memory, checkpoint_id=f"step-{step}")

Each rank keeps all that its own state has, also what DCP would write only once for all ranks: it then loads without
reading from others. `Checkpointer` does with one call what this does with DCP's planning, which takes several messages
between all ranks for each save.
"""

from __future__ import annotations

import io
import os
import re
from dataclasses import replace
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from perdure_training.checkpoint.checkpointer import Checkpointer

_NUMBER = re.compile(r"\d+")

_Contents = dict[tuple[str, tuple[int, ...]], torch.Tensor | bytes]
"""Tensors and encoded values, by name and by offset within the whole tensor."""


class MemoryWriter(StorageWriter):
    """Writes what `dcp.save` saves into the memory of the node, in place of files."""

    def __init__(self, checkpointer: Checkpointer) -> None:
        """Restores, on every rank; `dcp_writer` creates the object.

        Args:
            checkpointer: One that has restored nothing yet.
        """
        self._checkpointer = checkpointer
        self._saved: dict[str, Any] = {"contents": None, "metadata": None}
        self.step = checkpointer.restore(self._saved)
        """The step in memory, or None if there is none: the script starts, or loads from disk."""
        self._last = self.step or 0
        self._next: int | None = None
        self._local: SavePlan | None = None

    def reader(self) -> MemoryReader:
        """Returns what `dcp.load` takes as `storage_reader`; it loads the step that was found when this object was
        created.

        Raises:
            RuntimeError: if there is none: `step` is None.
        """
        if self.step is None:
            raise RuntimeError("dcp_writer: no step is in memory; check its `step` before loading")
        return MemoryReader(self._saved["contents"], self._saved["metadata"])

    def flush(self) -> None:
        """Waits until the snapshots of this rank are complete. A script need not call it."""
        self._checkpointer.flush()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Takes the step's number: the last one in the ID, else the one after the last save."""
        found = _NUMBER.findall(str(checkpoint_id)) if checkpoint_id is not None else []
        self._next = int(found[-1]) if found else None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing: all ranks do the same."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Remembers what this rank has, before DCP decides which rank writes what."""
        # A planner that caches reports that in place of a plan that is the last one again.
        if self._local is None or getattr(plan, "usable", True):
            self._local = plan
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Changes nothing."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copies this rank's whole state into memory."""
        assert self._local is not None, "DCP calls prepare_local_plan first"
        contents: _Contents = {}
        for item in self._local.items:
            data = planner.resolve_data(item)
            encoded = item.type is WriteItemType.BYTE_IO
            contents[_key(item.index)] = data.getvalue() if isinstance(data, io.BytesIO) and encoded else _tensor(data)
        _, metadata = create_default_global_save_plan([self._local])
        metadata = replace(metadata, planner_data=self._local.planner_data)
        step = self._last + 1 if self._next is None else self._next
        self._last = step
        self._checkpointer.save(step, {"contents": contents, "metadata": metadata})
        sizes = {key: len(one) if isinstance(one, bytes) else one.nbytes for key, one in contents.items()}
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, sizes[_key(item.index)], None) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Does nothing: each rank has the metadata of what it keeps."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns True: an ID is only read for its number."""
        return True


class MemoryReader(StorageReader):
    """Gives `dcp.load` the step that was in memory."""

    def __init__(self, contents: _Contents, metadata: Metadata) -> None:
        """Creates the object; `MemoryWriter.reader` does it."""
        self._contents = contents
        self._metadata = metadata

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing: there is one step."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the metadata of this rank's own part."""
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Changes nothing."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Changes nothing."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copies the contents into the state that is loaded."""
        for item in plan.items:
            content = self._contents[_key(item.storage_index)]
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(cast("bytes", content)))
                continue
            part = _tensor(content)
            for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                part = part.narrow(dimension, start, length)
            room = planner.resolve_tensor(item).detach()
            room.copy_(part)
            planner.commit_tensor(item, room)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns True."""
        return True


def dcp_writer(
    *, replicated: bool = False, copies: int | None = None, every: int = 1, name: str = "dcp"
) -> MemoryWriter:
    """Finds the newest step in memory, and returns what `dcp.save` takes as `storage_writer`. Call it on every rank,
    once, after `init_process_group`. Outside of Perdure it keeps nothing.

    A world of the same size and device mesh loads what it wrote. Nothing of it is copied to the job's storage: scripts
    that use DCP write there themselves.

    Args:
        replicated: As `Checkpointer`'s.
        copies: As `Checkpointer`'s.
        every: Keeps each so many steps of those that are saved.
        name: Distinguishes several states of one script.

    Raises:
        ValueError: if an argument is out of range.
        RuntimeError: if several ranks have no process group yet.
    """
    return MemoryWriter(Checkpointer(every=every, replicated=replicated, copies=copies, name=name, storage=False))


def _key(index: MetadataIndex) -> tuple[str, tuple[int, ...]]:
    return index.fqn, tuple(index.offset or ())


def _tensor(value: Any) -> torch.Tensor:
    return cast("torch.Tensor", value)
