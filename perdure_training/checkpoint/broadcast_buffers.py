"""Buffers that DistributedDataParallel gives to all ranks: those of rank 0 are the ones that count.

The statistics of a `BatchNorm` differ between ranks after each step, since each rank has seen other samples. Before the
next forward pass DDP replaces those of all ranks by rank 0's (`broadcast_buffers`). So a world of another size, whose
ranks cannot each have their own back, continues exactly with those of rank 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from perdure_training.checkpoint.values import PLAIN


def names_of_rank_0(state: Mapping[str, Any]) -> frozenset[str]:
    """Returns the names of these buffers, as checkpoints name values.

    Args:
        state: What the script saves: modules also in dictionaries, lists and tuples.
    """
    return frozenset(name for key, value in state.items() for name in _in_value(value, str(key), set()))


def _in_value(value: object, path: str, seen: set[int]) -> Iterator[str]:
    if isinstance(value, torch.nn.Module):
        for name, module in value.named_modules():
            if isinstance(module, DistributedDataParallel) and _broadcasts(module):
                yield from (_joined(path, name, "module", buffer) for buffer in _buffers(module))
    elif isinstance(value, (dict, list, tuple)) and id(cast("object", value)) not in seen:
        seen.add(id(cast("object", value)))
        is_dict = isinstance(value, dict)
        parts = cast("dict[Any, Any]", value) if is_dict else dict(enumerate(cast("list[Any]", value)))
        if not PLAIN.issuperset(map(type, parts.values())):
            for name, part in parts.items():
                yield from _in_value(part, f"{path}.{name}", seen)


def _broadcasts(module: DistributedDataParallel) -> bool:
    """Whether all ranks of the world have rank 0's buffers in each forward pass."""
    own_way = getattr(module, "buffer_hook", None) is not None
    return module.broadcast_buffers and not own_way and module.process_group.size() == dist.get_world_size()


def _buffers(module: DistributedDataParallel) -> Iterator[str]:
    ignored = getattr(module, "parameters_to_ignore", ())
    inner = cast("torch.nn.Module", cast("Any", module).module)
    return (name for name, _ in inner.named_buffers() if name not in ignored)


def _joined(*parts: str) -> str:
    return ".".join(filter(None, parts))
