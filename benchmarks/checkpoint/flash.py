"""Measures DLRover's flash checkpoint in DLRover's own environment, with the state that the other ways save."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.recovery import dlrover_environment
from benchmarks.recovery.dlrover_environment import NotAvailable
from benchmarks.recovery.processes import free_port, in_pid_namespace, pid_namespaces_work, with_own_memory

RANK = Path(__file__).with_name("flash_rank.py")
REPOSITORY = RANK.parents[2]
LIMIT_SECONDS = 1800
_SHOWN = 10
"""Lines of output that tell why a run failed."""

_WITH_MASTER = 'python=$1 port=$2; shift 2; $python -m dlrover.python.master.main --port $port $MASTER & exec "$@"'
"""Starts DLRover's master, for which `dlrover-run` waits: its `--standalone` fails with torch 2.15."""


def save(arguments: list[str]) -> Iterator[str]:
    """Has two ranks on one node of DLRover save; yields the lines of their output.

    Args:
        arguments: those of the ranks' script.

    Raises:
        NotAvailable: if DLRover cannot be installed, isolated or run here.
    """
    programs = asyncio.run(_programs())
    port = str(free_port())
    ranks = [programs / "dlrover-run", "--nnodes=1", "--nproc_per_node=2", RANK, *arguments]
    node = ["sh", "-c", _WITH_MASTER, "sh", programs / "python", port, *ranks]
    command = in_pid_namespace(with_own_memory(["timeout", str(LIMIT_SECONDS), *node]))
    with tempfile.TemporaryFile("w+") as log:
        with subprocess.Popen(command, env=_environment(port), stdout=subprocess.PIPE, stderr=log, text=True) as run:
            assert run.stdout is not None
            yield from run.stdout
        if run.returncode:
            log.seek(0)
            last = "".join(log.readlines()[-_SHOWN:])
            raise NotAvailable(f"`dlrover-run` ended with {run.returncode}; the end of its output:\n{last}")


async def _programs() -> Path:
    if not await pid_namespaces_work():
        raise NotAvailable("this machine does not allow a PID namespace, in which it must run (`unshare --pid`)")
    return await dlrover_environment.ensure()


def _environment(port: str) -> dict[str, str]:
    node = {"NODE_NUM": "1", "NODE_RANK": "0", "NODE_ID": "0", "POD_NAME": "bench-0"}
    address = {"DLROVER_MASTER_ADDR": f"127.0.0.1:{port}", "POD_IP": "127.0.0.1", "NODE_IP": "127.0.0.1"}
    return {
        **os.environ,
        **node,
        **address,
        "JOB_NAME": "bench",
        "MASTER": "--platform local --job_name bench --node_num 1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # The ranks import modules of this checkout.
        "PYTHONPATH": str(REPOSITORY),
    }
