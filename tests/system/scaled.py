"""A training over gloo whose steps follow a law: ranks share --compute seconds, and not --exchange seconds."""

from __future__ import annotations

import argparse
import time

import torch
from torch import distributed

from perdure_training import report

parser = argparse.ArgumentParser()
parser.add_argument("--compute", type=float, required=True)
parser.add_argument("--exchange", type=float, required=True)
parser.add_argument("--steps", type=int, default=1_000_000)
options = parser.parse_args()
torch.set_num_threads(1)
distributed.init_process_group("gloo")
for step in range(1, options.steps + 1):
    time.sleep(options.compute / distributed.get_world_size() + options.exchange)
    distributed.all_reduce(torch.ones(1))
    report(step=step, total=options.steps)
