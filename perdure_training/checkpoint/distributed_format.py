"""The layout of `torch.distributed.checkpoint` (DCP): what each rank writes, and how a state is read back from it.

A rank's data file is planned and not written here: a list of places, most of them in the rank's snapshot, so that the
agent copies the file together without torch. The bytes are those that DCP's own writer makes, so `dcp.load` reads them
without Perdure.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from perdure_training.checkpoint.dictionary_types import Path, record_types, types_in
from perdure_training.checkpoint.differing import Digest, checksum_of, differing_names, of_rank, record_holders
from perdure_training.checkpoint.saved_structure import set_value
from perdure_training.checkpoint.staging import Parts, is_dense, is_split

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

METADATA = ".metadata"
"""The file that makes a folder a checkpoint."""

_VERSION = "1.0.0"
"""The version of the layout, as DCP's writer of torch 2.15 names it."""

_IN_PLACE = 4096
"""Bytes from which a tensor's content stays in the snapshot until the agent copies it; smaller ones are copied."""

_TYPES = "perdure_types"
"""Attribute of a rank's plan: what its dictionaries are."""

_LENGTH = struct.Struct("<Q")

ReadRange = Callable[[str, int, int], bytearray]
"""Returns bytes of a checkpoint's file: its name, the offset, the number."""


class RankPlanner(DefaultSavePlanner):
    """Plans the part of one rank; knows the content of split tensors, which have none on their mesh's device."""

    def __init__(self, contents: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self._contents = contents
        self._names: dict[str, str] = {}
        self.types: dict[Path, bytes] = {}
        """What its dictionaries are."""

    def create_local_plan(self) -> SavePlan:
        state = cast("dict[str, Any]", self.state_dict)
        if empty := [name for name, value in state.items() if _has_no_content(value)]:
            raise ValueError(f"{', '.join(empty[:8])}: tensors on the device meta have no content that could be stored")
        _check_parts(state)
        # Their content is in several tensors: they are stored as objects are, with a plan that knows no part of them.
        state |= {name: (value,) for name, value in state.items() if _is_object(value)}
        plan = super().create_local_plan()
        # It reaches rank 0 with the plan, which has no field for it.
        object.__setattr__(plan, _TYPES, self.types)
        return plan

    def digests(self, plan: SavePlan) -> dict[MetadataIndex, Digest]:
        """Returns what tells whether another rank has the same values as this one."""
        return {item.index: self._digest(item) for item in plan.items}

    def rename(self, names: Mapping[str, str]) -> None:
        """Takes names that are the rank's own, each with the name in the state."""
        self._names = dict(names)

    def lookup_object(self, index: MetadataIndex) -> Any:
        name = self._names.get(index.fqn, index.fqn)
        found = cast("dict[str, Any]", self.state_dict)[name]
        return self._contents[id(found)] if is_split(found) else super().lookup_object(replace(index, fqn=name))

    def _digest(self, item: WriteItem) -> Digest:
        tensor = item.tensor_data
        kind = (item.type, tensor.properties.dtype, tensor.size) if tensor is not None else (item.type,)
        checksum = checksum_of(self.lookup_object(item.index))
        return Digest(kind, checksum, is_split=item.type is WriteItemType.SHARD)


@dataclass(frozen=True)
class RankFile:
    """A rank's data file, not written yet."""

    name: str
    size: int
    recipe: bytes
    """Which bytes it has: the length of a JSON text, the text, and bytes that the snapshot does not have. The text
    lists
    pieces: whether they are in the snapshot, their offset (there, or after the text), and their number of bytes."""
    results: list[WriteResult]
    """The place of each item in the file, for the checkpoint's metadata."""


def planner_of(parts: Parts, *, rank: int, each_rank: frozenset[str] = frozenset()) -> RankPlanner:
    """Returns the planner of a rank's state.

    Args:
        parts: The state.
        rank: The rank.
        each_rank: Names of the state whose values differ between ranks, such as generators: of those, every rank's is
            stored, and of all others that are not split, one rank's.
    """
    planner = RankPlanner(parts.contents)
    state = apart(parts.state, rank=rank, each_rank=each_rank)
    planner.types = types_in(state)
    planner.set_up_planner(state, is_coordinator=rank == 0)
    return planner


def plan_together(
    planner: RankPlanner, plans: Sequence[tuple[SavePlan, Mapping[MetadataIndex, Digest]]]
) -> tuple[list[SavePlan], Metadata, frozenset[str]]:
    """Decides which rank stores what, as rank 0.

    Args:
        planner: The one of rank 0.
        plans: The plan of each rank with its digests.

    Returns:
        The plan of each rank, the checkpoint's metadata, and the names whose values differ between ranks, so that each
        rank stores its own.

    Raises:
        ValueError: if the plans do not belong together.
    """
    differ, split = differing_names([digests for _, digests in plans])
    if split:
        names = ", ".join(sorted(split)[:8])
        raise ValueError(f"{names}: ranks have other values in the same part of a DTensor; expected the same on each")
    size = len(plans)
    own = [of_rank(plan, differ, rank=rank, world_size=size) for rank, (plan, _) in enumerate(plans)]
    finals, metadata = planner.create_global_plan(own)
    record_holders(metadata, [digests for _, digests in plans])
    record_types(metadata, [getattr(plan, _TYPES, {}) for plan, _ in plans])
    return finals, metadata, frozenset(differ)


def names_that_differ(digests: Sequence[Mapping[MetadataIndex, Digest]]) -> set[str]:
    """Returns the names of values that differ between ranks, of those that are not split.

    Args:
        digests: Of each rank, by name and place.
    """
    return differing_names(digests)[0]


def apart(state: Mapping[str, Any], *, rank: int, each_rank: frozenset[str]) -> dict[str, Any]:
    """Puts values that differ between ranks under a name of the rank."""
    return {name: {f"rank-{rank}": value} if name in each_rank else value for name, value in state.items()}


def plan_file(plan: SavePlan, planner: RankPlanner, content: memoryview, *, rank: int) -> RankFile:
    """Plans a rank's data file.

    Args:
        plan: The items that this rank stores.
        planner: The planner of its state.
        content: The bytes of its snapshot, in which the state's tensors are.
        rank: The rank.
    """
    name = f"__{rank}_0.distcp"
    stream = _PlannedFile(content)
    results: list[WriteResult] = []
    for item in plan.items:
        begun = stream.tell()
        _write(item, planner.resolve_data(item), stream)
        length = stream.tell() - begun
        results.append(WriteResult(item.index, length, _StorageInfo(name, begun, length)))
    return RankFile(name=name, size=stream.tell(), recipe=stream.recipe(), results=results)


def metadata_file(metadata: Metadata, results: list[list[WriteResult]]) -> bytes:
    """Returns the content of a checkpoint's `.metadata`.

    Args:
        metadata: As the global plan has it.
        results: The places of all ranks' items.
    """
    metadata.storage_data = {one.index: one.storage_data for of_rank in results for one in of_rank}
    metadata.storage_meta = StorageMeta()
    if hasattr(metadata, "version"):
        metadata.version = _VERSION
    return pickle.dumps(metadata)


def read_metadata(content: bytes) -> Metadata:
    """Reads a checkpoint's `.metadata`, which the job's own ranks wrote, and which was verified."""
    return cast("Metadata", pickle.loads(content))


class _Planner(DefaultLoadPlanner):
    """Plans what a rank loads."""

    def __init__(self) -> None:
        # Otherwise names are made by other rules than those of the planner that saves, which leave out empty values.
        super().__init__(flatten_sharded_tensors=False)
        self._objects: set[str] = set()

    def create_local_plan(self) -> LoadPlan:
        state = cast("dict[str, Any]", self.state_dict)
        _check_parts(state)
        self._objects = {name for name, value in state.items() if _is_object(value)}
        state |= {name: (state[name],) for name in self._objects}
        saved = cast("Metadata", self.metadata).state_dict_metadata
        for name, value in state.items():
            found = saved.get(name)
            if isinstance(value, torch.Tensor) and found is not None:
                kind = found.properties.dtype if isinstance(found, TensorStorageMetadata) else "an object"
                if kind != value.dtype:
                    raise ValueError(f"{name} is {kind} in the checkpoint, and {value.dtype} in the state")
        return super().create_local_plan()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        content = torch.load(value, weights_only=False)
        if name in self._objects:
            [content] = content
        # Not torch's `set_element`, which puts a value with the text of its key beside the one whose key is a number.
        state = cast("dict[str, Any]", self.original_state_dict)
        set_value(state, self.mappings[name], content)


class Loading:
    """The plan to load a checkpoint into a state; nothing of the state is changed before `read`."""

    def __init__(self, target: dict[str, Any], metadata: Metadata) -> None:
        """Plans what is read.

        Args:
            target: The state, which may be split over another number of ranks than the one that was stored.
            metadata: The checkpoint's, with the names that the state has.
        """
        self._metadata = metadata
        self._planner = _Planner()
        self._planner.set_up_planner(target, metadata, is_coordinator=True)
        self.problem = ""
        """Why the checkpoint does not have the state: it lacks a part, or has it in another form; empty if it has."""
        try:
            [plan] = self._planner.create_global_plan([self._planner.create_local_plan()])
            self._plan = self._planner.finish_plan(plan)
        except (RuntimeError, ValueError) as error:
            self.problem = str(error)

    @property
    def names(self) -> Collection[str]:
        """The names of all values, as the checkpoint names them."""
        return cast("dict[str, Any]", self._planner.state_dict).keys()

    @property
    def first_names(self) -> set[str]:
        """The names in the state that have any content: an empty dictionary has no place in a checkpoint."""
        return {str(path[0]) for path in cast("dict[str, tuple[Any, ...]]", self._planner.mappings).values()}

    @property
    def items(self) -> Sequence[ReadItem]:
        """What is read: values, or parts of the tensors that were saved."""
        return self._plan.items

    def place(self, item: ReadItem) -> Any:
        """Where the value is of which an item is a part."""
        return self._metadata.storage_data[item.storage_index]

    def room(self, item: ReadItem) -> torch.Tensor:
        """The part of the state's tensor into which an item is copied."""
        return self._planner.resolve_tensor(item).detach()

    def put(self, item: ReadItem, content: io.BytesIO) -> None:
        """Takes a value that is no tensor."""
        self._planner.load_bytes(item, content)

    def read(self, read: ReadRange) -> None:
        """Loads the checkpoint: the tensors of the state are changed in place, other values are replaced."""
        for item in self.items:
            place: _StorageInfo = self.place(item)
            content = io.BytesIO(read(place.relative_path, place.offset, place.length))
            if is_object(item):
                self.put(item, content)
                continue
            tensor = torch.load(content, map_location="cpu", weights_only=True)
            self.room(item).copy_(narrowed(tensor, item.storage_offsets, item.lengths))


def is_object(item: ReadItem) -> bool:
    """Whether an item is a value that is no tensor."""
    return item.type is LoadItemType.BYTE_IO


def narrowed(tensor: torch.Tensor, start: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """Returns a part of a tensor, which shares its memory."""
    for dimension, (begin, length) in enumerate(zip(start, lengths, strict=True)):
        tensor = tensor.narrow(dimension, begin, length)
    return tensor


def names_in(metadata: Metadata) -> dict[str, set[str]]:
    """Returns the names of the state that a checkpoint has, each with the names in it."""
    names: dict[str, set[str]] = {}
    for path in cast("dict[str, tuple[Any, ...]]", metadata.planner_data).values():
        names.setdefault(str(path[0]), set()).update(map(str, path[1:2]))
    return names


def _check_parts(state: Mapping[str, Any]) -> None:
    """Checks that each part of a DTensor is the one that its placements say, by which it is stored and loaded.

    Raises:
        ValueError: if one is not.
    """
    split = {name: value for name, value in state.items() if is_split(value)}
    partial = [name for name, value in split.items() if any(one.is_partial() for one in value.placements)]
    if partial:
        names = ", ".join(partial[:8])
        raise ValueError(f"{names}: the parts of a DTensor are sums that are not added up; redistribute it before")
    for name, value in split.items():
        _check_is_one_piece(name, value)
    other = [name for name, value in split.items() if not _has_parts_of_its_placements(value)]
    if other:
        names = ", ".join(other[:8])
        raise ValueError(
            f"{names}: the parts of a DTensor have other sizes than its placements give them; expected those that"
            " distribute_tensor makes"
        )


def _check_is_one_piece(name: str, tensor: DTensor) -> None:
    # Importing DTensor takes a while, which only a state that has one costs.
    from perdure_training.checkpoint.former_parts import check_is_one_piece

    mesh = tensor.device_mesh
    if (coordinate := mesh.get_coordinate()) is not None:
        try:
            check_is_one_piece(tensor.shape, mesh_shape=mesh.shape, coordinate=coordinate, placements=tensor.placements)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error


def _has_parts_of_its_placements(tensor: DTensor) -> bool:
    if tensor.device_mesh.get_coordinate() is None:
        return True
    [chunk] = cast("list[ChunkStorageMetadata]", tensor.__create_chunk_list__())
    local = tensor.to_local()
    return local.shape == chunk.sizes or local.numel() == chunk.sizes.numel() == 0


def _is_object(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not is_split(value) and not is_dense(value)


def _has_no_content(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not is_split(value) and value.device.type == "meta"


def _write(item: WriteItem, data: torch.Tensor | io.BytesIO, stream: _PlannedFile) -> None:
    if item.type is WriteItemType.BYTE_IO:
        stream.write(cast("io.BytesIO", data).getbuffer())
        return
    tensor = cast("torch.Tensor", data).detach()
    assert tensor.device.type == "cpu", "snapshots are in main memory"
    if not tensor.is_contiguous() or tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    with stream.expecting(tensor):
        torch.save(tensor, cast("Any", stream))


class _PlannedFile:
    """A file to which nothing is written: it remembers where the bytes are, or the bytes themselves if they are few."""

    def __init__(self, content: memoryview) -> None:
        whole = torch.frombuffer(content, dtype=torch.uint8)
        self._first = whole.data_ptr()
        self._end = self._first + len(content)
        self._pieces: list[tuple[bool, int, int]] = []
        self._others = bytearray()
        self._size = 0
        self._expected: torch.Tensor | None = None

    @contextmanager
    def expecting(self, tensor: torch.Tensor) -> Generator[None]:
        """Makes the write of the tensor's content, within this context, a piece of the snapshot."""
        in_place = tensor.nbytes >= _IN_PLACE and self._first <= tensor.data_ptr() < self._end
        self._expected = tensor if in_place else None
        yield
        self._expected = None

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        expected = self._expected
        # What surrounds a tensor's content in its file is smaller than any content that is expected.
        if expected is not None and size == expected.nbytes:
            self._pieces.append((True, expected.data_ptr() - self._first, size))
            self._expected = None
        else:
            last = self._pieces[-1] if self._pieces else (True, 0, 0)
            if last[0]:
                self._pieces.append((False, len(self._others), size))
            else:
                self._pieces[-1] = (False, last[1], last[2] + size)
            self._others += data
        self._size += size
        return size

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        pass

    def recipe(self) -> bytes:
        text = json.dumps([[int(in_place), offset, size] for in_place, offset, size in self._pieces]).encode()
        return _LENGTH.pack(len(text)) + text + self._others
