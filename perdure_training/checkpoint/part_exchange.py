"""Brings each rank the parts of other ranks' snapshots that it asks for, over a process group of its own."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex

from perdure_training.checkpoint.verification import fingerprint

_MOST_BYTES = 1 << 26
"""Bytes of a message, and of the room that it takes on either side."""
MESSAGE_WITHIN = timedelta(minutes=5)
"""The longest that one message takes, once two ranks have begun to send: less than a fifth of a megabyte a second is no
network. To begin may take longer, as a rank serves one other at a time."""
_CHECKSUM = 8
"""Bytes that follow each message's content."""
_ALIGNMENT = 16
"""Bytes to which a part begins in a message: those of the largest element."""

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
    size: int | None
    """Bytes of the part; None for a value that is no tensor, of which only its holder knows."""


@dataclass(frozen=True)
class _Piece:
    """What a message has of a part: all of it, or a piece of a value that is too large for a message."""

    number: int
    """Of the part, among those that were requested."""
    begin: int
    end: int
    at: int
    """Where it begins in the message."""


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
    largest: int,
    give: Callable[[PartRequest], torch.Tensor | bytes],
    take: Callable[[PartRequest, memoryview], None],
) -> int:
    """Sends and receives parts. Every rank of the world calls it, and all of them send and receive at the same time.

    In each round a rank requests parts of the rank that is so many places behind it, and serves the one that is as many
    before it, so that two ranks never request parts of the same rank at once.

    Args:
        requests: The parts that this rank requests of each other rank.
        rank: This rank.
        world_size: The number of ranks.
        largest: The most bytes that a value which is no tensor can have.
        give: Returns what another rank requests of this one: the part of a tensor, or bytes.
        take: Is given the bytes of a part, in the order of a contiguous tensor.

    Returns:
        The bytes that this rank has received: the parts with their checksums, and the others' requests.

    Raises:
        RuntimeError: if a rank ends, stops in the middle, or answers with something else than was requested, or bytes
            arrive that were not sent.
    """
    if world_size == 1:
        return 0
    group = cast("dist.ProcessGroup", dist.new_group(backend="gloo"))
    try:
        asks = torch.zeros(world_size, dtype=torch.uint8)
        asks[[other for other, parts in requests.items() if parts]] = 1
        all_asks = [torch.empty_like(asks) for _ in range(world_size)]
        dist.all_gather(all_asks, asks, group=group)
        arrived = 0
        for distance in range(1, world_size):
            server, client = (rank + distance) % world_size, (rank - distance) % world_size
            arrived += _round(
                requests[server] if asks[server] else (),
                server=server if asks[server] else None,
                client=client if all_asks[client][rank] else None,
                largest=largest,
                give=give,
                take=take,
                group=group,
            )
        # What a rank has given is kept until all have everything.
        dist.barrier(group)
        return arrived
    finally:
        dist.destroy_process_group(group)


def _round(
    requests: Sequence[PartRequest],
    *,
    server: int | None,
    client: int | None,
    largest: int,
    give: Callable[[PartRequest], torch.Tensor | bytes],
    take: Callable[[PartRequest, memoryview], None],
    group: dist.ProcessGroup,
) -> int:
    """Requests parts of one rank, and serves another; returns the bytes that have arrived here."""
    requested, arrived = _swap(requests, to=server, of=client, group=group)
    received = cast("Sequence[PartRequest]", requested or ())
    values = {number: cast("bytes", give(part)) for number, part in enumerate(received) if part.size is None}
    sizes = [len(values[number]) if part.size is None else part.size for number, part in enumerate(received)]
    arriving, more = _swap(sizes, to=client, of=server, group=group)
    arrived += more
    if server is not None:
        _check_sizes(requests, arriving, largest=largest, server=server)
    joined = _Joined(requests, cast("Sequence[int]", arriving or ()), take)
    messages = itertools.zip_longest(_messages(sizes), _messages(joined.sizes))
    for leaving, coming in messages:
        room = None if coming is None else bytearray(_length(coming) + _CHECKSUM)
        _pass(
            None if leaving is None else _message(leaving, received, values, give),
            None if room is None else torch.frombuffer(room, dtype=torch.uint8),
            to=client,
            of=server,
            group=group,
            within=MESSAGE_WITHIN,
        )
        if room is not None:
            content = memoryview(room)[:-_CHECKSUM]
            if fingerprint(content) != int.from_bytes(room[-_CHECKSUM:], "little"):
                part = requests[coming[0].number]
                raise RuntimeError(f"{part.index.fqn} of rank {part.rank} was damaged on its way from rank {server}")
            for piece in coming:
                joined.take(piece, content[piece.at : piece.at + piece.end - piece.begin])
            arrived += len(room)
    return arrived


def _check_sizes(requests: Sequence[PartRequest], sizes: object, *, largest: int, server: int) -> None:
    """Raises RuntimeError unless a rank says of each part that it has as many bytes as it can have."""
    if not isinstance(sizes, list) or len(cast("list[Any]", sizes)) != len(requests):
        raise RuntimeError(f"rank {server} has not answered each of {len(requests)} requests for parts of snapshots")
    for part, size in zip(requests, cast("list[Any]", sizes), strict=True):
        right = 0 < size <= largest if part.size is None else size == part.size
        if not right:
            expected = f"up to {largest}" if part.size is None else part.size
            raise RuntimeError(
                f"{part.index.fqn} of rank {part.rank}: rank {server} sends {size} bytes, expected {expected}"
            )


class _Joined:
    """Gives away parts that have arrived, and puts values together that came in several pieces."""

    def __init__(
        self, requests: Sequence[PartRequest], sizes: Sequence[int], take: Callable[[PartRequest, memoryview], None]
    ) -> None:
        self.sizes = sizes
        self._requests = requests
        self._take = take
        self._begun = bytearray()

    def take(self, piece: _Piece, content: memoryview) -> None:
        """Takes a piece. Those of a value come in their order."""
        if len(content) < self.sizes[piece.number]:
            self._begun += content
            if piece.end < self.sizes[piece.number]:
                return
            content, self._begun = memoryview(self._begun), bytearray()
        self._take(self._requests[piece.number], content)


def _messages(sizes: Sequence[int]) -> Iterator[list[_Piece]]:
    """Shares parts out to messages: small ones together, since each message takes a while whatever its size."""
    message: list[_Piece] = []
    at = 0
    for number, size in enumerate(sizes):
        begin = 0
        while begin < size:
            if message and at + min(size, _MOST_BYTES) > _MOST_BYTES:
                yield message
                message, at = [], 0
            end = min(size, begin + _MOST_BYTES - at)
            message.append(_Piece(number, begin, end, at))
            at += -(-(end - begin) // _ALIGNMENT) * _ALIGNMENT
            begin = end
    if message:
        yield message


def _length(message: Sequence[_Piece]) -> int:
    last = message[-1]
    return last.at + last.end - last.begin


def _message(
    message: Sequence[_Piece],
    parts: Sequence[PartRequest],
    values: Mapping[int, bytes],
    give: Callable[[PartRequest], torch.Tensor | bytes],
) -> torch.Tensor:
    """The bytes of parts and their checksum."""
    size = _length(message)
    room = bytearray(size + _CHECKSUM)
    for piece in message:
        if (value := values.get(piece.number)) is not None:
            room[piece.at : piece.at + piece.end - piece.begin] = memoryview(value)[piece.begin : piece.end]
            continue
        content = cast("torch.Tensor", give(parts[piece.number]))
        if content.nbytes != piece.end - piece.begin:
            part = parts[piece.number]
            raise RuntimeError(
                f"{part.index.fqn} of rank {part.rank} has {content.nbytes} bytes in a part of {part.size}"
            )
        copied = torch.frombuffer(room, dtype=content.dtype, count=content.numel(), offset=piece.at)
        copied.view(content.shape).copy_(content)
    room[size:] = fingerprint(memoryview(room)[:size]).to_bytes(_CHECKSUM, "little")
    return torch.frombuffer(room, dtype=torch.uint8)


def _swap(value: object, *, to: int | None, of: int | None, group: dist.ProcessGroup) -> tuple[object, int]:
    """Sends one rank a value, and returns what another sends at the same time, None where there is none, with the
    number of its bytes."""
    content = bytearray(pickle.dumps(value))
    size = torch.zeros(1, dtype=torch.int64)
    _pass(torch.tensor([len(content)]), size, to=to, of=of, group=group)
    room = bytearray(int(size))
    sent, received = (torch.frombuffer(one, dtype=torch.uint8) if one else None for one in (content, room))
    _pass(sent, received, to=to, of=of, group=group)
    return (pickle.loads(room), size.nbytes + len(room)) if of is not None else (None, 0)


def _pass(
    sent: torch.Tensor | None,
    received: torch.Tensor | None,
    *,
    to: int | None,
    of: int | None,
    group: dist.ProcessGroup,
    within: timedelta | None = None,
) -> None:
    """Sends one rank a tensor, as far as there are both, while another sends one; within torch's own timeout where no
    other is given."""
    works: list[tuple[Any, str]] = []
    if to is not None and sent is not None:
        works.append((dist.isend(sent, dst=to, group=group), f"rank {to} has not taken what was sent to it"))
    if of is not None and received is not None:
        works.append((dist.irecv(received, src=of, group=group), f"rank {of} has not sent what it was to send"))
    for work, problem in works:
        await_peer(work, problem, within=within)


def await_peer(work: Any, problem: str, *, within: timedelta | None = None) -> None:
    """Waits for a message.

    Args:
        work: What torch has begun.
        problem: What is wrong where it does not end, for people: it names the rank.
        within: The longest wait; None for torch's own.

    Raises:
        RuntimeError: if the other rank ends, or stops.
    """
    try:
        if within is None:
            work.wait()
        else:
            work.wait(within)
    except RuntimeError as error:
        raise RuntimeError(f"{problem}: it has ended or stopped, or its network is too slow ({error})") from error
