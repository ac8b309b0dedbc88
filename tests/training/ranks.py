"""Runs scripts of this folder on ranks of one machine, without Perdure."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore

from tests.training.warm_torch import run_with_torch


def run_ranks(
    script: str, memory: Path, *, ranks: int = 2, arguments: Sequence[str] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a script on some ranks, in the environment that torchrun would give them; returns what all have printed."""
    path = Path(__file__).with_name("scripts") / script
    # Torchrun hosts the store of its ranks, too.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=240))
    world = {
        "PERDURE_MEMORY_DIR": str(memory),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "ranks",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    ended = run_with_torch(
        [str(path), *arguments],
        environments=[
            os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | environment for rank in range(ranks)
        ],
        folder=Path.cwd(),
        within=240,
    )
    for one in ended:
        assert one.returncode == 0, one.stderr[-2000:]
    return subprocess.CompletedProcess(
        ended[0].args, 0, "".join(one.stdout for one in ended), "".join(one.stderr for one in ended)
    )
