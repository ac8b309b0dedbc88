"""Three ranks send each other parts of snapshots, and the second ends in the middle of it; the others print what comes
of it."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex

from perdure_training.checkpoint.part_exchange import PartRequest, exchange_parts

SIZE = 1 << 20
PARTS = 200
"""Of which a message has 64."""

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
whole = torch.zeros(SIZE, dtype=torch.uint8)
given = 0


def give(_: PartRequest) -> torch.Tensor:
    global given
    given += 1
    if rank == 1 and given > PARTS // 2:
        # Its sockets end as those of a killed process do.
        os._exit(0)
    return whole


requests = {
    other: [PartRequest(other, MetadataIndex(f"part {part}"), ((0,), (SIZE,)), SIZE) for part in range(PARTS)]
    for other in range(size)
    if other != rank
}
ended = "all parts have come"
try:
    exchange_parts(requests, rank=rank, world_size=size, largest=SIZE, give=give, take=lambda *_: None)
except RuntimeError:
    ended = "an error"
os.write(1, f"rank {rank}: {ended}\n".encode())
os._exit(0)
