"""Brings each rank the parts of other ranks' snapshots that it asks for, over a process group of its own."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex

from perdure_training.checkpoint.verification import fingerprint

_MOST_BYTES = 1 << 26
"""Bytes of a message, and of the room that it takes on either side."""
_CHECKSUM = 8
"""Bytes that follow each message's content."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""A part of a tensor: where it begins in each dimension, and how long it is there."""


@dataclass(frozen=True)
class PartRequest:
    """What a rank asks of a snapshot."""

    rank: int
    """The rank of the former world whose snapshot it is."""
    index: MetadataIndex
    """The value in it."""
    box: Box | None
    """The part of the tensor; None for a value that is no tensor."""


def boxes(box: Box, *, itemsize: int) -> Iterator[Box]:
    """Cuts a box into such that a message takes; none where it has no elements.

    Args:
        box: The box.
        itemsize: Bytes of an element.
    """
    start, lengths = box
    size = math.prod(lengths)
    if not size:
        return
    if size * itemsize <= _MOST_BYTES:
        yield box
        return
    cut = next(dimension for dimension, length in enumerate(lengths) if length > 1)
    half = lengths[cut] // 2
    yield from boxes((start, (*lengths[:cut], half, *lengths[cut + 1 :])), itemsize=itemsize)
    begin = (*start[:cut], start[cut] + half, *start[cut + 1 :])
    yield from boxes((begin, (*lengths[:cut], lengths[cut] - half, *lengths[cut + 1 :])), itemsize=itemsize)


def exchange_parts(
    requests: Mapping[int, Sequence[PartRequest]],
    *,
    rank: int,
    world_size: int,
    give: Callable[[PartRequest], torch.Tensor | bytes],
    take: Callable[[PartRequest, memoryview], None],
) -> None:
    """Sends and receives parts. Every rank of the world calls it, and all of them send and receive at the same time.

    In each round a rank asks the one that is so many places behind it, and serves the one that is as many before it, so
    that no rank is asked by two at once.

    Args:
        requests: What this rank asks of each other rank.
        rank: This rank.
        world_size: The number of ranks.
        give: Returns what another rank asks of this one: the part of a tensor, or bytes.
        take: Is given the bytes of what was asked for, in the order of a contiguous tensor.

    Raises:
        RuntimeError: if a rank ends, or bytes arrive that were not sent.
    """
    if world_size == 1:
        return
    group = cast("dist.ProcessGroup", dist.new_group(backend="gloo"))
    try:
        asks = torch.zeros(world_size, dtype=torch.uint8)
        asks[[other for other, parts in requests.items() if parts]] = 1
        all_asks = [torch.empty_like(asks) for _ in range(world_size)]
        dist.all_gather(all_asks, asks, group=group)
        for distance in range(1, world_size):
            server, client = (rank + distance) % world_size, (rank - distance) % world_size
            _round(
                requests[server] if asks[server] else (),
                server=server if asks[server] else None,
                client=client if all_asks[client][rank] else None,
                give=give,
                take=take,
                group=group,
            )
        # What a rank has given is kept until all have everything.
        dist.barrier(group)
    finally:
        dist.destroy_process_group(group)


def _round(
    requests: Sequence[PartRequest],
    *,
    server: int | None,
    client: int | None,
    give: Callable[[PartRequest], torch.Tensor | bytes],
    take: Callable[[PartRequest, memoryview], None],
    group: dist.ProcessGroup,
) -> None:
    """Asks one rank, and serves another."""
    received = cast("Sequence[PartRequest]", _swap(requests, to=server, of=client, group=group) or ())
    sizes = _swap([_size(give(part)) for part in received], to=client, of=server, group=group)
    arriving = cast("Sequence[int]", sizes or ())
    for number in range(max(len(received), len(arriving))):
        room = bytearray(arriving[number] + _CHECKSUM) if number < len(arriving) else None
        _pass(
            _message(give(received[number])) if number < len(received) else None,
            torch.frombuffer(room, dtype=torch.uint8) if room is not None else None,
            to=client,
            of=server,
            group=group,
        )
        if room is not None:
            content = memoryview(room)[:-_CHECKSUM]
            if fingerprint(content) != int.from_bytes(room[-_CHECKSUM:], "little"):
                part = requests[number]
                raise RuntimeError(f"{part.index.fqn} of rank {part.rank} was damaged on its way from rank {server}")
            take(requests[number], content)


def _size(tensor: torch.Tensor | bytes) -> int:
    return tensor.nbytes if isinstance(tensor, torch.Tensor) else len(tensor)


def _message(content: torch.Tensor | bytes) -> torch.Tensor:
    """The bytes of a part and their checksum."""
    size = _size(content)
    room = bytearray(size + _CHECKSUM)
    if isinstance(content, torch.Tensor):
        copied = torch.frombuffer(room, dtype=content.dtype, count=content.numel())
        copied.view(content.shape).copy_(content)
    else:
        room[:size] = content
    room[size:] = fingerprint(memoryview(room)[:size]).to_bytes(_CHECKSUM, "little")
    return torch.frombuffer(room, dtype=torch.uint8)


def _swap(value: object, *, to: int | None, of: int | None, group: dist.ProcessGroup) -> object:
    """Sends one rank a value, and returns what another sends at the same time; None where there is none."""
    content = bytearray(pickle.dumps(value))
    size = torch.zeros(1, dtype=torch.int64)
    _pass(torch.tensor([len(content)]), size, to=to, of=of, group=group)
    room = bytearray(int(size))
    sent, received = (torch.frombuffer(one, dtype=torch.uint8) if one else None for one in (content, room))
    _pass(sent, received, to=to, of=of, group=group)
    return pickle.loads(room) if of is not None else None


def _pass(
    sent: torch.Tensor | None,
    received: torch.Tensor | None,
    *,
    to: int | None,
    of: int | None,
    group: dist.ProcessGroup,
) -> None:
    """Sends one rank a tensor, as far as there are both, while another sends one."""
    works: list[Any] = []
    if to is not None and sent is not None:
        works.append(dist.isend(sent, dst=to, group=group))
    if of is not None and received is not None:
        works.append(dist.irecv(received, src=of, group=group))
    for work in works:
        work.wait()
