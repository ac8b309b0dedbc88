"""Parts of tensors that a world which is over had split, as the planners of `torch.distributed.checkpoint` take them.

A DTensor needs its device mesh, and that of a former world cannot be made again in a world of another size. What a
planner asks of a DTensor follows from what its snapshot has: the whole shape, the mesh's shape, the rank's place in it,
and the placements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset


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
