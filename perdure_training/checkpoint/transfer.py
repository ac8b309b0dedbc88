"""Sends snapshots from the ranks that have them to the ranks that lack them, over a process group of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist

from perdure_training.checkpoint.part_exchange import MESSAGE_WITHIN, await_peer
from perdure_training.checkpoint.verification import fingerprint
from perdure_training.checkpoint.world import RankIdentity
from perdure_training.snapshots.arena import Header, Slot

_PIECE = 1 << 26
"""Bytes of a message: gloo counts a message's elements with 32 bits."""


def exchange(sources: Mapping[int, int], *, sent: Mapping[int, Slot], own: RankIdentity, room: Slot | None) -> None:
    """Brings each rank of `sources` its snapshot. Every rank of the world calls it.

    Args:
        sources: The sender for each rank that lacks a snapshot.
        sent: The snapshots that this rank sends, by receiver.
        own: This rank.
        room: The slot with room for the snapshot that this rank receives, if it does.

    Raises:
        RuntimeError: if a rank ends or stops in the middle, or a snapshot arrives with other bytes than were saved.
    """
    group = cast("dist.ProcessGroup", dist.new_group(backend="gloo"))
    try:
        for receiver, sender in sorted(sources.items()):
            if own.rank == sender:
                _send(sent[receiver], receiver, group)
            elif own.rank == receiver and room is not None:
                _receive(room, sender, own, group)
        # A sender deletes what it has sent as soon as this returns.
        dist.barrier(group)
    finally:
        dist.destroy_process_group(group)


def _send(slot: Slot, receiver: int, group: dist.ProcessGroup) -> None:
    header = slot.header()
    if header is None:
        raise RuntimeError(f"{slot.path} is no longer a complete snapshot")
    dist.send_object_list([header.fields()], dst=receiver, group=group)
    problem = f"rank {receiver} has not taken step {header.step}"
    for number, piece in enumerate(_pieces(slot.read())):
        # The receiver may itself send before, and then takes the first one late.
        within = MESSAGE_WITHIN if number else None
        await_peer(dist.isend(piece, dst=receiver, group=group), problem, within=within)


def _receive(room: Slot, sender: int, own: RankIdentity, group: dist.ProcessGroup) -> None:
    described: list[dict[str, Any]] = [{}]
    dist.recv_object_list(described, src=sender, group=group)
    header = Header(**described[0])
    content = room.begin(header.size)
    for piece in _pieces(content):
        problem = f"rank {sender} has not sent step {header.step} of rank {header.rank}"
        await_peer(dist.irecv(piece, src=sender, group=group), problem, within=MESSAGE_WITHIN)
    if fingerprint(content) != header.checksum:
        raise RuntimeError(f"step {header.step} of rank {header.rank} was damaged on its way from rank {sender}")
    room.finish(replace(header, rank=own.rank, world_size=own.world_size))


def _pieces(content: memoryview) -> list[torch.Tensor]:
    size = len(content)
    whole = torch.frombuffer(content, dtype=torch.uint8)
    return [whole[start : min(start + _PIECE, size)] for start in range(0, size, _PIECE)]
