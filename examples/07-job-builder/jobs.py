"""Builds a job for each width of the layers: `python examples/07-job-builder/jobs.py 64 256 [--submit]`."""

import argparse
import sys
from datetime import timedelta
from pathlib import Path

from perdure import JobBuilder

FOLDER = Path(__file__).resolve().parents[1] / "01-first-job"


def job(width: int, steps: int) -> JobBuilder:
    command = ["torchrun", "train.py", "--width", str(width), "--steps", str(steps), "--out", "out/${job.name}"]
    builder = JobBuilder(
        f"width-{width}",
        labels={"sweep": "width"},
        workdir={"path": str(FOLDER)},
        env={"OMP_NUM_THREADS": "1"},
        retry={"max_restarts": 5, "window": timedelta(hours=1)},
    )
    builder.role("trainer", nodes="1:2", nproc_per_node=1, command=command)
    if width > 1000:
        builder.options(limits={"active_deadline": timedelta(hours=12)})
    return builder


parser = argparse.ArgumentParser()
parser.add_argument("widths", type=int, nargs="+")
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--submit", action="store_true", help="start the jobs instead of printing their files")
arguments = parser.parse_args()
for built in [job(width, arguments.steps) for width in arguments.widths]:
    if arguments.submit:
        print(built.submit().name, file=sys.stderr)
    else:
        print(f"---\n{built.to_yaml()}", end="")
