"""One of two ranks, each on a node of its own: saves a state until it is killed, or restores it after that."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.checkpoint.rank import Measurement, seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("way", choices=["save", "memory", "disk"])
    parser.add_argument("--gigabytes", type=float, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    saves = options.way == "save"
    measurement = Measurement(options.folder, gigabytes=options.gigabytes, trained=saves)
    if saves:
        checkpointer = measurement.checkpointer(every=1)
        checkpointer.save(1, measurement.state)
        checkpointer.flush()
        dist.barrier()
        measurement.report("saved", 1)
        signal.pause()
    dist.barrier()
    restore = measurement.load_from_disk if options.way == "disk" else lambda: measurement.checkpointer(every=1)
    slowest = torch.tensor([seconds(restore)], dtype=torch.float64)
    if not measurement.optimizer.state:
        raise SystemExit(f"rank {os.environ['RANK']} has restored nothing")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    measurement.report(options.way, slowest.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
