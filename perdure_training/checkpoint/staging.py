"""Lays out a training state as bytes: tensors as they are in memory, and a description of everything else.

Of a tensor that is split over ranks (DTensor) the rank's own part is laid out. It is put together again over the device
mesh of the new world, which the state that is restored already has. Tensors of other types are laid out as the tensors
that they consist of, and are of these types again.

The description is a pickle in which each tensor is a number, by which `tensor_index` has its place. A process that can
write the memory folder can run code in the ranks, as with every pickle; the folder belongs to the training's user, and
no other user can open it.
"""

from __future__ import annotations

import functools
import io
import itertools
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch

from perdure_training.checkpoint.pinned import pin
from perdure_training.checkpoint.tensor_index import Part, Place, TensorIndex, read_index

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

_Place, _Part = Place, Part
"""The names in the pickles of earlier releases."""

Piece = Callable[[int, int], memoryview]
"""Returns bytes of a snapshot, by offset and number."""


class Layout:
    """The plan for one state: where each tensor goes, and the description with references to these places."""

    def __init__(self, state: object) -> None:
        """Plans the layout; copies nothing.

        Raises:
            pickle.PicklingError: if the state has an object that cannot be pickled.
        """
        stream, tensors = io.BytesIO(), TensorIndex()
        _Describer(stream, tensors).dump(state)
        self._tensors = tensors
        self.index = tensors.before(stream.getvalue())
        self.index_at = tensors.end
        self.size = self.index_at + len(self.index)

    def copy_into(self, room: memoryview) -> None:
        """Copies the state into `size` bytes. Tensors on accelerators are complete when it returns."""
        tensors = self._tensors
        devices = {tensor.device for tensor in tensors.tensors if tensor.device.type != "cpu"}
        waits = {device: _synchronize(device) for device in devices}
        if any(device.type == "cuda" for device in devices):
            pin(room)
        for tensor, offset, size in zip(tensors.tensors, tensors.offsets, tensors.sizes, strict=True):
            if size:
                later = waits.get(tensor.device) is not None
                elements = torch.frombuffer(room[offset : offset + size], dtype=tensor.dtype)
                elements.reshape(tensor.shape).copy_(tensor, non_blocking=later)
        for wait in waits.values():
            if wait is not None:
                wait()
        room[self.index_at : self.size] = self.index


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
    index = piece(index_at, size - index_at)
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
    state = _Reader(content[index_at:], lambda start, size: content[start : start + size], known, parts=contents).load()
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
    return _FormerReader(content[index_at:], lambda start, size: content[start : start + size], {}).load()


def is_split_otherwise(content: memoryview, *, index_at: int, state: Callable[[], Any]) -> bool:
    """Whether a rank's snapshot is split in another way than the state that it restores: over other device meshes, at
    another place in them, or with other placements.

    Args:
        content: The bytes.
        index_at: Offset of the description.
        state: Returns the state, which is called only if the snapshot has split tensors.
    """
    reader = _PartReader(content[index_at:], lambda start, size: content[start : start + size], {})
    saved = reader.load()
    if not reader.found:
        return False
    restored = state()
    return _differs(saved, restored, {_key(mesh): mesh for mesh in meshes_of(restored)})


def _differs(saved: Any, restored: Any, meshes: Mapping[Any, DeviceMesh]) -> bool:
    if isinstance(saved, Part):
        mesh = meshes.get(saved.mesh)
        if mesh is None or saved.coordinate not in (None, tuple(mesh.get_coordinate() or ())):
            return True
        return is_split(restored) and tuple(restored.placements) != tuple(saved.placements)
    if isinstance(saved, dict):
        held = cast("dict[Any, Any]", restored) if isinstance(restored, dict) else {}
        return any(_differs(one, held.get(name), meshes) for name, one in cast("dict[Any, Any]", saved).items())
    if isinstance(saved, (list, tuple)):
        others = cast("list[Any]", restored) if isinstance(restored, (list, tuple)) else []
        return any(
            _differs(one, other, meshes) for one, other in itertools.zip_longest(cast("list[Any]", saved), others)
        )
    return False


class _Describer(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, tensors: TensorIndex) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self._tensors = tensors
        self._known: dict[int, tuple[torch.Tensor, int]] = {}

    def persistent_id(self, obj: object) -> int | None:
        if not isinstance(obj, torch.Tensor):
            return None
        # By object, so that a tensor that occurs twice is one tensor again. It is kept alive, and its ID with it.
        known = self._known.get(id(obj))
        if known is None:
            number = self._split(obj) if is_split(obj) else self._whole(obj)
            if number is None:
                return None
            known = self._known[id(obj)] = (obj, number)
        return known[1]

    def _whole(self, tensor: torch.Tensor) -> int | None:
        if type(tensor) is not torch.Tensor or _is_buffer(tensor):
            return None
        content = tensor.detach() if tensor.requires_grad else tensor
        return self._tensors.add(content) if is_dense(content) else None

    def _split(self, tensor: DTensor) -> int:
        local = self.persistent_id(_local(tensor))
        if local is None or local < 0:
            raise ValueError(f"a DTensor of {tensor.dtype} has parts without content of their own: expected dense ones")
        mesh = tensor.device_mesh
        part = Part(
            local=local,
            mesh=_key(mesh),
            placements=tuple(tensor.placements),
            shape=tensor.shape,
            stride=tensor.stride(),
            coordinate=tuple(mesh.get_coordinate() or ()),
        )
        return self._tensors.add_part(part)

    def reducer_override(self, obj: object) -> Any:
        """Describes tensors of other types by the tensors that they consist of. Those with a `__torch_dispatch__` have
        their content elsewhere, and are described as torch does it, with what they have as attributes."""
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        if _is_buffer(obj):
            return _buffer, (obj.detach(), bool(getattr(obj, "persistent", True)))
        kind = type(obj)
        if kind is torch.nn.Parameter:
            return _parameter, (obj.detach(), obj.requires_grad)
        if is_split(obj) or kind is torch.Tensor or not has_own_elements(obj):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            content = obj.detach().as_subclass(torch.Tensor)
        return _of_type, (content, kind, obj.requires_grad, attributes(obj))


def _synchronize(device: torch.device) -> Callable[[], object] | None:
    """Waits for what a device copies while its call has returned; None where no such wait is known."""
    wait = getattr(getattr(torch, device.type, None), "synchronize", None)
    if wait is None:
        return None
    # There is one such device.
    return wait if device.type == "mps" else functools.partial(wait, device)


def _parameter(content: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return torch.nn.Parameter(content, requires_grad)


def _buffer(content: torch.Tensor, persistent: bool) -> torch.Tensor:
    return torch.nn.Buffer(content, persistent=persistent)


def _of_type(content: torch.Tensor, kind: type[torch.Tensor], requires_grad: bool, state: Any) -> torch.Tensor:
    tensor = content.as_subclass(kind)
    set_attributes(tensor, state)
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor


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
        index: memoryview | bytes,
        piece: Piece,
        meshes: dict[Any, DeviceMesh],
        *,
        parts: dict[int, torch.Tensor] | None = None,
    ) -> None:
        self._places, described = read_index(memoryview(index))
        super().__init__(io.BytesIO(described))
        self._piece = piece
        self._meshes = meshes
        self._parts = parts
        self._known: dict[int, torch.Tensor] = {}

    def persistent_load(self, pid: int | Place | Part) -> torch.Tensor:
        # Earlier releases had the place itself, or the part, where there is a number now.
        found = self._places.find(pid) if isinstance(pid, int) else pid
        if isinstance(found, Part):
            return self._split(found, self.persistent_load(found.local))
        if found.number not in self._known:
            size = found.size
            self._known[found.number] = _elements(self._piece(found.offset, size), found) if size else _empty(found)
        return self._known[found.number]

    def _split(self, part: Part, local: torch.Tensor) -> torch.Tensor:
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
    def _split(self, part: Part, local: torch.Tensor) -> torch.Tensor:
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


class _PartReader(_Reader):
    """Reads split tensors as what describes the rank's parts."""

    found = False

    def _split(self, part: Part, local: torch.Tensor) -> Any:
        self.found = True
        return part


def _elements(content: memoryview, place: Place) -> torch.Tensor:
    return torch.frombuffer(content, dtype=place.dtype).reshape(place.shape)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's content is its elements: not so where it is sparse, quantized, on no device, or of a type of
    its own."""
    if not (is_plain(tensor) or hasattr(tensor, "__create_write_items__")):
        return False
    return tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type != "meta"


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of no type of its own, as parameters are not, either."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter)


def has_own_elements(tensor: torch.Tensor) -> bool:
    """Whether a tensor of a type of its own has its elements itself, and not in other tensors, and is pickled as torch
    does it."""
    kind = type(tensor)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return False
    own = kind.__reduce_ex__ in (torch.Tensor.__reduce_ex__, torch.nn.Parameter.__reduce_ex__)
    return own and tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type != "meta"


def attributes(tensor: torch.Tensor) -> Any:
    """What a tensor of a type of its own has beside its elements."""
    return torch._utils._get_obj_state(tensor)


def set_attributes(tensor: torch.Tensor, state: Any) -> None:
    """Gives a tensor what `attributes` has returned of another one."""
    torch._utils._set_obj_state(tensor, state)


def _is_buffer(tensor: torch.Tensor) -> bool:
    return getattr(tensor, "_is_buffer", False) is True


def is_split(value: object) -> TypeGuard[DTensor]:
    # Only a script that has imported the module has such tensors; importing it takes a while.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _local(tensor: DTensor) -> torch.Tensor:
    # Not `to_local`, whose result is another object each time: a DTensor that occurs twice has one part.
    local = tensor._local_tensor  # pyrefly: ignore[protected-access]
    module = sys.modules.get("torch.distributed._functional_collectives")
    if module is not None and isinstance(local, module.AsyncCollectiveTensor):
        return local.trigger_wait()
    return local


def _key(mesh: DeviceMesh) -> tuple[tuple[int, ...], tuple[str, ...] | None]:
    return tuple(mesh.shape), mesh.mesh_dim_names


def _empty(place: Place) -> torch.Tensor:
    return torch.empty(place.shape, dtype=place.dtype)
