"""Runs a training script as NVRx wants it: each rank reports a heartbeat at each step, and has the longest time between
two of them measured. The script itself knows nothing of it.

    ft_launcher heartbeats.py SCRIPT ARGUMENTS
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

from nvidia_resiliency_ext import fault_tolerance
from torch.optim.optimizer import register_optimizer_step_post_hook

MEASURED = 40
"""Heartbeats after which their timeout is set, to five times the longest time between two."""

client: Any = fault_tolerance.RankMonitorClient()
count = 0


def beat(*_: Any) -> None:
    global count
    count += 1
    if count == 1:
        client.init_workload_monitoring()
    client.send_heartbeat()
    if count == MEASURED:
        client.calculate_and_set_hb_timeouts()


if __name__ == "__main__":
    register_optimizer_step_post_hook(beat)
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
