"""Traces of jobs: what was submitted when, with how many GPUs, for how long, and how it scales.

A CSV file with a header and one line for each job:

| column | meaning |
|-|-|
| `submit_s` | when it was submitted, in seconds from the begin of the trace |
| `gpus` | GPUs that its owner asked for |
| `duration_s` | how long it trains with them |
| `exchange` | the share of its step with them that more GPUs do not shorten, 0 to 1 |

Or a workload of Pollux (`simulator/workloads*` in https://github.com/petuum/adaptdl), sampled from Philly's trace:
when which application was submitted with how many GPUs. How long it trains is not in there. Applications stand for
classes of GPU-hours, of which a middle one is taken, and jobs ask for GPUs at an efficiency of 0.5 to 0.8.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

GPUS_OF_A_NODE = 8
_ASKED = (1, 1, 1, 2, 2, 4, 4, 8)
"""Nodes of a job: most are small, and large ones take most of the time, as published traces of clusters show."""
_USUAL_DURATION, _SPREAD = 2400.0, 1.2
"""Seconds of half of the jobs at most, and the deviation of the logarithm."""
_SHORTEST, _LONGEST = 300.0, 40_000.0


_POLLUX_GPU_HOURS = {"cifar10": 0.5, "ncf": 0.5, "deepspeech2": 3, "bert": 3, "yolov3": 30, "imagenet": 300}
_POLLUX_EFFICIENCY = 0.65


@dataclass(frozen=True)
class TraceJob:
    """One job of a trace."""

    name: str
    submitted: float
    asked: int
    """Nodes."""
    duration: float
    """Seconds with the nodes that it asked for."""
    exchange: float

    def step(self, nodes: int) -> float:
        """Returns how long a step takes, in times of that with the nodes that it asked for."""
        return (1 - self.exchange) * self.asked / nodes + self.exchange


def read(path: Path, *, nodes: int, gpus_of_a_node: int = GPUS_OF_A_NODE) -> list[TraceJob]:
    """Reads a trace; jobs that asked for more than the cluster has ask for all of it."""
    with path.open(newline="") as file:
        rows = [row if "submit_s" in row else _of_pollux(row) for row in csv.DictReader(file)]
    return [
        TraceJob(
            name=f"{number:06}",
            submitted=float(row["submit_s"]),
            asked=min(max(-(-int(row["gpus"]) // gpus_of_a_node), 1), nodes),
            duration=float(row["duration_s"]),
            exchange=float(row["exchange"]),
        )
        for number, row in enumerate(rows)
    ]


def _of_pollux(row: Mapping[str, str]) -> dict[str, float | str]:
    gpus = int(row["num_replicas"])
    efficiency = _POLLUX_EFFICIENCY if gpus > 1 else 1.0
    return {
        "submit_s": row["time"],
        "gpus": row["num_replicas"],
        "duration_s": _POLLUX_GPU_HOURS[row["application"]] * 3600 / (gpus * efficiency),
        "exchange": (1 - efficiency) * gpus / (gpus - 1) if gpus > 1 else 0.0,
    }


def make(*, nodes: int, jobs: int, load: float, seed: int) -> list[TraceJob]:
    """Makes a trace whose jobs ask for `load` times what the cluster can do while they are submitted."""
    source = random.Random(seed)
    sizes = [min(source.choice(_ASKED), nodes) for _ in range(jobs)]
    durations = [
        min(max(source.lognormvariate(0, _SPREAD) * _USUAL_DURATION, _SHORTEST), _LONGEST) for _ in range(jobs)
    ]
    work = sum(size * duration for size, duration in zip(sizes, durations, strict=True))
    span = work / (nodes * load)
    submitted = sorted(source.uniform(0, span) for _ in range(jobs))
    return [
        TraceJob(f"{number:06}", at, size, duration, source.uniform(0.02, 0.4))
        for number, (at, size, duration) in enumerate(zip(submitted, sizes, durations, strict=True))
    ]
