"""A training that reads leased shards in step with its other ranks, and saves its position with each step: to a file,
or in memory. The shards are of a dataset, or of a stream that grows as the test says."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from perdure_training import report
from perdure_training.checkpoint import Checkpointer
from perdure_training.shards import ShardingClient, StreamClient, StreamShard

folder, size, dies_at = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
rank, world_size, generation = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "PERDURE_GENERATION"))
dist.init_process_group("gloo")


def ends() -> tuple[dict[str, float], bool]:
    return tuple(json.loads((folder / "ends.json").read_text()))


client: Any = (
    StreamClient("train", partitions={"a": 2, "b": 0}, ends=ends, shard_size=5)
    if "--stream" in sys.argv
    else ShardingClient("train", size=size, shard_size=5, epochs=2, shuffle=True, seed=3)
)
checkpoint = folder / "checkpoint.json"
step, consumed = 0, list[tuple[int | str, int]]()
in_memory = "--in-memory" in sys.argv
state: dict[str, Any] = {"data": client, "step": step, "consumed": consumed}
checkpointer = Checkpointer(replicated=True, every=1)
if in_memory:
    checkpointer.restore(state)
    step, consumed = state["step"], state["consumed"]
elif checkpoint.exists():
    saved = json.loads(checkpoint.read_text())
    step, consumed = saved["step"], saved["consumed"]
    client.load_state_dict(saved["data"])
with (folder / "steps").open("a", buffering=1) as log:
    while True:
        step += 1
        shard = client.fetch()
        if generation == 1 and rank == 1 and step == dies_at:
            os.mkfifo(folder / "die")
            (folder / "die").read_bytes()
            os.kill(os.getpid(), signal.SIGKILL)
        part = shard and (shard.partition if isinstance(shard, StreamShard) else shard.epoch)
        own = [(part, index) for index in shard] if shard else []
        parts: list[Any] = [None] * world_size
        dist.all_gather_object(parts, own)
        if not any(parts):
            break
        consumed += [sample for part in parts for sample in part]
        if shard:
            client.report(shard)
        client.step()
        state.update(step=step, consumed=consumed)
        if in_memory:
            checkpointer.save(step, state)
        if rank == 0:
            draft = checkpoint.with_suffix(".draft")
            draft.write_text(json.dumps({"step": step, "consumed": consumed, "data": client.state_dict()}))
            draft.replace(checkpoint)
        report(step=step)
        log.write(f"{time.time():.3f} {step} {rank} {world_size} {generation} {os.getpid()}\n")
dist.destroy_process_group()
