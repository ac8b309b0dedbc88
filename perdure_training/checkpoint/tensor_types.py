"""Tensors of types of their own, such as quantized parameters: whether one can become another, and how.

A copy between such tensors by their own operations may compute the content anew, from what they stand for. Here the
tensors are copied that they consist of.
"""

from __future__ import annotations

from typing import Any

import torch

from perdure_training.checkpoint.staging import (
    attributes,
    has_own_elements,
    is_dense,
    is_plain,
    is_split,
    set_attributes,
)


def kind_of(tensor: torch.Tensor) -> type[torch.Tensor]:
    """The type of a tensor; parameters and buffers are tensors."""
    return torch.Tensor if is_plain(tensor) else type(tensor)


def takes(target: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a tensor can become the other one by a copy of its elements."""
    if kind_of(target) is not kind_of(value) or (target.dtype, target.shape) != (value.dtype, value.shape):
        return False
    if is_split(target) and is_split(value):
        return target.device_mesh == value.device_mesh and target.placements == value.placements
    if is_plain(target):
        return is_dense(target) and is_dense(value) and _each_has_memory(target)
    if has_own_elements(target):
        return has_own_elements(value) and _each_has_memory(target)
    parts, others = _parts(target), _parts(value)
    if parts is None or others is None or not _same(parts[1], others[1]) or parts[0].keys() != others[0].keys():
        return False
    return all(takes(part, others[0][name]) for name, part in parts[0].items())


def copy_tensor(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copies a tensor into one that takes it."""
    with torch.no_grad():
        if is_plain(target) or is_split(target) or not takes(target, value):
            target.copy_(value)
        elif has_own_elements(target):
            with torch._C.DisableTorchFunctionSubclass():
                target.as_subclass(torch.Tensor).copy_(value.as_subclass(torch.Tensor))
            if (state := attributes(value)) is not None:
                set_attributes(target, state)
        else:
            parts, others = _parts(target), _parts(value)
            assert parts is not None
            assert others is not None
            for name, part in parts[0].items():
                copy_tensor(part, others[0][name])


def _parts(tensor: torch.Tensor) -> tuple[dict[str, torch.Tensor], object] | None:
    """The tensors that one consists of, and what else it has; None where it does not say it."""
    flatten: Any = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return None
    names, context = flatten()
    return {name: getattr(tensor, name) for name in names}, context


def _same(one: object, other: object) -> bool:
    try:
        return bool(one == other)
    except (RuntimeError, ValueError, TypeError):
        # It has tensors.
        return False


def _each_has_memory(tensor: torch.Tensor) -> bool:
    """Whether each element has memory of its own."""
    return all(stride or size < 2 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
