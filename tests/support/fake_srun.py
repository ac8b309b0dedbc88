"""`srun` in an allocation of `tests.support.allocation`: runs the command once per node, in the node's network."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys

from tests.support.allocation import ALLOCATION_VARIABLE


def main() -> int:
    """Returns the highest exit code of the tasks, as the real one does."""
    parser = argparse.ArgumentParser(prog="srun")
    parser.add_argument("--kill-on-bad-exit", type=int)
    parser.add_argument("-w", "--nodelist")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if options.kill_on_bad_exit != 0:
        parser.error("tests do not play that one task ends all others")
    networks: dict[str, str] = json.loads(os.environ[ALLOCATION_VARIABLE])
    nodes = options.nodelist.split(",") if options.nodelist else list(networks)
    tasks: list[subprocess.Popen[bytes]] = []
    for number, node in enumerate(nodes):
        ours = {"SLURM_PROCID": number, "SLURM_NODEID": number, "SLURM_LOCALID": 0, "SLURMD_NODENAME": node}
        environment = {**os.environ, **{name: str(value) for name, value in ours.items()}}
        tasks.append(subprocess.Popen(["ip", "netns", "exec", networks[node], *options.command], env=environment))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: [task.send_signal(number) for task in tasks])
    codes = [task.wait() for task in tasks]
    return max(code if code >= 0 else 128 - code for code in codes)


if __name__ == "__main__":
    sys.exit(main())
