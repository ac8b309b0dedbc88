"""Runs scripts of this folder on ranks of one machine, without Perdure."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def run_ranks(
    script: str, memory: Path, *, ranks: int = 2, arguments: Sequence[str] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    path = Path(__file__).with_name("scripts") / script
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        str(path),
        *arguments,
    ]
    variables = os.environ | {"PERDURE_MEMORY_DIR": str(memory), "OMP_NUM_THREADS": "1"} | environment
    run = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-2000:]
    return run
