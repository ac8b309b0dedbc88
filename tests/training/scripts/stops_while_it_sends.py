"""Two ranks, of which the second stops in the middle of what it sends until the first, which prints why, gives it up.

The argument is "parts" for parts of a snapshot, "snapshot" for a whole one."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.distributed.checkpoint.metadata import MetadataIndex

from perdure_training.checkpoint import part_exchange, transfer
from perdure_training.checkpoint.part_exchange import PartRequest, exchange_parts
from perdure_training.checkpoint.transfer import exchange
from perdure_training.checkpoint.verification import fingerprint
from perdure_training.checkpoint.world import RankIdentity
from perdure_training.snapshots.arena import Arena, Header

SIZE = 1 << 16
MESSAGES = 4

dist.init_process_group("gloo")
rank = dist.get_rank()
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=200))
for module in (part_exchange, transfer):
    module.MESSAGE_WITHIN = timedelta(seconds=2)
part_exchange._MOST_BYTES = transfer._PIECE = SIZE
sent = 0


def stop_in_the_middle() -> None:
    global sent
    sent += 1
    if rank == 1 and sent > MESSAGES // 2:
        store.get("given up")
        os._exit(0)


def exchange_some_parts() -> None:
    def give(_: PartRequest) -> torch.Tensor:
        stop_in_the_middle()
        return torch.zeros(SIZE, dtype=torch.uint8)

    parts = [PartRequest(1, MetadataIndex(f"part {part}"), ((0,), (SIZE,)), SIZE) for part in range(MESSAGES)]
    requests = {1: parts} if rank == 0 else {0: []}
    exchange_parts(requests, rank=rank, world_size=2, largest=SIZE, give=give, take=lambda *_: None)


def exchange_snapshot() -> None:
    slot = Arena(Path(os.environ["PERDURE_MEMORY_DIR"], f"node-{rank}", "stage-0", "state")).slot(0, 0, world_size=2)
    if rank == 1:
        content = slot.begin(SIZE * MESSAGES)
        header = Header(
            step=5,
            rank=0,
            world_size=2,
            generation=0,
            replicated=False,
            index_at=0,
            size=len(content),
            checksum=fingerprint(content),
        )
        slot.finish(header)
    isend: Any = dist.isend

    def send(*arguments: Any, **named: Any) -> Any:
        stop_in_the_middle()
        return isend(*arguments, **named)

    dist.isend = send
    own = RankIdentity(
        rank=rank,
        world_size=2,
        local_rank=rank,
        local_world_size=2,
        generation=0,
        folder=Path(os.environ["PERDURE_MEMORY_DIR"]),
        store=("", 0),
    )
    exchange({0: 1}, sent={0: slot} if rank == 1 else {}, own=own, room=slot if rank == 0 else None)


ended = "all has come"
try:
    exchange_some_parts() if sys.argv[1] == "parts" else exchange_snapshot()
except RuntimeError as error:
    ended = str(error)
os.write(1, f"rank {rank}: {ended}\n".encode())
store.set("given up", "")
os._exit(0)
