"""Parts of tensors that a world which is over had split, as the planners of `torch.distributed.checkpoint` take them.

A DTensor needs its device mesh, and that of a former world cannot be made again in a world of another size. What a
planner asks of a DTensor follows from what its snapshot has: the whole shape, the mesh's shape, the rank's place in it,
and the placements.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard


class FormerPart(torch.Tensor):
    """One rank's part of a tensor, with its place in the whole."""

    _whole: torch.Size
    _offsets: torch.Size | None
    """None if the rank had no part."""

    @classmethod
    def of(
        cls,
        content: torch.Tensor,
        *,
        whole: torch.Size,
        mesh_shape: Sequence[int],
        coordinate: Sequence[int],
        placements: Sequence[Any],
    ) -> FormerPart:
        """Returns a rank's part.

        Args:
            content: What the rank had, in main memory.
            whole: The shape of the whole tensor.
            mesh_shape: The shape of the device mesh.
            coordinate: The rank's place in the mesh; empty if it was not in it.
            placements: How the tensor was placed on the mesh.

        Raises:
            ValueError: if the content is not what the placements say.
        """
        if any(one.is_partial() for one in placements):
            raise ValueError("the parts of a DTensor are sums that are not added up; redistribute it before")
        part = content.as_subclass(cls)
        part._whole = whole
        part._offsets = None
        if coordinate:
            check_is_one_piece(whole, mesh_shape=mesh_shape, coordinate=coordinate, placements=placements)
            sizes, offsets = _compute_local_shape_and_global_offset(
                whole, list(mesh_shape), list(coordinate), placements
            )
            part._offsets = torch.Size(offsets)
            if torch.Size(sizes) != content.shape and torch.Size(sizes).numel():
                raise ValueError(
                    f"a part of a DTensor has the shape {list(content.shape)}, and its placements give {list(sizes)}"
                )
        return part

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        if self._offsets is None:
            return []
        content = self.as_subclass(torch.Tensor)
        described = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=self._offsets, sizes=content.shape),
            properties=TensorProperties.create_from_tensor(content),
            size=self._whole,
        )
        return [WriteItem(index=MetadataIndex(name, self._offsets), type=WriteItemType.SHARD, tensor_data=described)]

    def __get_tensor_shard__(self, _: MetadataIndex) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def check_is_one_piece(
    whole: Sequence[int], *, mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> None:
    """Checks that a rank's part is one piece of the whole tensor, as torch takes it to be when it plans a checkpoint.

    Raises:
        ValueError: if it is several, as placements can make it that are strided and not followed by what they are
            strided for.
    """
    if not any(isinstance(one, _StridedShard) for one in placements):
        return
    pieces = _pieces(tuple(whole), tuple(mesh_shape), tuple(coordinate), tuple(placements))
    if pieces > 1:
        raise ValueError(
            f"the placements {list(placements)} give a rank {pieces} pieces of a DTensor: expected parts of one piece"
        )


@functools.lru_cache(maxsize=4096)
def _pieces(
    whole: tuple[int, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Any, ...]
) -> int:
    """The number of pieces that a rank has in the dimension in which it has the most."""
    most = 1
    for dimension, size in enumerate(whole):
        indices = torch.arange(size)
        for split, ranks, place in zip(placements, mesh_shape, coordinate, strict=True):
            if getattr(split, "dim", None) == dimension:
                strided = isinstance(split, _StridedShard)
                of_row = _StridedShard(0, split_factor=split.split_factor) if strided else Shard(0)
                parts, _ = of_row._split_tensor(  # pyrefly: ignore[protected-access]
                    indices, ranks, with_padding=False
                )
                indices = parts[place]
        most = max(most, 1 + int((indices.diff() != 1).sum()))
    return most
