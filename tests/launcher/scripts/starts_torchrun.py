"""Starts its ranks by torchrun, as command lines for fine-tuning do; without torchrun's variables it is the program."""

import os
import subprocess
import sys

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]

if sys.argv[1:] != ["train"]:
    sys.exit(subprocess.run([*TORCHRUN, __file__, "train"], check=False).returncode)

from spawns import train  # noqa: E402 - the launcher imports no torch

train(int(os.environ["RANK"]), 2)
