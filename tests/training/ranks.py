"""Runs scripts of this folder on two ranks of one machine, without Perdure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_two_ranks(script: str, memory: Path) -> subprocess.CompletedProcess[str]:
    path = Path(__file__).with_name("scripts") / script
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(path)]
    environment = os.environ | {"PERDURE_MEMORY_DIR": str(memory), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-2000:]
    return run
