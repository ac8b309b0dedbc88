"""One of two ranks that saves whenever its turn comes, with the library of one commit.

It uses of `perdure_training` only what former commits have, too. Its folder is on the path of the library's tree.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

import perdure_training
from perdure_launcher.system.ports import PortPool
from perdure_training.checkpoint import Checkpointer
from perdure_training.snapshots.copies import CopyReceiver

TENSORS = 64


class SavingRank:
    """This rank, its state and its checkpointer."""

    def __init__(self, memory: Path, *, megabytes: float, split: bool) -> None:
        node = memory / f"node-{dist.get_rank()}"
        node.mkdir(parents=True)
        os.environ |= {"PERDURE_MEMORY_DIR": str(node), "PERDURE_RUN_ID": "bench", "PERDURE_GENERATION": "1"}
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        self._receiver: CopyReceiver | None = None
        if split:
            pool = PortPool("127.0.0.1", listening=True, size=1)
            self._receiver = CopyReceiver(node, pool.take(pool.numbers[0]), host="127.0.0.1")
            os.environ["PERDURE_COPIES"] = self._receiver.address.dump()
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if dist.get_rank() == 0 else None
        port: list[Any] = [self._store.port if self._store else None]
        dist.broadcast_object_list(port)
        os.environ["PERDURE_STORE"] = f"127.0.0.1:{port[0]}"
        numbers = max(1, round(megabytes * 1e6 / 4 / TENSORS))
        self._state: dict[str, Any] = {
            "tensors": {str(number): torch.full((numbers,), float(number)) for number in range(TENSORS)},
            "step": 0,
        }
        self._checkpointer = Checkpointer(every=1, replicated=not split)
        self._checkpointer.restore(self._state)

    def save(self) -> dict[str, float]:
        """Saves a step; returns the seconds of the call, and until the snapshot counts."""
        self._state["step"] += 1
        dist.barrier()
        begun = time.perf_counter()
        saved = self._checkpointer.save(self._state["step"], self._state)
        stall = time.perf_counter() - begun
        self._checkpointer.flush()
        finished = time.perf_counter() - begun
        if not saved:
            raise SystemExit("a step was not saved")
        dist.barrier()
        return {"stall": stall, "finished": finished}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("tree", type=Path)
    parser.add_argument("memory", type=Path)
    parser.add_argument("port", type=int)
    parser.add_argument("--megabytes", type=float, required=True)
    parser.add_argument("--split", action="store_true")
    options = parser.parse_args()
    if not Path(perdure_training.__file__).is_relative_to(options.tree):
        raise SystemExit(f"the library is {perdure_training.__file__}, expected that of {options.tree}")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = SavingRank(options.memory, megabytes=options.megabytes, split=options.split)
    turns = socket.create_connection(("127.0.0.1", options.port)).makefile("rw") if dist.get_rank() == 0 else None
    goes_on: list[Any] = [True]
    while True:
        if turns is not None:
            goes_on = [turns.readline() == "save\n"]
        dist.broadcast_object_list(goes_on)
        if not goes_on[0]:
            break
        figures = rank.save()
        if turns is not None:
            turns.write(json.dumps(figures) + "\n")
            turns.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
