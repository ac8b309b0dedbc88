"""Checksums of tensors, bit by bit: computed on their device at the speed of its memory, and the same on every device.

The elements are read as integers and added up. Integers wrap around, so the order does not count, which differs between
devices and from run to run. Any single bit that differs changes the sum, and so does any number of them unless they
cancel each other out in one tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the size of an element in bytes."""


def sum_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Adds up a tensor's elements, read as integers; the result is a number on the tensor's device."""
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)


def digest(sums: Iterable[torch.Tensor]) -> int:
    """Combines the sums of tensors, in their order, to one number of 63 bits that is not 0. Waits for their devices."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for one in sums:
        by_device.setdefault(one.device, []).append(one)
    content = hashlib.blake2b(digest_size=8)
    for some in by_device.values():
        content.update(repr(numbers_in(torch.stack(some))).encode())
    return max(int.from_bytes(content.digest(), "big") >> 1, 1)


def numbers_in(tensor: torch.Tensor) -> list[Any]:
    """Returns the elements of a tensor, in lists."""
    return cast("list[Any]", tensor.tolist())


class GradientSums:
    """Adds up the gradients of parameters as one rank computes them: before they are summed up over ranks."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Begins; each `backward` counts until `close`."""
        self._sums: dict[int, torch.Tensor] = {}
        self._hooks: list[Any] = [
            parameter.register_hook(partial(self._add, index))
            for index, parameter in enumerate(parameters)
            if parameter.requires_grad
        ]

    def close(self) -> int:
        """Ends, and returns the digest of all gradients."""
        for hook in self._hooks:
            hook.remove()
        return digest(self._sums[index] for index in sorted(self._sums))

    def _add(self, index: int, gradient: torch.Tensor) -> None:
        known = self._sums.get(index)
        # The order of several backward passes counts.
        self._sums[index] = sum_bits(gradient) + (0 if known is None else known * 31)
