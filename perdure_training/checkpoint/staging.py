"""Lays out a training state as bytes: tensors as they are in memory, and a description of everything else.

Of a tensor that is split over ranks (DTensor) the rank's own part is laid out. It is put together again over the device
mesh of the new world, which the state that is restored already has.

The description is a pickle in which each tensor is a reference. A process that can write the memory folder can run
code in the ranks, as with every pickle; the folder belongs to the training's user, and no other user can open it.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from perdure_training.checkpoint.pinned import pin

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

Piece = Callable[[int, int], memoryview]
"""Returns bytes of a snapshot, by offset and number."""

_ALIGNMENT = 64
"""Bytes to which tensors are aligned."""


@dataclass(frozen=True)
class _Place:
    """Where a tensor's elements are within the bytes."""

    number: int
    """Tells tensors apart: an empty one begins where the next one does."""
    offset: int
    size: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Part:
    """A rank's part of a DTensor."""

    local: _Place
    mesh: tuple[tuple[int, ...], tuple[str, ...] | None]
    """Shape and names of the device mesh."""
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    coordinate: tuple[int, ...] | None = None
    """The rank's place in the mesh; empty if it is not in it, None in snapshots of earlier releases."""


class Layout:
    """The plan for one state: where each tensor goes, and the description with references to these places."""

    def __init__(self, state: object) -> None:
        """Plans the layout; copies nothing.

        Raises:
            pickle.PicklingError: if the state has an object that cannot be pickled.
        """
        self._tensors: list[tuple[torch.Tensor, _Place]] = []
        self._end = 0
        stream = io.BytesIO()
        _Describer(stream, self._place).dump(state)
        self.index = stream.getvalue()
        self.index_at = self._end
        self.size = self._end + len(self.index)

    def copy_into(self, room: memoryview) -> None:
        """Copies the state into `size` bytes. Tensors on accelerators are complete when it returns."""
        devices = {tensor.device for tensor, _ in self._tensors if tensor.is_cuda}
        if devices:
            pin(room)
        for tensor, place in self._tensors:
            if place.size:
                _elements(room[place.offset : place.offset + place.size], place).copy_(tensor, non_blocking=True)
        for device in devices:
            torch.cuda.synchronize(device)
        room[self.index_at : self.size] = self.index

    def _place(self, tensor: torch.Tensor) -> _Place:
        size = tensor.numel() * tensor.element_size()
        place = _Place(len(self._tensors), self._end, size, tensor.dtype, tuple(tensor.shape))
        self._tensors.append((tensor, place))
        self._end += -(-size // _ALIGNMENT) * _ALIGNMENT
        return place


def read_state(piece: Piece, *, index_at: int, size: int, meshes: Iterable[DeviceMesh] = ()) -> Any:
    """Reads a state back. Its tensors are views of the bytes, unless they are on an accelerator.

    Args:
        piece: Returns the bytes at an offset.
        index_at: Offset of the description.
        size: Number of all bytes.
        meshes: The device meshes of this world, over which DTensors are put together.

    Raises:
        KeyError: if a DTensor's mesh is none of them.
    """
    index = io.BytesIO(piece(index_at, size - index_at))
    return _Reader(index, piece, {_key(mesh): mesh for mesh in meshes}).load()


def meshes_of(state: object) -> list[DeviceMesh]:
    """Returns the device meshes of all DTensors in a state."""
    found: dict[Any, DeviceMesh] = {}
    _MeshFinder(found).dump(state)
    return list(found.values())


@dataclass(frozen=True)
class Parts:
    """A state whose split tensors have no content, and the content of this rank's parts."""

    state: Any
    """As it was saved. The parts of DTensors are on no device: the mesh's may have no memory left for them."""
    contents: dict[int, torch.Tensor]
    """The parts in main memory, by the `id` of their DTensor."""


def read_parts(content: memoryview, *, index_at: int, meshes: Iterable[DeviceMesh]) -> Parts:
    """Reads a state whose tensors stay where they are in memory.

    Args:
        content: The bytes.
        index_at: Offset of the description.
        meshes: The device meshes of the world that saved it.

    Raises:
        KeyError: if a DTensor's mesh is none of them.
    """
    contents: dict[int, torch.Tensor] = {}
    known = {_key(mesh): mesh for mesh in meshes}
    index = io.BytesIO(content[index_at:])
    state = _Reader(index, lambda start, size: content[start : start + size], known, parts=contents).load()
    return Parts(state, contents)


def read_former_parts(content: memoryview, *, index_at: int) -> Any:
    """Reads a state that a rank of a world which is over had saved: its split tensors are `FormerPart`s, and all
    tensors stay where they are in memory.

    Args:
        content: The bytes.
        index_at: Offset of the description.

    Raises:
        ValueError: if the place of a part in its tensor is not known.
    """
    return _FormerReader(io.BytesIO(content[index_at:]), lambda start, size: content[start : start + size], {}).load()


class _Describer(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, place: Any) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self._place = place
        self._known: dict[int, tuple[torch.Tensor, _Place]] = {}

    def persistent_id(self, obj: object) -> _Place | _Part | None:
        if not isinstance(obj, torch.Tensor):
            return None
        if is_split(obj):
            local = self.persistent_id(_local(obj))
            if not isinstance(local, _Place):
                raise ValueError(
                    f"a DTensor of {obj.dtype} has parts without content of their own: expected dense ones"
                )
            coordinate = tuple(obj.device_mesh.get_coordinate() or ())
            return _Part(local, _key(obj.device_mesh), obj.placements, obj.shape, obj.stride(), coordinate)
        tensor = obj.detach()
        if not is_dense(tensor):
            return None
        # By object, so that a tensor that occurs twice is one tensor again. It is kept alive, and its ID with it.
        known = self._known.get(id(obj))
        if known is None:
            known = self._known[id(obj)] = (obj, self._place(tensor))
        return known[1]


class Nowhere:
    """A file for pickles of which only the walk through the value counts."""

    def write(self, data: Any, /) -> int:
        return len(data)


class _MeshFinder(pickle.Pickler):
    """Walks a state without keeping anything of it but the meshes."""

    def __init__(self, found: dict[Any, DeviceMesh]) -> None:
        super().__init__(Nowhere(), protocol=pickle.HIGHEST_PROTOCOL)
        self._found = found

    def persistent_id(self, obj: object) -> int | None:
        if is_split(obj):
            self._found[_key(obj.device_mesh)] = obj.device_mesh
        return 0 if isinstance(obj, torch.Tensor) else None


class _Reader(pickle.Unpickler):
    def __init__(
        self,
        stream: io.BytesIO,
        piece: Piece,
        meshes: dict[Any, DeviceMesh],
        *,
        parts: dict[int, torch.Tensor] | None = None,
    ) -> None:
        super().__init__(stream)
        self._piece = piece
        self._meshes = meshes
        self._parts = parts
        self._known: dict[int, torch.Tensor] = {}

    def persistent_load(self, pid: _Place | _Part) -> torch.Tensor:
        if isinstance(pid, _Part):
            return self._split(pid, self.persistent_load(pid.local))
        if pid.number not in self._known:
            self._known[pid.number] = _elements(self._piece(pid.offset, pid.size), pid) if pid.size else _empty(pid)
        return self._known[pid.number]

    def _split(self, part: _Part, local: torch.Tensor) -> torch.Tensor:
        """Returns the split tensor of which this is a part."""
        mesh = self._meshes.get(part.mesh)
        if mesh is None:
            raise KeyError(
                f"the snapshot has DTensors on a device mesh {part.mesh}, and the state that is restored none"
            )
        from torch.distributed.tensor import DTensor

        placed = local.to(mesh.device_type) if self._parts is None else torch.empty_like(local, device="meta")
        whole = DTensor.from_local(placed, mesh, part.placements, run_check=False, shape=part.shape, stride=part.stride)
        if self._parts is not None:
            self._parts[id(whole)] = local
        return whole


class _FormerReader(_Reader):
    def _split(self, part: _Part, local: torch.Tensor) -> torch.Tensor:
        # Importing DTensor takes a while, which only a state that has one costs.
        from perdure_training.checkpoint.former_parts import FormerPart

        if part.coordinate is None:
            raise ValueError("the snapshot is of an earlier release, and does not say which part of a DTensor it has")
        return FormerPart.of(
            local,
            whole=part.shape,
            mesh_shape=part.mesh[0],
            coordinate=part.coordinate,
            placements=part.placements,
        )


def _elements(content: memoryview, place: _Place) -> torch.Tensor:
    return torch.frombuffer(content, dtype=place.dtype).reshape(place.shape)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's content is its elements: not so where it is sparse, quantized, or on no device."""
    return tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type != "meta"


def is_split(value: object) -> TypeGuard[DTensor]:
    # Only a script that has imported the module has such tensors; importing it takes a while.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _local(tensor: DTensor) -> torch.Tensor:
    # Not `to_local`, whose result is another object each time: a DTensor that occurs twice has one part.
    return tensor._local_tensor  # pyrefly: ignore[protected-access]


def _key(mesh: DeviceMesh) -> tuple[tuple[int, ...], tuple[str, ...] | None]:
    return tuple(mesh.shape), mesh.mesh_dim_names


def _empty(place: _Place) -> torch.Tensor:
    return torch.empty(place.shape, dtype=place.dtype)
