"""Lays out a training state as bytes: tensors as they are in memory, and a description of everything else.

The description is a pickle in which each tensor is a reference. Whoever can write the memory folder can run code in the
ranks, as with every pickle; it belongs to the user of the training and nobody else can open it.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import torch

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


class Layout:
    """The plan for one state: where each tensor goes, and the description with references to these places."""

    def __init__(self, state: object) -> None:
        """Plans the layout; copies nothing.

        Raises:
            TypeError: if the state has a tensor that is split over ranks (DTensor).
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
        for tensor, place in self._tensors:
            if place.size:
                _elements(room, place).copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor, _ in self._tensors):
            torch.cuda.synchronize()
        room[self.index_at : self.size] = self.index

    def _place(self, tensor: torch.Tensor) -> _Place:
        size = tensor.numel() * tensor.element_size()
        place = _Place(len(self._tensors), self._end, size, tensor.dtype, tuple(tensor.shape))
        self._tensors.append((tensor, place))
        self._end += -(-size // _ALIGNMENT) * _ALIGNMENT
        return place


def read_state(content: memoryview, *, index_at: int) -> Any:
    """Reads a state back. Its tensors are copies in main memory."""
    return _Reader(io.BytesIO(bytes(content[index_at:])), content).load()


class _Describer(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, place: Any) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self._place = place
        self._known: dict[int, tuple[torch.Tensor, _Place]] = {}

    def persistent_id(self, obj: object) -> _Place | None:
        if not isinstance(obj, torch.Tensor):
            return None
        if hasattr(obj, "device_mesh"):
            raise TypeError("a DTensor cannot be kept in memory yet: save it with torch.distributed.checkpoint")
        tensor = obj.detach()
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            return None
        # By object, so that a tensor that occurs twice is one tensor again. It is kept alive, and its ID with it.
        known = self._known.get(id(obj))
        if known is None:
            known = self._known[id(obj)] = (obj, self._place(tensor))
        return known[1]


class _Reader(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, content: memoryview) -> None:
        super().__init__(stream)
        self._content = content
        self._known: dict[int, torch.Tensor] = {}

    def persistent_load(self, pid: _Place) -> torch.Tensor:
        if pid.number not in self._known:
            self._known[pid.number] = _elements(self._content, pid).clone() if pid.size else _empty(pid)
        return self._known[pid.number]


def _elements(content: memoryview, place: _Place) -> torch.Tensor:
    count = place.size // place.dtype.itemsize
    flat = torch.frombuffer(content, dtype=place.dtype, offset=place.offset, count=count)
    return flat.reshape(place.shape)


def _empty(place: _Place) -> torch.Tensor:
    return torch.empty(place.shape, dtype=place.dtype)
