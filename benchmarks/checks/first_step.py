"""Makes one step on each rank, and writes down when."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(32, 32))
model(torch.randn(8, 32)).sum().backward()
Path(sys.argv[1], f"rank-{dist.get_rank()}").write_text(str(time.time()))
dist.destroy_process_group()
