"""The most of its machine that a node has used at a time.

It is a part of `Progress`, and is joined by maximum, so that neither a restart of an agent nor the order of messages
loses any of it. What a node reports is a claim of its processes: it is bounded here, and no figure of one job speaks
for another namespace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, TypeVar

from pydantic import AfterValidator

from perdure.contract.base import Message

__all__ = ["Peaks"]

MOST_BYTES = 2**46
"""64 TiB: more than the memory of any machine that is sold."""
MOST_CORES = 4_096.0
MOST_SECONDS = 3_650 * 86_400.0

_NumberT = TypeVar("_NumberT", int, float)


def _within(most: _NumberT, number: _NumberT) -> _NumberT:
    return type(number)(0) if math.isnan(number) else min(max(number, type(number)(0)), most)


_Bytes = Annotated[int, AfterValidator(partial(_within, MOST_BYTES))]
_Cores = Annotated[float, AfterValidator(partial(_within, MOST_CORES))]
_Seconds = Annotated[float, AfterValidator(partial(_within, MOST_SECONDS))]


class Peaks(Message):
    """The most that one node has used at a time; of several nodes, that of the one with the most."""

    watched: _Seconds = 0.0
    """Seconds over which it was measured, every 10 s."""
    memory: _Bytes | None = None
    """Bytes of memory: what its processes hold, or what its container is charged without reclaimable caches, whichever
    is more."""
    memory_total: _Bytes | None = None
    """Bytes that it may use: its container's limit, else those of its machine."""
    cpu: _Cores | None = None
    """Processors, as the highest mean over a minute."""
    gpu_memory: _Bytes | None = None
    """Bytes of the GPU with the most."""
    gpu_memory_total: _Bytes | None = None
    """Bytes that this GPU has."""
    shm: _Bytes | None = None
    """Bytes of /dev/shm, where the node has one of its own."""


def join_peaks(peaks: Iterable[Peaks | None]) -> Peaks | None:
    """Returns the most of each; None where there is none."""
    known = [one for one in peaks if one is not None]
    if not known:
        return None
    return Peaks(
        watched=max(one.watched for one in known),
        memory=_most(known, lambda one: one.memory),
        memory_total=_most(known, lambda one: one.memory_total),
        cpu=_most(known, lambda one: one.cpu),
        gpu_memory=_most(known, lambda one: one.gpu_memory),
        gpu_memory_total=_most(known, lambda one: one.gpu_memory_total),
        shm=_most(known, lambda one: one.shm),
    )


def _most(peaks: Iterable[Peaks], figure: Callable[[Peaks], _NumberT | None]) -> _NumberT | None:
    return max((number for one in peaks if (number := figure(one)) is not None), default=None)
