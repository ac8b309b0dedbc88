"""Starts its ranks as processes that run a function, by torch's launcher, as `accelerate.notebook_launcher` does."""

import os
import sys

from spawns import train
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def rank() -> None:
    train(int(os.environ["RANK"]), 2)


if __name__ == "__main__":
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method=sys.argv[1],
    )
    elastic_launch(config, rank)()
