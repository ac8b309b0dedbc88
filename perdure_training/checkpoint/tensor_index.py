"""Where the tensors of a saved state are within its bytes: a table, to which its description refers by numbers.

A reference costs the pickle of the description a few bytes, and a state of many tensors is saved at each step. Earlier
releases described each place where it is referred to; such descriptions are read, too. They themselves refuse a table
by what stands before it.
"""

from __future__ import annotations

import math
import pickle
import struct
from array import array
from dataclasses import dataclass
from typing import Any

import torch

_ALIGNMENT = 64
"""Bytes to which tensors are aligned."""
_LENGTH = struct.Struct("<Q")
_REFUSAL = (
    b"this state was saved by a later release of Perdure, whose tensors this one cannot find: upgrade perdure on all "
    b"nodes"
)
_MARK = b"\x80\x04coperator\ngetitem\n}X" + struct.pack("<I", len(_REFUSAL)) + _REFUSAL + b"\x86R."
"""Begins an index with a table. It is a pickle: a release that knows no tables raises KeyError with this text."""


@dataclass(frozen=True)
class Place:
    """Where a tensor's elements are within the bytes."""

    number: int
    """Tells tensors apart: an empty one begins where the next one does."""
    offset: int
    size: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """A rank's part of a DTensor."""

    local: int | Place
    """The part's place, or its number."""
    mesh: tuple[tuple[int, ...], tuple[str, ...] | None]
    """Shape and names of the device mesh."""
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    coordinate: tuple[int, ...] | None = None
    """The rank's place in the mesh; empty if it is not in it, None in snapshots of earlier releases."""


class TensorIndex:
    """The tensors of a state that is saved, in the order in which they were found.

    Invariants:
        - A tensor has a number from 0 on, and a part of a DTensor one below 0.
        - `read_index` finds the same places by the same numbers.
    """

    def __init__(self) -> None:
        """Creates the object, which has no tensors."""
        self.tensors: list[torch.Tensor] = []
        self.offsets: list[int] = []
        self.sizes: list[int] = []
        self.end = 0
        """Where the next tensor begins."""
        self._types: dict[torch.dtype, int] = {}
        self._type_of: list[int] = []
        self._parts: list[Part] = []

    def add(self, tensor: torch.Tensor) -> int:
        """Takes a dense tensor; returns its number."""
        number, size = len(self.tensors), tensor.numel() * tensor.element_size()
        self.tensors.append(tensor)
        self.offsets.append(self.end)
        self.sizes.append(size)
        self._type_of.append(self._types.setdefault(tensor.dtype, len(self._types)))
        self.end += -(-size // _ALIGNMENT) * _ALIGNMENT
        return number

    def add_part(self, part: Part) -> int:
        """Takes a part of a DTensor, whose own tensor it has; returns its number."""
        self._parts.append(part)
        return -len(self._parts)

    def before(self, described: bytes) -> bytes:
        """Returns the index: the table, and after it the description that refers to it."""
        shapes = [tuple(tensor.shape) for tensor in self.tensors]
        # What many parts share is pickled once.
        shared: dict[Any, Any] = {}
        parts = [
            (
                one.local,
                shared.setdefault(one.mesh, one.mesh),
                shared.setdefault(one.placements, one.placements),
                tuple(one.shape),
                one.stride,
                shared.setdefault(one.coordinate, one.coordinate),
            )
            for one in self._parts
        ]
        numbers = array("q", self.offsets).tobytes(), array("B", self._type_of).tobytes()
        table = pickle.dumps((*numbers, tuple(self._types), shapes, parts), protocol=pickle.HIGHEST_PROTOCOL)
        return b"".join((_MARK, _LENGTH.pack(len(table)), table, described))


_Table = tuple[bytes, bytes, tuple[torch.dtype, ...], list[tuple[int, ...]], list[tuple[Any, ...]]]
"""The offset of each tensor, which of the types it has, the types, the shapes, and the fields of the parts."""


class Places:
    """The table of an index."""

    def __init__(self, table: memoryview | None) -> None:
        """Reads it; None where the index has none.

        Raises:
            ValueError: if it is torn.
        """
        read: _Table = pickle.loads(table) if table is not None else (b"", b"", (), [], [])
        offsets, types, self._types, self._shapes, self._parts = read
        self._offsets = memoryview(offsets).cast("q")
        self._type_of = types
        if not len(self._offsets) == len(types) == len(self._shapes):
            raise ValueError("the index of a saved state has not the same number of offsets, types and shapes")

    def find(self, number: int) -> Place | Part:
        """Returns the place of a number."""
        if number < 0:
            local, mesh, placements, shape, stride, coordinate = self._parts[-1 - number]
            return Part(local, mesh, placements, torch.Size(shape), stride, coordinate)
        dtype, shape = self._types[self._type_of[number]], self._shapes[number]
        return Place(number, self._offsets[number], math.prod(shape) * dtype.itemsize, dtype, shape)


def read_index(index: memoryview) -> tuple[Places, memoryview]:
    """Returns the table of an index, which is empty where an earlier release wrote it, and the description."""
    if index[: len(_MARK)] != _MARK:
        return Places(None), index
    begin = len(_MARK) + _LENGTH.size
    (length,) = _LENGTH.unpack(index[len(_MARK) : begin])
    return Places(index[begin : begin + length]), index[begin + length :]
